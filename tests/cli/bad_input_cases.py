"""What people get wrong, as data: the tests of bad input and ``docs/errors.md`` are made from these cases.

A case says what is wrong, what was typed, and which parts the printed line must name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

TINY = ("data=kv_lookup", "debug=one_step", "model.embed_dim=8", "model.num_heads=2", "model.num_layers=1", "callbacks.progress=false")  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One mistake.

    Attributes:
        wrong: what is wrong, in words; no two cases share it.
        typed: the arguments, with spaces between them.
        names: what the printed line must hold.
        code: the exit code; 0 is no mistake at all, and nothing is printed.
        builds: the mistake is found in files, machine or model, so ``TINY`` stands before what was typed; else it is found
            before anything is read.
        files: by name, made in the current folder before.
        prepare: whatever else must be so before, called with the current folder and pytest's monkeypatch.
        program: of ``scripts/``.
        cut: where the words of another package begin, which the page leaves out: they change with its version.
    """

    wrong: str
    typed: str
    names: tuple[str, ...]
    code: int = 2
    builds: bool = False
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    prepare: Callable[[Path, Any], Any] | None = None
    program: str = "train"
    cut: str | None = None

    @property
    def arguments(self) -> list[str]:
        """What the program is called with."""
        typed = self.typed.split(" ") if self.typed else []
        if not self.builds or self.program != "train":
            return typed
        chosen = {argument.partition("=")[0] for argument in typed}
        return [*(a for a in TINY if a.partition("=")[0] not in chosen), *typed]


def composed(wrong: str, typed: str, *names: str, **options: Any) -> Case:
    """A mistake that is found before anything is read."""
    return Case(wrong, typed, names, **options)


def built(wrong: str, typed: str, *names: str, **options: Any) -> Case:
    """A mistake that only files, machine or model can tell."""
    return Case(wrong, typed, names, builds=True, **options)


def of(program: str, wrong: str, typed: str, *names: str, **options: Any) -> Case:
    """A mistake in another program than ``train.py``."""
    return Case(wrong, typed, names, builds=True, program=program, **options)


Group = Literal["config", "data", "files", "environment"]

