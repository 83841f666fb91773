"""Every fenced block of README and docs runs: Python as it stands, commands made small by the one table ``SMALL``."""

import contextlib
import io
import json
import re
import shlex
import shutil
import sys
import tomllib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from page_blocks import ROOT, Block, blocks, breaks_when_pasted, commands, pages, read
from safetensors.torch import load_file, save_file

from minitx.ablation.grid import cells
from minitx.cli import check, evaluate, export, generate, train, view
from minitx.cli.compose import compose_config, compose_grid
from minitx.config import CONFIG_DIR, TransformerConfig
from minitx.data.tokenizer import train_tokenizer
from minitx.interop import save_hf
from minitx.nn import DecoderLM, Encoder

PROGRAMS = {
    "train": train,
    "evaluate": evaluate,
    "generate": generate,
    "view_attention": view,
    "export": export,
    "check": check,
}
INSTALLED = {f"minitx-{name.partition('_')[0]}": name for name in PROGRAMS}

SMALL = {
    r"^train(?!.*(--help|--cfg|ablation|one_step))": "trainer.max_steps=2 trainer.val_every=0 trainer.val_batches=1 "
    "trainer.accelerator=cpu trainer.threads=1 data.batch_size=4 evaluation.num_rows=2 evaluation.num_beams=1 callbacks.progress=false",
    r"^train(?!.*(--help|--cfg|ablation|one_step|from_template|data=module|experiment=sorted\b))": "trainer.val_batch_size=4",
    r"^train(?!.*(--help|--cfg|ablation|one_step|from_template))": "schedule.warmup_steps=1",
    r"^train(?!.*(--help|--cfg|ablation|init_from|own_project|from_template|model=hf))": "model.num_layers=1 model.embed_dim=16 model.num_heads=2",
    r"^train .*experiment=translate_dates": "data.train_size=97 data.val_size=8 data.locales=[en,de]",
    r"^train .*experiment=vit_digits": "model.patch_size=4",
    r"^train .*(ckpt_path=last|seed=1)": "trainer.max_steps=3",
    r"^train .*(data=hf|translate_text)": "data.bpe_vocab_size=300",
    r"^train .*callbacks=probe": "callbacks.probe.every=1 callbacks.probe.batch_size=4 callbacks.probe.weights_rows=4",
    r"^train .*callbacks=film": "callbacks.probe.every=1 callbacks.probe.batch_size=4 callbacks.probe.weights_every=1 callbacks.probe.weights_rows=4",
    r"^train .*weights_every=": "callbacks.probe.weights_every=1",
    r"^train .*data=chat": "data.context_len=64",
    r"^train .*data.streaming=true": "data.val_rows=8",
    r"^train .*context_len=|^train .*data=(text|hf)": "data.context_len=16",
    r"^evaluate": "num_rows=2 num_beams=1 device=cpu",
    r"^generate": "max_new_tokens=3 device=cpu",
    r"^view_attention(?!.*--play)": "device=cpu",
}
"""A command that a pattern is found in gets these overrides behind its own: the same command on a toy."""

COMPOSED = {
    r"^train .*_ablation": "a grid takes minutes; tests/test_configs.py composes cells of every study, tests/ablation runs grids",
    r"^train .*trainer=(ddp|fsdp|ddp_cpu)": "wants several devices; tests/lattice/runs.py has some",
    r"^train .*trainer.compile=true": "takes a compiler half a minute; tests/nn/test_compile.py compiles",
    r"^train .*data.path=ylecun/mnist": "wants a network; tests/data/test_images.py reads pictures from files",
}
"""Commands that are composed and checked, as ``train.py`` would, and not run."""

ELSEWHERE = {
    "docs/looking.md": "tests/docs/test_looking_page.py",
    "CONTRIBUTING.md": "tests/docs/test_recipes.py",
}
"""Pages whose Python is run, or compared with the file that it is from, by tests of their own."""

TEXT = "In the beginning was the Word, and the Word was with God, and the Word was God.\n"
ANSWER = {"role": "assistant", "content": "yes"}
STORIES = [f'{{"text": "story {n} of the cat and the hat"}}' for n in range(40)]


# What the pages presume: files of the reader's own, and runs that are made before


