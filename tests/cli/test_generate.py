"""``generate.py``: a checkpoint and a prompt in, text out."""

import json
import re
import signal
import threading

import pytest
import torch

from minitx.cli.command_line import compose_program
from minitx.cli.compose import compose_config
from minitx.cli.generate import GenerateConfig, _options
from minitx.cli.launch import run_training
from minitx.data.tokenizer import Tokenizer
from minitx.generation import Sampler, beam_search, generate
from minitx.interop.conversations import TEMPLATE, ChatFormat
from minitx.training.checkpoint_files import write_checkpoint
from minitx.training.checkpoints import load_model
from minitx.training.json_lines import read_json_lines
from tests.cli.conftest import SHORT, assert_named, put
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
    options = _options(GenerateConfig(ckpt_path="last.ckpt", stop="."), torch.nn.Identity(), known)
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
    config = compose_program(GenerateConfig, typed)
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


QUESTION, ANSWER = "Who made the earth?", "God."
TINY_CHAT = ("data=chat", "data.path=chats.jsonl", "data.tokenizer=char", "data.context_len=48", "trainer.max_steps=2")
CHATML = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"


def chats(place, *words):
    """A run of two steps on conversations, and its last checkpoint."""
    said = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
    (place / "chats.jsonl").write_text((json.dumps({"messages": said}) + "\n") * 31, encoding="utf-8")
    run_training(compose_config([*SHORT, *TINY_CHAT, *words]), place / "chat", "a test")
    return f"ckpt_path={place / 'chat' / 'checkpoints' / 'last.ckpt'}"


@pytest.mark.parametrize("template", [None, CHATML])
def test_a_prompt_of_a_chat_is_a_message_in_the_template_of_the_run(cli, place, template):
    last = chats(place, *([] if template is None else [f"data.template='{template}'"]))
    for prompt in (QUESTION, "God"):
        written_by = {
            word: cli(last, f"prompt={prompt}", "max_new_tokens=7", *([word] if word else []), program="generate")
            for word in ("", "template=false")
        }
        format = ChatFormat(template or TEMPLATE, load_model(last.partition("=")[2])[1])
        asked = format.tokenizer.decode(format.encode([{"role": "user", "content": prompt}], add_generation_prompt=True)[0])
        assert asked.endswith("assistant: " if template is None else "<assistant>") and prompt in asked
        for said, text in zip(written_by.values(), (asked, prompt), strict=True):
            assert said.out == answer_of(last, text, max_new_tokens=7)
        assert (
            written_by[""].err.startswith("prompts are user messages in the chat template")
            and written_by[""].err.count("\n") == 1
        )
        assert written_by["template=false"].err == ""
    lines = cli(last, "max_new_tokens=3", stdin="God\nWho\n", program="generate")
    assert lines.err.count("\n") == 1 and len(lines.out) > 2


def answer_of(last, text, **options):
    """The answer to a text with special tokens in it, by the library."""
    model, tokenizer, _ = load_model(last.partition("=")[2])
    ids = tokenizer.encode_sections(re.split("(<eos>)", text))[0]
    (answer,) = generate(model, torch.tensor([ids.tolist()]), context=64, **options)
    return tokenizer.decode(answer.tolist()) + "\n"


def test_a_template_that_refuses_a_prompt_is_named_with_what_leaves_it_out(assert_refused, cli, place):
    refuses = "{% if messages | length < 2 %}{{ raise_exception('too short') }}{% endif %}" + TEMPLATE.replace("\n", "")
    last = chats(place, f'data.template="{refuses}"')
    assert_refused("template=false ignores the template", last, "prompt=God", program="generate")
    assert cli(last, "prompt=God", "template=false", program="generate").code == 0


def test_a_tokenizer_with_a_template_and_without_an_end_mark_writes_only_with_template_false(cli, last, place):
    content = torch.load(last("text").partition("=")[2], weights_only=True)
    content["minitx"]["tokenizer"]["chat_template"] = "{% for m in messages %}{{ m.content }}e{{ eos_token }}{% endfor %}"
    write_checkpoint(content, "other.ckpt")
    said = cli("ckpt_path=other.ckpt", "prompt=God", program="generate")
    assert said.code == 2 and "has no eos" in said.err and "template=false" in said.err
    assert cli("ckpt_path=other.ckpt", "prompt=God", "template=false", "max_new_tokens=3", program="generate").out == written(
        last("text"), "God", max_new_tokens=3
    )


def test_samples_of_a_run_on_conversations_answer_a_users_message(place):
    last = chats(place, "callbacks.samples.every=2", f"callbacks.samples.prompts=['{QUESTION}']", "callbacks.samples.temperature=0",
                 "callbacks.samples.max_new_tokens=6")  # fmt: skip
    (record,) = read_json_lines(place / "chat" / "samples.jsonl")
    assert record["prompt"] == QUESTION
    assert record["text"] + "\n" == answer_of(last, f"user: {QUESTION}<eos>\nassistant: ", max_new_tokens=6)


OWN_WITH_A_TABLE = """
import torch
from torch import nn


class Own(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.words, self.places, self.head = nn.Embedding(vocab_size, 8), nn.Embedding(24, 8), nn.Linear(8, vocab_size)

    def forward(self, input_ids):
        return self.head(self.words(input_ids) + self.places(torch.arange(input_ids.shape[1])))
"""


def test_a_model_of_ones_own_continues_a_text_beyond_its_table_of_positions(cli, place, runs):
    """It sees at most ``data.context_len`` tokens, and with a longer ``context`` the message is the model's."""
    put(place / "owntable.py", OWN_WITH_A_TABLE)
    words = [word for word in SHORT if not word.startswith("model.")]
    data = "data=text", f"data.path={runs / 'text.txt'}", "data.context_len=24"
    ran = cli(*words, *data, "model._target_=owntable.Own", "output_dir=own", "evaluation.at_end=false")
    assert ran.code == 0, ran
    words = "ckpt_path=own", "trust=true", "prompt=In the", "max_new_tokens=70"
    written = cli(*words, program="generate")
    assert written.code == 0 and written == cli(*words, "context=24", program="generate"), written
    assert len(written.out.removesuffix("\n")) >= 70
    assert cli(*words, "context=25", program="generate").code != 0
