"""``docs/configuring.md``: every key with its type, default and meaning, from dataclasses, signatures and the YAML files.

A meaning stands under ``Attributes`` in the docstring of the dataclass, or of a class that it inherits from, and under ``Args`` in that
of a function; ``see ``NAME```` there is the meaning that NAME gives. What an option of a group is
stands at the top of its YAML file. ``python tests/docs/configuring_page.py`` writes the page; its first part is ``configuring_head.md``.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml

from minitx import data
from minitx.ablation.design import AblationConfig
from minitx.cli.evaluate import EvaluateConfig
from minitx.cli.export import ExportConfig
from minitx.cli.generate import GenerateConfig
from minitx.cli.view import ViewConfig
from minitx.config import ParameterRule, Part, RunConfig, TransformerConfig, to_dict
from minitx.data.tables import Where
from minitx.data.task import tokenizer_of
from minitx.data.tokenizers import Tokenizer
from minitx.training import optimizers
from minitx.training.build import DEFAULT_BATCH_SIZE
from minitx.training.nodes import BY_POSITION, FROM_THE_RUN, target_of

ROOT = Path(__file__).parents[2]
PAGE, HEAD = ROOT / "docs" / "configuring.md", Path(__file__).with_name("configuring_head.md")
GROUPS = (
    *("model", "data", "objective", "optimizer", "schedule", "trainer"),
    *("callbacks", "logger", "experiment", "ablation", "debug"),
)
PROGRAMS = {"evaluate": EvaluateConfig, "generate": GenerateConfig, "view_attention": ViewConfig, "export": ExportConfig}
PLAIN = {int: "whole number", float: "number", bool: "true, false", str: "word", type(None): "null"}
PLAIN |= dict.fromkeys((Any, object), "anything")


class Key(typing.NamedTuple):
    """A line of the page; ``meaning`` is empty where nobody has written one."""

    name: str
    kind: str
    default: str
    meaning: str


def sections(hint: Any = RunConfig, place: str = "") -> Iterator[tuple[str, type]]:
    """Where keys stand and their dataclass, for every dataclass in a type, the outermost first."""
    if dataclasses.is_dataclass(hint):
        yield place, typing.cast(type, hint)
        for name, inside in typing.get_type_hints(hint).items():
            yield from sections(inside, f"{place}.{name}".lstrip("."))
    origin = typing.get_origin(hint)
    below = "[]" if origin is tuple else ".NAME" if isinstance(origin, type) and issubclass(origin, Mapping) else ""
    for one in typing.get_args(hint):
        yield from sections(one, place + below)


def attributes(cls: type) -> dict[str, str]:
    """What the ``Attributes`` of a docstring say, by name."""
    section = (cls.__doc__ or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^ {8}(\w+): (.*(?:\n {12,}.*)*)", section, flags=re.MULTILINE)
    return {name: re.sub(r"\s+", " ", text).replace("``", "`").strip() for name, text in entries}


def keys(cls: type) -> list[Key]:
    """The keys of a dataclass. The class that is nearest says what a key means."""
    said: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        said |= attributes(base)
    hints = typing.get_type_hints(cls)
    return [
        Key(
            "NAME" if field.metadata.get("rest") else field.name,
            kind_of(hints[field.name]),
            default_of(field.default if field.default_factory is dataclasses.MISSING else field.default_factory()),
            field.metadata.get("meaning") or said.get(field.name, ""),
        )
        for field in dataclasses.fields(cls)  # type: ignore[arg-type]
    ]


SHARED = {"Where": Where, "tokenizer_of": tokenizer_of, "kjv": data.kjv}
SHARED |= {name: getattr(optimizers, name) for name in ("adamw", "constant", "linear")}
"""What explains arguments of several targets."""
LOADING = [
    Key("batch_size", "whole number", f"`{DEFAULT_BATCH_SIZE}`", "rows of a step, over all devices and micro-batches"),
    Key("num_workers", "whole number", "`0`", "processes that load batches; 0: the training process does"),
]


def targets(*groups: str) -> dict[str, Any]:
    """What the options of these groups name as ``_target_``, by the word that chooses the option."""
    paths = [path for group in groups for path in sorted((ROOT / "configs" / group).glob("*.yaml"))]
    return {f"{path.parent.name}={path.stem}": target_of(yaml.safe_load(path.read_text()), path.parent.name) for path in paths}


def explained(thing: Any) -> dict[str, str]:
    """What the ``Attributes`` or the ``Args`` of a docstring say, by name."""
    found = {}
    text = (thing.__doc__ or "").replace("Attributes:\n", "Args:\n").partition("Args:\n")[2].partition("\n\n")[0]
    for names, said in re.findall(r"^ {8}([\w, ]+): (.*(?:\n {12,}.*)*)", text, flags=re.MULTILINE):
        said = re.sub(r"\s+", " ", said).strip()
        seen = re.match(r"see ``(\w+)``\.", said)
        for name in names.split(", "):
            found[name] = explained(SHARED[seen[1]])[name] if seen else said.replace("``", "`")
    return found


def arguments(target: Any, positional: int = 0) -> list[Key]:
    """The arguments of a target, without the first ``positional`` ones and those that the run passes."""
    said, hints = explained(target), typing.get_type_hints(target.__init__ if isinstance(target, type) else target)
    named = list(inspect.signature(target).parameters.items())[positional:]
    return [
        Key(name, kind_of(hints[name]), default_of(one.default), said.get(name, ""))
        for name, one in named
        if not positional or name not in FROM_THE_RUN
    ]


def default_of(made: Any) -> str:
    """A default as somebody would type it; a long list by its beginning, a group not at all."""
    value = to_dict(made)
    if value in (dataclasses.MISSING, inspect.Parameter.empty):
        return "must be given"
    if value is None or isinstance(value, bool):
        return f"`{str(value).lower().replace('none', 'null')}`"
    if isinstance(value, list):
        return f"`[{', '.join(map(str, value[:3]))}{', …' if len(value) > 3 else ''}]`"
    return "" if isinstance(value, dict) else f"`{value}`"


def kind_of(hint: Any) -> str:
    """A type in words."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if hint == Part:
        return "`_target_` …"
    if origin is Literal:
        return ", ".join(f"`{word}`" for word in inside)
    if origin in (typing.Union, types.UnionType):
        return ", or ".join(dict.fromkeys(kind_of(one) for one in inside if one is not Tokenizer))
    if origin is tuple:
        return f"list of {kind_of(inside[0])}" if inside[-1] is Ellipsis else f"{len(inside)} of {kind_of(inside[0])}"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return f"mapping to {kind_of(inside[1])}"
    return "group" if dataclasses.is_dataclass(hint) else PLAIN[hint]