CONFIG = [
    composed("a key with a letter too few", "trainer.max_step=3", "trainer.max_step is not a key", "did you mean trainer.max_steps?", "allowed here:"),
    composed("a group with a letter too few", "trainr.max_steps=3", "trainr.max_steps is not a key", "did you mean trainer?"),
    composed("a key of another library, added with +", "+trainer.epochs=3", "trainer.epochs is not a key", "allowed here:", "max_steps"),
    composed("a key at the top that there is not", "foo=1", "foo is not a key", "allowed here:", "optimizer"),
    composed("an unknown key, forced in with ++", "++model.foo=1", "model.foo is not a key", "allowed here:"),
    composed("a word for a number", "model.num_heads=abc", "model.num_heads=abc", "whole number"),
    composed("a fraction for a whole number", "model.num_heads=2.5", "model.num_heads=2.5", "whole number"),
    composed("a list for a number", "model.num_heads=[1]", "model.num_heads=[1]", "whole number"),
    composed("true for a number", "model.num_heads=true", "model.num_heads=True", "whole number"),
    composed("null for a number", "model.num_heads=null", "model.num_heads=null", "not allowed", "whole number"),
    composed("heads that do not divide the width", "model.num_heads=7", "embed_dim=128", "num_heads=7", "head_dim"),
    composed("key heads that do not divide the heads", "model.num_kv_heads=3", "num_kv_heads=3", "divide", "num_heads=4"),
    composed("a width of zero", "model.embed_dim=0", "model.embed_dim=0", "positive"),
    composed("a dropout that drops all", "model.dropout=1.0", "model.dropout=1.0", "[0, 1)"),
    composed("a dropout that is no number", "model.dropout=nan", "model.dropout=nan", "[0, 1)"),
    composed("an unknown scale", "model.scale=sqrt", "model.scale=sqrt", "inv_sqrt, unscaled, inv, learned, log_length"),
    composed("none for no scaling", "model.scale=none", "model.scale=none", "unscaled", "inv_sqrt"),
    composed("null for no scaling", "model.scale=null", "model.scale=null", "inv_sqrt", "unscaled"),
    composed("true for a scale", "model.scale=true", "model.scale=True", "inv_sqrt", "unscaled"),
    composed("a list for a scale", "model.scale=[1]", "model.scale=[1]", "inv_sqrt"),
    composed("an endless scale", "model.scale=inf", "model.scale=inf", "number"),
    composed("an endless factor of the scale", "model.scale_factor=inf", "model.scale_factor=inf", "finite"),
    composed("a misspelt initialisation", "model.init=lecunn", "model.init=lecunn", "did you mean lecun?", "gpt2"),
    composed("true for a kind of norm", "model.qk_norm=true", "model.qk_norm=True", "rms, layer, l2"),
    composed("an unknown place of the norm", "model.norm_position=middle", "model.norm_position=middle", "pre, post, sandwich, deepnorm"),
    composed("rotary positions in heads of odd width", "model.position=rotary model.head_dim=5", "head_dim=5", "even", "rotary"),
    composed("parallel blocks with the norm behind", "model.parallel=true model.norm_position=post", "parallel=True", "norm_position=post"),
    composed("a table of positions shorter than the rows", "model.max_len=8", "model.max_len=8", "64"),
    composed("an unknown model", "model=nonsense", "model=nonsense", "char_small", "llama_small"),
    composed("an unknown experiment", "experiment=nonsense", "experiment=nonsense", "char_lm", "scaling_ablation"),
    composed("an unknown optimizer", "optimizer=sgd", "optimizer=sgd", "adamw"),
    composed("an unknown debug mode", "debug=on", "debug=on", "one_step"),
    composed("an unknown grid", "experiment=scaling_ablation ablation=huge", "ablation=huge", "quick", "smoke"),
    composed("a misspelt group", "modle=char_small", "modle", "model"),
    composed("a warm-up longer than the run", "schedule.warmup_steps=2000", "schedule.warmup_steps=2000", "trainer.max_steps=1000"),
    composed("a negative last learning rate", "schedule.final_lr=-0.1", "schedule.final_lr=-0.1", "zero or more"),
    composed("a decay over nothing", "schedule=trapezoid schedule.decay_fraction=0", "schedule.decay_fraction=0", "(0, 1]"),
    composed("a learning rate of zero", "optimizer.lr=0", "optimizer.lr=0", "positive"),
    composed("a word for the learning rate", "optimizer.lr=fast", "optimizer.lr=fast", "number"),
    composed("one beta of two", "optimizer.betas=[0.9]", "optimizer.betas=[0.9]", "2 entries"),
    composed("a beta of one", "optimizer.betas=[0.9,1]", "betas=[0.9, 1.0]", "[0, 1)"),
    composed("a clip of zero", "optimizer.clip=0", "optimizer.clip=0", "positive"),
    composed("a word for a list of rules", "optimizer.rules=abc", "optimizer.rules=abc", "list"),
    composed("a rule with a misspelt key", "optimizer.rules=[{matc:q_proj}]", "optimizer.rules[0].matc is not a key", "match"),
    composed("a rule that matches nothing by name", "optimizer.rules=[{lr:2}]", "optimizer.rules[0].match is missing"),
    composed("a rule with a broken regular expression", "optimizer.rules=[{match:'('}]", "optimizer.rules[0].match=(", "regular expression"),
    composed("a rule with a word for its factor", "optimizer.rules=[{match:q_proj,lr:big}]", "optimizer.rules[0].lr=big", "head_dim^p"),
    composed("torch's word for a device", "trainer.accelerator=cuda", "trainer.accelerator=cuda", "auto, cpu, gpu"),
    composed("a precision that is not offered", "trainer.precision=16", "trainer.precision=16", "bf16-mixed"),
    composed("a word for the number of devices", "trainer.devices=auto", "trainer.devices=auto", "whole number"),
    composed("a batch that does not divide into micro-batches", "trainer.accumulate=5", "data.batch_size=12", "trainer.accumulate=5"),
    composed("no micro-batch at all", "trainer.accumulate=0", "trainer.accumulate=0", "positive"),
    composed("a run of no steps", "trainer.max_steps=0", "trainer.max_steps=0", "positive"),
    composed("neither true nor false", "trainer.compile=maybe", "trainer.compile=maybe", "true or false"),
    composed("no thread at all", "trainer.threads=0", "trainer.threads=0", "positive"),
    composed("a text of one's own without its file", "data=text", "data.path=null", "text file"),
    composed("a file for data that take none", "data.path=x.txt", "data.path=x.txt", "data=text"),
    composed("more pairs than keys", "data=kv_lookup data.num_pairs=65", "data.num_pairs=65", "num_keys=64"),
    composed("everything for validation", "data.val_fraction=1", "data.val_fraction=1", "(0, 1)"),
    composed("a vocabulary smaller than the bytes", "data.bpe_vocab_size=3", "data.bpe_vocab_size=3", "257"),
    composed("an unknown name of data", "data.name=wiki", "data.name=wiki", "kjv, text, kv_lookup"),
    composed("a key of other data", "data=kv_lookup data.context_len=3", "data.context_len is not a key"),
    composed("a smoothing that leaves no label", "objective.label_smoothing=1", "objective.label_smoothing=1", "[0, 1)"),
    composed("a negative seed", "seed=-1", "seed=-1", "[0, 2^32)"),
    composed("a word for the seed", "seed=abc", "seed=abc", "whole number"),
    composed("an unknown answer to a loss that is not finite", "on_nonfinite=ignore", "on_nonfinite=ignore", "stop, record"),
    composed("probes at negative steps", "callbacks.probe.every=-1", "callbacks.probe.every=-1", "zero or more"),
    composed("an interpolation to nothing", "model.embed_dim=${nope}", "model.embed_dim", "nope"),
    composed("an interpolation to an unset variable", "model.embed_dim=${oc.env:MINITX_NOT_SET}", "model.embed_dim", "MINITX_NOT_SET"),
    composed("a misspelt launcher", "experiment=scaling_ablation ablation.launcher=slurn", "ablation.launcher=slurn", "local, slurm, ray", "did you mean slurm?"),
    composed("options for a launcher that takes none", "experiment=scaling_ablation +ablation.launcher_options.cluster=local", "ablation.launcher_options", "takes none"),
    composed("a stack of cells that measure lengths", "experiment=position_ablation ablation.stack=true", "evaluation.lengths", "cannot be trained in a stack"),
    composed("a stack for a launcher without use for it", "experiment=scaling_ablation ablation.stack=true ablation.launcher=ray", "ablation.stack", "launcher=ray has no use"),
    composed("a report of a grid that never ran", "experiment=scaling_ablation ablation.report_only=true", "output_dir=", "holds no cells.jsonl", "run the grid first"),
    composed("a margin of zero", "experiment=scaling_ablation ablation.margin=0", "ablation.margin=0", "positive"),
    composed("an unknown arm", "experiment=scaling_ablation ablation.studies.text.arms=[foo]", "studies.text.arms=['foo']", "inv_sqrt"),
    composed("a condition to skip that has an unknown name", "experiment=scaling_ablation ablation.studies.recall.skip=[{foo:[a]}]", "skip", "foo", "head_dim"),
    composed("a condition to skip that has an unknown value", "experiment=scaling_ablation ablation.studies.recall.skip=[{init:[lecunn]}]", "skip", "lecunn", "gpt2"),
    composed("a seed given twice", "experiment=scaling_ablation ablation.studies.recall.seeds=[0,0]", "ablation.studies", "twice"),
    composed("a study whose run has too few steps", "experiment=scaling_ablation ablation.studies.floor.base=['data=kv_lookup']", "ablation.studies.floor.base", "trainer.max_steps"),
    composed("a logger without a class", "+logger.x.project=minitx", "logger.x", "_target_"),
    composed("a key of a logger that was not chosen", "logger.wandb.project=x", "logger.wandb.project is not a key"),
    built("a strategy that nobody knows", "trainer.strategy=nonsense", "trainer.strategy=nonsense", cut="cannot be used:"),
    built("a backend that nobody knows", "model.backend=nonsense", "nonsense", "sdpa", "math"),
    built("a backend without the option", "model.backend=sdpa model.softcap=5", "sdpa", "soft-cap"),
    built("an endless soft-cap", "model.softcap=inf", "softcap", "inf"),
    built("a model beyond any memory", "model.embed_dim=1000000000000000000", "model cannot be built", cut="cannot be built:"),
    built("a rule that matches no parameter", "optimizer.rules=[{match:nomatch}]", "optimizer.rules[0].match=nomatch", "matches no parameter"),
    built("a rule with a negative factor", "optimizer.rules=[{match:q_proj,lr:-1}]", "optimizer.rules[0].lr=-1", "zero or more"),
    built("rules that freeze everything", "optimizer.rules=[{match:'.',trainable:false}]", "optimizer.rules", "nothing is left to train"),
    built("a callback with an argument that it does not take", "+callbacks.extra.a={_target_:lightning.pytorch.callbacks.Timer,nonsense:1}", "callbacks.extra.a", "nonsense", cut="cannot be built:"),
]  # fmt: skip

