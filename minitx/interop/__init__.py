"""Hugging Face models: their weights loaded into our blocks and saved again, and unchanged models with our attention core.

Pickle files are never loaded, and no code of a model folder runs.

Two ways lead in. Into our blocks: ``family.py`` (what a family of models is), ``config_json.py`` (its config), ``decoder_families.py`` and
``encoder_families.py`` (the tables), ``weights.py`` (``load_hf``, ``save_hf``). As transformers' own model: ``adopt.py`` with
``adopted_core.py``, ``call_tracker.py`` and ``trial.py``, ``finetune.py`` for a run, ``lora.py``. Both use ``files.py``.
"""

from typing import TYPE_CHECKING

from minitx.config.lazy import on_first_use

if TYPE_CHECKING:
    from minitx.interop.adopt import adopt_hf, release_hf
    from minitx.interop.conversations import chat
    from minitx.interop.finetune import hf_from_config, pretrained_hf
    from minitx.interop.lora import Lora
    from minitx.interop.weights import FAMILIES, load_hf, save_hf

__all__ = [
    "FAMILIES",
    "Lora",
    "adopt_hf",
    "chat",
    "hf_from_config",
    "load_hf",
    "pretrained_hf",
    "release_hf",
    "save_hf",
]

__getattr__, __dir__ = on_first_use(__name__)
