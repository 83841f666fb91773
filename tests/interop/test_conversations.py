"""Conversations: what a template writes, and which tokens count."""

import json
import sys

import jinja2
import numpy as np
import pandas
import pytest
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from minitx.config import ConfigError
from minitx.data import classify, pairs
from minitx.data.splits import as_split
from minitx.data.tokenizer import Tokenizer, fingerprint, train_tokenizer
from minitx.data.tokenizer_folder import load_tokenizer
from minitx.interop.conversations import TEMPLATE, ChatFormat, chat
from tests.data.conftest import SPACE, batch_of, beginning_with_a_space, total_left_out
from tests.interop.chat_templates import GENERATION, PLAIN, SPECIAL

pytestmark = pytest.mark.usefixtures("offline_datasets")
LETTERS = "".join(map(chr, range(32, 127))) + "\né"


def turns(*said):
    return [dict(zip(("role", "content"), turn.split(": ", 1), strict=True)) for turn in said]


CHAT = turns("system: be brief", "user: 1+1?", "assistant: 2", "user: thanks", "assistant: né")
CHATML = (
    "{% if messages[0].role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{{ bos_token }}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def tokenizer():
    return train_tokenizer("char", [LETTERS], vocab_size=0, marks=("bos", "eos"))


SAID = "user: 1+1?<eos>\nassistant: 2<eos>\n"
CALLS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for call in m.tool_calls %}[{{ call.name }}]{% endfor %}{{ eos_token }}\n{% endfor %}"
A_CALL = [*CHAT[1:2], {"role": "assistant", "tool_calls": [{"name": "né"}]}, {"role": "tool", "content": "3"}, *CHAT[2:3]]
WRITTEN = [
    (TEMPLATE, CHAT, f"system: be brief<eos>\n{SAID}user: thanks<eos>\nassistant: né<eos>\nassistant: ", "2<eos>né<eos>"),
    (CHATML, CHAT[1:3], "<bos><|im_start|>user\n1+1?<eos>\n<|im_start|>assistant\n2<eos>\n<|im_start|>assistant\n", "2<eos>"),
    (CALLS, A_CALL, "<user>1+1?<eos>\n<assistant>[né]<eos>\n<tool>3<eos>\n<assistant>2<eos>\n", "[né]<eos>2<eos>"),
]


@pytest.mark.parametrize(("template", "said", "whole", "answers"), WRITTEN)
def test_a_template_writes_a_conversation_and_answers_and_their_end_marks_count(tokenizer, template, said, whole, answers):
    ids, counted = ChatFormat(template, tokenizer).encode(said, add_generation_prompt=True)
    assert (tokenizer.decode(ids), tokenizer.decode(ids[counted])) == (whole, answers)


@pytest.mark.parametrize("kind", SPACE)
@pytest.mark.parametrize("answer", ["<|{{ m.role }}|>\n{{ m.content }}", "{{ m.role }}: {{ m.content }}", " {{ m.content }}"])
def test_tokens_are_those_that_transformers_gives_the_whole(kind, answer, tmp_path):
    """Also of a tokenizer that begins a text with a space, and of a token that joins a template's space and a content."""
    transformers = pytest.importorskip("transformers")
    theirs = beginning_with_a_space(kind, LETTERS.replace(" ", "").replace("a", "").replace("é", "").replace("n", "an"))
    theirs.add_special_tokens(["</s>", "[INST]"])
    theirs.save(str(tmp_path / "tokenizer.json"))
    template = "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %}" + answer
    template += "{{ eos_token }}{% endif %}{% endfor %}\n"
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    said, ours = turns("user: 1+1?", "assistant: a 2", "user: a", "assistant: a"), load_tokenizer(str(tmp_path))
    ids, counted = ChatFormat(ours.chat_template, ours).encode(said)
    wanted = transformers.AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(said, return_dict=False)
    assert ids.tolist() == wanted
    texts = [
        ours.decode(part).strip() for part in np.split(ids[counted], np.flatnonzero(ids[counted] == ours.mark_ids["eos"]) + 1)
    ]
    assert texts == ["a 2</s>", "a</s>", ""]


