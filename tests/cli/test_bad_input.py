"""A mistake in what was typed gets one line that names key, value and what is allowed, exit code 2, and no folder."""

from __future__ import annotations

import pytest
import torch

TINY = ("data=kv_lookup", "debug=one_step", "model.embed_dim=8", "model.num_heads=2", "model.num_layers=1", "callbacks.progress=false")  # fmt: skip

# (arguments, what the line must name)
COMPOSED = {
    "trainer.max_step=3": ("trainer.max_step is not a key", "did you mean trainer.max_steps?", "allowed here:"),
    "trainr.max_steps=3": ("trainr.max_steps is not a key", "did you mean trainer?"),
    "+trainer.epochs=3": ("trainer.epochs is not a key", "allowed here:", "max_steps"),
    "foo=1": ("foo is not a key", "allowed here:", "optimizer"),
    "++model.foo=1": ("model.foo is not a key", "allowed here:"),
    "model.num_heads=abc": ("model.num_heads=abc", "whole number"),
    "model.num_heads=2.5": ("model.num_heads=2.5", "whole number"),
    "model.num_heads=[1]": ("model.num_heads=[1]", "whole number"),
    "model.num_heads=true": ("model.num_heads=True", "whole number"),
    "model.num_heads=null": ("model.num_heads=null", "not allowed", "whole number"),
    "model.num_heads=7": ("embed_dim=128", "num_heads=7", "head_dim"),
    "model.num_kv_heads=3": ("num_kv_heads=3", "divide", "num_heads=4"),
    "model.embed_dim=0": ("model.embed_dim=0", "positive"),
    "model.dropout=1.0": ("model.dropout=1.0", "[0, 1)"),
    "model.dropout=nan": ("model.dropout=nan", "[0, 1)"),
    "model.scale=sqrt": ("model.scale=sqrt", "inv_sqrt, unscaled, inv, learned, log_length"),
    "model.scale=none": ("model.scale=none", "unscaled", "inv_sqrt"),
    "model.scale=null": ("model.scale=null", "inv_sqrt", "unscaled"),
    "model.scale=true": ("model.scale=True", "inv_sqrt", "unscaled"),
    "model.scale=[1]": ("model.scale=[1]", "inv_sqrt"),
    "model.scale=inf": ("model.scale=inf", "number"),
    "model.scale_factor=inf": ("model.scale_factor=inf", "finite"),
    "model.init=lecunn": ("model.init=lecunn", "did you mean lecun?", "gpt2"),
    "model.qk_norm=true": ("model.qk_norm=True", "rms, layer, l2"),
    "model.norm_position=middle": ("model.norm_position=middle", "pre, post, sandwich, deepnorm"),
    "model.position=rotary model.head_dim=5": ("head_dim=5", "even", "rotary"),
    "model.parallel=true model.norm_position=post": ("parallel=True", "norm_position=post"),
    "model.max_len=8": ("model.max_len=8", "64"),
    "model=nonsense": ("model=nonsense", "char_small", "llama_small"),
    "experiment=nonsense": ("experiment=nonsense", "char_lm", "scaling_ablation"),
    "optimizer=sgd": ("optimizer=sgd", "adamw"),
    "debug=on": ("debug=on", "one_step"),
    "experiment=scaling_ablation ablation=huge": ("ablation=huge", "quick", "smoke"),
    "modle=char_small": ("modle", "model"),
    "schedule.warmup_steps=2000": ("schedule.warmup_steps=2000", "trainer.max_steps=1000"),
    "schedule.final_lr=-0.1": ("schedule.final_lr=-0.1", "zero or more"),
    "schedule=trapezoid schedule.decay_fraction=0": ("schedule.decay_fraction=0", "(0, 1]"),
    "optimizer.lr=0": ("optimizer.lr=0", "positive"),
    "optimizer.lr=fast": ("optimizer.lr=fast", "number"),
    "optimizer.betas=[0.9]": ("optimizer.betas=[0.9]", "2 entries"),
    "optimizer.betas=[0.9,1]": ("betas=[0.9, 1.0]", "[0, 1)"),
    "optimizer.clip=0": ("optimizer.clip=0", "positive"),
    "optimizer.rules=abc": ("optimizer.rules=abc", "list"),
    "optimizer.rules=[{matc:q_proj}]": ("optimizer.rules[0].matc is not a key", "match"),
    "optimizer.rules=[{lr:2}]": ("optimizer.rules[0].match is missing",),
    "optimizer.rules=[{match:'('}]": ("optimizer.rules[0].match=(", "regular expression"),
    "optimizer.rules=[{match:q_proj,lr:big}]": ("optimizer.rules[0].lr=big", "head_dim^p"),
    "trainer.accelerator=cuda": ("trainer.accelerator=cuda", "auto, cpu, gpu"),
    "trainer.precision=16": ("trainer.precision=16", "bf16-mixed"),
    "trainer.devices=auto": ("trainer.devices=auto", "whole number"),
    "trainer.accumulate=5": ("data.batch_size=12", "trainer.accumulate=5"),
    "trainer.accumulate=0": ("trainer.accumulate=0", "positive"),
    "trainer.max_steps=0": ("trainer.max_steps=0", "positive"),
    "trainer.compile=maybe": ("trainer.compile=maybe", "true or false"),
    "trainer.threads=0": ("trainer.threads=0", "positive"),
    "data=text": ("data.path=null", "text file"),
    "data.path=x.txt": ("data.path=x.txt", "data=text"),
    "data=kv_lookup data.num_pairs=65": ("data.num_pairs=65", "num_keys=64"),
    "data.val_fraction=1": ("data.val_fraction=1", "(0, 1)"),
    "data.bpe_vocab_size=3": ("data.bpe_vocab_size=3", "257"),
    "data.name=wiki": ("data.name=wiki", "kjv, text, kv_lookup"),
    "data=kv_lookup data.context_len=3": ("data.context_len is not a key",),
    "objective.label_smoothing=1": ("objective.label_smoothing=1", "[0, 1)"),
    "seed=-1": ("seed=-1", "[0, 2^32)"),
    "seed=abc": ("seed=abc", "whole number"),
    "on_nonfinite=ignore": ("on_nonfinite=ignore", "stop, record"),
    "callbacks.probe.every=-1": ("callbacks.probe.every=-1", "zero or more"),
    "model.embed_dim=${nope}": ("model.embed_dim", "nope"),
    "model.embed_dim=${oc.env:MINITX_NOT_SET}": ("model.embed_dim", "MINITX_NOT_SET"),
    "experiment=scaling_ablation ablation.launcher=slurn": (
        "ablation.launcher=slurn",
        "local, slurm, ray",
        "did you mean slurm?",
    ),
    "experiment=scaling_ablation +ablation.launcher_options.cluster=local": ("ablation.launcher_options", "takes none"),
    "experiment=position_ablation ablation.stack=true": ("evaluation.lengths", "cannot be trained in a stack"),
    "experiment=scaling_ablation ablation.stack=true ablation.launcher=ray": ("ablation.stack", "launcher=ray has no use"),
    "experiment=scaling_ablation ablation.report_only=true": ("output_dir=", "holds no cells.jsonl", "run the grid first"),
    "experiment=scaling_ablation ablation.margin=0": ("ablation.margin=0", "positive"),
    "experiment=scaling_ablation ablation.studies.text.arms=[foo]": ("studies.text.arms=['foo']", "inv_sqrt"),
    "experiment=scaling_ablation ablation.studies.recall.skip=[{foo:[a]}]": ("skip", "foo", "head_dim"),
    "experiment=scaling_ablation ablation.studies.recall.skip=[{init:[lecunn]}]": ("skip", "lecunn", "gpt2"),
    "experiment=scaling_ablation ablation.studies.recall.seeds=[0,0]": ("ablation.studies", "twice"),
    "experiment=scaling_ablation ablation.studies.floor.base=['data=kv_lookup']": (
        "ablation.studies.floor.base",
        "trainer.max_steps",
    ),
    "+logger.x.project=minitx": ("logger.x", "_target_"),
    "logger.wandb.project=x": ("logger.wandb.project is not a key",),
}