def options(group: str) -> dict[str, str]:
    """The options of a group with the first sentence of the comment that each begins with."""
    found = {}
    for path in sorted((ROOT / "configs" / group).glob("*.yaml")):
        text = path.read_text(encoding="utf-8").removeprefix("# @package _global_\n")
        comment = re.match(r"(?:# \S.*\n)*", text)[0].replace("\n# ", " ").removeprefix("# ").strip()  # type: ignore[index]
        found[path.stem] = comment.partition(". ")[0].rstrip(".:")
    return found


def table(columns: str, rows: list[list[str]]) -> str:
    """A table in Markdown. Nothing in it is markup; what looks like YAML is code."""
    code = r"`[^`]*`|\{[^}]*\}+|<\w+>(?:/<\w+>)*/?|\w+/<\w+>[/<>\w]*"
    lines = [columns, "|---" * (columns.count("|") - 1) + "|"]
    for row in rows:
        marked = (re.sub(code, lambda m: f"`{m[0].strip('`')}`", cell).replace("|", "\\|").replace("*", "\\*") for cell in row)
        lines.append(f"| {' | '.join(marked)} |")
    return "\n".join(lines)


def section(place: str, cls: type) -> str:
    """The heading and the table of one dataclass."""
    title = f"### `{place}`" if place else "### Of the run"
    return f"{title}\n\n{table_of(keys(cls))}"


def table_of(keys: Iterable[Key]) -> str:
    """A table of keys."""
    rows = [[f"`{key.name}`", key.kind, key.default, key.meaning.rstrip(".")] for key in keys]
    return table("| key | type | default | meaning |", rows)


def of_targets(*groups: str) -> list[str]:
    """The heading and the table of each option of these groups: its arguments."""
    found = {option: (option.partition("=")[0], target) for option, target in targets(*groups).items()}
    return [
        f"### `{group}`, `{option}`\n\n{table_of(arguments(target, BY_POSITION.get(group, 0)))}"
        for option, (group, target) in found.items()
    ]


def page() -> str:
    """The whole page."""
    parts = [HEAD.read_text(encoding="utf-8").rstrip(), "## Groups and their options"]
    for group in GROUPS:
        rows = [[f"`{name}`", says] for name, says in options(group).items()]
        parts.append(f"### `{group}=`\n\n{table('| option | what |', rows)}")
    parts.append(
        "## Keys\n\nA key of a group is typed with the group before it: `model.embed_dim=64`. Options of groups have other defaults."
    )
    parts += [section(place, cls) for place, cls in sections()]
    parts.append(section("model", TransformerConfig))
    parts += of_targets("objective", "optimizer", "schedule")
    parts.append(section("optimizer.rules[]", ParameterRule))
    parts.append(f"### `data`, of every data set\n\n{table_of(LOADING)}")
    parts += of_targets("data")
    parts += [section(place, cls) for place, cls in sections(AblationConfig, "ablation")]
    parts.append("## The other programs\n\nThey take `key=value` as well, and no files. `--help` prints these tables.")
    parts += [section(f"{name}.py", cls) for name, cls in PROGRAMS.items()]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
