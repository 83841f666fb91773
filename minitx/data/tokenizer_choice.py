"""The tokenizer that ``data.tokenizer`` names, or one that is trained on the data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from minitx.data.tokenizer import LEARNED, Tokenizer, train_tokenizer


def find_tokenizer(name: str | Tokenizer) -> Tokenizer | None:
    """Return the tokenizer that ``data.tokenizer`` names, or None for ``char`` and ``bpe``, which are trained on the data.

    Args:
        name: ``char``, ``bpe``, a ``tokenizer.json``, a folder that contains one, or a name on the Hugging Face hub. A file from the hub
            stays in the hub's cache (``HF_HOME``) and is read from there without a network. A ``Tokenizer`` is returned unchanged.

    Raises:
        ConfigError: nothing has this name, or its file cannot be read.
    """
    if isinstance(name, Tokenizer):
        return name
    if name in LEARNED:
        return None
    from minitx.data.tokenizer_folder import open_tokenizer  # the characters and bytes of a text need no folder

    return open_tokenizer(name)


def find_or_train_tokenizer(
    tokenizer: str | Tokenizer, bpe_vocab_size: int, texts: Iterable[str], marks: Sequence[str]
) -> Tokenizer:
    """Return a tokenizer.

    Args:
        tokenizer: ``char`` (one id per character) or ``bpe`` (byte-level), learned from the training split (``bpe`` from at most
            67 million characters of a text file, spread over it); a ``tokenizer.json``, a folder with one, or a name on the
            Hugging Face hub.
        bpe_vocab_size: largest vocabulary of ``tokenizer=bpe``.
        texts: the texts that ``char`` and ``bpe`` are learned from.
        marks: the marks of a tokenizer that is learned.
    """
    return find_tokenizer(tokenizer) or train_tokenizer(str(tokenizer), texts, vocab_size=bpe_vocab_size, marks=marks)
