"""What people get wrong, as data: the tests of bad input and ``docs/errors.md`` are made from these cases.

A case says what is wrong, what was typed, and which parts the printed line must name.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import sys
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
        prepare: whatever else must be so before, called with the current folder and pytest's monkeypatch; a file that it
            returns stays open meanwhile.
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

WORDS = "In the beginning was the Word, and the Word was with God.\n" * 50
PAIRS = "eins,one\nzwei,two\ndrei,three\nvier,four\n"
MINE = "--config-dir=conf --config-name=mine"
OWN = "--config-dir=conf experiment=own"
TEXT = "data=text data.path=a.txt data.context_len=16 data.batch_size=4"
PAIRED = "data=pairs data.path=p.csv model=vaswani_small data.tokenizer=char data.batch_size=2"
HUB = "data=hf data.path=d.jsonl data.tokenizer=char data.context_len=16 data.batch_size=2"
PRETRAINED = "data=text data.path=a.txt model=gpt2 model.pretrained=theirs data.context_len=16 model.max_len=64"


def nan_pictures(place: Path, patch: Any) -> None:
    """A folder of images whose pixels are floats, one of them no number."""
    from PIL import Image

    for label in ("cat", "dog"):
        (place / "pictures" / label).mkdir(parents=True)
        image = Image.new("F", (8, 8), 0.5)
        image.putpixel((0, 0), float("nan"))
        image.save(place / "pictures" / label / "1.tiff")


def pretrained(tokenizer: str | None) -> Callable[[Path, Any], None]:
    """A folder of a model with 5 ids: without a tokenizer, with half of one, or with one for the characters given."""

    def prepare(place: Path, patch: Any) -> None:
        from minitx.config import TransformerConfig
        from minitx.data.tokenizers import CharTokenizer
        from minitx.interop import save_hf
        from minitx.nn import DecoderLM

        (place / "a.txt").write_text(WORDS, encoding="utf-8")
        sizes = {"embed_dim": 8, "num_heads": 2, "num_layers": 1, "max_len": 64, "activation": "gelu_tanh"}
        save_hf(DecoderLM(TransformerConfig(vocab_size=5, **sizes)), place / "theirs")
        if tokenizer is not None and tokenizer.startswith("{"):
            (place / "theirs" / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
        elif tokenizer is not None:
            CharTokenizer(tokenizer).save(place / "theirs" / "tokenizer.json")

    return prepare


def hold(place: Path, patch: Any) -> Any:
    """A run that is going on in the folder ``run``, until what is returned is closed."""
    (place / "run").mkdir()
    held = (place / "run" / ".lock").open("a")
    fcntl.flock(held, fcntl.LOCK_EX)
    return held


def no_network(place: Path, patch: Any) -> None:
    """A hub that does not answer."""
    import datasets

    patch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    patch.setattr(datasets.config, "HF_ENDPOINT", "http://127.0.0.1:9")


def without(*packages: str) -> Callable[[Path, Any], None]:
    """Packages that are not installed."""

    def prepare(place: Path, patch: Any) -> None:
        for package in packages:
            patch.setitem(sys.modules, package, None)

    return prepare


def kill_worker(place: Path, patch: Any) -> None:
    """Kill a process that makes batches as soon as it has been started."""
    start = multiprocessing.process.BaseProcess.start

    def start_and_kill(process: multiprocessing.process.BaseProcess) -> None:
        start(process)
        process.kill()
        process.join()  # torch's handler of dead workers must not find it later, in the middle of other code

    patch.setattr(multiprocessing.process.BaseProcess, "start", start_and_kill)


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
    composed("a power of d_k without quotes in a rule", "optimizer.rules=[{match:q_proj,lr:head_dim^-0.5}]", "cannot be read", "stands in quotes"),
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
    composed("Muon over cut matrices", "optimizer=muon trainer=fsdp", "optimizer.name=muon", "trainer.strategy=sharded", "ddp"),
    composed("a soft-cap on logits of an encoder", "model.architecture=encoder model.logit_softcap=30", "logit_softcap=30.0", "architecture=encoder"),
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
    composed("a strategy that nobody knows", "trainer.strategy=nonsense", "trainer.strategy=nonsense", "auto, ddp, sharded"),
    built("a backend that nobody knows", "model.backend=nonsense", "nonsense", "sdpa", "math"),
    built("a backend without the option", "model.backend=sdpa model.softcap=5", "sdpa", "soft-cap"),
    built("an endless soft-cap", "model.softcap=inf", "softcap", "inf"),
    built("a model beyond any memory", "model.embed_dim=1000000000000000000", "model cannot be built", cut="cannot be built:"),
    built("a rule that matches no parameter", "optimizer.rules=[{match:nomatch}]", "optimizer.rules[0].match=nomatch", "matches no parameter"),
    built("a rule with a negative factor", "optimizer.rules=[{match:q_proj,lr:-1}]", "optimizer.rules[0].lr=-1", "zero or more"),
    built("rules that freeze everything", "optimizer.rules=[{match:'.',trainable:false}]", "optimizer.rules", "nothing is left to train"),
    built("a callback with an argument that it does not take", "+callbacks.extra.a={_target_:lightning.pytorch.callbacks.Timer,nonsense:1}", "callbacks.extra.a", "nonsense", cut="cannot be built:"),
    composed("an endless learning rate", "optimizer.lr=inf", "optimizer.lr=inf", "finite"),
    composed("a learning rate that is no number", "optimizer.lr=nan", "optimizer.lr=nan", "positive"),
    composed("an endless weight decay", "optimizer.weight_decay=inf", "optimizer.weight_decay=inf", "finite"),
    composed("an endless clip for none", "optimizer.clip=inf", "optimizer.clip=inf", "finite"),
    composed("an endless last learning rate", "schedule.final_lr=inf", "schedule.final_lr=inf", "finite"),
    composed("a seed beyond any number", "seed=1e400", "seed=inf", "whole number"),
    composed("a seed that is left open", "seed=???", "seed=???", "whole number"),
    composed("a value that is left out", "model.num_heads=", "model.num_heads=", "whole number"),
    composed("a key that refers to itself", "seed=${seed}", "seed", "Recursive interpolation"),
    composed("a key without a value", "max_steps", "max_steps is not key=value"),
    composed("a value without a key", "=3", "=3 names no key"),
    composed("a flag of another program", "--max_steps=3", "--max_steps=3", "unrecognized"),
    composed("a flag without its value", "--config-name", "--config-name", "expected one argument"),
    composed("a flag with an unknown value", "--cfg=all_of_it", "--cfg", "all_of_it", "job", cut="invalid choice: 'all_of_it'"),
    composed("= in the path of a checkpoint", "ckpt_path=runs/lr=1/last.ckpt", "ckpt_path=runs/lr=1/last.ckpt", "quotes", "'ckpt_path=\"runs/lr=1/last.ckpt\"'"),
    composed("a comma in the path of a folder", "output_dir=a,b", "output_dir=a,b", "[a,b]", "-m"),
    composed("a list that does not end", "optimizer.betas=[0.9", "optimizer.betas=[0.9", "cannot be read"),
    composed("a quote that does not end", "data.path=\"x", "data.path=\"x", "cannot be read"),
    composed("traceback neither true nor false", "traceback=maybe", "traceback=maybe", "true or false"),
    composed("an empty model", "model={}", "model={}", "option"),
    composed("no model", "model=null", "model=null", "option"),
    composed("a number for a trainer", "trainer=3", "trainer=3", "option"),
    composed("a group taken away", "~optimizer", "~optimizer", "optimizer=OPTION"),
    composed("a group of keys set to null", "evaluation=null", "evaluation is missing"),
    composed("a mapping for a list", "optimizer.rules={match:x}", "optimizer.rules={match:x}"),
    composed("a number for a rule", "optimizer.rules=[1]", "optimizer.rules[0]=1", "group of keys"),
    composed("a group chosen twice", "+model=char_small", "model", "more than once"),
    composed("an empty output folder", "output_dir=", "output_dir=", "folder"),
    composed("an empty path of a checkpoint", "ckpt_path=", "ckpt_path=", "file"),
    composed("a class outside the list", "+logger.x._target_=os.system", "logger.x._target_=os.system", "not allowed"),
    composed("an unknown logger", "logger=tensorboard", "logger=tensorboard", "csv, wandb"),
    composed("an unknown objective", "objective.name=masked_lm", "objective.name=masked_lm", "cross_entropy"),
    composed("more experts a token than there are", "model.num_experts=1", "experts_per_token=2", "num_experts=1"),
    composed("a window of nothing", "model.window=0", "model.window=0", "positive"),
    composed("a stretch of positions without its length", "model.position=rotary model.rotary_scaling=yarn", "rotary_original_len=null", "yarn"),
    composed("a number of workers below zero", "data.num_workers=-1", "data.num_workers=-1", "zero or more"),
    composed("a config of one's own that is not there", "--config-dir=conf --config-name=other", "other", files={"conf/mine.yaml": "seed: 1\n"}),
    composed("a folder of configs that is not there", "--config-dir=conf", "--config-dir=conf", "not a folder"),
    composed("an empty config of one's own", MINE, "conf/mine.yaml", "defaults: [train, _self_]", files={"conf/mine.yaml": ""}),
    composed("a config of one's own that is not UTF-8", MINE, "conf/mine.yaml", "UTF-8 at byte 21", files={"conf/mine.yaml": b"defaults: [train]\n# c\xe9\n"}),
    composed("a config of one's own that is a list", MINE, "conf/mine.yaml", "defaults", files={"conf/mine.yaml": "- seed\n"}),
    composed("a config of one's own that chooses nothing", MINE, "conf/mine.yaml", "defaults", files={"conf/mine.yaml": "seed: 1\n"}),
    composed("a config of one's own with a typo", MINE, "sed is not a key", "seed", files={"conf/mine.yaml": "defaults: [train, _self_]\nsed: 1\n"}),
    composed("a bracket that does not end in a config", MINE, "conf/mine.yaml, line 3", files={"conf/mine.yaml": "defaults: [train, _self_]\nseed: [1\n"}),
    composed("a key twice in a config", MINE, "conf/mine.yaml, line 3", "duplicate key seed", files={"conf/mine.yaml": "defaults: [train, _self_]\nseed: 1\nseed: 2\n"}),
    composed("a tab in a config", MINE, "conf/mine.yaml, line 2", files={"conf/mine.yaml": "defaults: [train, _self_]\n\tseed: 1\n"}),
    composed("a NUL in a config", MINE, "conf/mine.yaml", "no YAML", files={"conf/mine.yaml": "defaults: [train, _self_]\ns\0: 1\n"}),
    composed("a config that runs code", MINE, "conf/mine.yaml, line 2", "os.system", files={"conf/mine.yaml": "defaults: [train, _self_]\nseed: !!python/object/apply:os.system [touch hacked]\n"}),
    composed("a config that holds itself", MINE, "seed holds itself", files={"conf/mine.yaml": "defaults: [train, _self_]\nseed: &a [*a]\n"}),
    composed("a word for the list of defaults", MINE, "mine", "defaults must be a list", files={"conf/mine.yaml": "defaults: train\n"}),
    composed("an empty experiment of one's own", OWN, "experiment={}", "# @package _global_", files={"conf/experiment/own.yaml": ""}),
    composed("an experiment that is not UTF-8", OWN, "conf/experiment/own.yaml", "UTF-8 at byte 0", files={"conf/experiment/own.yaml": b"\xff\xfes"}),
    composed("an experiment that is a list", OWN, "experiment=['seed']", "# @package _global_", files={"conf/experiment/own.yaml": "- seed\n"}),
    composed("an experiment without its first line", OWN, "experiment={'seed': 1}", "# @package _global_", files={"conf/experiment/own.yaml": "seed: 1\n"}),
    composed("an experiment with a typo", OWN, "trainer.max_step is not a key", files={"conf/experiment/own.yaml": "# @package _global_\ntrainer:\n  max_step: 1\n"}),
    composed("an experiment with an unknown model", OWN, "model=nowhere", "char_small", files={"conf/experiment/own.yaml": "# @package _global_\ndefaults:\n  - override /model: nowhere\n"}),
    built("a causal model for masked tokens", "data=masked model=char_small data.path=a.txt", "model.architecture=decoder", "data=masked", "encoder", files={"a.txt": WORDS}),
    built("a model that sees all for the next token", "model=encoder_small model.head=lm", "model.architecture=encoder", "data=kv_lookup", "decoder"),
    built("a decoder for pairs", "data=pairs data.path=p.csv data.batch_size=2 data.tokenizer=char", "model.architecture=decoder", "data=pairs", "encoder_decoder", files={"p.csv": PAIRS}),
    built("a model of text for images", "data=digits", "model.architecture=decoder", "data=digits", "vision"),
    of("evaluate", "traceback neither true nor false, of another program", "traceback=yes", "traceback=yes must be true or false"),
    of("generate", "no checkpoint to write with", "", "ckpt_path is missing"),
    of("atlas", "a misspelt key of the atlas", "ckpt=x", "ckpt is not a key", "ckpt_path"),
]  # fmt: skip

DATA = [
    built("a file that is not there", "data=text data.path=missing.txt", "data.path=missing.txt", "does not exist"),
    built("a folder for a file", "data=text data.path=.", "data.path=.", "folder"),
    built("an empty file", "data=text data.path=empty.txt", "data.path=empty.txt", "empty", files={"empty.txt": ""}),
    built("bytes that are no text", "data=text data.path=binary.txt", "data.path=binary.txt", "UTF-8", files={"binary.txt": bytes(range(256)) * 40}),
    built("a text shorter than a row", "data=text data.path=short.txt", "data.path=short.txt", "data.context_len=64", files={"short.txt": "too short"}),
    built("a vocabulary smaller than that of the data", "model.vocab_size=3", "model.vocab_size=3", "80"),
    built("bytes of a mark and no text", TEXT, "data.path=a.txt", "0 characters", files={"a.txt": "\ufeff"}),
    built("white space and no text", TEXT, "data.path=a.txt", "white space", files={"a.txt": " \n\t\n" * 100}),
    built("NUL in a text", TEXT, "data.path=a.txt", "NUL", files={"a.txt": WORDS + "\0" + WORDS}),
    built("UTF-16", TEXT, "data.path=a.txt", "UTF-8 at byte 0", files={"a.txt": WORDS.encode("utf-16")}),
    built("UTF-16 without its mark", TEXT, "data.path=a.txt", "NUL", "UTF-16", files={"a.txt": WORDS.encode("utf-16-le")}),
    built("Latin-1", TEXT, "data.path=a.txt", "UTF-8 at byte 3", files={"a.txt": ("caf\xe9 " * 500).encode("latin-1")}),
    built("a mark before the text, which is left out", TEXT, code=0, files={"a.txt": "\ufeff" + WORDS}),
    built("a line of 10 MB, which is read in pieces", TEXT, code=0, files={"a.txt": "ab" * 5_000_000}),
    built("a word of 10 MB for byte pairs", TEXT + " data.tokenizer=bpe", "data.tokenizer=bpe", "characters", "data.tokenizer=char", files={"a.txt": "ab" * 5_000_000}),
    built("fewer rows than a batch", TEXT + " data.batch_size=64", "data.path=a.txt", "4 training rows", "data.batch_size=64", files={"a.txt": "0123456789" * 10}),
    built("no token left to validate", TEXT + " data.val_fraction=0.0001", "data.path=a.txt", "data.val_fraction=0.0001", files={"a.txt": WORDS}),
    built("a pipe for a file", TEXT, "data.path=a.txt", "no file", prepare=lambda place, _: os.mkfifo("a.txt")),
    built("a device for a file", TEXT, "data.path=a.txt", "no file", prepare=lambda place, _: os.symlink("/dev/zero", "a.txt")),
    built("a link to itself for a file", TEXT, "data.path=a.txt", "symbolic links", prepare=lambda place, _: os.symlink("a.txt", "a.txt")),
    built("a name too long for a file", "data=text data.path=" + "a" * 300, "data.path=aaa", "too long"),
    built("no label in masked rows", "data=masked model=encoder_small data.mask_fraction=0", "data.mask_fraction=0.0", "(0, 1)"),
    built("no label in a copy", "data=induction data.segment_len=1", "data.segment_len=1", "asked for"),
    built("pairs without their file", "data=pairs", "data.path=null", "file of pairs"),
    built("an empty file of pairs", PAIRED, "data.path=p.csv", "empty", files={"p.csv": ""}),
    built("one column of two", PAIRED, "data.path=p.csv", "1 columns in row 1", files={"p.csv": "a\nb\n"}),
    built("only blank sides", PAIRED, "data.path=p.csv", "blank", files={"p.csv": " , \n  ,  \n"}),
    built("one source for both splits", PAIRED, "data.path=p.csv", "1 different sources", files={"p.csv": "a,b\na,c\n"}),
    built("pairs that are all too long", PAIRED + " data.max_source_len=1", "data.max_source_len=1", "none of the", files={"p.csv": PAIRS}),
    built("fewer pairs than a batch", PAIRED + " data.batch_size=64", "data.path=p.csv", "training rows", "data.batch_size=64", files={"p.csv": PAIRS}),
    built("a column that is not there", PAIRED + " data.source_column=de data.target_column=en", "data.source_column=de", "p.csv", files={"p.csv": PAIRS}),
    built("a field beyond what csv holds", PAIRED, "data.path=p.csv", "csv", files={"p.csv": "a" * 200_000 + ",b\nc,d\n"}, cut="no csv file:"),
    built("pairs in Latin-1", PAIRED, "data.path=p.csv", "UTF-8", files={"p.csv": "caf\xe9,b\nc,d\n".encode("latin-1")}),
    built("targets for fewer sources", "data=pairs data.path=s.txt data.target_path=t.txt", "data.target_path=t.txt has 2 lines", "data.path=s.txt has 3", files={"s.txt": "a\nb\nc\n", "t.txt": "a\nb\n"}),
    built("documents without their name", "data=hf", "data.path=null", "data set"),
    built("documents that are not there", HUB.replace("d.jsonl", "none.jsonl"), "data.path=none.jsonl", "does not exist"),
    built("an empty file of documents", HUB, "data.path=d.jsonl", "empty", files={"d.jsonl": ""}),
    built("half a line of JSON", HUB, "data.path=d.jsonl", "cannot be read", files={"d.jsonl": '{"text": \n'}, cut="cannot be read:"),
    built("documents without a column of text", HUB, "data.text_column=null", "a, b", files={"d.jsonl": '{"a":"x","b":"y"}\n' * 5}),
    built("numbers for documents", HUB, "data.text_column=text", "int", files={"d.jsonl": '{"text":3}\n' * 5}),
    built("documents that are all blank", HUB, "data.path=d.jsonl", "blank", files={"d.jsonl": '{"text":"  "}\n' * 5}),
    built("one document for both splits", HUB, "data.path=d.jsonl", "1 documents", files={"d.jsonl": '{"text":"one"}\n'}),
    built("a split that is not there", HUB + " data.split=test", "data.split=test", "d.jsonl", files={"d.jsonl": '{"text":"one"}\n' * 9}, cut="d.jsonl:"),
    built("a column of documents that is not there", HUB + " data.text_column=story", "data.text_column=story", "text", files={"d.jsonl": '{"text":"one"}\n' * 9}),
    built("a broken parquet file", HUB.replace("d.jsonl", "d.parquet"), "data.path=d.parquet", "cannot be read", files={"d.parquet": "PAR1 and no more"}, cut="cannot be read:"),
    built("a file of no known kind", HUB.replace("d.jsonl", "d.xyz"), "data.path=d.xyz", ".parquet", files={"d.xyz": "?"}),
    built("a language that there is not", "data=languages model=encoder_small data.languages=[de,xx]", "data.languages=xx", "Babel"),
    built("one language to tell apart", "data=languages model=encoder_small data.languages=[de,de]", "data.languages=['de', 'de']", "two"),
    built("a locale that there is not", "data=dates model=vaswani_small data.locales=[xx]", "data.locales=xx", "Babel"),
    built("too few images to hold some out", "data=digits model=vit_small data.val_fraction=0.0001", "data.val_fraction=0.0001", "1797"),
    built("fewer images than a batch", "data=digits model=vit_small data.batch_size=4096", "data=digits", "data.batch_size=4096"),
    built("images that are shifted out of sight", "data=digits model=vit_small data.shift=8", "data.shift=8", "8 pixels"),
    built("features that are not finite", "data=images data.path=pictures model=vit_small", "data.image_column=image", "mode F", prepare=nan_pictures),
    built("a folder without images", "data=images data.path=pictures model=vit_small", "data.path=pictures", "cannot be read", prepare=lambda place, _: os.mkdir("pictures"), cut="cannot be read:"),
    built("a model folder without a tokenizer", PRETRAINED, "tokenizer.json cannot be read", prepare=pretrained(None)),
    built("a tokenizer that is cut off", PRETRAINED, "tokenizer.json is no tokenizer.json", prepare=pretrained('{"version": "1.0", "tru'), cut="no tokenizer.json:"),
    built("a tokenizer with ids beyond the vocabulary", PRETRAINED, "model.vocab_size=5", "vocabulary of the data", prepare=pretrained("abcdefghijklmnopqrstuvwxyz ")),
    of("cost", "a folder for costs that cannot be", "model=char_small output_dir=/dev/null/x lengths=8,16 compare=math model.max_len=16", "output_dir=/dev/null/x"),
]  # fmt: skip


def checkpoint(damage: Callable[[bytes], bytes] = bytes, **state: Any) -> Callable[[Path, Any], None]:
    """A checkpoint ``bad.ckpt`` of a small model, whose bytes went through ``damage``."""

    def prepare(place: Path, _: Any) -> None:
        import torch

        from minitx.config import TransformerConfig, to_dict
        from minitx.training.checkpoint import AtomicCheckpointIO

        model = to_dict(TransformerConfig(vocab_size=80, embed_dim=16, num_heads=2, num_layers=1))
        whole = {"state_dict": {"weight": torch.zeros(997)}, "global_step": 3, "minitx": {"model": model, **state}}
        AtomicCheckpointIO().save_checkpoint(whole, place / "bad.ckpt")
        (place / "bad.ckpt").write_bytes(damage((place / "bad.ckpt").read_bytes()))

    return prepare


def without_digest(place: Path, _: Any) -> None:
    import torch

    torch.save({"state_dict": {}, "minitx": {"model": {}}}, place / "bad.ckpt")


def run_of_checkpoints(place: Path, patch: Any) -> None:
    """A folder whose ``last.ckpt`` is damaged and whose ``best.ckpt`` is not."""
    (place / "run" / "checkpoints").mkdir(parents=True)
    checkpoint()(place, patch)
    (place / "bad.ckpt").rename(place / "run" / "checkpoints" / "best.ckpt")
    (place / "run" / "checkpoints" / "last.ckpt").write_bytes(b"")


def evil(place: Path, _: Any) -> None:
    import os

    import torch

    class Evil:
        def __reduce__(self) -> Any:
            return os.system, ("touch owned",)

    from minitx.training.checkpoint import AtomicCheckpointIO

    AtomicCheckpointIO().save_checkpoint({"minitx": Evil(), "weight": torch.zeros(3)}, place / "bad.ckpt")


def cut_to(percent: int) -> Callable[[bytes], bytes]:
    return lambda content: content[: len(content) * percent // 100]


def flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 8]) + content[middle + 1 :]


def started(processes: int) -> Callable[[Path, Any], None]:
    """As if torchrun had started this process as one of several."""

    def prepare(place: Path, patch: Any) -> None:
        for name, value in {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": str(processes), "RANK": "0"}.items():
            patch.setenv(name, value)

    return prepare


BAD = "ckpt_path=bad.ckpt"
NOT_OURS = "bad.ckpt cannot be read as a checkpoint of minitx"

FILES = [
    built("an empty checkpoint", BAD, NOT_OURS, "it is empty", prepare=checkpoint(cut_to(0))),
    built("a checkpoint of which 1 % is left", BAD, NOT_OURS, "cut short", prepare=checkpoint(cut_to(1)), cut="it is cut short"),
    built("a checkpoint of which half is left", BAD, NOT_OURS, "cut short", prepare=checkpoint(cut_to(50))),
    built("a checkpoint of which 99 % is left", BAD, NOT_OURS, "cut short", prepare=checkpoint(cut_to(99))),
    built("a checkpoint with one bit flipped", BAD, NOT_OURS, "SHA-256", prepare=checkpoint(flipped)),
    built("a zip file for a checkpoint", BAD, NOT_OURS, "another program's", prepare=without_digest),
    built("a checkpoint of a newer version", BAD, NOT_OURS, "a newer minitx wrote it (format 99", "update minitx", prepare=checkpoint(format=99)),
    built("a checkpoint of another model", BAD, "holds another model", "embed_dim 16 != 8", prepare=checkpoint(format=1)),
    built("a checkpoint that would run a program", BAD, NOT_OURS, prepare=evil, cut="of minitx:"),
    built("a damaged last checkpoint beside a whole one", "output_dir=run ckpt_path=last", "last.ckpt cannot be read", "it is empty", "go on from the newest whole one", "best.ckpt", prepare=run_of_checkpoints),
    built("a checkpoint that is not there", "ckpt_path=missing.ckpt", "ckpt_path=missing.ckpt", "not a file"),
    built("the last checkpoint of no run", "ckpt_path=last", "ckpt_path=last", "output_dir=null"),
    built("the last checkpoint of a folder without a run", "ckpt_path=last output_dir=run", "ckpt_path=", "run/checkpoints/last.ckpt", "not a file"),
    built("a text for a checkpoint", "ckpt_path=short.txt", "ckpt_path=short.txt", "cannot be read as a checkpoint", files={"short.txt": "too short"}, cut="of minitx:"),
    built("a file for the output folder", "output_dir=short.txt", "output_dir=", "short.txt", "file", files={"short.txt": "too short"}),
    built("an output folder below a file", "output_dir=short.txt/below", "output_dir=", "short.txt/below", files={"short.txt": "too short"}),
    built("an output folder where nothing can be made", "output_dir=/dev/null/x", "output_dir=/dev/null/x", "cannot be written"),
    built("an output folder where even root makes nothing", "output_dir=/proc/x", "output_dir=/proc/x", "cannot be written"),
    built("an output folder that links to itself", "output_dir=loop", "output_dir=", "loop", "symbolic link", prepare=lambda place, _: os.symlink("loop", "loop")),
    built("an output folder that links to nothing", "output_dir=gone", "output_dir=", "gone", "symbolic link", prepare=lambda place, _: os.symlink("no/where", "gone")),
    built("an output folder with a name too long", "output_dir=" + "a" * 300, "output_dir=", "too long"),
    built("a grid where nothing can be made", "experiment=scaling_ablation output_dir=/dev/null/x", "output_dir=/dev/null/x", "cannot be written"),
    built("an output folder of a run with a mistake", "output_dir=new/run model.backend=nonsense", "nonsense"),
    built("two runs in one folder", "output_dir=run", "output_dir=", "a run that is going on", prepare=hold),
    built("a run that is to go on while it is going on", "output_dir=run ckpt_path=last", "output_dir=", "a run that is going on", prepare=hold),
    built("a folder for prepared data that cannot be made", TEXT, "/dev/null/data", "prepared data", files={"a.txt": WORDS}, prepare=lambda _, patch: patch.setattr("minitx.data.module.data_dir", lambda: Path("/dev/null/data")), cut="/dev/null/data/"),
]  # fmt: skip

ENVIRONMENT = [
    built("several devices where there is one CPU", "trainer.devices=2", "trainer.devices=2", "accelerator=auto", "trainer.accelerator=cpu"),
    built("more GPUs than there are", "trainer=ddp trainer.devices=64 data.batch_size=64", "trainer.accelerator=gpu with trainer.devices=64", cut="this machine has"),
    built("machines that nobody has started", "trainer.num_nodes=2", "trainer.num_nodes=2", "torchrun or srun"),
    built("fewer processes than were started", "trainer.devices=1", "trainer.devices=1 x trainer.num_nodes=1 is 1, but 2 processes were started", prepare=started(2)),
    built("no network for a data set of the hub", "data=hf data.path=someone/stories", "data.path=someone/stories", "cannot be reached", "data.path=FILE", prepare=no_network),
    built("no network for images of the hub", "data=images data.path=someone/pictures model=vit_small", "data.path=someone/pictures", "cannot be reached", prepare=no_network),
    built("no package for digits", "data=digits model=vit_small", "data=digits", "scikit-learn", prepare=without("sklearn.datasets")),
    built("no package for dates", "data=dates model=vaswani_small", "Babel", prepare=without("babel", "babel.dates")),
    built("no package for data sets", "data=hf data.path=d.jsonl", "data.path=d.jsonl", "datasets", files={"d.jsonl": ""}, prepare=without("datasets")),
    built("no package for TensorBoard", "+logger.x={_target_:lightning.pytorch.loggers.TensorBoardLogger}", "logger.x", "cannot be built", prepare=without("tensorboard", "tensorboardX"), cut="cannot be built:"),
    built("a worker that is killed", "data.num_workers=1 trainer.max_steps=100000 output_dir=run", "data.num_workers=1", "ended from outside", code=3, cut="in the training process", prepare=kill_worker),
]  # fmt: skip

CASES: dict[Group, list[Case]] = {"config": CONFIG, "data": DATA, "files": FILES, "environment": ENVIRONMENT}
