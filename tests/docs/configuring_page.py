"""``docs/configuring.md``: every key with its type, default and meaning, from the dataclasses and the YAML beside them.

A meaning is written once: as the comment of its line in the YAML file that states every key of its kind, or, where there is
no such file, under ``Attributes`` in the docstring of the dataclass. ``python tests/docs/configuring_page.py`` writes the page.
"""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml

from minitx import config as configs
from minitx.cli.atlas import AtlasConfig
from minitx.cli.cost import CostConfig
from minitx.cli.evaluate import EvaluateConfig
from minitx.cli.generate import GenerateConfig
from minitx.cli.view import ViewConfig

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
PAGE = ROOT / "docs" / "configuring.md"


class Section(typing.NamedTuple):
    """Where keys stand, their dataclass, and the file of ``configs/`` (and the key in it) that states each of them."""

    place: str
    cls: Any
    file: str | None = None
    inside: str = ""


SECTIONS = (
    Section("model", configs.TransformerConfig, "model/char_small"),
    Section("data", configs.TextDataConfig, "data/text"),
    Section("data", configs.MaskedDataConfig, "data/masked"),
    Section("data", configs.PairsDataConfig, "data/pairs"),
    Section("data", configs.DatesDataConfig, "data/dates"),
    Section("data", configs.ClassifyDataConfig, "data/languages"),
    Section("data", configs.ImageDataConfig, "data/images"),
    Section("data", configs.HubDataConfig, "data/hf"),
    Section("data", configs.KeyValueDataConfig, "data/kv_lookup"),
    Section("data", configs.MultiQueryDataConfig, "data/multi_query_recall"),
    Section("data", configs.InductionDataConfig, "data/induction"),
    Section("objective", configs.ObjectiveConfig, "objective/cross_entropy"),
    Section("optimizer", configs.OptimizerConfig, "optimizer/adamw"),
    Section("optimizer.rules[]", configs.ParameterRule),
    Section("schedule", configs.ScheduleConfig, "schedule/cosine"),
    Section("trainer", configs.TrainerConfig, "trainer/default"),
    Section("callbacks", configs.CallbacksConfig, "callbacks/default"),
    Section("callbacks.probe", configs.ProbeConfig, "callbacks/default", "probe"),
    Section("evaluation", configs.EvaluationConfig, "train", "evaluation"),
    Section("ablation", configs.AblationConfig, "ablation/parts/run"),
    Section("ablation.studies.NAME", configs.StudyConfig),
    Section("ablation.comparisons[]", configs.ComparisonConfig),
    Section("ablation.predictions.NAME", configs.PredictionConfig),
    Section("ablation.predictions.NAME.expect[]", configs.ExpectedVerdict),
)
GROUPS = (
    "model",
    "data",
    "objective",
    "optimizer",
    "schedule",
    "trainer",
    "callbacks",
    "logger",
    "experiment",
    "ablation",
    "debug",
)
PROGRAMS = {
    "evaluate": EvaluateConfig,
    "generate": GenerateConfig,
    "view_attention": ViewConfig,
    "atlas": AtlasConfig,
    "cost": CostConfig,
}


class Key(typing.NamedTuple):
    """A line of the page."""

    name: str
    kind: str
    default: str
    meanings: tuple[str, ...]


def comments(file: str) -> dict[str, str]:
    """The comment behind each key of a YAML file, by dotted key; a line of comment below goes on with it."""
    found: dict[str, str] = {}
    path: list[tuple[int, str]] = []
    for line in (CONFIGS / f"{file}.yaml").read_text(encoding="utf-8").splitlines():
        matched = re.match(r"( *)(\w+):(?: |$)", line)
        body, _, comment = re.sub(r"\{[^}]*\}", lambda m: m[0].replace("#", " "), line).partition("# ")
        if matched:
            path = [(depth, name) for depth, name in path if depth < len(matched[1])] + [(len(matched[1]), matched[2])]
            if comment:
                found[".".join(name for _, name in path)] = line.partition("# ")[2].strip()
        elif path and comment and not body.strip() and body:
            found[".".join(name for _, name in path)] += " " + comment.strip()
    return found


