"""Fine-tuning on conversations. A chat template formats them, and the loss is on the answers only."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cache
from itertools import chain
from typing import Any

import numpy as np

from minitx.config import ConfigError
from minitx.config.schema import Count, Fraction, first_line, require
from minitx.data.documents import DocumentRows, learned_marks, task_of
from minitx.data.file_formats import column_of, divided, load_tables, share_of
from minitx.data.task import Ragged, Task, VocabSize, hold_out, tokenizer_of
from minitx.data.tokenizers import Tokenizer, count_unknown, require_marks

log = logging.getLogger(__name__)

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""The default template: one line for each message, with the end mark after its content."""

Message = Mapping[str, str]
SLOT = "\ue000{}\ue001"
"""A placeholder for the content of a message in the template's output, from Unicode's private use area."""

LONGEST_TAIL = 4
"""The largest number of tokens that end an answer: a special token, and white space."""

OPEN, CLOSE = "\ue002", "\ue003"
"""They mark the text between ``{% generation %}`` and ``{% endgeneration %}``."""


class ChatFormat:
    """Encode conversations as ids with a chat template.

    The template writes everything except the contents of messages, which are inserted afterwards. A content is therefore never
    interpreted as a template or as a special token. Special tokens in the template (``{{ eos_token }}``, ``<|im_end|>``) become
    their ids.

    Args:
        template: a chat template as on the Hugging Face hub: jinja2 with the names that transformers defines (``messages``,
            ``add_generation_prompt``, ``bos_token``, ``eos_token``, ``raise_exception``, ``strftime_now``, ``{% generation %}``,
            ``{% break %}``, ``{% continue %}``; ``tools`` and ``documents`` are None). It runs in jinja2's sandbox, because templates
            may come from other people.
        tokenizer: a tokenizer with an end mark.
        name: the name of the template in messages.

    Attributes:
        reads: the variables that the template reads.
        writes_date: whether the template calls ``strftime_now``.
        marks_answers: whether the template has ``{% generation %}``. The tokens in these blocks then count.

    Raises:
        ConfigError: the template is not valid jinja2, or the tokenizer has no end mark.
    """

    def __init__(self, template: str, tokenizer: Tokenizer, name: str = "data.template") -> None:
        import jinja2
        from jinja2.meta import find_undeclared_variables

        self.tokenizer, self.name = tokenizer, name
        self.special = {token["content"]: token["id"] for token in json.loads(tokenizer.to_dict()["json"])["added_tokens"]}
        texts = {id: text for text, id in self.special.items()}
        named = {
            role: text for role, text in tokenizer.special_tokens.items() if text in self.special
        }  # they take precedence over known names
        self.marks = {f"{name}_token": texts[id] for name, id in tokenizer.mark_ids.items()} | named
        if "eos_token" not in self.marks:  # it ends an answer
            require_marks(tokenizer, "eos")
        names = "|".join(re.escape(text) for text in sorted(self.special, key=len, reverse=True))
        self.parts = re.compile(f"({names}|{SLOT.format('[0-9]+')}|[{OPEN}{CLOSE}])")
        environment = _environment()
        try:
            self.template, tree = environment.from_string(template), environment.parse(template)
        except jinja2.TemplateError as error:
            raise ConfigError(f"{name} cannot be read: {first_line(error)}") from None
        self.reads = find_undeclared_variables(tree)
        self.writes_date = any(node.name == "strftime_now" for node in tree.find_all(jinja2.nodes.Name))
        self.marks_answers = tree.find(jinja2.nodes.ExtensionAttribute) is not None

    def encode(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of a conversation, and a bool array of the same shape, True for tokens that count.

        The tokens inside of ``{% generation %}`` count if the template has it, else the answers of ``assistant`` and their end marks.

        Raises:
            ConfigError: the template raises an error, changes more of a content than white space at its ends, or has neither
                ``{% generation %}`` nor a special token after an answer.
        """
        shown = [{**message, "content": SLOT.format(i)} for i, message in enumerate(messages)]
        marked = self._render(shown, add_generation_prompt, marks=(OPEN, CLOSE))
        written = re.sub(f"[{OPEN}{CLOSE}]", "", marked), self._render(messages, add_generation_prompt)
        contents = iter(self._as_written(*written, messages))
        sections, counted, in_answer = [""], list[bool](), False  # texts, with a special token between two; each character
        for part in [*filter(None, self.parts.split(marked)), None]:
            slot = re.fullmatch(SLOT.format("([0-9]+)"), part or "")
            if in_answer and not self.marks_answers and (slot or part is None):
                raise ConfigError(
                    f"{self.name} must write a special token, such as {{{{ eos_token }}}}, after each answer, or enclose answers in "
                    "{% generation %}"
                )
            if part is None or part in (OPEN, CLOSE):
                in_answer = part == OPEN
                continue
            if not self.marks_answers:
                in_answer = in_answer or (slot is not None and messages[int(slot[1])]["role"] == "assistant")
            text = next(contents) if slot else part
            counted += [in_answer] * len(text)
            if part in self.special:
                sections, in_answer = [*sections, part, ""], in_answer and self.marks_answers
            else:
                sections[-1] += text
        ids, places = self.tokenizer.encode_sections(sections)
        before, (start, end) = np.cumsum([0, *counted, False]), places.T  # the number of counted characters before each
        return ids, before[np.maximum(end, start + 1)] > before[start]

    def prompt(self, text: str) -> tuple[np.ndarray, list[int]]:
        """Return the ids of a conversation up to the answer to a user's message ``text``, and the special tokens that end an answer.

        Raises:
            ConfigError: see ``encode``.
        """
        asked, ends = [{"role": "user", "content": text}], list[int]()
        with suppress(ConfigError):  # a template whose answers have no end cannot be trained, but can still write a prompt
            ends = self.ends(*self.encode([*asked, {"role": "assistant", "content": text}]))
        return self.encode(asked, add_generation_prompt=True)[0], ends

    def prompt_ids(self, text: str) -> list[int]:
        """Return the ids of a conversation up to the answer to a user's message ``text``."""
        return [int(id) for id in self.prompt(text)[0]]

    def ends(self, ids: np.ndarray, counted: np.ndarray) -> list[int]:
        """Return the special tokens that end answers, given the result of ``encode``. White space may follow and count."""
        edges = np.flatnonzero(np.diff(counted, prepend=False, append=False))
        starts, stops = edges[::2], edges[1::2]
        is_special = np.isin(ids, [*self.special.values()])
        last = np.maximum.accumulate(np.where(is_special, np.arange(len(ids)), -1))[stops - 1]
        is_end = (last >= starts) & (last >= stops - LONGEST_TAIL)
        tails = {tuple(ids[i:stop].tolist()) for i, stop in zip(last[is_end], stops[is_end], strict=True)}
        return sorted({end for end, *rest in tails if not self.tokenizer.decode(rest).strip()})

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool, marks: tuple[str, str] = ("", "")) -> str:
        context = {"tools": None, "documents": None, "add_generation_prompt": add_generation_prompt, _MARKS: marks}
        try:
            return self.template.render({"bos_token": "", **self.marks, **context, "messages": messages})
        except Exception as error:  # a template may raise any exception
            raise ConfigError(f"{self.name} refuses a conversation: {first_line(error)}") from None

    def _as_written(self, slots: str, whole: str, messages: Sequence[Message]) -> list[str]:
        """Return the contents in ``whole`` in order, possibly stripped. ``slots`` has a placeholder for each.

        Raises:
            ConfigError: ``whole`` is not ``slots`` with these contents.
        """
        literals = re.split(SLOT.format("([0-9]+)"), slots)
        contents = [messages[int(number)]["content"] for number in literals[1::2]]
        if whole == "".join(map("".join, zip(literals[::2], [*contents, ""], strict=True))):
            return contents
        forms = [dict.fromkeys([content, content.strip(), content.lstrip(), content.rstrip()]) for content in contents]
        each = [f"({'|'.join(map(re.escape, form))})" for form in forms]
        match = re.fullmatch("".join(map("".join, zip(map(re.escape, literals[::2]), [*each, ""], strict=True))), whole)
        if match is None:
            first = messages[0]["content"]
            raise ConfigError(f"{self.name} changes the text of a message in the conversation that begins with {first!r:.60}")
        return [*match.groups()]


