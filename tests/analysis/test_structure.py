"""Agreement with a structure beyond position and word identity; readers of files that name what is wrong."""

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from minitx.analysis.agreement import MIN_SENTENCES, Agreement, agreement_of, word_attention
from minitx.analysis.atlas import head_atlas, head_scores
from minitx.analysis.intervals import Interval
from minitx.analysis.snapshot import AttentionMap, Snapshot
from minitx.analysis.structure import (
    Links,
    Sentence,
    Structure,
    encode_sentences,
    read_brackets,
    read_conllu,
    shuffle_words,
)

DATA = Path(__file__).parent / "data"
ADJECTIVE, NOUN, OTHER = range(100, 200), range(200, 300), range(300, 400)


# --- a small language: adjectives belong to the next noun; noun n has the adjective n − 100; other words stand between


def noun_phrases(num_rows, num_nouns=5, seed=3):
    """ids (B, L) and the structure: from each adjective to its noun."""
    generator = torch.Generator().manual_seed(seed)

    def draw(high):
        return int(torch.randint(high, (1,), generator=generator))

    rows = []
    for _ in range(num_rows):
        ids, arcs, waiting = [], [], []
        for noun in (torch.randperm(100, generator=generator)[:num_nouns] + NOUN.start).tolist():
            for _ in range(1 + draw(2)):
                waiting.append(len(ids))
                ids += [noun - 100]
                ids += [OTHER.start + draw(100) for _ in range(draw(2))]
            arcs += [(place, len(ids), "amod") for place in waiting]
            ids, waiting = [*ids, noun], []
        rows.append((ids, arcs))
    length = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([row + [0] * (length - len(row)) for row, _ in rows])
    links = tuple(Links(words := tuple((i, i + 1) for i in range(len(row))), words, tuple(arcs)) for row, arcs in rows)
    return {"input_ids": ids, "key_mask": ids > 0}, Structure("input_ids", "input_ids", links)


def attend(inputs):
    """Four heads, as a function of the tokens: by syntax, by identity, by position, by nothing."""
    ids, real = inputs["input_ids"], inputs["key_mask"]
    B, L = ids.shape
    is_adjective, is_noun = ((ids >= kind.start) & (ids < kind.stop) for kind in (ADJECTIVE, NOUN))
    place = torch.arange(L)
    behind = is_noun[:, None] & (place > place[:, None])
    nearest = torch.where(behind, place, L).amin(-1)  # (B, L): the next noun
    scores = torch.randn(B, 4, L, L, generator=torch.Generator().manual_seed(0))
    scores[:, 0] += 9.0 * (is_adjective[..., None] & (place == nearest[..., None]))
    scores[:, 1] += 9.0 * (ids[:, None] == ids[:, :, None] + 100)
    scores[:, 2] += 9.0 * (place == place[:, None] + 1)
    visible = real[:, None, None].expand(B, 4, L, L)
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    layer = AttentionMap("core", "self", "input_ids", "input_ids", weights, visible, scores.amax(-1))
    return Snapshot((layer,), {"input_ids": [["?"] * L] * B}, {"input_ids": ids}, {"input_ids": real})


def test_only_the_head_that_reads_syntax_is_syntactic():
    inputs, structure = noun_phrases(40)
    halves = [
        ({name: tensor[rows] for name, tensor in inputs.items()}, replace(structure, rows=structure.rows[rows]))
        for rows in (slice(0, 21), slice(21, 40))
    ]
    by_syntax, by_identity, by_position, by_nothing = head_atlas(attend, halves).heads
    assert by_syntax.label == "syntactic"
    assert by_syntax.agreement.direction == "forward"
    assert by_syntax.agreement.share > 0.95
    assert 0.3 < by_syntax.agreement.baseline < 0.7, "the next word is a guess to beat"
    assert by_syntax.agreement.excess.sentences == 20, "judged on the other half"

    assert by_position.label == "next"
    assert by_position.agreement.verdict == "no better than position"
    assert by_position.agreement.share == pytest.approx(by_position.agreement.baseline, abs=0.03)
    assert by_position.agreement.rule == ("offset", 1)

    assert by_identity.agreement.verdict == "by word identity"
    assert by_identity.label != "syntactic"
    assert by_nothing.label == "none"


