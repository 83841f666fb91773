"""Looking at attention without changing the answer."""

from minitx.analysis.capture import capture
from minitx.analysis.export import to_bertviz
from minitx.analysis.figures import (
    distance_profile,
    entropy_over_layers,
    logit_histograms,
    saturation_over_steps,
    save_figure,
)
from minitx.analysis.heads import head_scores, heads_figure, syntax_scores
from minitx.analysis.heatmaps import head_heatmap, heatmap_grid
from minitx.analysis.snapshot import AttentionMap, Snapshot, read_snapshots, take_snapshot
from minitx.analysis.statistics import attention_statistics, zhai_entropy_bound
from minitx.analysis.treebank import Sentence, read_conllu

__all__ = [
    "AttentionMap",
    "Sentence",
    "Snapshot",
    "attention_statistics",
    "capture",
    "distance_profile",
    "entropy_over_layers",
    "head_heatmap",
    "head_scores",
    "heads_figure",
    "heatmap_grid",
    "logit_histograms",
    "read_conllu",
    "read_snapshots",
    "saturation_over_steps",
    "save_figure",
    "syntax_scores",
    "take_snapshot",
    "to_bertviz",
    "zhai_entropy_bound",
]