def assert_one_line(said, parts):
    assert said.code == 2, said
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1, said.err
    assert "Traceback" not in said.out + said.err
    for part in parts:
        assert part in said.err, (part, said.err)


@pytest.fixture
def nothing_runs(monkeypatch):
    """A mistake that slips through would train for minutes."""

    def ran(*args, **kwargs):
        raise AssertionError("the run began")

    monkeypatch.setattr("minitx.cli.train.run_training", ran)
    monkeypatch.setattr("minitx.cli.ablate.open_launcher", ran)


@pytest.mark.parametrize("typed", COMPOSED)
def test_a_typo_gets_one_line_that_names_it(cli, place, nothing_runs, typed):
    assert_one_line(cli(*typed.split(" ")), COMPOSED[typed])
    assert list(place.iterdir()) == []


# what only the machine, the files or the built model can tell
BUILT = {
    "data=text data.path=missing.txt": ("data.path=missing.txt", "does not exist"),
    "data=text data.path=.": ("data.path=.", "folder"),
    "data=text data.path=empty.txt": ("data.path=empty.txt", "empty"),
    "data=text data.path=binary.txt": ("data.path=binary.txt", "UTF-8"),
    "data=text data.path=short.txt": ("data.path=short.txt", "data.context_len=64"),
    "ckpt_path=missing.ckpt": ("ckpt_path=missing.ckpt", "not a file"),
    "ckpt_path=last": ("ckpt_path=", "last.ckpt", "not a file"),
    "ckpt_path=short.txt": ("ckpt_path=short.txt", "cannot be read as a checkpoint"),
    "output_dir=short.txt": ("output_dir=", "short.txt", "file"),
    "output_dir=short.txt/below": ("output_dir=", "short.txt/below"),
    "trainer.strategy=nonsense": ("trainer.strategy=nonsense",),
    "model.backend=nonsense": ("nonsense", "sdpa", "math"),
    "model.backend=sdpa model.softcap=5": ("sdpa", "soft-cap"),
    "model.softcap=inf": ("softcap", "inf"),
    "model.embed_dim=1000000000000000000": ("model cannot be built",),
    "model.vocab_size=3": ("model.vocab_size=3", "80"),
    "optimizer.rules=[{match:nomatch}]": ("optimizer.rules[0].match=nomatch", "matches no parameter"),
    "optimizer.rules=[{match:q_proj,lr:-1}]": ("optimizer.rules[0].lr=-1", "zero or more"),
    "optimizer.rules=[{match:'.',trainable:false}]": ("optimizer.rules", "nothing is left to train"),
    "+callbacks.extra.a={_target_:lightning.pytorch.callbacks.Timer,nonsense:1}": ("callbacks.extra.a", "nonsense"),
}


