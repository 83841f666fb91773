"""``docs/configuring.md``: every key of a run with its default and meaning, from dataclasses, signatures and the YAML files.

Keys that several options of a group explain in the same words are listed once, below the names of these options. A meaning is under
``Attributes`` in the docstring of the dataclass, or of a class that it inherits from, and under ``Args`` in the docstring of a function;
``see ``NAME```` there is the meaning that NAME gives. The comment at the top of an option's YAML file describes the option.

``python tests/docs/configuring_page.py`` writes the page; its first part is ``configuring_head.md``. The other programs print their keys
(``--help``).
"""

import dataclasses
import inspect
import re
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
from minitx.cli.view_config import ViewConfig
from minitx.config import ParameterRule, Part, RunConfig, TransformerConfig, to_dict
from minitx.config.part import FROM_THE_RUN, find_target
from minitx.config.schema import config_class_of
from minitx.config.training import CALLBACKS, LOADING
from minitx.data.tables import load_tables
from minitx.data.tokenizer_choice import find_or_train_tokenizer
from minitx.interop.finetune import pretrained_hf
from minitx.interop.lora import Lora
from minitx.training import optimizers, schedules

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
WITH_SECTIONS = {*GROUPS, "evaluation", "init_from"} - {"experiment"}
"""Keys of a run that have a section of their own."""


class Key(typing.NamedTuple):
    """A key in a list; ``default`` is None if the key must be given, and empty if it is not shown."""

    name: str
    words: tuple[str, ...]
    default: str | None
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
            words_of(hints[field.name]),
            default_of(field.default if field.default_factory is dataclasses.MISSING else field.default_factory()),
            said.get(field.name, ""),
        )
        for field in dataclasses.fields(cls)  # type: ignore[arg-type]
    ]


