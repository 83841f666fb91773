"""Checks of any attention function, layer or model. They import torch only: models are passed in as objects."""

from typing import TYPE_CHECKING

from minitx.config.lazy import on_first_use

if TYPE_CHECKING:
    from minitx.check.attention_checks import check_attention
    from minitx.check.model_checks import (
        assert_cache_changes_nothing,
        assert_causal,
        assert_deterministic,
        assert_documents_are_apart,
        assert_gradients_reach_everything,
        assert_ignores_padding,
        assert_rows_are_independent,
        check_model,
    )
    from minitx.check.mutants import mutant
    from minitx.check.results import Check, Finding, Report, Severity, Status
    from minitx.check.twins import twin

__all__ = [
    "Check",
    "Finding",
    "Report",
    "Severity",
    "Status",
    "assert_cache_changes_nothing",
    "assert_causal",
    "assert_deterministic",
    "assert_documents_are_apart",
    "assert_gradients_reach_everything",
    "assert_ignores_padding",
    "assert_rows_are_independent",
    "check_attention",
    "check_model",
    "mutant",
    "twin",
]

__getattr__, __dir__ = on_first_use(__name__)
