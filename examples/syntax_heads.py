"""Measure which heads of a trained model follow the syntax of a treebank, compared with fixed positions and shuffled words.

    pip install conllu
    python examples/syntax_heads.py runs/char_lm/.../checkpoints/last.ckpt trees.conllu

It prints a line for each self-attention head of a decoder or encoder with a tokenizer: the relation that the head follows best, in
which share of the words its largest weight is on the right word, and the same share for uniform attention, for the best fixed
position, and in shuffled words. Any ``Sentence(words, arcs)`` can take the place of a treebank (``brackets.py``).

A word counts if it has arcs to some, but not all, of the words that it sees (Clark et al. 2019, arXiv:1906.04341, section 4).
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from minitx.analysis import AttentionMap, Snapshot, take_snapshot
from minitx.analysis.heads import MARGIN, Measured, hits_of_best_rule, offset_rules
from minitx.estimates import MIN_VALUES, Interval
from minitx.training.checkpoints import load_stored

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True)
class Sentence:
    """Words with arcs (word, word, relation), in a treebank from each word to its head; ``spaced``: is there a space before the word?"""

    words: tuple[str, ...]
    arcs: tuple[tuple[int, int, str], ...] = ()
    spaced: tuple[bool, ...] = ()

    def shuffled(self, random: np.random.Generator) -> "Sentence":
        """Return the words in random order, with arcs between the same words."""
        order = random.permutation(len(self.words))  # the old place of each new word
        place = np.argsort(order).tolist()
        arcs = tuple((place[i], place[j], name) for i, j, name in self.arcs)
        return replace(self, words=tuple(self.words[i] for i in order), arcs=arcs)

    def encode(self, encode: Encode, before: Sequence[int] = ()) -> tuple[Tensor, list[tuple[int, int]]]:
        """Return ids (1, L), after the ids ``before``, and the tokens [start, stop) of each word. Each word is encoded separately."""
        ids, spans = list(before), []
        for i, word in enumerate(self.words):
            pieces = encode(" " * (bool(self.spaced) and self.spaced[i]) + word)
            spans.append((len(ids), len(ids) + len(pieces)))
            ids += pieces
        return torch.tensor([ids]), spans


def read_conllu(path: str | Path) -> list[Sentence]:
    """Read a CoNLL-U file. A multiword token is one word with the arcs of its parts; empty nodes and the root's arc are left out."""
    import conllu

    sentences = []
    for tokens in conllu.parse(Path(path).read_text(encoding="utf-8-sig")):
        words, spaced, word_of, space = [], [], {0: -1}, False
        for token in tokens:
            number = token["id"]
            if number in word_of or (not isinstance(number, int) and number[1] == "."):
                continue  # a part of a multiword token, or an empty node
            parts = [number] if isinstance(number, int) else range(number[0], number[2] + 1)
            word_of |= dict.fromkeys(parts, len(words))
            words.append(token["form"])
            spaced.append(space)
            space = (token["misc"] or {}).get("SpaceAfter") != "No"
        heads = [(token["id"], token["head"], token["deprel"]) for token in tokens if isinstance(token["id"], int)]
        pairs = [(word_of[number], word_of[head], relation) for number, head, relation in heads]
        sentences.append(Sentence(tuple(words), tuple(arc for arc in pairs if arc[1] not in (-1, arc[0])), tuple(spaced)))
    return sentences


def agreement(layer: AttentionMap, spans: Sequence[tuple[int, int]], sentence: Sentence) -> dict[str, Measured]:
    """Return the share of words with an arc to their favourite word, by relation and direction (``nsubj →``).

    Weights between words are summed over the tokens of the key word and averaged over the tokens of the query word. A word is
    never its own favourite. Words with equal weights share the count.
    """
    place, (start, stop) = torch.arange(layer.weights.shape[-1]), torch.tensor(spans).T[..., None]
    inside = ((place >= start) & (place < stop)).double()  # (W, L)
    visible = (inside @ layer.visible[0].all(0).double() @ inside.T > 0).fill_diagonal_(False)
    weights = (inside / inside.sum(-1, keepdim=True).clamp(min=1)) @ layer.weights[0].double() @ inside.T
    weights = weights.masked_fill(~visible, -1.0)
    best = (weights >= weights.amax(-1, keepdim=True) * (1 - 1e-6)) & visible  # (H, W, W)
    favourite = best / best.sum(-1, keepdim=True).clamp(min=1).double()
    results = {}
    for relation in dict.fromkeys(name for *_, name in sentence.arcs):
        pairs = torch.zeros_like(visible)
        pairs[tuple(torch.tensor([(i, j) for i, j, name in sentence.arcs if name == relation]).T)] = True
        for candidate, keys in ((f"{relation} →", pairs & visible), (f"{relation} ←", pairs.T & visible)):
            rows = keys.any(-1) & (keys != visible).any(-1)
            if rows.any():
                keys = keys & rows[:, None]
                chance = (keys.sum(-1) / visible.sum(-1).clamp(min=1))[rows].mean().double()
                shares = (favourite * keys).sum(dim=(1, 2)) / rows.sum()
                results[candidate] = Measured(shares, chance.expand(len(shares)), offset_rules(keys))
    return results


