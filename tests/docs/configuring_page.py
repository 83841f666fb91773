"""``docs/configuring.md``: every key with its type, default and meaning, from the dataclasses and the YAML files.

A meaning stands under ``Attributes`` in the docstring of the dataclass, or of a class that it inherits from. What an option of a group is
stands at the top of its YAML file. ``python tests/docs/configuring_page.py`` writes the page; its first part is ``configuring_head.md``.
"""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from minitx.ablation.design import AblationConfig
from minitx.cli.evaluate import EvaluateConfig
from minitx.cli.export import ExportConfig
from minitx.cli.generate import GenerateConfig
from minitx.cli.view import ViewConfig
from minitx.config import DataConfig, Part, RunConfig, to_dict

ROOT = Path(__file__).parents[2]
PAGE, HEAD = ROOT / "docs" / "configuring.md", Path(__file__).with_name("configuring_head.md")
GROUPS = (
    *("model", "data", "objective", "optimizer", "schedule", "trainer"),
    *("callbacks", "logger", "experiment", "ablation", "debug"),
)
PROGRAMS = {"evaluate": EvaluateConfig, "generate": GenerateConfig, "view_attention": ViewConfig, "export": ExportConfig}
PLAIN = {int: "whole number", float: "number", bool: "true, false", str: "word", Any: "anything", type(None): "null"}


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
            default_of(field),
            field.metadata.get("meaning") or said.get(field.name, ""),
        )
        for field in dataclasses.fields(cls)  # type: ignore[arg-type]
    ]


def default_of(field: dataclasses.Field[Any]) -> str:
    """A default as somebody would type it; a long list by its beginning, a group not at all."""
    made = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    value = to_dict(made)
    if value is dataclasses.MISSING:
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
        return ", or ".join(dict.fromkeys(kind_of(one) for one in inside))
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
    if cls in typing.get_args(DataConfig):
        title += ", " + ", ".join(f"`data={name}`" for name in typing.get_args(typing.get_type_hints(cls)["name"]))
    rows = [[f"`{key.name}`", key.kind, key.default, key.meaning.rstrip(".")] for key in keys(cls)]
    return f"{title}\n\n{table('| key | type | default | meaning |', rows)}"


def page() -> str:
    """The whole page."""
    parts = [HEAD.read_text(encoding="utf-8").rstrip(), "## Groups and their options"]
    for group in GROUPS:
        rows = [[f"`{name}`", says] for name, says in options(group).items()]
        parts.append(f"### `{group}=`\n\n{table('| option | what |', rows)}")
    parts.append(
        "## Keys\n\nA key of a group is typed with the group before it: `model.embed_dim=64`. Options of groups have other defaults."
    )
    parts += [section(place, cls) for place, cls in (*sections(), *sections(AblationConfig, "ablation"))]
    parts.append("## The other programs\n\nThey take `key=value` as well, and no files. `--help` prints these tables.")
    parts += [section(f"{name}.py", cls) for name, cls in PROGRAMS.items()]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