@pytest.fixture(scope="module")
def both_tokenizers(tmp_path_factory):
    """A tokenizer of transformers with the special tokens of many models, and ours of its folder."""
    transformers, folder = pytest.importorskip("transformers"), tmp_path_factory.mktemp("tokenizer")
    raw = tokenizers.Tokenizer.from_str(train_tokenizer("bpe", [LETTERS] * 9, vocab_size=400).to_dict()["json"])
    raw.add_special_tokens([*SPECIAL])
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<|im_start|>", eos_token="<|endoftext|>")
    theirs.save_pretrained(folder)
    return theirs, load_tokenizer(folder)


TURNS = ["system: be brief", "user:  1+1?\n", "assistant: 2 ", "user: thanks", "assistant: né"]


@pytest.mark.parametrize(("chat", "prompt"), [(TURNS, False), (TURNS[1:], True)], ids=["whole", "prompt"])
@pytest.mark.parametrize("name", [*PLAIN, *GENERATION])
def test_a_template_writes_what_transformers_writes_and_its_marks_decide_what_counts(both_tokenizers, name, chat, prompt):
    (theirs, ours), said, template = both_tokenizers, turns(*chat), (PLAIN | GENERATION)[name]
    options = {"chat_template": template, "add_generation_prompt": prompt}
    format = ChatFormat(template, ours)
    ids, counted = format.encode(said, add_generation_prompt=prompt)
    wanted = theirs.apply_chat_template(said, return_assistant_tokens_mask=name in GENERATION, **options)
    assert ids.tolist() == wanted["input_ids"]
    if name in GENERATION:
        assert counted.astype(int).tolist() == wanted["assistant_masks"]
    else:
        ends = np.flatnonzero(counted & ~np.append(counted, False)[1:])
        assert len(ends) == sum(turn.startswith("assistant") for turn in chat)
        assert {*theirs.convert_ids_to_tokens(ids[ends])} <= {*SPECIAL, "<|endoftext|>"}


@pytest.mark.parametrize("name", [name for name, template in PLAIN.items() if "add_generation_prompt" in template])
def test_all_that_follows_the_prompt_of_generation_counts_up_to_the_end_mark(both_tokenizers, name):
    """Thoughts included, which Qwen 3 writes in the last answer only."""
    format, said = ChatFormat(PLAIN[name], both_tokenizers[1]), turns(*TURNS)
    ids, counted = format.encode(said)
    prompt, _ = format.encode(said[:-1], add_generation_prompt=True)
    assert ids[: len(prompt)].tolist() == prompt.tolist() and not counted[len(prompt) - 1]
    answer = format.tokenizer.decode(ids[len(prompt) :]).rstrip()
    assert format.tokenizer.decode(ids[len(prompt) :][counted[len(prompt) :]]) == answer


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("chatml", "<|im_end|>"),
        ("llama 3", "<|eot_id|>"),
        ("zephyr", "<|endoftext|>"),
        ("smol 3", "<|im_end|>"),
        ("bare answer", None),
    ],
)
def test_a_prompt_ends_where_the_answer_begins_and_the_answer_with_its_special_token(both_tokenizers, name, end):
    (theirs, ours), template = both_tokenizers, (PLAIN | GENERATION)[name]
    ids, ends = ChatFormat(template, ours).prompt("1+1?")
    asked = turns("user: 1+1?")
    wanted = theirs.apply_chat_template(asked, chat_template=template, add_generation_prompt=True)
    assert ids.tolist() == wanted["input_ids"]
    assert ends == ([] if end is None else [theirs.convert_tokens_to_ids(end)])