@pytest.mark.parametrize("plain_first", [False, True])
def test_batches_without_a_structure_leave_what_the_others_say_of_agreement(plain_first):
    batches = [noun_phrases(40), (noun_phrases(2)[0], None)]
    heads = head_atlas(attend, batches[::-1] if plain_first else batches).heads
    assert [head.agreement.verdict for head in heads[:3]] == ["syntactic", "by word identity", "no better than position"]
    assert heads[0].agreement.excess.sentences == 20


def test_shuffling_brings_syntactic_down_to_the_baseline_and_leaves_identity_alone():
    inputs, structure = noun_phrases(40)
    shuffled, moved = shuffle_words(inputs, structure)
    by_syntax, by_identity, _, _ = head_scores(attend(inputs), structure, control=(attend(shuffled), moved)).heads
    agreement = by_syntax.agreement
    assert agreement.share > 0.95
    assert agreement.left.high < 0.1, "not above the positional baseline any more"
    assert agreement.lost.low > 0.5
    assert by_identity.agreement.shuffled == pytest.approx(by_identity.agreement.share, abs=0.05)

    # the same verdict on shuffled sentences themselves, against their own baseline
    again = head_scores(attend(shuffled), moved, control=(attend(shuffle_words(shuffled, moved, seed=1)[0]), moved))
    assert again.heads[0].agreement.verdict == "no better than position"
    assert again.heads[0].label != "syntactic"


def test_without_a_control_or_with_few_sentences_nothing_is_called_syntactic():
    inputs, structure = noun_phrases(40)
    (head, *_) = head_scores(attend(inputs), structure).heads
    assert head.agreement.verdict == "no control"
    assert head.label != "syntactic"
    few = 2 * MIN_SENTENCES - 1
    snapshot = attend({name: tensor[:few] for name, tensor in inputs.items()})
    (head, *_) = head_scores(snapshot, replace(structure, rows=structure.rows[:few])).heads
    assert head.agreement is None
    with pytest.raises(ValueError, match="structure has 40 rows, but the snapshot has 9"):
        head_scores(snapshot, structure)


def test_a_head_that_looks_from_nouns_to_adjectives_is_found_backward():
    inputs, structure = noun_phrases(40)

    def mirrored(inputs):
        snapshot = attend(inputs)
        (layer,) = snapshot.maps
        weights = layer.weights.transpose(2, 3) / layer.weights.sum(2)[..., None].clamp(min=1e-9)
        return replace(snapshot, maps=(replace(layer, weights=weights),))

    (head, *_) = head_atlas(mirrored, [(inputs, structure)]).heads
    assert (head.agreement.direction, head.agreement.verdict) == ("backward", "syntactic")


def test_a_relation_is_chosen_on_the_even_sentences_and_judged_on_the_odd_ones():
    inputs, structure = noun_phrases(40)
    links = [replace(row, arcs=row.arcs + tuple((j, i, "back") for i, j, _ in row.arcs)) for row in structure.rows]
    snapshot = attend(inputs)
    (layer,) = snapshot.maps
    weights = layer.weights.clone()
    weights[1::2, 0] = weights[1::2, 3]  # on the odd sentences the syntactic head does nothing
    snapshot = replace(snapshot, maps=(replace(layer, weights=weights),))
    (head, *_) = head_scores(snapshot, replace(structure, rows=tuple(links))).heads
    assert head.agreement.relation == "amod"
    assert head.agreement.share < 0.3
    assert {(a.relation, a.direction) for a in head.relations} == {
        (relation, direction) for relation in ("all", "amod", "back") for direction in ("forward", "backward")
    }


def interval(low, high):
    return Interval((low + high) / 2, low, high, 20)


@pytest.mark.parametrize(
    ("excess", "lost", "left", "verdict"),
    [
        ((0.11, 0.3), (0.11, 0.5), (0.0, 0.2), "syntactic"),
        ((0.09, 0.3), (0.11, 0.5), (0.0, 0.2), "no better than position"),
        ((0.11, 0.3), (0.09, 0.5), (0.0, 0.2), "by word identity"),  # perhaps nothing is lost
        ((0.11, 0.9), (0.11, 0.5), (0.11, 0.2), "by word identity"),  # too much is left
        ((0.11, 0.3), (math.nan, math.nan), (math.nan, math.nan), "no control"),
    ],
)
def test_the_verdict_looks_at_both_baselines(excess, lost, left, verdict):
    found = Agreement("all", "forward", ("offset", 1), 0.9, 0.4, interval(*excess), 0.5, interval(*lost), interval(*left))
    assert found.verdict == verdict


