"""The budget of waits: how often the host waits for an accelerator, counted on the pretended one (``tests/pretend.py``)."""

import collections
import contextlib

import pytest
import torch
from extra import train_with
from lightning.pytorch.callbacks import Checkpoint
from ranks import run_ranks

import minitx.data.token_cache
from minitx.analysis import capture, knock_out_heads, patch_heads, take_snapshot
from minitx.cli.compose import compose_config
from minitx.config import TransformerConfig
from minitx.generation import Sampler, beam_search, generate
from minitx.nn import (
    BlockSparse,
    Causal,
    DecoderLM,
    Documents,
    Padding,
    PrefixLM,
    SlidingWindow,
    scaled_dot_product_attention,
)
from minitx.nn.masks import Dense
from tests import pretend
from tests.test_configs import small_llama

pytestmark = pretend.is_needed

LAYERS, TOKENS = 3, 5

BUDGET = {
    "a training step": ("0", "in every precision, with `trainer.clip`, `trainer.accumulate`, dropout, soft-cap and every mask"),
    "a step of an optimizer without `fused`": ("1", "the host decides whether the update is made"),
    "a row of `metrics.csv`": ("1", ""),
    "a validation": (
        "3",
        "its start, its sums and the count of tokens in a checkpoint; each tensor of a checkpoint is one more",
    ),
    "a probe": ("3", "for any number of layers"),
    "a file of attention weights": ("layers + 2", "`callbacks.probe.weights_every`"),
    "a token, greedy, sampled or by beam search": ("1", "for all rows of a batch; a text or a batch has two more"),
    "an attention call of `chunked`": ("0", ""),
    "`capture`, a layer": ("1", "statistics; all other records stay on the device"),
    "`knock_out_heads`, all heads": ("1", ""),
    "`patch_heads`, all heads": ("2", ""),
    "`callbacks=ema`, a step": ("2", "torch's `AveragedModel` reads its counter"),
    "`callbacks=lr_monitor`, a step": ("1", "Lightning uploads the rate of each group; `metrics.csv` has `lr` without it"),
    "`trainer.stop_at`, a step": ("1", "the metric is read at every step"),
    "`model=hf`, a step": ("1", "transformers' own"),
}
"""What waits how often, and why. ``docs/training.md`` links here."""


def limit(what):
    words = BUDGET[what][0].split(" + ")
    return sum(LAYERS if word == "layers" else int(word) for word in words)


def allowed(what, counted, times=1):
    """Assert that ``counted`` is what the budget has, which may only fall. The message has the lines."""
    lines = "\n".join(f"{count} {' '.join(wait)}" for wait, count in sorted(counted.items()))
    assert counted.total() <= times * limit(what), f"{what}: {counted.total()} waits\n{lines}"


# --- runs


class Count(Checkpoint):
    """Notes the waits between two hooks. It is a ``Checkpoint``, because Lightning calls those last."""

    def __init__(self):
        self.parts, self.before = {}, collections.Counter()

    def note(self, part, trainer):
        now = pretend.log.copy()
        self.parts[part, trainer.global_step] = now - self.before
        self.before = now

    def on_train_start(self, trainer, module):
        self.note("start", trainer)

    def on_train_batch_end(self, trainer, *_):
        self.parts[("step", trainer.global_step)] = self.parts.pop(("step", trainer.global_step), collections.Counter())
        earlier = self.parts["step", trainer.global_step]
        self.note("step", trainer)
        self.parts["step", trainer.global_step] += earlier  # of the micro-batches before

    def on_validation_end(self, trainer, module):
        self.note("validation", trainer)


def runs_on_device(configs, folder):
    """The waits of each part of the runs, by name."""
    pretend.register()
    minitx.data.token_cache.data_dir = lambda: folder / "data"
    found = {}
    for name, config in configs.items():
        counter = Count()
        train_with(pretend.on_device(config), folder / name, counter)
        found[name] = counter.parts
    return found


ADAM = {"_target_": "torch.optim.Adam", "lr": 0.01}
MUON = {"_target_": "minitx.training.optimizers.muon", "lr": 0.01}
SGD = {"_target_": "minitx.training.optimizers.sgd", "lr": 0.01}
MONITOR = {"lr": {"_target_": "lightning.pytorch.callbacks.LearningRateMonitor"}}
EMA = {"ema": {"_target_": "lightning.pytorch.callbacks.EMAWeightAveraging", "decay": 0.5}}
PLAIN = {"trainer__log_every": 3, "model__num_layers": LAYERS}


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    path = tmp_path_factory.mktemp("documents") / "documents.jsonl"
    path.write_text("".join(f'{{"text": "{"word " * (1 + n % 5)}"}}\n' for n in range(60)))
    return {"_target_": "minitx.data.hf", "path": str(path), "context_len": 15, "batch_size": 12, "tokenizer": "char"}