def attributes(cls: type) -> dict[str, str]:
    """What the ``Attributes`` of a docstring say, by name."""
    section = (cls.__doc__ or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^ {8}(\w+): (.*(?:\n {12,}.*)*)", section, flags=re.MULTILINE)
    return {name: re.sub(r"\s+", " ", text).replace("``", "`").strip() for name, text in entries}


def keys(section: Section) -> list[Key]:
    """The keys of a section, each with all the meanings that are written for it."""
    in_code, in_yaml, values = attributes(section.cls), {}, {}
    if section.file is not None:
        group, _, option = section.file.partition("/")
        in_yaml = {"name": options(group)[option]} if section.place == "data" else {}
        in_yaml |= comments(section.file)
        values = yaml.safe_load((CONFIGS / f"{section.file}.yaml").read_text(encoding="utf-8"))
    values = values[section.inside] if section.inside else values
    prefix = f"{section.inside}." if section.inside else ""
    found = []
    for field in dataclasses.fields(section.cls):
        meanings = [said[name] for said, name in ((in_code, field.name), (in_yaml, prefix + field.name)) if name in said]
        kind = kind_of(typing.get_type_hints(section.cls)[field.name])
        words = " | ".join(re.findall(r"`([^`]+)`", kind))  # what may be chosen stands in the column of types
        meanings = (
            [re.sub(rf"(: )?(?<![\w|] ){re.escape(words)}(?= *$|[;,])", "", one).lstrip("; ") for one in meanings]
            if words
            else meanings
        )
        found.append(Key(field.name, kind, typed(values.get(field.name, default_of(field))), tuple(meanings)))
    return found


def run_keys() -> list[Key]:
    """The keys of a run that are no groups."""
    groups = {*GROUPS, *(section.place for section in SECTIONS)} - {"experiment"}
    return [key for key in keys(Section("", configs.RunConfig, "train")) if key.name not in groups]


def default_of(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return configs.to_dict(field.default_factory())
    return configs.to_dict(field.default)


def typed(value: Any) -> str:
    """A default as somebody would type it; a long list by its beginning."""
    if value is dataclasses.MISSING:
        return "must be given"
    if value is None or isinstance(value, bool):
        return f"`{str(value).lower().replace('none', 'null')}`"
    if isinstance(value, list):
        return f"`[{', '.join(map(str, value[:3]))}{', …' if len(value) > 3 else ''}]`"
    return "" if isinstance(value, dict) and value else f"`{value}`"


PLAIN = {int: "whole number", float: "number", bool: "true, false", str: "word", Any: "anything", type(None): "null"}


def kind_of(hint: Any) -> str:
    """A type in words."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
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
    for path in sorted((CONFIGS / group).glob("*.yaml")):
        text = path.read_text(encoding="utf-8").removeprefix("# @package _global_\n")
        comment = re.match(r"(?:# \S.*\n)*", text)[0].replace("\n# ", " ").removeprefix("# ").strip()  # type: ignore[index]
        found[path.stem] = comment.partition(". ")[0].rstrip(".:")
    return found


def table(found: list[Key]) -> str:
    rows = [
        f"| `{key.name}` | {key.kind} | {key.default} | {' '.join(key.meanings)} |" for key in (escaped(one) for one in found)
    ]
    return "\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *rows])


def escaped(key: Key) -> Key:
    return key._replace(kind=key.kind.replace("|", "\\|"), meanings=tuple(shown(meaning) for meaning in key.meanings))


def shown(meaning: str) -> str:
    """A comment as Markdown: nothing in it belongs to a table or a list; what looks like YAML is code."""
    marked = re.sub(r"`[^`]*`|\{[^}]*\}+|<\w+>(?:/<\w+>)*/?|\w+/<\w+>[/<>\w]*", lambda m: f"`{m[0].strip('`')}`", meaning)
    return marked.replace("|", "\\|").replace("*", "\\*").rstrip(".")


def title_of(section: Section) -> str:
    """The heading of a table of keys, and for which other options it stands."""
    option = section.file.replace("/", "=", 1) if section.file is not None and section.place == "data" else ""
    title = f"### `{section.place}`" + (f", `{option}`" if option else "")
    names = typing.get_args(typing.get_type_hints(section.cls)["name"]) if option else ()
    others = [f"`data={name}`" for name in names if f"data={name}" != option]
    return f"{title}\n\nAlso for {', '.join(others)}." if others else title


def page() -> str:
    """The whole page."""
    parts = [HEAD.rstrip()]
    for group in GROUPS:
        rows = [f"| `{name}` | {shown(says)} |" for name, says in options(group).items()]
        parts.append("\n".join([f"### `{group}=`", "", "| option | what |", "|---|---|", *rows]))
    parts.append(f"## Keys\n\n{KEYS}\n\n### Of the run\n\n{table(run_keys())}")
    parts += [f"{title_of(section)}\n\n{table(keys(section))}" for section in SECTIONS]
    parts.append(f"## The other programs\n\n{OTHERS}")
    for name, cls in PROGRAMS.items():
        hints, fields = typing.get_type_hints(cls), dataclasses.fields(cls)
        rows = [Key(f.name, kind_of(hints[f.name]), typed(default_of(f)), (f.metadata["meaning"],)) for f in fields]
        parts.append(f"### `{name}.py`\n\n{table(rows)}")
    return "\n\n".join(parts) + "\n"


HEAD = """\
# Configuring

A run is one config: YAML files that are put together, and what is typed over them. One word per thing, from YAML to constructor:
`model.scale` in a file, on the command line, in `config.yaml` of a run and in `TransformerConfig` is the same key with the same
meaning. `python tests/docs/configuring_page.py` writes this page from the dataclasses of `minitx/config/` and the comments in `configs/`.

## Choosing and overriding

```bash
python scripts/train.py model=llama_small data=kjv optimizer=muon       # group=option chooses a file
python scripts/train.py experiment=char_lm model.num_layers=6           # group.key=value changes one key
python scripts/train.py experiment=char_lm 'data.path="my text.txt"' data=text   # a value with =,()[]{} or a blank: two pairs of quotes
python scripts/train.py experiment=kv_lookup 'optimizer.rules=[{match: "(q|k)_proj", lr: "head_dim^-0.25"}]'
python scripts/train.py experiment=char_lm +callbacks.extra.timer._target_=lightning.pytorch.callbacks.Timer   # + adds to a mapping
python scripts/train.py experiment=char_lm --cfg job                    # prints the composed config and runs nothing
python scripts/train.py experiment=char_lm debug=one_step               # one step with every hook: does it run?
```

What comes later wins: the option of each group (and what its own `defaults` name), then `experiment`, then `debug`, then the command
line from left to right. Nothing else is read: an environment variable changes a key only where a
config names it, as `${oc.env:NAME}`.

A key that does not exist, a value of another type and a combination that has no meaning are answered in one sentence with exit code 2,
before torch is imported ([errors.md](errors.md)). A key that is `null` says in its meaning what then holds.

## Sweeps

```bash
python scripts/train.py -m experiment=kv_lookup model.scale=inv_sqrt,unscaled seed=0,1
```

`-m` runs every combination, one after another, each in a folder of its own below `runs/sweeps/`. For an answer with intervals ask
the lab instead: [ablation.md](ablation.md).

## A config of your own

`conf/experiment/mine.yaml`, in any folder; its first line makes its keys those of the whole run:

```yaml
# @package _global_
defaults:
  - override /model: llama_small
  - override /data: kv_lookup

experiment: mine          # names the run's folder
model:
  position: none
  num_layers: 1
optimizer:
  lr: 3.0e-3
trainer:
  max_steps: 300
```

```bash
python scripts/train.py --config-dir=conf experiment=mine model.scale=unscaled
```

In a checkout it can as well lie in `configs/experiment/`. A file in `conf/model/` is an option of `model=`, and so on; it needs to
state only what differs from the option that its `defaults` name.

The folder of a run holds `config.yaml`, in which everything is resolved, and `command.txt`, the command that made it. From Python a
config is a frozen dataclass, with the same checks:

```python
from minitx.config import RunConfig, TransformerConfig

config = RunConfig(model=TransformerConfig(embed_dim=64, num_heads=2, scale="unscaled"), seed=3)
print(config.model.width_per_head)
```

```text
32
```

## Groups and their options
"""

KEYS = """\
A key of a group is typed with the group before it: `model.embed_dim=64`, `optimizer.rules=[{match: …, lr: …}]`. Defaults are those of
`model=char_small`, `trainer=default`, and so on, or of the option that the heading names; other options and experiments have others."""

OTHERS = "They take `key=value` as well, and no files. `--help` prints these tables."


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
