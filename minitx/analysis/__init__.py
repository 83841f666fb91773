"""Looking at attention without changing the answer."""

from minitx.analysis.atlas import atlas_over_steps, head_atlas, head_scores
from minitx.analysis.capture import capture
from minitx.analysis.export import to_bertviz
from minitx.analysis.figures import (
    distance_profile,
    entropy_over_layers,
    logit_histograms,
    saturation_over_steps,
    save_figure,
)
from minitx.analysis.heatmaps import head_heatmap, heatmap_grid
from minitx.analysis.intervene import HeadEffects, intervene, knock_out_heads, logit_lens, patch_heads
from minitx.analysis.snapshot import AttentionMap, Snapshot, read_snapshots, take_snapshot
from minitx.analysis.statistics import attention_statistics, zhai_entropy_bound
from minitx.analysis.structure import read_brackets, read_conllu

__all__ = [
    "AttentionMap",
    "HeadEffects",
    "Snapshot",
    "atlas_over_steps",
    "attention_statistics",
    "capture",
    "distance_profile",
    "entropy_over_layers",
    "head_atlas",
    "head_heatmap",
    "head_scores",
    "heatmap_grid",
    "intervene",
    "knock_out_heads",
    "logit_histograms",
    "logit_lens",
    "patch_heads",
    "read_brackets",
    "read_conllu",
    "read_snapshots",
    "saturation_over_steps",
    "save_figure",
    "take_snapshot",
    "to_bertviz",
    "zhai_entropy_bound",
]