def test_a_step_waits_for_nothing_a_row_and_a_validation_for_little(make_config, documents, tmp_path):
    probe = {"probe__every": 3, "probe__weights_every": 3, "probe__weights_rows": 2}
    configs = {
        "clipped": make_config(
            **PLAIN, **probe, trainer__clip=1.0, model__dropout=0.1, trainer__val_every=4, trainer__ckpt_every=4
        ),
        "tiles": make_config(
            **PLAIN, model__backend="chunked", model__dropout=0.1, trainer__precision="bf16-mixed", optimizer=MUON
        ),
        "packed": make_config(**PLAIN, data=documents, trainer__accumulate=2, model__softcap=5.0, optimizer=SGD),
        "adam": make_config(**PLAIN, trainer__precision="bf16-true", optimizer=ADAM),
    }
    found = run_ranks(1, runs_on_device, configs, tmp_path)[0]
    for name, parts in found.items():
        optimizer = "a step of an optimizer without `fused`" if name == "adam" else "a training step"
        for step in (1, 2, 3, 4, 5, 6):
            counted = parts["step", step]
            if name == "clipped":
                counted = without_probes(counted, step)
            is_row = step in (1, 3, 6)
            times = limit(optimizer) + is_row * limit("a row of `metrics.csv`")
            allowed("a row of `metrics.csv`", counted, times) if is_row else allowed(optimizer, counted)
    for step in (4, 6):
        counted = found["clipped"]["validation", step]
        copies = sum(count for (_, name, _), count in counted.items() if name == "pickle")
        assert copies
        allowed("a validation", collections.Counter({wait: n for wait, n in counted.items() if wait[1] != "pickle"}))


OF_A_PROBE = ("analysis/probe.py", "analysis/gradients.py")
OF_A_FILE = (
    "analysis/snapshot_sources.py",
    "analysis/snapshot.py",
    "analysis/answers.py",
    "analysis/questions.py",
    "data/token_labels.py",
)


def without_probes(counted, step):
    """The waits of a step without those of its probe, which are compared with the budget."""
    probe, file, rest = (collections.Counter() for _ in range(3))
    for wait, count in counted.items():
        place = wait[2].removeprefix("minitx/").rpartition(":")[0]
        is_latch = place == "training/nonfinite.py"
        (probe if place in OF_A_PROBE or is_latch else file if place in OF_A_FILE else rest)[wait] = count
    # steps 0 and 1 are probed in the same step, and the batch is uploaded there
    uploads = collections.Counter({wait: count for wait, count in probe.items() if wait[0] == "up"})
    assert step == 1 or not uploads
    allowed("a probe", probe - uploads, 2 if step == 1 else 1)
    allowed("a file of attention weights", file)
    return rest


@pytest.mark.slow
def test_callbacks_of_others_wait_as_the_page_says(make_config, tmp_path):
    rule = {"metric": "train_loss", "value": 0.0}
    configs = {
        "`callbacks=ema`, a step": make_config(**PLAIN, callbacks=EMA),
        "`callbacks=lr_monitor`, a step": make_config(**PLAIN, callbacks=MONITOR),
        "`trainer.stop_at`, a step": make_config(**PLAIN, trainer__stop_at=minitx.config.training.StopAtConfig(**rule)),
    }
    for what, parts in run_ranks(1, runs_on_device, configs, tmp_path)[0].items():
        for step in (2, 4, 5):
            assert parts["step", step].total() == limit(what), what


@pytest.mark.slow
def test_a_model_of_transformers_waits_once_a_step(tmp_path):
    (tmp_path / "text.txt").write_text("Once upon a midnight dreary, while I pondered\n" * 40)
    folder = small_llama(tmp_path / "llama")
    words = (
        f"model=hf model.path={folder} data=text data.path={tmp_path / 'text.txt'} data.context_len=7 data.tokenizer={folder}"
    )
    words += " data.batch_size=4 trainer.max_steps=6 trainer.log_every=3 trainer.val_every=0 trainer.val_batches=1 trainer.ckpt_every=0"
    config = compose_config([*words.split(), "trainer.rehearse=false", "callbacks.progress=false"])
    parts = run_ranks(1, runs_on_device, {"hf": config}, tmp_path)[0]["hf"]
    assert [parts["step", step].total() for step in (2, 4, 5)] == [limit("`model=hf`, a step")] * 3


