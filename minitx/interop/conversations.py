"""Fine-tuning on conversations. transformers renders the chat template, and the loss is on the assistant's messages."""

from __future__ import annotations

import copy
import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, takewhile
from typing import Any

import numpy as np

from minitx.config import ConfigError
from minitx.config.packages import package
from minitx.config.schema import Count, Fraction, first_line, require
from minitx.data.documents import DocumentRows, Ragged, learned_marks, task_of
from minitx.data.tables import checksum_of, column_of, divided, hold_out, load_tables, share_of
from minitx.data.task import Task, VocabSize
from minitx.data.tokenizer import Tokenizer, count_unknown, require_marks
from minitx.data.tokenizer_choice import find_or_train_tokenizer

log = logging.getLogger(__name__)

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""The default template: one line for each message, with the end mark after its content."""

Message = Mapping[str, Any]

NEEDS_END = "must write a special token, such as {{ eos_token }}, after each answer, or enclose answers in {% generation %}"
BREAK, OTHER = "\ufdd0", "\ufdd1"
"""Noncharacters of Unicode (no text has them): one separates the letters of a special token's name in a message, the other
stands for another message."""


class ChatFormat:
    """Encode conversations as ids with a chat template.

    Special tokens that the template writes (``{{ eos_token }}``, ``<|im_end|>``) become their ids. In a message, their names are text.

    Args:
        template: a chat template (jinja2), as on the Hugging Face hub. transformers renders it in a sandbox.
        tokenizer: a tokenizer with an end mark.
        name: the name of the template in messages.

    Attributes:
        marks_answers: whether the template has ``{% generation %}``. The tokens in these blocks then count.
        writes_prompt: whether the template writes something for ``add_generation_prompt``.

    Raises:
        ConfigError: transformers is not installed, or the tokenizer has no end mark.
    """

    def __init__(self, template: str, tokenizer: Tokenizer, name: str = "data.template") -> None:
        self.template, self.tokenizer, self.name = template, tokenizer, name
        self.renderer = package("transformers.utils.chat_template_utils", name).render_jinja_template
        added = json.loads(tokenizer.to_dict()["json"])["added_tokens"]
        self.added = {token["content"]: token["id"] for token in added}
        texts = {id: text for text, id in self.added.items()}
        named = {role: text for role, text in tokenizer.special_tokens.items() if text in self.added}
        self.marks = {f"{role}_token": texts[id] for role, id in tokenizer.mark_ids.items()} | named
        if "eos_token" not in self.marks:  # it ends an answer
            require_marks(tokenizer, "eos")
        self.special = {token["content"] for token in added if token["special"]} | {*self.marks.values()}
        self.marks_answers = re.search(r"{%[-+]?\s*generation\b", template) is not None
        self.writes_prompt, asked = False, [{"role": "user", "content": OTHER}]
        with suppress(ConfigError):  # a template may refuse these messages
            self.writes_prompt = self._render(asked, True)[0] != self._render(asked)[0]

    def encode(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of a conversation, and a bool array of the same shape, True for tokens that count.

        The tokens inside of ``{% generation %}`` count if the template has it. Otherwise, the assistant's messages count: from the end
        of the generation prompt (from the text of the message, if there is no prompt) to the special token that ends the message.

        Raises:
            ConfigError: the template raises an error, or has neither ``{% generation %}`` nor a special token after an answer.
        """
        text, answers = self._written(messages, add_generation_prompt)
        counted = np.zeros(len(text), bool)
        for start, stop in answers:
            counted[start:stop] = True
        counted = counted[[character != BREAK for character in text]]
        sections = [section.replace(BREAK, "") for section in re.split(f"(?<!{BREAK})({_one_of(self.special)})", text)]
        ids, places = self.tokenizer.encode_sections(sections)
        before, (start, stop) = np.cumsum([0, *counted, False]), places.T  # the number of counted characters before each
        return ids, before[np.maximum(stop, start + 1)] > before[start]

    def prompt(self, text: str) -> tuple[np.ndarray, list[int]]:
        """Return the ids of a conversation up to the answer to a user's message ``text``, and the special tokens that end an answer.

        Raises:
            ConfigError: see ``encode``.
        """
        asked, ends = [{"role": "user", "content": text}], set[int]()
        with suppress(ConfigError):  # a template whose answers have no end cannot be trained, but can still write a prompt
            ends = self.ends([*asked, {"role": "assistant", "content": text}])
        return self.encode(asked, add_generation_prompt=True)[0], sorted(ends)

    def ends(self, messages: Sequence[Message]) -> set[int]:
        """Return the special tokens that end the answers of a conversation. White space after them does not matter."""
        text, answers = self._written(messages)
        lasts = [re.search(f"({_one_of(self.added)})$", text[start:stop].rstrip()) for start, stop in answers]
        return {self.added[last[0]] for last in lasts if last}

    def _written(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of a conversation, with BREAK in special tokens' names in messages, and the places that count."""
        names = _one_of(self.special)

        def escape(text: str) -> str:
            return re.sub(names, lambda name: BREAK + BREAK.join(name[0]), text.replace(BREAK, ""))

        messages = [_with_texts(message, escape) for message in messages]
        text, answers = self._render(messages, add_generation_prompt)
        if not self.marks_answers:
            assistants = (i for i, message in enumerate(messages) if message["role"] == "assistant")
            answers = [self._answer(messages, add_generation_prompt, text, i) for i in assistants]
        return text, answers

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of a conversation, and the places of its ``{% generation %}`` blocks."""
        options = {"return_assistant_tokens_mask": self.marks_answers, "add_generation_prompt": add_generation_prompt}
        try:
            (text,), blocks = self.renderer(
                [messages], chat_template=self.template, **{"bos_token": "", **self.marks}, **options
            )
        except Exception as error:  # a template may raise any exception
            raise ConfigError(f"{self.name} refuses a conversation: {first_line(error)}") from None
        return text, blocks[0] if blocks else []

    def _beginning(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        """The text of the first messages of a conversation, or "" if the template refuses them without the others."""
        with suppress(ConfigError):
            return self._render(messages, add_generation_prompt)[0]
        return ""

    def _answer(self, messages: Sequence[Message], add_generation_prompt: bool, text: str, i: int) -> tuple[int, int]:
        """Return the place in ``text`` of message ``i``, by the assistant, up to the special token that ends it.

        The answer begins where the text of the earlier messages ends, and ends where the text up to message ``i`` ends. A template may
        write these messages differently if others follow. The answer is then the part that changes if ``messages[i]`` changes.

        Too much counts, without an error, if the template then writes an answer twice, writes something computed from it before it (its
        length), or ends only the last answer. Such a template needs ``{% generation %}``. A template that accepts only certain texts, or
        ends no answer, is refused.
        """
        asked = self._beginning(messages[:i], add_generation_prompt=True) if self.writes_prompt else ""
        answered = self._beginning(messages[: i + 1]).rstrip()
        last = re.search(f"({_one_of(self.added)})$", answered)
        require(not answered or last is not None, f"{self.name} {NEEDS_END}")
        start, stop = (len(part) if part and text.startswith(part) else None for part in (asked, answered))
        if start is None or stop is None:
            other = {**_with_texts(messages[i], lambda text: OTHER * (len(text) or 1)), "role": "assistant", "content": OTHER}
            others, _ = self._render([*messages[:i], other, *messages[i + 1 :]], add_generation_prompt)
            start = _num_shared(text, others) if start is None else start
        if stop is None:
            ends = _one_of({*self.special, *(last.groups() if last else ())})
            end = re.compile(f"(?<!{BREAK})({ends})").search(text, len(text) - _num_shared(text[::-1], others[::-1]))
            if end is None:
                raise ConfigError(f"{self.name} {NEEDS_END}")
            stop = end.end()
        return start, stop


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

    The answers are the blocks ``{% generation %}`` of the template, else what ``assistant`` writes, with the tokens that end its messages.

    Args:
        path, val_path, subset, split, val_split: see ``load_tables``.
        val_fraction: share of the conversations for validation.
        messages_column: the column of conversations (lists of messages with ``role`` and ``content`` or ``tool_calls``).
        template: a chat template (jinja2), rendered by transformers (extra ``hf``); ``null``: the tokenizer folder's, else ours.
        tokenizer, bpe_vocab_size: see ``find_or_train_tokenizer``.
        context_len: longest row in tokens; longer conversations are truncated.
        packing: several conversations in a row, without attention between them; ``false``: one.
        bucket: put rows of similar length into the same batch.

    Raises:
        ConfigError: the data cannot be read or contain no conversations, or the template or the tokenizer does not fit.
    """
    loaded = load_tables(path, val_path, subset, split, val_split)
    tables = divided(loaded, lambda table: hold_out(range(len(table)), val_fraction))
    splits = [_conversations(table, messages_column) for table in tables]
    texts = (f"{message['role']}: {message.get('content', '')}\n" for chat in splits[0] for message in chat)
    marks = learned_marks(tokenizer)
    tokenizer = copy.copy(find_or_train_tokenizer(tokenizer, bpe_vocab_size, chain([template or ""], texts), marks))
    template = template or tokenizer.chat_template or TEMPLATE
    tokenizer.chat_template = template  # a checkpoint stores it with the tokenizer
    format, name = ChatFormat(template, tokenizer), f"data.path={path}"
    if re.search(r"\btools\b", template) and any("tools" in table.column_names and any(table["tools"]) for table in tables):
        raise ConfigError(
            f"{name} has a column tools, but tools are not passed to the template: write them into a message, or remove the column"
        )
    if "tool_calls" not in template and any("tool_calls" in message for chats in splits for chat in chats for message in chat):
        raise ConfigError(f"data.messages_column={messages_column} has tool_calls, but data.template does not write them")
    if "strftime_now" in template:
        log.warning("data.template writes today's date, so a run that resumes on another day has different rows")
    (train, train_left_out), (val, val_left_out) = (
        _conversation_rows(part, format, context_len, packing, source)
        for part, source in zip(splits, (name, f"data.val_path={val_path}" if val_path else name), strict=True)
    )
    count_unknown(tokenizer, [train.pieces.values], name)
    ends = sorted(set[int]().union(*map(format.ends, filter(None, splits[0]))))
    if not ends:
        log.warning(
            "data.template has no special token at the end of {% generation %}: the model does not learn to end an answer"
        )
    task = task_of(name, train, val, tokenizer, ends, bucket, left_out={"train": train_left_out, "val": val_left_out})
    checksum = checksum_of(
        *([repr(chat) for chat in chats] for chats in splits)
    )  # not of the rows: a template may write the date
    return replace(task, encode_prompt=lambda text: format.prompt(text)[0].tolist(), checksum=checksum)


def _conversation_rows(
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
    chats = _with_own_keys([chat or [] for chat in table[column_of(table, column, "messages_column")]])
    messages = [message for chat in chats for message in (chat if isinstance(chat, list) else [None])]
    require(
        all(isinstance(each, dict) and isinstance(each.get("role"), str) and _is_text(each) for each in messages),
        f"data.messages_column={column} must contain lists of messages with the texts role and content (only a message with tool_calls "
        "may have no content)",
    )
    return chats


def _is_text(message: Message) -> bool:
    return isinstance(message.get("content", "" if message.get("tool_calls") else None), str)


def _with_own_keys(value: Any) -> Any:
    """Remove None: a table has None for keys and arguments that occur only in other messages or calls."""
    if isinstance(value, dict):
        return {key: _with_own_keys(each) for key, each in value.items() if each is not None}
    return [*map(_with_own_keys, value)] if isinstance(value, list) else value


def _with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Apply ``change`` to every text of a message, but not to keys."""
    if isinstance(value, Mapping):
        return {key: _with_texts(each, change) for key, each in value.items()}
    if isinstance(value, list):
        return [_with_texts(each, change) for each in value]
    return change(value) if isinstance(value, str) else value


def _one_of(names: Iterable[str]) -> str:
    """The pattern that matches one of the names, the longest that fits."""
    return "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))


def _num_shared(first: str, second: str) -> int:
    """The length of the common prefix of both texts."""
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))))
