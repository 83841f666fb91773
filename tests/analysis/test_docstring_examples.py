"""What the room exports explains itself with an example that runs."""

import doctest

import pytest

from minitx import analysis


@pytest.mark.parametrize("name", analysis.__all__)
def test_every_exported_name_has_an_example_that_runs(name):
    thing = getattr(analysis, name)
    (found,) = doctest.DocTestFinder(recurse=False).find(thing, name)
    assert found.examples, f"{name} has no example"
    told: list[str] = []
    result = doctest.DocTestRunner(optionflags=doctest.REPORT_ONLY_FIRST_FAILURE).run(found, out=told.append)
    assert result.failed == 0, "".join(told)