@pytest.mark.slow
def test_samples_cost_a_wait_a_token(make_config, tmp_path):
    config = make_config(**PLAIN, samples__every=2, samples__max_new_tokens=TOKENS)
    parts = run_ranks(1, runs_on_device, {"samples": config}, tmp_path)[0]["samples"]
    # three prompts, their texts, and the latch
    allowed("a token, greedy, sampled or by beam search", parts["step", 2], 3 * TOKENS + 2)


# --- looking and generating


def counted_in(action):
    with pretend.waits() as counted:
        action()
    return counted


def tools():
    """The waits of generation and of each tool, by what the budget calls it."""
    device = pretend.register()
    torch.manual_seed(0)
    model = (
        DecoderLM(TransformerConfig(vocab_size=29, embed_dim=24, num_heads=4, num_layers=LAYERS, max_len=64)).eval().to(device)
    )
    ids = torch.randint(29, (3, 7), device=device)
    real = torch.arange(7, device=device) >= torch.tensor([[0], [2], [1]], device=device)
    found = {}

    def count(what, action):
        found.setdefault(what, []).append(counted_in(action))

    def statistics():
        with capture(model):
            model(ids, key_mask=real)

    def loss(network):
        return network(ids).square().mean((1, 2))

    sampler = Sampler(temperature=0.8, top_k=9, top_p=0.9, min_p=0.01, repetition_penalty=1.2)
    token = "a token, greedy, sampled or by beam search"
    count(token, lambda: generate(model, ids, key_mask=real, max_new_tokens=TOKENS, context=9))
    count(token, lambda: generate(model, ids, max_new_tokens=TOKENS, sampler=sampler, generator=torch.Generator()))
    count(token, lambda: beam_search(model, ids, max_new_tokens=TOKENS, stop=[3, 7]))
    with torch.device(device):  # a user's default device
        count(token, lambda: generate(model, ids, max_new_tokens=TOKENS, sampler=sampler, generator=torch.Generator()))
        count(token, lambda: beam_search(model, ids, max_new_tokens=TOKENS, stop=[3, 7]))
    count("`capture`, a layer", statistics)
    count("`knock_out_heads`, all heads", lambda: knock_out_heads(model, loss))
    clean, corrupted = {"input_ids": ids}, {"input_ids": ids.flip(1)}
    count("`patch_heads`, all heads", lambda: patch_heads(model, clean, corrupted, lambda logits: logits[:, -1, 4]))
    count("a file of attention weights", lambda: take_snapshot(model, {"input_ids": ids, "key_mask": real}))
    query = torch.randn(2, 4, 300, 8, device=device, requires_grad=True)
    number = torch.arange(300, device=device).repeat(2, 1) // 97
    pattern = torch.ones(5, 5, dtype=torch.bool, device=device).tril()
    causal = Causal()
    masks = [None, causal, SlidingWindow(64) & causal, Documents(number) & causal, Padding(number < 2) & causal, PrefixLM(70)]
    masks += [PrefixLM(number[0, :2] + 5), BlockSparse(pattern, 60), Dense((number[:, :, None] >= number[:, None])[:, None])]
    for mask in masks:

        def attend(mask=mask):
            output = scaled_dot_product_attention(query, query, query, attn_mask=mask, dropout_p=0.1, backend="chunked")
            output.sum().backward()

        for context in (contextlib.nullcontext(), torch.device(device)):
            with context:
                count("an attention call of `chunked`", attend)
    return found


TIMES = {"a token, greedy, sampled or by beam search": TOKENS + 2, "`capture`, a layer": LAYERS}


def test_generation_and_each_tool_keep_to_the_budget():
    for what, counters in run_ranks(1, tools)[0].items():
        for counted in counters:
            allowed(what, counted, TIMES.get(what, 1))


def seeded():
    """A tool that reads what it need not."""
    device = pretend.register()
    model = torch.nn.Linear(3, 3).to(device)
    with pretend.waits() as counted:
        float(model(torch.ones(1, 3, device=device)).sum())
    return counted


def test_a_number_that_is_read_is_counted_with_its_line():
    [((kind, name, place), count)] = run_ranks(1, seeded)[0].items()
    assert (kind, name, count) == ("read", "_local_scalar_dense", 1) and "test_waits.py:" in place
    with pytest.raises(AssertionError, match=r"(?s)a training step: 1 waits.*test_waits.py:\d+"):
        allowed("a training step", collections.Counter({(kind, name, place): count}))
