"""``docs/configuring.md``: every key with its type, default and meaning, from dataclasses, signatures and the YAML files.

What several options of a group, or several programs, explain in the same words stands on the page once.

A meaning stands under ``Attributes`` in the docstring of the dataclass, or of a class that it inherits from, and under ``Args`` in that
of a function; ``see ``NAME```` there is the meaning that NAME gives. What an option of a group is
stands at the top of its YAML file. ``python tests/docs/configuring_page.py`` writes the page; its first part is ``configuring_head.md``.
"""

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
from minitx.analysis.wandb_files import WandbFiles
from minitx.cli.check import CheckConfig
from minitx.cli.evaluate import EvaluateConfig
from minitx.cli.export import ExportConfig
from minitx.cli.generate import GenerateConfig
from minitx.cli.view import ViewConfig
from minitx.config import ParameterRule, Part, RunConfig, TransformerConfig, to_dict
from minitx.config.part import FROM_THE_RUN, find_target
from minitx.config.schema import config_class_of
from minitx.config.training import CALLBACKS, LOADING
from minitx.data.tables import load_tables
from minitx.data.tokenizer_choice import find_or_train_tokenizer
from minitx.data.tokenizers import Tokenizer
from minitx.interop.finetune import pretrained_hf
from minitx.interop.lora import Lora
from minitx.training import optimizers

ROOT = Path(__file__).parents[2]
PAGE, HEAD = ROOT / "docs" / "configuring.md", Path(__file__).with_name("configuring_head.md")
GROUPS = ("model", "data", "objective", "optimizer", "schedule", "trainer", "callbacks", "logger", "experiment")
GROUPS += ("ablation", "debug")
PROGRAMS = {
    "evaluate": EvaluateConfig,
    "generate": GenerateConfig,
    "view_attention": ViewConfig,
    "export": ExportConfig,
    "check": CheckConfig,
}
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
    if dataclasses.is_dataclass(hint) and hint is not Part:
        yield place, typing.cast(type, hint)
        for name, inside in typing.get_type_hints(hint).items():
            yield from sections(inside, f"{place}.{name}".lstrip("."))
    origin = typing.get_origin(hint)
    below = "[]" if origin is tuple else ".NAME" if isinstance(origin, type) and issubclass(origin, Mapping) else ""
    for one in typing.get_args(hint):
        yield from sections(one, place + below)


def keys(cls: type) -> list[Key]:
    """The keys of a dataclass. The class that is nearest says what a key means."""
    said: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        said |= explained(base)
    hints = typing.get_type_hints(cls)
    return [
        Key(
            "NAME" if field.metadata.get("rest") else field.name,
            kind_of(hints[field.name]),
            default_of(field.default if field.default_factory is dataclasses.MISSING else field.default_factory()),
            said.get(field.name, ""),
        )
        for field in dataclasses.fields(cls)  # type: ignore[arg-type]
    ]


SHARED = {"load_tables": load_tables, "find_or_train_tokenizer": find_or_train_tokenizer, "kjv": data.kjv}
SHARED |= {name: getattr(optimizers, name) for name in ("adamw", "constant", "linear")}
"""What explains arguments of several targets."""
OF_ALL_DATA = [
    Key("batch_size", "whole number", f"`{LOADING['batch_size'][1]}`", "rows of a step, over all devices and micro-batches"),
    Key("num_workers", "whole number", "`0`", "processes that load batches; 0: the training process does"),
]


def targets(*groups: str) -> dict[str, Any]:
    """What the options of these groups name as ``_target_``, by the first word that chooses it: other options only set its keys."""
    paths = [path for group in groups for path in sorted((ROOT / "configs" / group).glob("*.yaml"))]
    named = {path: yaml.safe_load(path.read_text())["_target_"] for path in paths}
    first = {name: path for path, name in reversed(named.items())}
    return {
        f"{path.parent.name}={path.stem}": find_target(name, path.parent.name)
        for path, name in named.items()
        if first[name] == path
    }


def by_position(group: str) -> int:
    """How many first arguments a run passes to the targets of a group."""
    hint = typing.get_type_hints(RunConfig, include_extras=True)[group]
    return hint.__metadata__[0].first


def explained(thing: Any) -> dict[str, str]:
    """What the ``Attributes`` or the ``Args`` of a docstring say, by name."""
    found = {}
    _, *rest = re.split(r"(?:Attributes|Args):\n", inspect.cleandoc(thing.__doc__ or ""), maxsplit=1)
    text = "".join(rest).partition("\n\n")[0]
    for names, said in re.findall(r"^ {4}([\w, ]+): (.*(?:\n {8,}.*)*)", text, flags=re.MULTILINE):
        said = re.sub(r"\s+", " ", said).strip()
        seen = re.match(r"see ``(\w+)``\.", said)
        for name in names.split(", "):
            found[name] = explained(SHARED[seen[1]])[name] if seen else said.replace("``", "`")
    return found


def arguments(target: Any, positional: int = 0, without: Iterable[str] = ()) -> list[Key]:
    """The arguments of a target, without the first ``positional`` ones, those that the run passes, and ``without``."""
    hidden = {*without, *(FROM_THE_RUN if positional else ())}
    said, hints = explained(target), typing.get_type_hints(target.__init__ if isinstance(target, type) else target)
    named = [one for one in list(inspect.signature(target).parameters.values())[positional:] if one.name not in hidden]
    return [Key(one.name, kind_of(hints[one.name]), default_of(one.default), said.get(one.name, "")) for one in named]


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


