"""``docs/configuring.md`` is what the dataclasses, the signatures and the YAML files say, and they say it of every key."""

import dataclasses
import functools

import configuring_page as made
import pytest

from minitx.ablation.design import AblationConfig

CLASSES = [*made.sections(), *made.sections(AblationConfig, "ablation"), *made.PROGRAMS.items()]
CLASSES += [("model", made.TransformerConfig), ("rules", made.ParameterRule)]


@pytest.mark.parametrize(("place", "cls"), CLASSES)
def test_every_key_has_a_meaning_and_no_other_word_has_one(place, cls):
    assert [key.name for key in made.keys(cls) if not key.meaning] == []
    assert set(made.explained(cls)) <= {field.name for field in dataclasses.fields(cls)}


page = functools.cache(made.page)
TARGETS = made.targets("objective", "optimizer", "schedule", "data")


@pytest.mark.parametrize("option", TARGETS)
def test_every_argument_of_a_target_has_a_meaning_and_stands_below_its_option(option):
    target, positional = TARGETS[option], made.by_position(option.partition("=")[0])
    found = {key.name: key.meaning for key in made.arguments(target, positional)}
    part = page().partition(f"### `{option}`\n")[2].partition("\n#")[0]
    assert [name for name, meaning in found.items() if not meaning or f"`{name}" not in part] == []
    assert set(made.explained(target)) - set(made.FROM_THE_RUN) == set(found) - set(made.FROM_THE_RUN)


@pytest.mark.parametrize("group", made.GROUPS)
def test_every_option_says_what_it_is(group):
    assert [name for name, says in made.options(group).items() if not says] == []


def test_the_committed_page_is_what_the_generator_writes():
    assert made.PAGE.read_text(encoding="utf-8") == page(), "run make docs, or python tests/docs/configuring_page.py"
