"""What only the scaling ablation says: ``about: minitx.ablation.scaling``. A grid names its studies in ``options``, see ``Options``."""

from minitx.ablation.scaling.first_figure import figure
from minitx.ablation.scaling.options import Options
from minitx.ablation.scaling.rules import RULES
from minitx.ablation.scaling.sections import limits, sections
from minitx.ablation.scaling.sentences import sentences

__all__ = ["RULES", "Options", "figure", "limits", "sections", "sentences"]
