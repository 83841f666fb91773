"""Sentences with a known structure, made by hand or read from a CoNLL-U treebank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Sentence:
    """Words with a known structure.

    Attributes:
        words: the texts. arcs: (word, word, relation); in a treebank, from each word to its head.
        spaced: whether there is a space before each word. Default: no spaces.

    >>> sentence = Sentence(("The", "cat", "slept"), ((0, 1, "det"), (1, 2, "nsubj")), (False, True, True))
    >>> sentence.shuffled(np.random.default_rng(0)).words
    ('slept', 'The', 'cat')
    """

    words: tuple[str, ...]
    arcs: tuple[tuple[int, int, str], ...] = ()
    spaced: tuple[bool, ...] = ()

    def shuffled(self, random: np.random.Generator) -> Sentence:
        """Return the words in random order, with arcs between the same words."""
        order = random.permutation(len(self.words))  # the old place of each new word
        place = np.argsort(order)
        words = tuple(self.words[i] for i in order)
        return replace(self, words=words, arcs=tuple((int(place[i]), int(place[j]), name) for i, j, name in self.arcs))

    def encode(
        self, encode: Callable[[str], Sequence[int]], before: Sequence[int] = ()
    ) -> tuple[Tensor, list[tuple[int, int]]]:
        """Return ids (1, L), and the tokens [start, stop) of each word. Each word is encoded by itself, with the space before it.

        Args:
            before: ids to put before the sentence, such as a class token.

        >>> Sentence(("ab", "c"), spaced=(False, True)).encode(lambda text: [ord(character) for character in text])
        (tensor([[97, 98, 32, 99]]), [(0, 2), (2, 4)])
        """
        ids, spans = list(before), []
        for i, word in enumerate(self.words):
            pieces = encode(" " * (bool(self.spaced) and self.spaced[i]) + word)
            spans.append((len(ids), len(ids) + len(pieces)))
            ids += pieces
        return torch.tensor([ids]), spans


def read_conllu(path: str | Path) -> list[Sentence]:
    """Read the sentences of a CoNLL-U file, with an arc from each word to its head. It needs the package ``conllu``.

    A multiword token is one word with the arcs of its parts. Empty nodes and the arc of the root are left out.
    ``SpaceAfter=No`` is respected. Source: https://universaldependencies.org/format.html.

    Raises:
        ValueError: the file is not CoNLL-U. ModuleNotFoundError: ``conllu`` is missing (``pip install "minitx[syntax]"``).

    >>> import tempfile
    >>> lines = ["1 The the DET _ _ 2 det _ _", "2 cat cat NOUN _ _ 3 nsubj _ _", "3 slept sleep VERB _ _ 0 root _ _", "", ""]
    >>> file = Path(tempfile.mkdtemp()) / "one.conllu"
    >>> _ = file.write_text("\\n".join(lines).replace(" ", "\\t"))
    >>> read_conllu(file)[0].arcs
    ((0, 1, 'det'), (1, 2, 'nsubj'))
    """
    import conllu

    try:
        parsed = conllu.parse(Path(path).read_text(encoding="utf-8-sig"))
        sentences = [_sentence(tokens) for tokens in parsed if len(tokens)]
    except (OSError, UnicodeDecodeError, conllu.exceptions.ParseException, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a CoNLL-U file: {' '.join(str(error).split())[:150]}") from None
    if not sentences:
        raise ValueError(f"{path} holds no sentence")
    return sentences


def _sentence(tokens: Sequence[Mapping[str, Any]]) -> Sentence:
    words: list[str] = []
    spaced: list[bool] = []
    word_of, space = {0: -1}, False
    for token in tokens:
        number = token["id"]
        if isinstance(number, int) and number in word_of:
            continue  # a part of a multiword token
        if not isinstance(number, int) and number[1] == ".":
            continue
        parts = [number] if isinstance(number, int) else range(number[0], number[2] + 1)
        word_of |= dict.fromkeys(parts, len(words))
        words.append(token["form"])
        spaced.append(space)
        space = (token["misc"] or {}).get("SpaceAfter") != "No"
    heads = [(token["id"], token["head"], token["deprel"]) for token in tokens if isinstance(token["id"], int)]
    pairs = [(word_of[number], word_of[head], relation) for number, head, relation in heads]
    return Sentence(tuple(words), tuple(pair for pair in pairs if pair[1] not in (-1, pair[0])), tuple(spaced))