_MARKS = "_marks_of_generation"
"""The name in a template's context of the two marks around a ``{% generation %}`` block."""


@cache
def _environment() -> Any:
    """A jinja2 environment that renders chat templates like ``transformers.utils.chat_template_utils``."""
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """The block ``{% generation %} … {% endgeneration %}``."""

        tags = {"generation"}  # noqa: RUF012  as in jinja2

        def parse(self, parser: Any) -> Any:
            line, body = next(parser.stream).lineno, parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("enclose", [jinja2.nodes.ContextReference()])
            return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

        def enclose(self, context: Any, caller: Any) -> str:
            before, after = context[_MARKS]
            return f"{before}{caller()}{after}"

    def refuse(message: str) -> None:
        raise ValueError(message)

    def to_json(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:  # jinja2's own filter escapes for HTML
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    return environment


def chat(
    *,
    path: str,
    val_path: str | None = None,
    subset: str | None = None,
    split: str = "train",
    val_split: str | None = None,
    val_fraction: Fraction = 0.1,
    messages_column: str = "messages",
    template: str | None = None,
    tokenizer: str | Tokenizer = "bpe",
    bpe_vocab_size: VocabSize = 4096,
    context_len: Count = 256,
    packing: bool = True,
    bucket: bool = True,
) -> Task:
    """Fine-tuning on conversations, with the loss on the answers only.

    The answers are the blocks ``{% generation %}`` of the template, else the contents of ``assistant`` and the tokens that end them.

    Args:
        path, val_path, subset, split, val_split: see ``load_tables``.
        val_fraction: the part of the conversations that is held out for validation.
        messages_column: the column of conversations (lists of messages with ``role`` and ``content``).
        template: a chat template (jinja2), as on the Hugging Face hub; ``null``: the template in the tokenizer's folder, else ours.
        tokenizer, bpe_vocab_size: see ``tokenizer_of``.
        context_len: longest row, in tokens. A longer conversation is truncated.
        packing: put several conversations into a row, without attention between them; ``false``: one conversation per row.
        bucket: put rows of similar length into the same batch.

    Raises:
        ConfigError: the data cannot be read or contain no conversations, or the template or the tokenizer does not fit.
    """
    loaded = load_tables(path, val_path, subset, split, val_split)
    tables = divided(loaded, lambda table: hold_out(range(len(table)), val_fraction))
    splits = [_conversations(table, messages_column) for table in tables]
    texts = (f"{message['role']}: {message['content']}\n" for chat in splits[0] for message in chat)
    made_by = tokenizer_of(tokenizer, bpe_vocab_size, chain([template or ""], texts), learned_marks(tokenizer))
    format, name = ChatFormat(template or made_by.chat_template or TEMPLATE, made_by), f"data.path={path}"
    has_tools = any("tools" in table.column_names and any(table["tools"]) for table in tables)
    require(
        not has_tools or "tools" not in format.reads,
        f"{name} has a column tools, but tools are not passed to the template: write them into a message, or remove the column",
    )
    if format.writes_date:
        log.warning("data.template writes today's date, so a run that resumes on another day has different rows")
    (train, of_train), (val, of_val) = (_rows(part, format, context_len, packing, name) for part in splits)
    count_unknown(made_by, [train.pieces.values], name)
    ends = format.ends(train.pieces.values, train.counted.values)  # type: ignore[union-attr]
    task = task_of(name, train, val, made_by, ends, bucket, left_out={"train": of_train, "val": of_val})
    return dataclasses.replace(task, encode_prompt=format.prompt_ids)


def is_chat(node: Mapping[str, Any]) -> bool:
    """Return whether the config node of the data is ``data=chat``."""
    return str(node.get("_target_")).rpartition(".")[2] == "chat"


def template_of(node: Mapping[str, Any], tokenizer: Tokenizer | None) -> str | None:
    """Return the chat template of a run, given the config node of its data.

    With ``data=chat`` it is the template of the rows, else the template in the tokenizer's folder, or None.
    """
    known = None if tokenizer is None else tokenizer.chat_template
    return (node.get("template") or known or TEMPLATE) if is_chat(node) else known


def _rows(
    chats: Sequence[Sequence[Message]], format: ChatFormat, context_len: int, packing: bool, name: str
) -> tuple[DocumentRows, list[str]]:
    """Return the rows of conversations, truncated at ``context_len``, and sentences for ``Task.left_out``.

    A conversation without an answer in its first ``context_len`` tokens is left out.
    """
    longest = context_len + 1  # plus the target of the last position
    encoded = [(ids, counted) for ids, counted in map(format.encode, filter(None, chats)) if counted[1:longest].any()]
    require(bool(encoded), f"{name} has no conversation with an answer of role assistant in {context_len} tokens")
    total, cut = len(chats), sum(len(ids) > longest for ids, _ in encoded)
    left_out = share_of(total - len(encoded), total, f"conversations are left out: without an answer in {context_len} tokens")
    left_out += share_of(cut, total, f"conversations are cut at data.context_len={context_len}")
    counted = np.concatenate([counted[:longest] for _, counted in encoded])
    documents = Ragged.of([ids[:longest] for ids, _ in encoded])
    return DocumentRows(documents, context_len=context_len, packing=packing, counted=counted), left_out


def _conversations(table: Any, column: str) -> Sequence[Sequence[Message]]:
    chats = _without_none([chat or [] for chat in table[column_of(table, column, "messages_column")]])
    messages = [message for chat in chats for message in (chat if isinstance(chat, list) else [None])]
    require(
        all(isinstance(each, dict) and isinstance(each.get(key), str) for each in messages for key in ("role", "content")),
        f"data.messages_column={column} must contain lists of messages with the texts role and content; replace null, as in messages "
        'with tool_calls, by ""',
    )
    return chats


def _without_none(value: Any) -> Any:
    """Remove None: a table has None for keys and arguments that occur only in other messages or calls."""
    if isinstance(value, dict):
        return {key: _without_none(each) for key, each in value.items() if each is not None}
    return [*map(_without_none, value)] if isinstance(value, list) else value