@pytest.mark.parametrize(("name", "end"), [("smol 3", "<|im_end|>"), ("training", "<|im_end|>"), ("bare answer", None)])
def test_with_marks_a_run_counts_what_they_enclose_and_ends_a_text_with_what_ends_it(
    both_tokenizers, write_text, name, end, caplog
):
    ours, rows = both_tokenizers[1], [json.dumps({"messages": turns(*said)}) for said in [*[TURNS] * 9, TURNS[:2]]]
    task = chat(path=write_text("\n".join(rows), "a.jsonl"), tokenizer=ours, template=GENERATION[name], packing=False)
    assert task.model_fields.get("eos_id") == (end and ours.encode_sections(["", end, ""])[0][0])
    ids, counted = ChatFormat(GENERATION[name], ours).encode(turns(*TURNS))
    assert task.train[0]["labels"].tolist() == np.where(counted, ids.astype(int), -100)[1:].tolist()
    assert len(task.train) + len(task.val) == 9
    assert ("today's date" in caplog.text) == (name == "smol 3")
    assert ("does not learn to end an answer" in caplog.text) == (end is None)


@pytest.mark.parametrize(
    "form",
    [
        "{{ m.content }}",
        "{{ m.content | upper }}",
        "{{ m.content | trim }}",
        "{{ m.content | trim if m.role == 'user' else m.content }}",
    ],
)
def test_a_content_is_what_the_template_makes_of_it(tokenizer, form):
    """As ``apply_chat_template`` of transformers writes it, which renders the contents themselves."""
    said = turns("user:  \n1+1? ", "assistant: \n2\n", "user: ", "assistant: ok ")
    format = ChatFormat("{% for m in messages %}[{{ m.role }}]" + form + "{{ eos_token }}{% endfor %}", tokenizer)
    rendered = jinja2.Template(format.template).render(messages=said, eos_token="<eos>")
    assert tokenizer.decode(format.encode(said)[0]) == rendered


def test_special_tokens_of_the_tokenizer_that_a_template_writes_are_one_token(tmp_path):
    theirs = tokenizers.Tokenizer.from_str(train_tokenizer("bpe", [LETTERS], vocab_size=300).to_dict()["json"])
    theirs.add_special_tokens([tokenizers.AddedToken(name, special=True) for name in ("<|im_start|>", "<|im_end|>")])
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    said = [*CHAT[1:3], *turns("user: <|im_end|>")]
    ids, counted = ChatFormat(template, Tokenizer(theirs.to_str())).encode(said)
    start, end = (theirs.token_to_id(name) for name in ("<|im_start|>", "<|im_end|>"))
    assert (ids == start).sum() == (ids == end).sum() == 3, "what a message says is text"
    assert ids[counted].tolist()[-1] == end and theirs.decode(ids[counted][:-1].tolist()) == "2"


CALL = """{%- for m in messages %}{{- '<|im_start|> ' + m.role }}{%- if m.content %}{{- ' ' + m.content }}{%- endif %}
{%- for call in m.tool_calls or [] %}{{- ' <tool_call> ' + call.name + ' </tool_call>' }}{%- endfor %}{{- ' <|im_end|> ' }}{%- endfor %}"""


@pytest.mark.parametrize("content", ["yes", "", None])
@pytest.mark.parametrize("added", [[], ["<tool_call>", "</tool_call>"]])
def test_a_call_counts_up_to_its_end_mark_whether_its_tags_are_added_tokens_or_words(content, added):
    """With added tokens as in Qwen's vocabularies."""
    words = [
        "<|im_start|>",
        "<|im_end|>",
        "</s>",
        "<unk>",
        "user",
        "assistant",
        "hi",
        "yes",
        "add",
        "<tool_call>",
        "</tool_call>",
    ]
    theirs = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    theirs.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    theirs.add_special_tokens(words[:3])
    theirs.add_tokens(added)
    answer = {"role": "assistant", "content": content, "tool_calls": [{"name": "add"}]}
    ids, counted = ChatFormat(CALL, Tokenizer(theirs.to_str())).encode([*turns("user: hi"), answer, *turns("user: hi"), answer])
    wanted = [*(["yes"] if content else []), "<tool_call>", "add", "</tool_call>", "<|im_end|>"]
    assert [theirs.id_to_token(id) for id in ids[counted]] == 2 * wanted


THOUGHTS = "{% for m in messages %}{{ m.role }} {% if loop.last %}think {% endif %}{{ m.content }} <end> {% endfor %}"


