"""The part of the report for the scaling ablation: ``about: minitx.ablation.scaling``. Its options are in ``configs/ablation/parts/scaling.yaml``."""

from minitx.ablation.scaling.first_figure import figure
from minitx.ablation.scaling.rules import RULES
from minitx.ablation.scaling.sections import limits, sections
from minitx.ablation.scaling.sentences import sentences

LEAD = (
    "Attention compares a query q with keys k by the scores q·k / √d_k, where d_k is the width of a head, and turns them into weights by a "
    "softmax. Without the scale 1/√d_k the scores are √d_k times larger. What does that do to training?"
)
"""The text above the sentences, for readers who do not know the scale."""

__all__ = ["LEAD", "RULES", "figure", "limits", "sections", "sentences"]