def test_no_relation_makes_a_random_head_syntactic():
    inputs, structure = noun_phrases(30)
    rows = tuple(  # each word of a sentence belongs to some other one, by relations of the same names
        replace(row, arcs=tuple((a, int(b), f"r{a % 7}") for a, b in enumerate(torch.randperm(len(row.key_words)))))
        for row in structure.rows
    )

    def random(inputs):
        snapshot = attend(inputs)
        (layer,) = snapshot.maps
        scores = torch.randn(30, 24, *layer.weights.shape[2:], generator=torch.Generator().manual_seed(0))
        visible = layer.visible[:, :1].expand_as(scores)
        layer = replace(layer, weights=scores.masked_fill(~visible, -torch.inf).softmax(-1), visible=visible)
        return replace(snapshot, maps=(layer,))

    heads = head_atlas(random, [(inputs, replace(structure, rows=rows))]).heads
    assert {head.agreement.verdict for head in heads} == {"no better than position"}


# --- agreement by hand


def one_row(weights, visible=None, kind="self"):
    weights = torch.tensor(weights, dtype=torch.float64)[None, None]
    visible = torch.ones_like(weights).bool() if visible is None else torch.tensor(visible).bool()[None, None]
    keys = "input_ids" if kind != "cross" else "source"
    return AttentionMap("core", kind, "input_ids", keys, weights, visible, weights.amax(-1))


def test_weights_between_words_are_summed_over_keys_and_averaged_over_queries():
    weights = torch.tensor([[[0.1, 0.2, 0.3, 0.4], [0.3, 0.1, 0.2, 0.4], [0.0, 0.5, 0.5, 0.0], [1.0, 0.0, 0.0, 0.0]]])
    words = ((0, 2), (3, 4))  # token 2 is a space
    assert word_attention(weights, words, words)[0].flatten().tolist() == pytest.approx([0.35, 0.4, 1.0, 0.0])


def test_agreement_and_its_positional_rules_worked_out_by_hand():
    weights = [[0.7, 0.2, 0.1, 0.0], [0.6, 0.0, 0.3, 0.1], [0.1, 0.1, 0.0, 0.8], [0.25, 0.25, 0.25, 0.25]]
    words = tuple((i, i + 1) for i in range(4))
    links = Links(words, words, ((0, 1, "x"), (1, 2, "x"), (2, 3, "x"), (3, 0, "y")))
    shares, rules = agreement_of(one_row(weights), links)
    assert float(shares["x", "forward"]) == pytest.approx(2 / 3)  # a word is not its own favourite
    assert float(shares["y", "forward"]) == pytest.approx(1 / 3)  # three others are liked equally
    assert float(shares["all", "forward"]) == pytest.approx((2 + 1 / 3) / 4)
    assert float(shares["x", "backward"]) == pytest.approx((1 + 0 + 1 / 3) / 3)
    assert rules["x", "forward"]["offset", 1] == pytest.approx(1.0)
    assert rules["all", "forward"]["offset", 1] == pytest.approx(3 / 4)
    assert rules["all", "forward"]["from the end", 0] == pytest.approx(1 / 4)


def test_arcs_to_hidden_words_and_arcs_to_all_words_do_not_count():
    words = tuple((i, i + 1) for i in range(3))
    causal = one_row([[1.0, 0, 0], [0.9, 0.1, 0], [0.4, 0.5, 0.1]], [[1, 0, 0], [1, 1, 0], [1, 1, 1]], kind="causal")
    links = Links(words, words, ((0, 1, "hidden"), (1, 0, "only one"), (2, 1, "x"), (2, 0, "both"), (2, 1, "both")))
    shares, _ = agreement_of(causal, links)
    assert {name for name, direction in shares if direction == "forward"} == {"x"}
    assert float(shares["x", "forward"]) == 1.0


