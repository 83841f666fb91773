"""``docs/configuring.md`` is what the dataclasses, the signatures and the YAML files say, and they say it of every key."""

import dataclasses
import functools
import pydoc
import re

import configuring_page as made
import pytest

from minitx.ablation.design import AblationConfig

OF_A_GRID = list(made.sections(AblationConfig, "ablation"))
CLASSES = [*made.sections(), *OF_A_GRID, *made.PROGRAMS.items()]
CLASSES += [("model", made.TransformerConfig), ("rules", made.ParameterRule)]


@pytest.mark.parametrize(("place", "cls"), CLASSES)
def test_every_key_has_a_meaning_and_no_other_word_has_one(place, cls):
    assert [key.name for key in made.keys(cls) if not key.meaning] == []
    assert set(made.explained(cls)) <= {field.name for field in dataclasses.fields(cls)}


page = functools.cache(made.page)
TARGETS = made.targets("objective", "optimizer", "schedule", "data")


def part_of(group):
    """The part of the page about a group."""
    return page().partition(f"\n### `{group}=`\n")[2].partition("\n### ")[0]


def listed_for(option):
    """The keys that are listed for an option: above the first names of options, or below its own name."""
    group, _, name = option.partition("=")
    keys = part_of(group).partition("<summary>")[2].partition("\n#### ")[0]
    above, *lists = re.split(r"^\*\*(.*)\*\*$", keys, flags=re.MULTILINE)
    shown = [above] + [own for names, own in zip(lists[::2], lists[1::2], strict=True) if f"`{name}`" in names.split(", ")]
    return [key for own in shown for key in re.findall(r"^- `(\w+)", own, flags=re.MULTILINE)]


@pytest.mark.parametrize("option", TARGETS)
def test_every_argument_of_a_target_has_a_meaning_and_is_listed_once_for_its_option(option):
    group = option.partition("=")[0]
    target, positional = TARGETS[option], made.by_position(group)
    found = {key.name: key.meaning for key in made.arguments(target, positional)}
    of_every_option = [key.name for key in made.OF_ALL_DATA] if group == "data" else []
    assert [name for name, meaning in found.items() if not meaning] == []
    assert sorted(listed_for(option)) == sorted([*found, *of_every_option])
    assert set(made.explained(target)) - set(made.FROM_THE_RUN) == set(found) - set(made.FROM_THE_RUN)


def test_every_key_of_a_run_and_of_its_model_is_listed_or_has_a_heading():
    for place, cls in [*made.sections(), ("model", made.TransformerConfig)]:
        for key in made.keys(cls):
            assert re.search(rf"^(- `{key.name}[`=]|#+ `{key.name}=?`$)", page(), flags=re.MULTILINE), (place, key)


@pytest.mark.parametrize(("place", "cls"), OF_A_GRID)
def test_the_command_on_the_page_prints_each_key_of_a_grid_with_its_default_and_its_meaning(place, cls):
    shown = re.sub(r"\s+", " ", re.sub(r"\n \| ", " ", pydoc.plain(pydoc.render_doc(f"minitx.ablation.design.{cls.__name__}"))))
    assert f"- `{place}`: {made.named(cls)} (`{cls.__name__}`)" in part_of("ablation")
    for key in made.keys(cls):
        assert f" {key.name}: {key.meaning}" in shown.replace("``", "`"), key
        assert re.search(rf" {key.name}: ['\"].* = ", shown), key


@pytest.mark.parametrize("group", made.GROUPS)
def test_every_option_says_what_it_is(group):
    assert [name for name, says in made.options(group).items() if not says] == []
    named = re.findall(r"^- (.*?):", part_of(group).partition("<details")[0], flags=re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", " ".join(named))) == set(made.options(group))


def test_the_committed_page_is_what_the_generator_writes():
    assert made.PAGE.read_text(encoding="utf-8") == page(), "run make docs, or python tests/docs/configuring_page.py"