def test_an_added_token_ends_an_answer_also_where_a_template_drops_thoughts_of_earlier_messages():
    words = ["<unk>", "</s>", "<end>", "user", "assistant", "think", "hi", "yes"]
    theirs = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    theirs.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    theirs.add_special_tokens(["</s>"])
    theirs.add_tokens(["<end>"])
    chat = turns("user: hi", "assistant: yes", "user: hi", "assistant: yes")
    ids, counted = ChatFormat(THOUGHTS, Tokenizer(theirs.to_str())).encode(chat)
    assert [theirs.id_to_token(id) for id in ids[counted]] == ["yes", "<end>", "yes", "<end>"]


@pytest.mark.parametrize("content", ["[inst]", "[INST]", "＜/s＞"])
def test_a_content_is_no_special_token_also_where_the_normaliser_makes_it_its_name(content):
    theirs = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate("[]</>instok")}, []))
    theirs.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    theirs.add_special_tokens([tokenizers.AddedToken(name, special=True, normalized=True) for name in ("[inst]", "</s>")])
    ours = Tokenizer(theirs.to_str())
    format = ChatFormat("{% for m in messages %}[inst]{{ m.content }}{{ eos_token }}{% endfor %}", ours)
    ids, counted = format.encode(turns(f"user: {content}", "assistant: ok"))
    inst, eos = map(theirs.token_to_id, ("[inst]", "</s>"))
    assert ids.tolist() == [inst, *ours.encode(content), eos, inst, *ours.encode("ok"), eos]
    assert counted.tolist() == [False] * (len(ids) - 3) + [True] * 3


def test_a_special_token_that_takes_the_space_behind_it_is_no_part_of_the_answer():
    theirs = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate("ok ")}, []))
    theirs.add_special_tokens([tokenizers.AddedToken("<|assistant|>", rstrip=True), "</s>"])
    ours = Tokenizer(theirs.to_str())
    ids, counted = ChatFormat("<|assistant|>{{ messages[0].content }}{{ eos_token }}", ours).encode(turns("assistant:  ok"))
    assert [theirs.id_to_token(id) for id in ids] == ["<|assistant|>", "o", "k", "</s>"]
    assert counted.tolist() == [False, True, True, True]


def test_the_marks_of_a_template_are_those_that_the_tokenizers_folder_names(tmp_path):
    theirs = tokenizers.Tokenizer.from_str(train_tokenizer("bpe", [LETTERS], vocab_size=300).to_dict()["json"])
    theirs.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    theirs.save(str(tmp_path / "tokenizer.json"))
    named = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}, "pad_token": "<absent>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    tokenizer = load_tokenizer(tmp_path)
    ids, _ = ChatFormat("{{ bos_token }}{{ pad_token }}" + TEMPLATE, tokenizer).encode(CHAT[2:3])
    assert tokenizer.decode(ids) == "<|im_start|>assistant: 2<|im_end|>\n"


BROKEN = ["{% for m in messages %}", "{{ raise_exception('no') }}", "{% for m in messages %}{{ m.content }}\n{% endfor %}"]
BROKEN += ["{{ messages[0].content | length }}"]
BROKEN += ["{% for m in messages %}{{ eos_token }}{{ m.role }}: {{ m.content }}{% endfor %}"]  # the next message ends an answer
UNSAFE = ["{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}"]


@pytest.mark.parametrize("template", [*BROKEN, *UNSAFE])
def test_a_template_that_cannot_be_used_is_refused(tokenizer, template):
    with pytest.raises(ConfigError, match=r"^data\.template "):
        ChatFormat(template, tokenizer).encode([*CHAT, *CHAT[2:4]])


@pytest.fixture
def path(write_text):
    rows = [turns(f"user: {n}?", f"assistant: {str(n) * (n % 5 + 1)}") for n in range(23)]
    rows += [turns("user: " + "x" * 40, "assistant: too far"), [], None, turns("user: unanswered")]
    return write_text("\n".join(json.dumps({"messages": row}) for row in rows), "chats.jsonl")