DATA = [
    built("a file that is not there", "data=text data.path=missing.txt", "data.path=missing.txt", "does not exist"),
    built("a folder for a file", "data=text data.path=.", "data.path=.", "folder"),
    built("an empty file", "data=text data.path=empty.txt", "data.path=empty.txt", "empty", files={"empty.txt": ""}),
    built("bytes that are no text", "data=text data.path=binary.txt", "data.path=binary.txt", "UTF-8", files={"binary.txt": bytes(range(256)) * 40}),
    built("a text shorter than a row", "data=text data.path=short.txt", "data.path=short.txt", "data.context_len=64", files={"short.txt": "too short"}),
    built("a vocabulary smaller than that of the data", "model.vocab_size=3", "model.vocab_size=3", "80"),
]  # fmt: skip

FILES = [
    built("a checkpoint that is not there", "ckpt_path=missing.ckpt", "ckpt_path=missing.ckpt", "not a file"),
    built("the last checkpoint of no run", "ckpt_path=last", "ckpt_path=last", "output_dir=null"),
    built("the last checkpoint of a folder without a run", "ckpt_path=last output_dir=run", "ckpt_path=", "run/checkpoints/last.ckpt", "not a file"),
    built("a text for a checkpoint", "ckpt_path=short.txt", "ckpt_path=short.txt", "cannot be read as a checkpoint", files={"short.txt": "too short"}, cut="of minitx:"),
    built("a file for the output folder", "output_dir=short.txt", "output_dir=", "short.txt", "file", files={"short.txt": "too short"}),
    built("an output folder below a file", "output_dir=short.txt/below", "output_dir=", "short.txt/below", files={"short.txt": "too short"}),
]  # fmt: skip

ENVIRONMENT: list[Case] = []

CASES: dict[Group, list[Case]] = {"config": CONFIG, "data": DATA, "files": FILES, "environment": ENVIRONMENT}
