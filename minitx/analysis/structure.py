"""Structure that attention can be compared with: which word of a row belongs to which other one.

It is read from a CoNLL-U or bracket file, or known of a synthetic task. All of it is arcs between words, and a word is a
span of tokens, so that characters, byte pairs and whole words are treated alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

Arc = tuple[int, int, str]
Span = tuple[int, int]
_GO_ALONG = {"input_ids": ("input_ids", "token_type_ids"), "decoder_input_ids": ("decoder_input_ids",)}


@dataclass(frozen=True)
class Links:
    """What belongs to what in one row.

    Attributes:
        query_words, key_words: tokens [start, stop) of each word, counted among the row's real tokens. Words do not
            overlap; tokens between them (spaces, marks) belong to none.
        arcs: (query word, key word, relation): where the query word looks if it follows the structure.
    """

    query_words: tuple[Span, ...]
    key_words: tuple[Span, ...]
    arcs: tuple[Arc, ...]


@dataclass(frozen=True)
class Structure:
    """``Links`` of every row of a batch, between two axes of a ``Snapshot`` (equal ones for self-attention)."""

    queries: str
    keys: str
    rows: tuple[Links, ...]


@dataclass(frozen=True)
class Sentence:
    """A sentence of a file: its words, whether a space stands before each, and arcs between words by their number."""

    words: tuple[str, ...]
    spaced: tuple[bool, ...]
    arcs: tuple[Arc, ...]

    @property
    def text(self) -> str:
        """The words with their spaces."""
        return "".join(" " * space + word for word, space in zip(self.words, self.spaced, strict=True))


# --- dependencies


def read_conllu(path: str | Path) -> list[Sentence]:
    """The sentences of a CoNLL-U file, an arc from every word to its head, named by its relation (``nsubj``).

    The root has no arc. A multiword token (``1-2``) is one word with the arcs of its parts to other words, because it is
    what a model reads; empty nodes (``1.1``) are left out. Spaces follow ``SpaceAfter=No``.

    Source: https://universaldependencies.org/format.html.

    Raises:
        ValueError: not such a file; the message names the file and the line.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "one.conllu"
    >>> lines = ["1 The the DET _ _ 2 det _ _", "2 cat cat NOUN _ _ 3 nsubj _ _", "3 slept sleep VERB _ _ 0 root _ _"]
    >>> _ = file.write_text("\\n".join(line.replace(" ", "\\t") for line in lines))
    >>> read_conllu(file)[0].text, read_conllu(file)[0].arcs
    ('The cat slept', ((0, 1, 'det'), (1, 2, 'nsubj')))
    """
    sentences = [_dependencies(path, lines) for lines in _blocks(path)]
    if not sentences:
        raise ValueError(f"{path} holds no sentence; CoNLL-U has ten columns a word, separated by tabs")
    return sentences


def _blocks(path: str | Path) -> Iterator[list[tuple[int, list[str]]]]:
    """(line number, columns) of the words of each sentence."""
    block: list[tuple[int, list[str]]] = []
    for number, line in enumerate([*_text(path).splitlines(), ""], 1):
        if line.startswith("#"):
            continue
        if line.strip():
            columns = line.split("\t")
            if len(columns) != 10:
                raise ValueError(f"{path}, line {number}: {len(columns)} columns, but CoNLL-U has 10, separated by tabs")
            block.append((number, columns))
        elif block:
            yield block
            block = []


def _dependencies(path: str | Path, lines: Sequence[tuple[int, list[str]]]) -> Sentence:
    words: list[str] = []
    spaced: list[bool] = []
    heads: list[tuple[int, str, str]] = []  # (line, head, relation) of node i + 1
    word_of: list[int] = []  # of node i + 1
    space, multiword_end = False, 0
    for number, (node, form, _, _, _, _, head, relation, _, misc) in lines:
        if re.fullmatch(r"\d+\.\d+", node):
            continue
        ends = re.fullmatch(r"(\d+)(?:-(\d+))?", node)
        if not ends or int(ends[1]) != len(heads) + 1 or (ends[2] and int(ends[2]) <= int(ends[1])):
            raise ValueError(f"{path}, line {number}: ID is {node}, but word {len(heads) + 1} comes next")
        if ends[2] or len(heads) >= multiword_end:  # not a part of what was read before it
            words.append(form)
            spaced.append(space)
            space = "SpaceAfter=No" not in misc.split("|")
        if ends[2]:
            multiword_end = int(ends[2])
            continue
        heads.append((number, head, relation))
        word_of.append(len(words) - 1)
    if len(heads) < multiword_end:
        raise ValueError(f"{path}, line {lines[-1][0]}: the multiword token ends with word {multiword_end}, which is missing")
    arcs = []
    for word, (number, head, relation) in zip(word_of, heads, strict=True):
        if not (head.isdecimal() and int(head) <= len(heads)):
            raise ValueError(f"{path}, line {number}: HEAD is {head}, but must be 0 (root) or one of words 1 to {len(heads)}")
        if int(head) and word_of[int(head) - 1] != word:
            arcs.append((word, word_of[int(head) - 1], relation))
    return Sentence(tuple(words), tuple(spaced), tuple(arcs))


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None


# --- brackets


def read_brackets(path: str | Path) -> list[Sentence]:
    """The sentences of a bracket file; arcs lead from each word to those that share its smallest constituent.

    Round brackets are labelled as in the Penn Treebank, ``(S (NP (DT the) (NN cat)) (VP (VBD sat)))``; square ones have
    no labels, ``[[the cat] sat]``. A sentence is an outermost bracket, on one line or several. The smallest constituent is
    the innermost bracket that holds the word and another word; its label (``constituent`` without labels) is the relation.
    Traces (``-NONE-``) are left out, ``-LRB-`` and ``-RRB-`` are round brackets. No space stands before ``, . ; : ! ?``.

    Source: Marcus et al. 1993, *Computational Linguistics* 19(2), for the labelled form.

    Raises:
        ValueError: not such a file; the message names the file and the line.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "two.txt"
    >>> _ = file.write_text("[[the cat] sat]")
    >>> read_brackets(file)[0].arcs
    ((0, 1, 'constituent'), (1, 0, 'constituent'), (2, 0, 'constituent'), (2, 1, 'constituent'))
    """
    sentences = [sentence for tree in _trees(path) if (sentence := _constituents(tree)).words]
    if not sentences:
        raise ValueError(f"{path} holds no sentence; (S (NP (DT the) (NN cat)) ...) or [[the cat] ...] is wanted")
    return sentences


@dataclass
class _Bracket:
    line: int
    kind: str
    label: str | None
    children: list[_Bracket | str]


def _trees(path: str | Path) -> Iterator[_Bracket]:
    """The outermost brackets."""
    open_ones: list[_Bracket] = []
    for number, line in enumerate(_text(path).splitlines(), 1):
        for piece in re.findall(r"[()\[\]]|[^\s()\[\]]+", line):
            inside = open_ones[-1] if open_ones else None
            if piece in "([":
                open_ones.append(_Bracket(number, piece, None, []))
            elif piece in ")]":
                if inside is None or inside.kind + piece not in ("()", "[]"):
                    raise ValueError(f"{path}, line {number}: {piece} closes nothing that is open")
                open_ones.pop()
                if not open_ones:
                    yield inside
                else:
                    open_ones[-1].children.append(inside)
            elif inside is None:
                raise ValueError(f"{path}, line {number}: {piece} stands outside of all brackets")
            elif inside.kind == "(" and inside.label is None and not inside.children:
                inside.label = piece
            else:
                inside.children.append(piece)
    if open_ones:
        raise ValueError(f"{path}, line {open_ones[-1].line}: {open_ones[-1].kind} is never closed")


def _constituents(tree: _Bracket) -> Sentence:
    words: list[str] = []
    spans: list[tuple[int, int, str]] = []  # inner brackets first

    def walk(bracket: _Bracket) -> None:
        start = len(words)
        for child in bracket.children:
            if isinstance(child, _Bracket):
                walk(child)
            elif bracket.label != "-NONE-":
                words.append({"-LRB-": "(", "-RRB-": ")"}.get(child, child))
        if len(words) - start > 1:
            spans.append((start, len(words), bracket.label or "constituent"))

    walk(tree)
    arcs: list[Arc] = []
    for word in range(len(words)):
        start, stop, label = next((span for span in spans if span[0] <= word < span[1]), (0, 0, ""))
        arcs += [(word, other, label) for other in range(start, stop) if other != word]
    spaced = tuple(i > 0 and word not in tuple(",.;:!?") for i, word in enumerate(words))
    return Sentence(tuple(words), spaced, tuple(arcs))


# --- from sentences to the inputs of a model


def encode_sentences(
    sentences: Iterable[Sentence], encode: Callable[[str], Sequence[int]], *, before: Sequence[int] = (), pad_id: int = 0
) -> tuple[dict[str, Tensor], Structure]:
    """``input_ids`` and ``key_mask`` (B, L) of sentences, and where their words are.

    Every word is encoded by itself, with its space where it has one, so that its tokens are known exactly. A space that
    is a token of its own belongs to no word.

    Args:
        encode: text -> ids. before: ids in front of every row, such as the mark of a class. pad_id: fills rows up.

    >>> inputs, structure = encode_sentences([Sentence(("ab", "c"), (False, True), ((0, 1, "x"),))], lambda t: [ord(c) for c in t])
    >>> inputs["input_ids"].tolist(), structure.rows[0].key_words
    ([[97, 98, 32, 99]], ((0, 2), (3, 4)))
    """
    rows, links = [], []
    for sentence in sentences:
        ids, words = list(before), []
        for word, space in zip(sentence.words, sentence.spaced, strict=True):
            pieces, separator = list(encode(" " * space + word)), list(encode(" " * space))
            loose = len(separator) if space and pieces == separator + list(encode(word)) else 0
            words.append((len(ids) + loose, len(ids) + len(pieces)))
            ids += pieces
        rows.append(torch.tensor(ids))
        links.append(Links(tuple(words), tuple(words), sentence.arcs))
    input_ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad_id)
    lengths = torch.tensor([len(row) for row in rows])
    key_mask = torch.arange(input_ids.shape[1]) < lengths[:, None]
    return {"input_ids": input_ids, "key_mask": key_mask}, Structure("input_ids", "input_ids", tuple(links))


# --- what is known of synthetic tasks


def position_structure(targets: Tensor, axis: str = "input_ids") -> Structure:
    """Arcs ``answer`` from each position to the one that ``targets`` (B, L) names, −1 for none; rows without padding.

    >>> position_structure(torch.tensor([[-1, -1, -1, 1]])).rows[0].arcs
    ((3, 1, 'answer'),)
    """
    words = tuple((i, i + 1) for i in range(targets.shape[1]))
    arcs = [tuple((i, j, "answer") for i, j in enumerate(row) if j >= 0) for row in targets.tolist()]
    return Structure(axis, axis, tuple(Links(words, words, own) for own in arcs))


# --- the control


def shuffle_words(inputs: Mapping[str, Tensor], structure: Structure, *, seed: int = 0) -> tuple[dict[str, Tensor], Structure]:
    """The same rows with their words in random order, and the structure gone along: an arc joins the same two words.

    The words of the key axis are permuted, whole; tokens between them (spaces, marks) keep their place in the order.
    What depends on order is gone, what depends on the identity of a word is not.

    Args:
        inputs: of the model; ``input_ids`` and what belongs to each of its tokens, ``token_type_ids``, go along.

    Raises:
        ValueError: words that overlap, or are not in the row.
    """
    generator = np.random.default_rng(seed)
    names = [name for name in _GO_ALONG[structure.keys] if name in inputs]
    out = {name: tensor.clone() if name in names else tensor for name, tensor in inputs.items()}
    mask = inputs.get("key_mask" if structure.keys == "input_ids" else "decoder_key_mask")
    rows = []
    for row, links in enumerate(structure.rows):
        length = inputs[structure.keys].shape[1]
        real = np.arange(length) if mask is None else np.flatnonzero(mask[row].cpu().numpy())
        order, moved = _shuffled_order(links.key_words, len(real), generator)
        for name in names:
            out[name][row, real] = inputs[name][row, real[order]]
        query_words = moved if structure.queries == structure.keys else links.query_words
        rows.append(replace(links, key_words=moved, query_words=query_words))
    return out, replace(structure, rows=tuple(rows))


def _shuffled_order(words: Sequence[Span], length: int, generator: np.random.Generator) -> tuple[np.ndarray, tuple[Span, ...]]:
    """For each new position the old one, and where each word went."""
    in_order = sorted(range(len(words)), key=words.__getitem__)
    ends = [0, *(end for word in in_order for end in words[word]), length]
    if any(a > b for a, b in pairwise(ends)):
        raise ValueError(f"words={list(words)} must lie in [0, {length}) and not overlap")
    order: list[int] = list(range(ends[1]))
    moved: dict[int, Span] = {}
    for slot, word in enumerate(generator.permutation(len(words))):
        start, stop = words[in_order[word]]
        moved[in_order[word]] = (len(order), len(order) + stop - start)
        order += range(start, stop)
        order += range(words[in_order[slot]][1], ends[2 * slot + 3])  # what stands before the next slot
    return np.array(order, dtype=np.int64), tuple(moved[word] for word in range(len(words)))
