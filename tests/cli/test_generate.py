"""``generate.py``: a checkpoint and a prompt in, text out."""

import signal
import threading

import pytest
import torch

from minitx.cli.command_line import parse
from minitx.cli.generate import GenerateConfig, _options
from minitx.data.tokenizers import Tokenizer
from minitx.generation import Sampler, beam_search, generate
from minitx.training.checkpoints import load_model, write_checkpoint
from tests.cli.conftest import assert_named
from tests.cli.processes import start
from tests.data.conftest import SPACE, beginning_with_a_space
from tests.waiting import PATIENCE


def written(last, prompt, write=generate, **options):
    """The text that the library writes, without the program."""
    model, tokenizer, _ = load_model(last.partition("=")[2])
    (answer,) = write(model, torch.tensor([tokenizer.encode(prompt).tolist()]), **options)
    return tokenizer.decode(answer.tolist()) + "\n"


@pytest.mark.parametrize(("run", "prompt"), [("text", "In the"), ("bytes", "你好"), ("dates", "de: 7.3.1999")])
def test_a_prompt_is_continued_or_answered_as_the_library_does(output, last, run, prompt):
    ways = [
        (generate, {"max_new_tokens": 70} if run == "text" else {"max_new_tokens": 11}),  # beyond model.max_len
        (beam_search, {"max_new_tokens": 9, "num_beams": 3, "length_penalty": 0.2, "repetition_penalty": 1.3}),
    ]
    for write, options in ways:
        words = [f"{name}={value}" for name, value in options.items()]
        context = {"context": 64} if options["max_new_tokens"] == 70 else {}
        assert output("generate", last(run), f"prompt={prompt}", *words) == written(
            last(run), prompt, write, **options, **context
        )


def test_each_line_of_stdin_gets_an_answer_and_no_lines_none(output, last):
    wanted = [written(last("text"), prompt, max_new_tokens=5, stop=[1]) for prompt in ("God", "heaven and", "th")]
    got = output("generate", last("text"), "max_new_tokens=5", "stop=\n", stdin="\ufeffGod\nheaven and\r\nth")
    assert got == "".join(wanted)
    assert output("generate", last("text")) == ""


def test_a_seed_repeats_its_samples_and_samples_differ(output, last):
    words = last("text"), "prompt=the ", "temperature=1.5", "num_samples=3", "max_new_tokens=20", "top_k=20"
    first = output("generate", *words)
    assert first == output("generate", *words) != output("generate", *words, "seed=1")
    assert len(set(first.removesuffix("\n").split("\n---\n"))) == 3
    options = {"max_new_tokens": 20, "generator": torch.Generator().manual_seed(0)}
    assert first.startswith(written(last("text"), "the ", sampler=Sampler(temperature=1.5, top_k=20), **options))


def test_a_stop_ends_the_answer_before_it(output, last):
    words = last("text"), "prompt=In the", "max_new_tokens=15"
    free = output("generate", *words).removesuffix("\n")
    assert output("generate", *words, f"stop={free[4]}") == free.split(free[4])[0] + "\n"


@pytest.mark.parametrize("kind", SPACE)
def test_a_stop_is_the_token_inside_of_a_text_also_if_a_text_begins_with_a_space(kind):
    known = Tokenizer(beginning_with_a_space(kind, ".ab\n").to_str())
    options = _options(GenerateConfig(ckpt_path="last.ckpt", stop="."), torch.nn.Identity(), known, None)
    assert options["stop"] == known.encode("a.").tolist()[-1:] != known.encode(".").tolist()


def test_a_bad_line_of_stdin_is_named_by_its_number(cli, last):
    said = cli(last("text"), "max_new_tokens=2", stdin=b"God\nthe \xff\nhe\n", program="generate")
    assert (said.code, said.out.count("\n"), said.err.count("\n")) == (2, 1, 1)
    assert "line 2" in said.err


def test_a_checkpoint_that_was_changed_is_refused_and_what_was_not_typed_exits_with_3(cli, last, place):
    edits = {
        "no tokenizer": lambda stored, weights: stored.update(tokenizer=None),
        "embeddings.token.weight": lambda stored, weights: stored["model"].update(embed_dim=18),
        "not finite": lambda stored, weights: [weight.fill_(torch.nan) for weight in weights.values()],
    }
    for part, edit in edits.items():
        checkpoint = torch.load(last("text").partition("=")[2], weights_only=True)
        edit(checkpoint["minitx"], checkpoint["state_dict"])
        write_checkpoint(checkpoint, place / "changed.ckpt")
        said = cli("ckpt_path=changed.ckpt", "prompt=a", program="generate")
        assert_named(said, part, code=3 if part == "not finite" else 2)


def test_text_arguments_stand_as_they_are_and_others_are_read():
    typed = ["ckpt_path=1", "prompt=a: [b, =c #d", "top_p=.9", "stop=null", "max_new_tokens=null", "min_p=1e-3"]
    config = parse(GenerateConfig, typed)
    assert (config.ckpt_path, config.prompt, config.top_p, config.min_p) == ("1", "a: [b, =c #d", 0.9, 0.001)
    assert (config.stop, config.max_new_tokens) == (None, None)


@pytest.mark.slow
def test_the_script_answers_line_by_line_and_ends_with_130_on_ctrl_c(last, tmp_path):
    process = start([last("text"), "max_new_tokens=6", "device=cpu"], tmp_path, program="generate")
    watchdog = threading.Timer(PATIENCE, process.kill)  # an answer that is kept back would be waited for without end
    watchdog.start()
    try:
        for prompt in ("God", "你好"):  # each answer is there before the next prompt is asked
            process.stdin.write(f"{prompt}\n")
            process.stdin.flush()
            answer = written(last("text"), prompt, max_new_tokens=6)
            assert "".join(process.stdout.readline() for _ in range(answer.count("\n"))) == answer
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE)
    finally:
        watchdog.cancel()
        process.kill()
    assert (process.returncode, err.count("\n")) == (130, 1)
    assert list(tmp_path.iterdir()) == []