def marked(text: str) -> str:
    """A text in which nothing is markup; what looks like YAML is code."""
    code = r"`[^`]*`|\b_target_\b|\{[^}]*\}+|<\w+>(?:/<\w+>)*/?|\w+/<\w+>[/<>\w]*"
    parts = re.split(f"({code})", text)  # a text, a code, a text ...
    return "".join(f"`{part.strip('`')}`" if n % 2 else part.replace("*", "\\*") for n, part in enumerate(parts))


def table(columns: str, rows: list[list[str]]) -> str:
    """A table in Markdown."""
    lines = [columns, "|---" * (columns.count("|") - 1) + "|"]
    lines += [f"| {' | '.join(marked(cell).replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    return "\n".join(lines)


def section(place: str, cls: type) -> str:
    """The heading and the keys of one dataclass."""
    title = f"### `{place}`" if place else "### Of the run"
    return f"{title}\n\n{listed(keys(cls))}"


SHOWN = {"whole number": r"`-?\d+`", "number": r"`-?\d+(\.\d+|e).*`", "true, false": "`(true|false)`", "word": "`[^\\[].*`|``"}
"""The defaults that show their type."""


def type_of(key: Key) -> str:
    """The type in parentheses, where neither the default nor the meaning says it."""
    kinds = key.kind.split(", or ")
    if key.default == "`null`" or re.search(r"\bnull\b", key.meaning):
        kinds = [kind for kind in kinds if kind != "null"]
    if all(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", key.meaning) for word in re.findall("`([^`]+)`", key.kind)):
        kinds = [kind for kind in kinds if not kind.startswith("`")]
    if not kinds or (len(kinds) == 1 and re.fullmatch(SHOWN.get(kinds[0], "(?!)"), key.default)):
        return ""
    return f"({', or '.join(dict.fromkeys(kinds))}) "


def listed(keys: Iterable[Key]) -> str:
    """A list of keys: as typed with the default, and the meaning."""
    lines = []
    for key in keys:
        default = {"must be given": "=…", "": ""}.get(key.default, f"={key.default.strip('`')}")
        lines.append(f"- `{key.name}{default}`: {marked(type_of(key) + key.meaning.rstrip('.'))}")
    return "\n".join(lines)


def shared(tables: Iterable[list[Key]]) -> dict[tuple[str, str, str], Key]:
    """The keys that two or more tables explain in the same words, with the default that most of them have. One meaning for each name."""
    found: dict[tuple[str, str, str], list[Key]] = {}
    for key in (key for table in tables for key in table):
        found.setdefault((key.name, key.kind, key.meaning), []).append(key)
    often = {same: max(keys, key=keys.count) for same, keys in found.items() if len(keys) > 1}
    names = [key.name for key in often.values()]
    return {same: key for same, key in often.items() if names.count(key.name) == 1}


def of_several(title: str, tables: Mapping[str, list[Key]], common: Iterable[Key] = ()) -> list[str]:
    """One list of what the ``tables`` share, with ``common`` before it, and for each of them its other keys."""
    once = shared(tables.values())
    parts = [f"### {title}\n\n{listed([*common, *once.values()])}"] if once or common else []
    for name, keys in tables.items():
        parts.append(f"### `{name}`")
        names, own = [], []
        for key in keys:
            if same := once.get((key.name, key.kind, key.meaning)):
                default = "" if key.default == same.default else f"={key.default.strip('`')}"
                names.append(f"`{key.name}{default}`")
            else:
                own.append(key)
        parts += [f"As above: {', '.join(names)}."] if names else []
        parts += [listed(own)] if own else []
    return parts


def of_targets(group: str, title: str, common: Iterable[Key] = ()) -> list[str]:
    """The arguments of the options of a group."""
    positional = by_position(group)
    return of_several(title, {option: arguments(target, positional) for option, target in targets(group).items()}, common)


def page() -> str:
    """The whole page."""
    parts = [HEAD.read_text(encoding="utf-8").rstrip(), "## Groups and their options"]
    for group in GROUPS:
        rows = [[f"`{name}`", says] for name, says in options(group).items()]
        parts.append(f"### `{group}=`\n\n{table('| option | what |', rows)}")
    parts.append(
        "## Keys\n\nA key of a group is typed with the group before it: `model.embed_dim=64`. The lists show each key with its default; "
        "`=…` must be given. The YAML file of an option may set another one. The default shows the type: `4` is a whole number, `0.5` a number, "
        "`true` true or false, `gelu` a word, and `null` without more says that a word may be given. Parentheses hold any other type."
    )
    parts += [section(place, cls) for place, cls in sections()]
    of_callbacks = {name: config_class_of(find_target(node["_target_"], name)) for name, node in CALLBACKS.items()}
    parts += [section(f"callbacks.{name}", cls) for name, cls in of_callbacks.items() if cls is not None]
    parts.append(f"### `callbacks.wandb`\n\n{listed(arguments(WandbFiles, without=['folder']))}")
    parts.append(section("model", TransformerConfig))
    of_data = ("task", "num_labels", "pad_id", "tokenizer")
    parts.append(f"### `model=hf`\n\n{listed(arguments(pretrained_hf, without=of_data))}")
    parts.append(section("model.lora", Lora))
    for group in ("objective", "optimizer", "schedule"):
        parts += of_targets(group, f"`{group}`, of several options")
    parts.append(section("optimizer.rules[]", ParameterRule))
    parts += of_targets("data", "`data`, of several data sets", OF_ALL_DATA)
    parts += [section(place, cls) for place, cls in sections(AblationConfig, "ablation")]
    parts.append("## The other programs\n\nThey take `key=value` as well, and no files. `--help` prints these keys.")
    parts += of_several("Of several programs", {f"{name}.py": keys(cls) for name, cls in PROGRAMS.items()})
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
