"""``generate.py`` as a user meets it: a checkpoint and a prompt in, text out, one sentence for a mistake."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from minitx.cli.arguments import help_text, parse
from minitx.cli.generate import USAGE, GenerateConfig, main
from minitx.config import (
    CallbacksConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    TextDataConfig,
    TrainerConfig,
    TransformerConfig,
)
from minitx.data.tokenizers import train_tokenizer
from minitx.generation import generate
from minitx.training.checkpoint import AtomicCheckpointIO
from minitx.training.stored import load_model
from minitx.training.run import train
from tests.waiting import PATIENCE

SCRIPT = Path(__file__).parents[2] / "scripts" / "generate.py"
TEXT = "In the beginning God created the heaven and the earth.\n你好世界 🎉\n"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Checkpoints of two tiny runs, over characters and over bytes."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_text(TEXT * 60, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minitx.data.load.data_dir", lambda: folder)
        for kind in ("char", "bpe"):
            data = TextDataConfig(
                name="text", path=str(folder / "text.txt"), context_len=24, tokenizer=kind, bpe_vocab_size=270, batch_size=4
            )
            config = RunConfig(
                model=TransformerConfig(embed_dim=16, num_heads=2, num_layers=1, max_len=24),
                data=data,
                optimizer=OptimizerConfig(lr=1e-2),
                schedule=ScheduleConfig(warmup_steps=1),
                trainer=TrainerConfig(max_steps=20, accelerator="cpu", threads=1, val_batches=1),
                callbacks=CallbacksConfig(progress=False),
            )
            train(config, folder / kind)
    return folder


@pytest.fixture
def char_checkpoint(trained):
    return trained / "char" / "checkpoints" / "last.ckpt"


@pytest.fixture
def bpe_checkpoint(trained):
    return trained / "bpe" / "checkpoints" / "last.ckpt"


@pytest.fixture
def cli(monkeypatch, capsys):
    """``cli("prompt=a", ..., stdin="a line")`` runs ``generate.py`` in this process."""

    def run(*arguments, stdin: str | bytes = ""):
        raw = stdin.encode() if isinstance(stdin, str) else stdin
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["generate.py", *map(str, arguments)])
            patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw)))
            patch.setenv("MINITX_TRACEBACK", "0")
            code = main()
        return SimpleNamespace(code=code, **dict(zip(("out", "err"), capsys.readouterr(), strict=True)))

    return run


def written(checkpoint, prompt, **options):
    """The text that the library writes, without the program."""
    model, tokenizer, _ = load_model(checkpoint)
    (answer,) = generate(model, torch.tensor([tokenizer.encode(prompt).tolist()]), **options)
    return tokenizer.decode(answer.tolist()) + "\n"


def test_a_checkpoint_alone_gives_model_tokenizer_and_config(char_checkpoint):
    model, tokenizer, state = load_model(char_checkpoint)
    saved = torch.load(char_checkpoint, weights_only=True)["state_dict"]
    assert not model.training
    assert state["config"]["data"]["context_len"] == 24
    assert model.config.vocab_size == tokenizer.vocab_size == len(set(TEXT)) + 1
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, saved[f"network.{name}"]), name


def test_a_prompt_is_continued_as_the_library_does(cli, char_checkpoint, bpe_checkpoint):
    for checkpoint, prompt in ((char_checkpoint, "In the"), (bpe_checkpoint, "你好")):
        said = cli(f"ckpt_path={checkpoint}", f"prompt={prompt}", "max_new_tokens=11")
        assert (said.code, said.err, said.out) == (0, "", written(checkpoint, prompt, max_new_tokens=11))
    beams = cli(f"ckpt_path={char_checkpoint}", "prompt=he", "max_new_tokens=9", "num_beams=3", "length_penalty=0.2")
    assert beams.out == written(char_checkpoint, "he", max_new_tokens=9, num_beams=3, length_penalty=0.2)


def test_each_line_of_stdin_gets_an_answer_and_no_lines_none(cli, char_checkpoint):
    said = cli(f"ckpt_path={char_checkpoint}", "max_new_tokens=5", "stop=\n", stdin="God\nheaven and\r\nth")
    wanted = [written(char_checkpoint, prompt, max_new_tokens=5, stop=[1]) for prompt in ("God", "heaven and", "th")]
    assert (said.code, said.err, said.out) == (0, "", "".join(wanted))
    assert cli(f"ckpt_path={char_checkpoint}").out == ""


def test_a_seed_repeats_its_samples_and_samples_differ(cli, char_checkpoint):
    arguments = (
        f"ckpt_path={char_checkpoint}",
        "prompt=the ",
        "temperature=1.5",
        "num_samples=3",
        "max_new_tokens=20",
        "top_k=20",
    )
    first, second, other = cli(*arguments), cli(*arguments), cli(*arguments, "seed=1")
    assert first.out == second.out != other.out
    samples = first.out.removesuffix("\n").split("\n---\n")
    assert len(samples) == len(set(samples)) == 3
    generator = torch.Generator().manual_seed(0)
    assert first.out.startswith(
        written(char_checkpoint, "the ", temperature=1.5, max_new_tokens=20, top_k=20, generator=generator)
    )


def test_a_stop_ends_the_answer_before_it(cli, char_checkpoint):
    free = written(char_checkpoint, "In the", max_new_tokens=15).removesuffix("\n")
    stop = free[4]
    assert (
        cli(f"ckpt_path={char_checkpoint}", "prompt=In the", "max_new_tokens=15", f"stop={stop}").out
        == free.split(stop)[0] + "\n"
    )


class Echo(nn.Module):
    """An encoder-decoder that says its source again, then the end."""

    config = SimpleNamespace(architecture="encoder_decoder", num_layers=1, bos_id=0, eos_id=0)

    def __init__(self, vocab_size):
        super().__init__()
        self.vocab_size, self.here = vocab_size, nn.Parameter(torch.zeros(()))

    def encode(self, input_ids, *, key_mask=None):
        return F.one_hot(F.pad(input_ids, (0, 1)), self.vocab_size).float()

    def forward(self, input_ids, decoder_input_ids, *, key_mask=None, memory=None, cache=None):
        past, (B, L) = cache.length, decoder_input_ids.shape
        cache.layers[0].append(torch.zeros(B, 1, L, 1), torch.zeros(B, 1, L, 1))
        return memory[:, past : past + L]


def test_an_encoder_decoder_takes_the_prompt_as_its_source(cli, monkeypatch):
    tokenizer = train_tokenizer("char", [TEXT])
    loaded = Echo(tokenizer.vocab_size).eval(), tokenizer, {"model": {"architecture": "encoder_decoder"}}
    monkeypatch.setattr("minitx.training.stored.load_model", lambda path: loaded)
    said = cli("ckpt_path=x", stdin="你好\nIn the beginning\n")
    assert (said.code, said.err, said.out) == (0, "", "你好\nIn the beginning\n")
    assert cli("ckpt_path=x", "prompt=").err == "error: prompt is empty: the model needs one character at least\n"


KEYS = ", ".join(GenerateConfig.__dataclass_fields__)
TYPED = {
    "temprature=1": f"temprature is not a key; did you mean temperature? allowed here: {KEYS}",
    "--seed=1": f"--seed is not a key; did you mean seed? allowed here: {KEYS}",
    "hello": "hello is not key=value; --help shows the keys",
    "seed=1 seed=2": "seed is given twice",
    "temperature=warm": "temperature=warm must be a number, got str",
    "max_new_tokens=2.5": "max_new_tokens=2.5 must be a whole number, got float",
    "top_k=[": "top_k=[ must be a whole number, got str",
    "seed=-1": "seed=-1 must lie in [0, 2^63)",
    "num_samples=0": "num_samples=0 must be positive",
    "num_samples=2": "num_samples=2 needs temperature above 0: without draws all are the same",
    "temperature=-1": "temperature=-1.0 must be zero (greedy) or a positive number",
    "temperature=1 top_p=2": "top_p=2.0 must lie in (0, 1] (1 keeps everything)",
    "top_k=5": "top_k=5 has no effect without sampling: set temperature above 0",
    "context=30": "context=30: the position table ends at max_len=24",
    "context=0": "context=0 must be a positive whole number",
    "stop=ab": "stop='ab' must be the text of one token, but it has 2",
    "stop=é": f"stop has the character 'é' (U+00E9), which is none of the {len(set(TEXT))} that the model knows",
    "prompt=né": f"prompt has the character 'é' (U+00E9), which is none of the {len(set(TEXT))} that the model knows",
    "prompt=": "prompt is empty: the model needs one character at least",
    "prompt=\udcff": "prompt is not UTF-8 text: character 1 cannot be read",
}


@pytest.mark.parametrize("typed", TYPED)
def test_a_mistake_gets_one_sentence(cli, char_checkpoint, typed):
    arguments = [f"ckpt_path={char_checkpoint}", *typed.split(" ")]
    if "prompt=" not in typed:
        arguments.append("prompt=God")
    said = cli(*arguments)
    assert (said.code, said.out, said.err) == (2, "", f"error: {TYPED[typed]}\n")


def test_a_bad_line_of_stdin_is_named_by_its_number(cli, char_checkpoint):
    said = cli(f"ckpt_path={char_checkpoint}", "max_new_tokens=2", stdin=b"God\nthe \xff\nhe\n")
    assert (said.code, said.out.count("\n")) == (2, 1)
    assert said.err == "error: line 2 of stdin: prompt is not UTF-8 text: character 5 cannot be read\n"


def test_a_device_that_is_none_is_named(cli, char_checkpoint):
    said = cli(f"ckpt_path={char_checkpoint}", "prompt=God", "device=toaster")
    assert said.code == 2
    assert said.err.startswith("error: device=toaster cannot be used: ")
    assert said.err.count("\n") == 1


def test_what_is_not_a_checkpoint_for_text_is_refused(cli, char_checkpoint, tmp_path):
    assert cli("prompt=a").err == "error: ckpt_path is missing\n"
    assert cli("ckpt_path=none.ckpt").err == "error: ckpt_path=none.ckpt is not a file\n"
    path = tmp_path / "x.ckpt"
    path.write_text("not a checkpoint")
    assert cli(f"ckpt_path={path}").err.startswith(f"error: ckpt_path={path} cannot be read as a checkpoint of minitx: ")

    def changed(**values):
        checkpoint = torch.load(char_checkpoint, weights_only=True)
        checkpoint["minitx"] = {**checkpoint["minitx"], **values}
        AtomicCheckpointIO().save_checkpoint(checkpoint, path)
        said = cli(f"ckpt_path={path}", "prompt=a")
        assert (said.code, said.out, said.err.count("\n")) == (2, "", 1)
        return said.err.removeprefix(f"error: ckpt_path={path} ").rstrip()

    model = torch.load(char_checkpoint, weights_only=True)["minitx"]["model"]
    assert changed(tokenizer=None) == "holds no tokenizer: its model was not trained on text"
    assert "kind=x" in changed(tokenizer={"kind": "x"})
    assert "unexpected keyword argument 'foo'" in changed(model={**model, "foo": 1})
    assert "size mismatch for embeddings.token.weight" in changed(model={**model, "embed_dim": 18})


def test_a_checkpoint_that_holds_code_is_not_executed(cli, tmp_path):
    class Evil:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "executed",))

    path = tmp_path / "evil.ckpt"
    AtomicCheckpointIO().save_checkpoint({"minitx": {"model": Evil()}}, path)
    assert cli(f"ckpt_path={path}", "prompt=a").code == 2
    assert not (tmp_path / "executed").exists()


def test_a_failure_that_was_not_typed_exits_with_3(cli, char_checkpoint, tmp_path):
    checkpoint = torch.load(char_checkpoint, weights_only=True)
    for weight in checkpoint["state_dict"].values():
        weight.fill_(torch.nan)
    AtomicCheckpointIO().save_checkpoint(checkpoint, tmp_path / "nan.ckpt")
    said = cli(f"ckpt_path={tmp_path / 'nan.ckpt'}", "prompt=a")
    assert said.code == 3
    assert said.err == "error: FloatingPointError: the model's logits are not finite (traceback=true shows where)\n"
    assert "Traceback (most recent call last)" in cli("ckpt_path=none", "traceback=true").err


def test_help_names_every_key_with_its_default(cli):
    said = cli("--help")
    assert (said.code, said.err, said.out) == (0, "", help_text(GenerateConfig, USAGE))
    for name, field in GenerateConfig.__dataclass_fields__.items():
        assert f"  {name}=" in said.out
        assert field.metadata["meaning"] in said.out
    assert "length_penalty=0.6" in said.out


def test_text_arguments_stand_as_they_are_and_others_are_read():
    config = parse(
        GenerateConfig, ["ckpt_path=1", "prompt=a: [b, =c #d", "top_p=.9", "stop=null", "max_new_tokens=null", "min_p=1e-3"]
    )
    assert (config.ckpt_path, config.prompt, config.top_p, config.stop) == ("1", "a: [b, =c #d", 0.9, "null")
    assert (config.max_new_tokens, config.min_p) == (None, 0.001)


def test_the_stop_of_a_byte_level_model_is_its_end_mark(bpe_checkpoint):
    from minitx.cli.generate import _stop_ids

    model, tokenizer, _ = load_model(bpe_checkpoint)
    assert tokenizer.end_id is not None
    assert _stop_ids(model, tokenizer, None) == [tokenizer.end_id]
    assert _stop_ids(model, tokenizer, "G") == tokenizer.encode("G").tolist()


@pytest.mark.slow
def test_the_script_answers_line_by_line_and_ends_with_130_on_ctrl_c(char_checkpoint, tmp_path):
    listening = (  # a shell starts what runs in its background deaf to SIGINT, and children inherit that
        "import runpy, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    arguments = [str(SCRIPT), f"ckpt_path={char_checkpoint}", "max_new_tokens=6", "device=cpu"]
    process = subprocess.Popen(
        [sys.executable, "-c", listening, *arguments],
        cwd=tmp_path, text=True, encoding="utf-8", stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONUTF8": "1", "PYTHONUNBUFFERED": ""},
    )  # fmt: skip
    watchdog = threading.Timer(PATIENCE, process.kill)  # an answer that is kept back would be waited for without end
    watchdog.start()
    try:
        for prompt in ("God", "你好"):  # each answer is there before the next prompt is asked
            process.stdin.write(f"{prompt}\n")
            process.stdin.flush()
            answer = written(char_checkpoint, prompt, max_new_tokens=6)
            assert "".join(process.stdout.readline() for _ in range(answer.count("\n"))) == answer
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE)
    finally:
        watchdog.cancel()
        process.kill()
    assert (process.returncode, out, err) == (130, "", "stopped by SIGINT\n")
    assert list(tmp_path.iterdir()) == []


def test_a_typo_is_answered_before_torch_is_imported(tmp_path):
    watcher = (
        "import sys; sys.argv = ['generate.py', 'ckpt_path=x', 'temprature=1']\n"
        "from minitx.cli.generate import main\n"
        "code = main()\n"
        "sys.exit('imported' if {'torch', 'numpy', 'lightning'} & set(sys.modules) else code)\n"
    )
    done = subprocess.run([sys.executable, "-c", watcher], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done


def test_a_text_may_grow_beyond_what_the_model_looks_back_on(cli, char_checkpoint):
    prompt = "God created the heaven and the earth"  # longer than the table of positions, 24
    said = cli(f"ckpt_path={char_checkpoint}", f"prompt={prompt}", "max_new_tokens=70")
    assert (said.code, said.err) == (0, "")
    assert said.out == written(char_checkpoint, prompt, max_new_tokens=70, context=24)
    assert len(said.out) == 71
