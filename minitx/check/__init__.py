"""Checks of any attention function, layer or model. They import torch only: models are passed in as objects.

- ``check_attention``: ``calling`` finds a way to call the subject, ``cases`` has the calls, ``layers_and_functions`` runs them, ``diagnosis``
  searches for the ``mutants`` that explain the outputs, and ``attention_checks`` has the verdicts.
- ``check_model``: ``model_interface`` finds a way to call the model, ``model_examination`` measures it, and ``visibility``, ``incremental``,
  ``modes_and_sizes`` and ``loss_and_gradients`` have the checks.
- ``twin``: ``tensor_trace`` records both models, ``twins`` compares them, and ``port_mistakes`` has the mistakes to try.

``results`` has the report of all three.
"""

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