@pytest.mark.parametrize("packing", [False, True])
def test_conversations_become_a_task_and_those_without_an_answer_are_left_out_and_counted(path, packing):
    task = chat(path=path, tokenizer="char", context_len=47, packing=packing)
    assert total_left_out(task, "are left out: without an answer in 47 tokens") == 4
    cut = chat(path=path, tokenizer="char", context_len=25, packing=packing)
    whole = [len(f"user: {n}?\nassistant: {str(n) * (n % 5 + 1)}\n") + 2 for n in range(23)]  # with two end marks
    assert total_left_out(cut, "are cut at data.context_len=25") == sum(length > 26 for length in whole)
    assert task.kind == "language_model"
    assert task.model_fields == {"vocab_size": task.tokenizer.vocab_size, "eos_id": task.tokenizer.mark_ids["eos"]}
    answers = []
    for which in ("train", "val"):
        split = as_split(task, which)
        batch = batch_of(split)
        counted = batch["labels"] != -100
        assert split.count(np.arange(len(split))) == counted.sum()
        follows = batch["input_ids"][:, 1:][counted[:, :-1]]
        assert (follows == batch["labels"][:, :-1][counted[:, :-1]]).all(), "a label is the next token"
        assert ("document_ids" in batch) == packing
        answers += task.tokenizer.decode(batch["labels"][counted]).split("<eos>")[:-1]
    assert sorted(answers) == sorted(str(n) * (n % 5 + 1) for n in range(23)), "what is cut off has no answer"


def test_the_template_is_that_of_the_tokenizers_folder_unless_one_is_given(path, tokenizer, tmp_path):
    def first(**values):
        return tokenizer.decode(chat(path=path, tokenizer=str(tmp_path), **values).train[0]["input_ids"])

    tokenizer.save(tmp_path / "tokenizer.json")
    assert first().startswith("user: ")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "[a]" + TEMPLATE}))
    assert first().startswith("[a]user: ")
    (tmp_path / "chat_template.jinja").write_text("[bc]" + TEMPLATE)
    assert first().startswith("[bc]user: ")
    assert first(template="!" + TEMPLATE).startswith("!user: ")
    (tmp_path / "chat_template.jinja").unlink()
    several = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "[d]" + TEMPLATE}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    assert first().startswith("[d]user: ")
    (tmp_path / "chat_template.jinja").write_text("[bc]" + TEMPLATE)
    stored = Tokenizer.from_dict(load_tokenizer(tmp_path).to_dict())  # as in a checkpoint
    assert tokenizer.decode(chat(path=path, tokenizer=stored).train[0]["input_ids"]).startswith("[bc]user: ")
    assert fingerprint(stored) == fingerprint(tokenizer), "the ids are the same"


@pytest.mark.parametrize("tokenizer", ["char", "bpe"])
def test_a_learned_tokenizer_knows_what_a_given_template_writes(path, tokenizer):
    task = chat(
        path=path, tokenizer=tokenizer, template="{% for m in messages %}«Q» {{ m.content }}{{ eos_token }}{% endfor %}"
    )
    assert task.tokenizer.decode(task.train[0]["input_ids"]).count("«Q» ") > 0


def test_the_checksum_of_conversations_changes_with_their_texts_alone(write_text):
    def checksum(chat_rows, name, **options):
        rows = "\n".join(json.dumps({"messages": row}) for row in chat_rows)
        return chat(path=write_text(rows, name), tokenizer="char", **options).checksum

    other = [*CHAT[:-1], {**CHAT[-1], "content": CHAT[-1]["content"][::-1]}]
    whole = checksum([CHAT] * 5, "a.jsonl")
    assert checksum([CHAT] * 5, "moved.jsonl", context_len=64) == whole != checksum([CHAT] * 4 + [other], "b.jsonl")