@pytest.mark.parametrize("typed", BUILT)
def test_what_only_the_machine_can_tell_gets_one_line_too(cli, place, typed):
    (place / "empty.txt").touch()
    (place / "binary.txt").write_bytes(bytes(range(256)) * 40)
    (place / "short.txt").write_text("too short")
    before = sorted(place.rglob("*"))
    arguments = typed.split(" ")
    tiny = [a for a in TINY if not (a.startswith("data=") and arguments[0].startswith("data="))]
    assert_one_line(cli(*tiny, *arguments), BUILT[typed])
    assert sorted(place.rglob("*")) == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a machine without a GPU")
def test_a_gpu_that_is_not_there_is_named(cli, place):
    assert_one_line(cli(*TINY, "trainer.accelerator=gpu"), ("trainer.accelerator=gpu", "0 usable GPUs"))
    assert list(place.iterdir()) == []


def test_a_folder_that_holds_a_run_is_not_written_over(cli, place):
    assert cli(*TINY, "output_dir=run").code == 0
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    assert_one_line(cli(*TINY, "output_dir=run"), ("output_dir=", "holds a run already", "ckpt_path=last"))
    assert {path: path.read_bytes() for path in place.rglob("*") if path.is_file()} == before


def test_traceback_shows_where_an_error_came_from(cli):
    said = cli("traceback=true", "model.num_heads=abc")
    assert said.code == 2
    assert "Traceback (most recent call last)" in said.err
    assert said.err.rstrip().splitlines()[-1].startswith("error: model.num_heads=abc")
    assert "Traceback" not in cli("model.num_heads=abc").err


def test_a_run_that_stops_being_finite_exits_with_3_and_one_line(cli):
    said = cli(*TINY, "trainer.max_steps=4", "optimizer.lr=1e30", "model.norm_position=post", "trainer.ckpt_every=1")
    assert said.code == 3, said
    assert "not finite" in said.err
    assert said.err.count("\n") == 1


def test_a_run_that_records_ends_with_0(cli):
    arguments = (*TINY, "trainer.max_steps=4", "optimizer.lr=1e30", "model.norm_position=post", "on_nonfinite=record")
    said = cli(*arguments)
    assert (said.code, said.err) == (0, "")