@dataclass(frozen=True)
class SyntaxScore:
    """Share of words whose favourite is right for the relation ``at``; the same for uniform attention, the best fixed position, and
    shuffled words; ``gain`` = value − position and ``lost`` = value − shuffled, paired by sentence."""

    at: str
    value: float
    uniform: float
    position: float
    shuffled: float
    gain: Interval
    lost: Interval

    @property
    def is_syntactic(self) -> bool:
        """Whether the head is better than position and worse in shuffled words, both by 0.1 at the lower end of the interval."""
        return self.gain.above(MARGIN) and self.lost.above(MARGIN)


def syntax_scores(
    attend: Callable[[Tensor], Snapshot],
    sentences: Iterable[Sentence],
    encode: Encode,
    before: Sequence[int] = (),
    seed: int = 0,
) -> dict[tuple[str, int], SyntaxScore]:
    """Score how far each self-attention head (layer, head) follows the arcs. ``attend`` makes a ``Snapshot`` from ids (1, L).

    The model reads each sentence twice, the second time with its words shuffled. For each head, the relation and direction with
    the largest gain over position is chosen on the even sentences. Value, controls and intervals come from the odd sentences. A
    relation needs five sentences in each half.
    """
    random, read = np.random.default_rng(seed), []
    for sentence in sentences:
        for variant in (sentence, sentence.shuffled(random)):
            ids, spans = variant.encode(encode, before)
            layers = [layer for layer in attend(ids).maps if layer.queries == layer.keys]
            read.append({layer.name: agreement(layer, spans, variant) for layer in layers})
    plain, control = read[0::2], read[1::2]
    scores = {}
    for name in plain[0] if plain else ():
        results, controls = [layers[name] for layers in plain], [layers[name] for layers in control]
        halves = [Counter(relation for result in results[half::2] for relation in result) for half in (0, 1)]
        relations = [relation for relation in halves[0] if min(half[relation] for half in halves) >= MIN_VALUES]
        by_relation = [_scores(relation, results, controls) for relation in relations]
        for head, choices in enumerate(zip(*by_relation, strict=True)):
            scores[name, head] = max(choices, key=lambda choice: choice[0])[1]
    return scores


def _scores(relation: str, plain: list[dict], control: list[dict]) -> list[tuple[float, SyntaxScore]]:
    """For each head, the mean gain over position on the even sentences, and the score on the odd ones."""
    some = next(result[relation].value for result in plain if relation in result)
    unknown = Measured(torch.full_like(some, torch.nan), torch.full_like(some, torch.nan))
    results, controls = ([result.get(relation, unknown) for result in half] for half in (plain, control))
    value, uniform = (torch.stack(values) for values in ([r.value for r in results], [r.uniform for r in results]))  # (n, H)
    shuffled = torch.stack([result.value for result in controls])
    position = hits_of_best_rule([result.rules for result in results])[:, None].expand_as(value)
    chosen_by = (value - position)[0::2].nanmean(0).tolist()
    scores = []
    for columns in zip(*(values[1::2].T for values in (value, uniform, position, shuffled)), strict=True):
        v, _, p, s = columns
        means = (float(column.nanmean()) for column in columns)
        scores.append(SyntaxScore(relation, *means, gain=Interval.of(v - p), lost=Interval.of(v - s)))
    return list(zip(chosen_by, scores, strict=True))


def main(checkpoint: str, treebank: str, num_rows: int = 64) -> dict[tuple[str, int], SyntaxScore]:
    """Print a line for each head, and return the scores."""
    stored = load_stored(checkpoint)
    model, tokenizer = stored.network, stored.tokenizer

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text).tolist()

    sentences = [one for one in read_conllu(treebank) if one.encode(encode)[0].shape[1] <= model.config.max_len]
    scores = syntax_scores(lambda ids: take_snapshot(model, {"input_ids": ids}), sentences[:num_rows], encode)
    print(f"{'layer':18} head {'relation':14} share uniform position shuffled  gain 95 %")
    for (layer, head), s in scores.items():
        numbers = f"{s.value:5.2f} {s.uniform:7.2f} {s.position:8.2f} {s.shuffled:8.2f}  {s.gain.low:.2f} to {s.gain.high:.2f}"
        print(f"{layer:18.18} {head:4} {s.at:14} {numbers}  {'syntactic' if s.is_syntactic else ''}".rstrip())
    return scores


if __name__ == "__main__":
    main(*sys.argv[1:])