SHAPE = {"embed_dim": 12, "num_heads": 3, "num_layers": 1}
LLAMA = {"position": "rotary", "norm": "rms", "activation": "swiglu", "bias": False}
BERT = {"norm_position": "post", "embed_norm": True, "type_vocab_size": 2, "head": "lm"}
BERT |= {"head_bias": True, "head_transform": True}


def their_decoder(**shape: object) -> Callable[[Path], None]:
    """A folder as the hub has them, with a byte-level tokenizer."""

    def make(folder: Path) -> None:
        tokenizer = train_tokenizer("bpe", [TEXT], vocab_size=270)
        save_hf(DecoderLM(TransformerConfig(vocab_size=tokenizer.vocab_size, max_len=128, **shape)), folder)
        tokenizer.save(str(folder / "tokenizer.json"))

    return make


their_gpt2 = their_decoder(activation="gelu_tanh", **SHAPE)
their_smollm2 = their_decoder(embed_dim=14, num_heads=7, num_layers=19, **LLAMA)
"""As small as it can be with a head 6 in layer 18."""


def their_llama(folder: Path) -> None:
    save_hf(DecoderLM(TransformerConfig(vocab_size=17, **SHAPE, **LLAMA)), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": [1, 2, 3]}))


def their_bert(folder: Path) -> None:
    save_hf(Encoder(TransformerConfig(architecture="encoder", vocab_size=17, **SHAPE, **BERT)), folder)
    more = {"cls.seq_relationship.weight": torch.zeros(2, 12), "bert.pooler.dense.weight": torch.zeros(12, 12)}
    save_file({**load_file(folder / "model.safetensors"), **more}, folder / "model.safetensors", metadata={"format": "pt"})


def yaml_of(page: str, file: str) -> Callable[[Path], None]:
    """A folder of configs with the one block of YAML that ``page`` shows, as ``file``."""

    def make(folder: Path) -> None:
        (block,) = blocks(page, "yaml")
        (folder / file).parent.mkdir(parents=True)
        (folder / file).write_text(block.text, encoding="utf-8")

    return make


def grids_of_ones_own(folder: Path) -> None:
    """A folder with the grid of docs/ablation.md, and with the change and the grid of docs/changes.md."""
    yaml_of("docs/ablation.md", "ablation/my_qk_norm.yaml")(folder)
    for language, file in (("python", "head_gate.py"), ("yaml", "ablation/head_gate.yaml")):
        (block,) = blocks("docs/changes.md", language)
        (folder / file).write_text(block.text, encoding="utf-8")


def lines(*texts: str) -> Callable[[Path], object]:
    return lambda path: path.write_text("\n".join(texts) + "\n", encoding="utf-8")


COPIED = ("examples/custom_scale", "examples/own_project", "examples/from_template")
PRESUMED: dict[str, Callable[[Path], object] | str] = {
    "my.txt": lines(TEXT * 40),
    "stories.jsonl": lines(*STORIES),
    "reviews.csv": lines("review,stars", *(f"words of review {n},{n % 3}" for n in range(40))),
    "chats.jsonl": lines(*(json.dumps({"messages": [{"role": "user", "content": f"{n}?"}, ANSWER]}) for n in range(40))),
    "pairs.tsv": lines(*(f"das ist {n}\tthis is {n}" for n in range(40))),
    "train.de": lines(*(f"das ist {n}" for n in range(40))),
    "train.en": lines(*(f"this is {n}" for n in range(40))),
    **{f"{split}.de": lines(*(f"das ist {n}" for n in range(40, 49))) for split in ("val", "test")},
    **{f"{split}.en": lines(*(f"this is {n}" for n in range(40, 49))) for split in ("val", "test")},
    "FOLDER": their_gpt2,
    "OTHER": their_gpt2,
    "folder": their_gpt2,
    "llama": their_llama,
    "HuggingFaceTB/SmolLM2-135M-Instruct": their_smollm2,
    "bert": their_bert,
    "char": "experiment=char_lm",
    "a": "char",
    "b": "experiment=char_lm seed=1",
    "digits": "experiment=vit_digits",
    "dates": "experiment=translate_dates callbacks=probe callbacks.probe.weights_every=1",
    "scaled": "experiment=kv_lookup callbacks=probe callbacks.probe.weights_every=1",
    "unscaled": "experiment=kv_lookup model.scale=unscaled callbacks=probe callbacks.probe.weights_every=1",
    "mine, yours.txt": "my.txt",
    "conf": yaml_of("docs/configuring.md", "experiment/mine.yaml"),
    "mine": grids_of_ones_own,
    **{name: partial(shutil.copytree, ROOT / name) for name in COPIED},
    "mine.py": lines(
        "from minitx.config import TransformerConfig",
        "from minitx.nn import DecoderLM, scaled_dot_product_attention as attention",
        "MyGPT = DecoderLM(TransformerConfig(vocab_size=31, embed_dim=32, num_layers=1, num_heads=4, max_len=64))",
    ),
    "my_module.py": lines("from minitx.nn import scaled_dot_product_attention as my_attention"),
}
"""What a page speaks of as there: how it is made, or the overrides of a short run, or where on this shelf it is copied from."""

NAMING = r"(?:^|^(?:--config-dir|ckpt_path|model|model\.path|compare|output_dir|init_from\.path|data\.tokenizer|data\.\w*path)=\"?|,)"
"""What stands before a path in an argument."""

SLOW = [f"docs/{name}.md" for name in ("ablation", "attention", "configuring", "looking", "training", "weights")]
"""Pages whose Python is run in the slow tier, and whose commands in that of a release: their programs have faster tests of their own."""


class Shelf:
    """Each thing that the pages presume, made once and copied to where a block runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def bring(self, name: str, place: Path) -> None:
        """``name`` in the folder ``place``, unless it is there."""
        if (place / name).exists():
            return
        made, how = self.folder / name, PRESUMED[name]
        if not made.exists():
            made.parent.mkdir(parents=True, exist_ok=True)
            if callable(how):
                how(made)
            elif how.startswith("experiment="):
                call("train", [*how.split(), f"output_dir={made}"])
            else:
                self.bring(how.partition("/")[0], self.folder)
                (shutil.copytree if (self.folder / how).is_dir() else shutil.copy)(self.folder / how, made)
        if place == self.folder:
            return
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if made.is_dir() else shutil.copy)(made, place / name)

    def bring_all(self, words: Sequence[str], place: Path) -> None:
        """Everything that a command names, but the folder that it is about to make."""
        new = [] if "ckpt_path=last" in words else [word.partition("=")[2] for word in words if word.startswith("output_dir=")]
        for name in presumed(words):
            if name not in new:
                self.bring(name, place)


def presumed(words: Sequence[str]) -> list[str]:
    """The names of ``PRESUMED`` that stand in ``words`` as a path or its beginning."""
    return [name for name in PRESUMED if any(re.search(rf"{NAMING}{re.escape(name)}(?=$|[/,:\"])", word) for word in words)]


@pytest.fixture(scope="session")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    return Shelf(tmp_path_factory.mktemp("shelf"))


@pytest.fixture(scope="session")
def shared_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared_data: Path) -> Path:
    """An empty current folder, as the root of a checkout without the code."""
    monkeypatch.setattr("minitx.data.token_cache.data_dir", lambda: shared_data)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", shared_data / "datasets")
    monkeypatch.setattr("minitx.analysis.film.LAST_FRAMES", 2)  # each is drawn
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


# Commands


def said(words: Sequence[str]) -> str:
    """A command as the tables above see it: the program without path and ending, and its arguments."""
    return " ".join([re.sub(r"^scripts/(\w+)\.py$", r"\1", words[0]), *words[1:]])


def call(program: str, arguments: Sequence[str]) -> None:
    """The program in this process, on a toy."""
    typed = said([program, *arguments])
    more = [word for pattern, extra in SMALL.items() if re.search(pattern, typed) for word in extra.split()]
    replaced = {word.partition("=")[0] for word in more}  # train.py takes the last of two, the others refuse a second
    with pytest.MonkeyPatch.context() as patch:
        given = arguments if program == "train" else [word for word in arguments if word.partition("=")[0] not in replaced]
        patch.setattr(sys, "argv", [f"{program}.py", *given, *more])
        for name in ("HYDRA_FULL_ERROR", "MINITX_TRACEBACK"):
            patch.setenv(name, "0")
        code = PROGRAMS[program].main()
    assert code == 0, f"exit code {code} of: {program}.py {' '.join([*arguments, *more])}"


def compose(arguments: Sequence[str], processes: int | None = None) -> None:
    """The command's config, as ``train.py`` would check it; with the number of ``processes`` that a launcher starts."""
    words = [word for word in arguments if not word.startswith("-") or word.startswith(CONFIG_DIR)]
    config = compose_config(words)
    assert processes in (None, config.trainer.world_size), (processes, config.trainer)
    grid = compose_grid(words)
    assert grid is None or cells(grid)


def check_install(words: Sequence[str]) -> None:
    extras = tomllib.loads(read("pyproject.toml"))["project"]["optional-dependencies"]
    for word in words:
        assert {extra for found in re.findall(r"\[([\w,]+)\]", word) for extra in found.split(",")} <= set(extras), word
        assert not word.endswith(".txt") or (ROOT / word).is_file(), word


def number(words: Sequence[str], option: str) -> int:
    return next((int(word.partition("=")[2]) for word in words if word.startswith(f"--{option}=")), 1)


def obey(words: list[str], shelf: Shelf, place: Path) -> None:
    """Run a command, or, where that cannot be, hold all that can be known of it against the repository."""
    words = [f"scripts/{INSTALLED[word]}.py" if word in INSTALLED else word for word in words]
    script = next((word for word in words if re.fullmatch(r"(scripts|examples|benchmarks)/[\w/]+\.py", word)), None)
    if words[0] in ("pip", "pip3") and words[1] == "install":
        check_install(words)
    elif words[0] == "make":
        targets = re.findall(r"^([\w-]+):", read("Makefile"), flags=re.MULTILINE)
        assert [word for word in words[1:] if "=" not in word and word not in targets] == []
    elif script is not None and script.startswith("scripts/") and words[0] in ("python", script):
        program, arguments = Path(script).stem, words[words.index(script) + 1 :]
        # it registers its kernel for the whole process; tests/examples/ runs it
        if program == "check" and arguments[0].startswith("examples/"):
            assert (ROOT / arguments[0].partition(":")[0]).is_file()
            return
        if any(re.search(pattern, said([program, *arguments])) for pattern in COMPOSED):
            shelf.bring_all([word for word in arguments if word.startswith("--")], place)
            compose(arguments)
        else:
            shelf.bring_all(arguments, place)
            call(program, arguments)
    elif words[0] in ("torchrun", "srun"):
        names = {"torchrun": ("nproc-per-node", "nnodes"), "srun": ("ntasks-per-node", "nodes")}[words[0]]
        assert script == "scripts/train.py"
        compose(words[words.index(script) + 1 :], number(words, names[0]) * number(words, names[1]))
    elif script is not None:
        assert (ROOT / script).is_file(), script
    else:
        assert words[:3] == ["python3", "-m", "venv"] or words == [".", ".venv/bin/activate"], f"no way to check: {words}"


RUN = [page for page in pages() if not page.endswith(".zh.md")]  # those have the code of the English ones: tests/test_readme.py
BASH = [block for page in RUN for block in blocks(page, "bash")]
PYTHON = [page for page in RUN if blocks(page, "python") and page not in ELSEWHERE]


def tier(page: str, mark: pytest.MarkDecorator, thing: Any = None) -> Any:
    return pytest.param(thing or page, id=getattr(thing, "name", page), marks=mark if page in SLOW else ())


@pytest.mark.parametrize("block", [tier(block.page, pytest.mark.release, block) for block in BASH])
def test_every_command_runs(block: Block, shelf: Shelf, place: Path) -> None:
    typed = list(commands(block))
    assert typed, f"no command in {block.name}"
    for words in typed:
        obey(words, shelf, place)


# Python


def matches(printed: str, shown: str) -> bool:
    """Whether a block printed what stands below it, where a line ``...`` stands for any lines."""
    pattern = "".join("(?:.*\n)*?" if line == "..." else re.escape(line.rstrip()) + r"[ ]*\n" for line in shown.splitlines())
    return re.fullmatch(pattern, printed) is not None


@pytest.mark.parametrize("page", [tier(page, pytest.mark.slow) for page in PYTHON])
def test_the_python_of_a_page_runs_in_order_and_prints_what_stands_below_it(page: str, shelf: Shelf, place: Path) -> None:
    found, names = blocks(page), {"__name__": "__main__"}
    for block, after in zip(found, [*found[1:], None], strict=True):
        if block.language != "python":
            continue
        shelf.bring_all(re.findall(r'"([^"\n]*)"', block.text), place)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * (block.line - 1) + block.text, page, "exec", dont_inherit=True), names)
        if after is not None and read(page).split(block.text + "```\n", 1)[1].startswith("\n```text\n"):
            assert matches(printed.getvalue(), after.text), f"{block.name} printed:\n{printed.getvalue()}"
    for name in [name for name in names if name.startswith("test_")]:
        names[name]()


