"""What several files of this folder look at."""

import pytest

from tests.ablation import made_up


@pytest.fixture(scope="session")
def whole():
    """The findings of the whole fabricated grid."""
    return made_up.of_the_scale(truth=made_up.Truth(spread=1.02))
