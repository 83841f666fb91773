"""Tools to record attention without changing the output, and to change it on purpose.

An ``ObservedCall`` is one attention call. A recorder gets it and returns a record; ``watch`` runs a model and collects the records as ``CallRecords``.
The labels of a batch are ``Questions``, the output of the model is ``Answers``. A ``Snapshot`` has both, and an ``AttentionMap`` for each
layer; the viewer, the head scores, the film and the figures draw snapshots.
"""

from typing import TYPE_CHECKING

from minitx.config.lazy import on_first_use

if TYPE_CHECKING:
    from minitx.analysis.experiments import HeadEffects, knock_out_heads, patch_heads
    from minitx.analysis.figures import (
        effects_figure,
        head_heatmap,
        heatmap,
        heatmap_grid,
        induction_steps,
        saturation_over_steps,
        to_bertviz,
    )
    from minitx.analysis.heads import head_scores, heads_figure
    from minitx.analysis.interventions import intervene
    from minitx.analysis.lens import logit_lens
    from minitx.analysis.recorder import capture
    from minitx.analysis.snapshot import AttentionMap, Snapshot, read_snapshots
    from minitx.analysis.snapshot_sources import take_snapshot
    from minitx.analysis.statistics import attention_statistics, zhai_entropy_bound
    from minitx.canvas import save_figure

__all__ = [
    "AttentionMap",
    "HeadEffects",
    "Snapshot",
    "attention_statistics",
    "capture",
    "effects_figure",
    "head_heatmap",
    "head_scores",
    "heads_figure",
    "heatmap",
    "heatmap_grid",
    "induction_steps",
    "intervene",
    "knock_out_heads",
    "logit_lens",
    "patch_heads",
    "read_snapshots",
    "saturation_over_steps",
    "save_figure",
    "take_snapshot",
    "to_bertviz",
    "zhai_entropy_bound",
]

__getattr__, __dir__ = on_first_use(__name__)