def test_what_was_printed_is_compared_line_by_line():
    assert matches("a\nb  \nc\n", "a\n...\nc\n") and matches("a\n", "a\n") and matches("a\nc\n", "a\n...\nc\n")
    assert not matches("a\nb\n", "a\n") and not matches("a\n", "a\nb\n") and not matches("a\nd\n", "a\n...\nc\n")


# Rows of docs/coming_from.md: what is typed there, and here

SECTIONS = {part.partition("\n")[0]: part for part in read("docs/coming_from.md").split("\n## ")[1:]}


def typed_here(section: str) -> list[str]:
    """The second cell of each row of a section's table."""
    rows = [re.fullmatch(r"\| (.+) \| `([^`]+)` \|", line) for line in SECTIONS[section].splitlines() if line.startswith("| ")]
    assert rows[0] is None and all(rows[1:]), f"a row of {section} has no code of its own"
    return [row[2] for row in rows if row]


def is_command(text: str) -> bool:
    return text.startswith(("python scripts/", "minitx-", "torchrun "))


@pytest.mark.parametrize("section", SECTIONS)
def test_what_one_comes_from_has_ten_rows_and_their_python_runs_in_order(section: str, shelf: Shelf, place: Path) -> None:
    rows, names = typed_here(section), {}
    assert len(rows) >= 10
    for block in re.findall(r"```python\n(.*?)```", SECTIONS[section], flags=re.DOTALL):
        exec(compile(block, section, "exec", dont_inherit=True), names)
    for text in rows:
        if not is_command(text):
            shelf.bring_all([f"model={name}" for name in re.findall(r'load_hf\("([^"]*)"', text)], place)
            exec(compile(text, text, "exec", dont_inherit=True), names)