def test_cross_attention_agrees_in_one_direction_and_may_count_from_the_ends():
    links = Links(((0, 1), (1, 2)), ((0, 1), (1, 2), (2, 3)), ((0, 1, "x"), (1, 2, "x")))
    shares, rules = agreement_of(one_row([[0.1, 0.8, 0.1], [0.9, 0.1, 0.0]], kind="cross"), links)
    assert {name: float(share) for name, share in shares.items()} == {("all", "forward"): 0.5, ("x", "forward"): 0.5}
    assert rules["x", "forward"]["offset from the end", 0] == 1.0
    assert rules["x", "forward"]["from the end", 0] == 0.5


# --- shuffling


def test_shuffling_moves_whole_words_and_keeps_the_rest_in_place():
    inputs, structure = encode_sentences(
        [Sentence(("the", "old", "cat"), (False, True, True), ((0, 2, "det"), (1, 2, "amod"))), Sentence(("a",), (False,), ())],
        lambda text: [ord(c) for c in text],
        before=[1],
    )
    inputs["token_type_ids"] = torch.arange(inputs["input_ids"].numel()).view_as(inputs["input_ids"])
    seen = set()
    for seed in range(20):
        shuffled, moved = shuffle_words(inputs, structure, seed=seed)
        text = "".join(map(chr, shuffled["input_ids"][0, 1:].tolist()))
        seen.add(text)
        words = [text[start - 1 : stop - 1] for start, stop in moved.rows[0].key_words]
        assert words == ["the", "old", "cat"], "arcs join the same words"
        assert moved.rows[0].arcs == structure.rows[0].arcs
        assert moved.rows[0].query_words == moved.rows[0].key_words
        assert shuffled["input_ids"][:, 0].tolist() == [1, 1]
        assert shuffled["input_ids"][1].tolist() == inputs["input_ids"][1].tolist()
        order = shuffled["token_type_ids"][0]
        assert inputs["input_ids"].view(-1)[order].tolist() == shuffled["input_ids"][0].tolist(), "types go along"
    assert seen == {"the old cat", "the cat old", "old the cat", "old cat the", "cat the old", "cat old the"}


def test_shuffling_the_source_leaves_the_target_alone():
    inputs = {
        "input_ids": torch.tensor([[0, 5, 6, 7, 8]]),
        "key_mask": torch.tensor([[False, True, True, True, True]]),
        "decoder_input_ids": torch.tensor([[3, 4]]),
    }
    words = tuple((i, i + 1) for i in range(4))
    structure = Structure("decoder_input_ids", "input_ids", (Links(words[:2], words, ((1, 3, "x"),)),))
    shuffled, moved = shuffle_words(inputs, structure, seed=5)
    assert shuffled["decoder_input_ids"].tolist() == [[3, 4]]
    assert shuffled["input_ids"][0, 0] == 0, "padding stays"
    (start, _) = moved.rows[0].key_words[3]
    assert shuffled["input_ids"][0, 1 + start] == 8
    assert sorted(shuffled["input_ids"][0].tolist()) == [0, 5, 6, 7, 8]
    assert moved.rows[0].query_words == words[:2]


def test_overlapping_words_are_refused():
    words = ((0, 2), (1, 3))
    with pytest.raises(ValueError, match="must lie in \\[0, 3\\) and not overlap"):
        shuffle_words({"input_ids": torch.ones(1, 3)}, Structure("input_ids", "input_ids", (Links(words, words, ()),)))


# --- files


def arcs_in_words(sentence):
    return {(sentence.words[a], sentence.words[b], relation) for a, b, relation in sentence.arcs}


def test_dependencies_with_multiword_tokens_and_empty_nodes():
    sentences = read_conllu(DATA / "few.conllu")
    assert [s.text for s in sentences] == [
        *("The old cat slept.", "I don't see her boat.", "Ann drinks tea and Tom milk", "The man who came left early."),
    ]
    assert arcs_in_words(sentences[0]) == {
        *(("The", "cat", "det"), ("old", "cat", "amod"), ("cat", "slept", "nsubj"), (".", "slept", "punct")),
    }
    assert ("don't", "see", "aux") in arcs_in_words(sentences[1])
    assert ("don't", "see", "advmod") in arcs_in_words(sentences[1])
    assert ("milk", "Tom", "orphan") in arcs_in_words(sentences[2])
    assert len(sentences[2].words) == 6, "the empty node is left out"
    assert arcs_in_words(sentences[3]) >= {("came", "man", "acl:relcl"), ("man", "left", "nsubj")}