def test_what_ends_an_answer_ends_generation(write_text):
    path = write_text("\n".join([json.dumps({"messages": CHAT})] * 3), "a.jsonl")
    theirs = tokenizers.Tokenizer.from_str(train_tokenizer("bpe", [LETTERS], vocab_size=300).to_dict()["json"])
    theirs.add_special_tokens(["<|im_end|>", "<|eom|>"])
    ends = tuple(map(theirs.token_to_id, ("<|im_end|>", "<|eom|>")))
    for end, wanted in (("<|im_end|>", ends[0]), ("{{ '<|im_end|>' if loop.last else '<|eom|>' }}", ends)):
        template = "{% for m in messages %}{{ m.content }}" + end + "{% endfor %}"
        assert chat(path=path, tokenizer=Tokenizer(theirs.to_str()), template=template).model_fields["eos_id"] == wanted


def test_a_message_of_a_parquet_file_has_only_its_own_keys(tmp_path):
    answer = {"role": "assistant", "content": "yes", "calls": [{"a": "A"}, {"b": "B"}]}
    says = [{"role": "user", "name": "Ann", "content": "hi"}, answer]
    pandas.DataFrame({"messages": [says] * 8}).to_parquet(tmp_path / "a.parquet")
    template = "{% for m in messages %}{{ m.name }}{{ m.content }}{{ m.calls[0] | join if m.calls }}{{ eos_token }}{% endfor %}"
    known = train_tokenizer("char", [LETTERS], marks=("eos",))
    task = chat(path=str(tmp_path / "a.parquet"), tokenizer=known, template=template)
    assert known.decode(task.train[0]["input_ids"]).startswith("Annhi<eos>yesaAnn")


ROWS = [({"chat": []}, "messages_column"), ({"messages": "hello"}, "messages_column"), ({"messages": CHAT[:1]}, "path")]
NO_CALLS = [{"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}]


@pytest.mark.parametrize(
    ("row", "key", "said"), [*((*row, "") for row in ROWS), ({"messages": NO_CALLS}, "messages_column", "does not write")]
)
def test_rows_that_are_no_conversations_are_refused(write_text, row, key, said):
    path = write_text("\n".join([json.dumps(row)] * 5), "a.jsonl")
    with pytest.raises(ConfigError, match=rf"^data\.{key}=.*{said}"):
        chat(path=path, tokenizer="char")


def test_tools_that_a_template_reads_are_refused_because_it_does_not_get_them(write_text):
    says = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    rows = [json.dumps({"messages": says, "tools": '[{"name": "sum"}]'})] * 8
    options = {"path": write_text("\n".join(rows), "tools.jsonl"), "tokenizer": "char"}
    chat(**options)
    with pytest.raises(ConfigError, match="has a column tools, but tools are not passed to the template"):
        chat(**options, template="{% if tools %}{{ tools }}{% endif %}" + TEMPLATE)


def test_the_extra_that_renders_templates_is_named_where_it_is_missing(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.utils.chat_template_utils", None)
    with pytest.raises(ConfigError, match=r"^data\.template needs the package transformers: install minitx with the extra hf$"):
        chat(path=path, tokenizer="char")


def test_a_tokenizer_without_an_end_mark_is_refused(path):
    with pytest.raises(ConfigError, match="eos"):
        chat(path=path, tokenizer=train_tokenizer("char", [LETTERS]))


CHATS = [json.dumps({"messages": turns(f"user: я{n}", "assistant: я")}) for n in range(20)]
TABLES = {
    "a.jsonl": CHATS,
    "a.tsv": [f"я{n}\tя" for n in range(20)],
    "a.csv": ["text,label", *(f"я{n},{n % 2}" for n in range(20))],
}


@pytest.mark.parametrize(("load", "name"), [(chat, "a.jsonl"), (pairs, "a.tsv"), (classify, "a.csv")])
@pytest.mark.parametrize(("known", "is_told"), [("abc", True), ("я0123456789abcdefghijklmnopqrstuvwxyz:\n ", False)])
def test_characters_that_a_tokenizer_does_not_know_are_told_of_rows_of_every_kind(
    write_text, caplog, load, name, known, is_told
):
    tokenizer = train_tokenizer("char", [known], vocab_size=0, marks=("pad", "bos", "eos"))
    load(path=write_text("\n".join(TABLES[name]), name), tokenizer=tokenizer)
    assert ("the tokenizer does not know these characters" in caplog.text) == is_told