COMMANDS = sorted({text for section in SECTIONS for text in typed_here(section) if is_command(text)})


@pytest.mark.release
@pytest.mark.parametrize("text", COMMANDS)
def test_a_command_for_those_who_come_from_elsewhere_runs(text: str, shelf: Shelf, place: Path) -> None:
    obey(shlex.split(text), shelf, place)


# The tables


@pytest.mark.parametrize("page", pages())
def test_every_block_is_of_a_language_that_is_checked(page: str) -> None:
    """``text`` stands below Python that printed it, ``yaml`` where a test of its own composes it, ``diff`` where one applies it."""
    for block in blocks(page):
        assert block.language in ("bash", "python", "text", "yaml", "diff"), f"nothing runs {block.name}"


@pytest.mark.parametrize("page", pages())
def test_every_command_survives_being_pasted_into_bash_and_zsh(page: str) -> None:
    for block in blocks(page, "bash"):
        if not block.text.startswith("#!"):  # a file, not commands
            assert [line for line in block.text.splitlines() if breaks_when_pasted(line)] == [], block.name


def test_what_breaks_when_pasted_is_seen():
    for line in ("ls  # files", 'ls "$V"', "$V text=a", "# a run's folder", "# a (b)", "pip install .[train]", "ls *.md"):
        assert breaks_when_pasted(line), line
    for line in ("# the files here", 'pip install -e ".[train]"', "train.py 'callbacks=[default,ema]'", "a && b", 'a="a#b"'):
        assert not breaks_when_pasted(line), line