def test_brackets_with_and_without_labels():
    first, second, third = read_brackets(DATA / "few.brackets")
    assert first.text == "the old cat slept on a mat."
    assert {(a, b) for a, b, label in arcs_in_words(first) if label == "NP"} == {
        *(("the", "old"), ("the", "cat"), ("old", "the"), ("old", "cat"), ("cat", "the"), ("cat", "old")),
        *(("a", "mat"), ("mat", "a")),
    }
    assert {b for a, b, _ in arcs_in_words(first) if a == "on"} == {"a", "mat"}
    assert second.text == "Ann said she left", "traces are left out"
    assert third.words == ("the", "cat", "sat", "on", "the", "mat")
    assert {(a, b) for a, b, label in third.arcs if label == "constituent" and a < 2} == {(0, 1), (1, 0)}


def word(node, form, head, relation="x", misc="_"):
    return "\t".join([str(node), form, *"____", "_"[:0] + str(head), relation, "_", misc])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no sentence; CoNLL-U has ten columns"),
        ("# only a comment\n\n", "holds no sentence"),
        ("1 The 2 det\n", "line 1: 1 columns, but CoNLL-U has 10, separated by tabs"),
        (word(1, "a", 0) + "\n" + word(3, "b", 1), "line 2: ID is 3, but word 2 comes next"),
        (word("x", "a", 0), "line 1: ID is x, but word 1 comes next"),
        (word(1, "a", 2), "line 1: HEAD is 2, but must be 0 (root) or one of words 1 to 1"),
        ("# 1\n\n" + word(1, "a", "_"), "line 3: HEAD is _, but must be 0"),
        (word("1-2", "ab", "_") + "\n" + word(1, "a", 0), "line 2: the multiword token ends with word 2, which is missing"),
        (word("2-1", "ab", "_") + "\n" + word(1, "a", 0), "line 1: ID is 2-1, but word 1 comes next"),
    ],
)
def test_a_broken_dependency_file_is_named_with_its_line(tmp_path, text, said):
    file = tmp_path / "broken.conllu"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the message is compared below)
        read_conllu(file)
    assert str(error.value).startswith(str(file))
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no sentence"),
        ("(S (NP (DT the))\n(VP (VBD sat))", "line 1: ( is never closed"),
        ("(S (NP the))\n)", "line 2: ) closes nothing that is open"),
        ("[[the cat) sat]", "line 1: ) closes nothing that is open"),
        ("the cat", "line 1: the stands outside of all brackets"),
    ],
)
def test_a_broken_bracket_file_is_named_with_its_line(tmp_path, text, said):
    file = tmp_path / "broken.txt"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError) as error:  # noqa: PT011
        read_brackets(file)
    assert str(error.value).startswith(str(file))
    assert said in str(error.value)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        read_conllu(tmp_path / "nowhere")
    (tmp_path / "latin").write_bytes("1\tä".encode("latin-1"))
    with pytest.raises(ValueError, match="is not UTF-8"):
        read_brackets(tmp_path / "latin")


def test_words_are_encoded_one_by_one_with_their_space():
    sentences = read_conllu(DATA / "few.conllu")
    inputs, structure = encode_sentences(sentences, lambda text: [ord(c) for c in text])
    for row, sentence in enumerate(sentences):
        length = int(inputs["key_mask"][row].sum())
        assert "".join(map(chr, inputs["input_ids"][row, :length].tolist())) == sentence.text
        words = [sentence.text[start:stop] for start, stop in structure.rows[row].key_words]
        assert words == list(sentence.words)
    # a tokenizer that keeps the space with the word: the space is the word's
    _, structure = encode_sentences(sentences, lambda text: [len(text)])
    assert all(words == tuple(pairwise(range(len(words) + 1))) for words in (row.key_words for row in structure.rows))