SHARED = {"load_tables": load_tables, "find_or_train_tokenizer": find_or_train_tokenizer, "kjv": data.kjv}
SHARED |= {"adamw": optimizers.adamw, "constant": schedules.constant, "linear": schedules.linear}
"""What explains arguments of several targets."""
OF_ALL_DATA = [
    Key("batch_size", (), str(LOADING["batch_size"][1]), "rows of a step, over all devices and micro-batches"),
    Key("num_workers", (), str(LOADING["num_workers"][1]), "processes that load batches; 0: the training process does"),
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
    return [Key(one.name, words_of(hints[one.name]), default_of(one.default), said.get(one.name, "")) for one in named]


def default_of(made: Any) -> str | None:
    """A default as somebody would type it; a long list by its beginning, a group not at all."""
    value = to_dict(made)
    if value in (dataclasses.MISSING, inspect.Parameter.empty):
        return None
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    if isinstance(value, list):
        return f"[{', '.join(map(str, value[:3]))}{', …' if len(value) > 3 else ''}]"
    return ("" if value else "{}") if isinstance(value, dict) else str(value)


def words_of(hint: Any) -> tuple[str, ...]:
    """The words that a type allows; none if it allows any word."""
    inside = typing.get_args(hint)
    return inside if typing.get_origin(hint) is Literal else tuple(word for one in inside for word in words_of(one))


def options(group: str) -> dict[str, str]:
    """The options of a group with the first sentence of the comment that each begins with."""
    found = {}
    for path in sorted((ROOT / "configs" / group).glob("*.yaml")):
        text = path.read_text(encoding="utf-8").removeprefix("# @package _global_\n")
        comment = re.match(r"(?:# \S.*\n)*", text)[0].replace("\n# ", " ").removeprefix("# ").strip()  # type: ignore[index]
        found[path.stem] = comment.partition(". ")[0].rstrip(".:")
    return found


def described(group: str) -> str:
    """A list of the options of a group. Options with the same description share a line."""
    named: dict[str, list[str]] = {}
    for name, meaning in options(group).items():
        named.setdefault(meaning, []).append(f"`{name}`")
    return "\n".join(f"- {', '.join(names)}: {marked(meaning)}" for meaning, names in named.items())


def marked(text: str) -> str:
    """A text in which nothing is markup; what looks like YAML is code."""
    code = r"`[^`]*`|\b_target_\b|\{[^}]*\}+|<\w+>(?:/<\w+>)*/?|\w+/<\w+>[/<>\w]*"
    parts = re.split(f"({code})", text)  # a text, a code, a text ...
    return "".join(f"`{part.strip('`')}`" if n % 2 else part.replace("*", "\\*") for n, part in enumerate(parts))


def listed(keys: Iterable[Key]) -> str:
    """A list of keys: as typed with the default, and the meaning."""
    lines = []
    for key in keys:
        unnamed = [word for word in key.words if not re.search(rf"(?<!\w){re.escape(word)}(?!\w)", key.meaning)]
        words = f"({' | '.join(key.words)}) " if unnamed else ""
        default = "=…" if key.default is None else key.default and f"={key.default}"
        meaning = re.sub(r" \([^()]*arXiv[^()]*\)", "", key.meaning).rstrip(".").removesuffix("; null: off")
        lines.append(f"- `{key.name}{default}`: {marked(words + meaning)}")
    return "\n".join(lines)


def of_options(tables: Mapping[str, list[Key]], common: Iterable[Key] = ()) -> Iterator[str]:
    """The keys of several options, each once, below the names of the options that have it; another default is in parentheses."""
    found: dict[tuple[str, str], dict[str, Key]] = {}
    for option, own in tables.items():
        for key in own:
            found.setdefault((key.name, key.meaning), {})[option] = key
    lists: dict[tuple[str, ...], list[Key]] = {}
    for shared in found.values():
        defaults = [key.default for key in shared.values()]
        usual = max(defaults, key=defaults.count)
        others: dict[str | None, list[str]] = {}
        for option, key in shared.items():
            if key.default != usual:
                others.setdefault(key.default, []).append(f"`{option}`")
        exceptions = [f"`{default}` with {', '.join(names)}" for default, names in others.items()]
        key = next(key for key in shared.values() if key.default == usual)
        meaning = f"{key.meaning.rstrip('.')} ({'; '.join(exceptions)})" if exceptions else key.meaning
        lists.setdefault(tuple(shared), []).append(key._replace(meaning=meaning))
    everywhere = [*common, *lists.pop(tuple(tables), [])]
    if everywhere:
        yield listed(everywhere)
    for names, own in sorted(lists.items(), key=lambda entry: -len(entry[0])):
        yield f"**{', '.join(f'`{name}`' for name in names)}**"
        yield listed(own)


def of_targets(group: str, common: Iterable[Key] = ()) -> Iterator[str]:
    """The arguments of the options of a group."""
    positional = by_position(group)
    tables = {option.partition("=")[2]: arguments(target, positional) for option, target in targets(group).items()}
    return of_options(tables, common)


def in_section(place: str, keys: Iterable[Key]) -> list[str]:
    """The heading and the keys of a place inside a group."""
    return [f"#### `{place}`", listed(keys)]


def keys_of_groups() -> dict[str, list[str]]:
    """The blocks of Markdown that list the keys of each group; the keys of the run itself are under an empty name."""
    found: dict[str, list[str]] = {group: [] for group in ("", *GROUPS)}
    for place, cls in sections():
        group = place.partition(".")[0]
        own = [key for key in keys(cls) if place or key.name not in WITH_SECTIONS]
        found[group if group in GROUPS else ""] += [listed(own)] if place in ("", *GROUPS) else in_section(place, own)
    of_grid = [f"- `{place}`: {named(cls)} (`{cls.__name__}`)" for place, cls in sections(AblationConfig, "ablation")]
    found["ablation"] += [GRID, "\n".join(of_grid)]
    found["model"] += [listed(keys(TransformerConfig))]
    found["model"] += in_section("model=hf", arguments(pretrained_hf, without=("task", "num_labels", "pad_id", "tokenizer")))
    found["model"] += in_section("model.lora", keys(Lora))
    found["data"] += of_targets("data", OF_ALL_DATA)
    for group in ("objective", "optimizer", "schedule"):
        found[group] += of_targets(group)
    found["optimizer"] += in_section("optimizer.rules[]", keys(ParameterRule))
    of_callbacks = {name: config_class_of(find_target(node["_target_"], name)) for name, node in CALLBACKS.items()}
    for name, cls in of_callbacks.items():
        found["callbacks"] += in_section(f"callbacks.{name}", keys(cls)) if cls is not None else []
    found["callbacks"] += in_section("callbacks.wandb", arguments(WandbFiles, without=["folder"]))
    return found


GRID = "`python -m pydoc minitx.ablation.design.StudyConfig` prints the keys of a study with defaults and meanings; likewise for the other places:"
"""What is above the places inside a grid."""


def named(cls: type) -> str:
    """The names of the keys of a dataclass."""
    return ", ".join(f"`{key.name}`" for key in keys(cls))


def folded(blocks: Iterable[str]) -> list[str]:
    """Blocks that a reader unfolds."""
    return ['<details markdown="1">', "<summary>Keys</summary>", *blocks, "</details>"]


def page() -> str:
    """The whole page."""
    lists = keys_of_groups()
    parts = [HEAD.read_text(encoding="utf-8").rstrip()]
    parts += folded(lists.pop(""))
    for group, blocks in lists.items():
        parts += [f"### `{group}=`", described(group)]
        parts += folded(blocks) if blocks else []
    parts.append(
        "## The other programs\n\nThey take `key=value` as well, and no files. `--help` prints each key with its default and meaning, "
        "as in `python scripts/generate.py --help`."
    )
    parts += [f"### `{name}.py`\n\n{named(cls)}" for name, cls in PROGRAMS.items()]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
