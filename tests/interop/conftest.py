"""The fixtures of texts and tables, for conversations."""

from tests.data.conftest import offline_datasets, write_text  # noqa: F401
