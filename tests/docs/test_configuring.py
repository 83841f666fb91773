"""docs/configuring.md is what dataclasses and YAML say, and they say it of every key, once."""

from __future__ import annotations

import dataclasses
import typing

import configuring_page as made
import pytest

from minitx import config as configs


@pytest.mark.parametrize("section", made.SECTIONS, ids=lambda section: f"{section.place}-{section.cls.__name__}")
def test_every_key_has_one_meaning_in_one_place(section):
    for key in made.keys(section):
        assert key.meanings, (
            f"{section.place}.{key.name} of {section.cls.__name__} has no meaning: write it beside the key in {section.file or 'the docstring'}"
        )
        assert len(key.meanings) == 1, f"{section.place}.{key.name} has two: {key.meanings}"


def test_every_key_of_the_run_itself_has_a_meaning():
    assert [key.name for key in made.run_keys()] == ["experiment", "seed", "ckpt_path", "output_dir", "on_nonfinite"]
    assert all(len(key.meanings) == 1 for key in made.run_keys())


def dataclasses_in(hint):
    """The config classes that a type speaks of."""
    inside = [one for argument in typing.get_args(hint) for one in dataclasses_in(argument)]
    return [*([hint, *dataclasses_under(hint)] if dataclasses.is_dataclass(hint) else []), *inside]


def dataclasses_under(cls):
    return [one for hint in typing.get_type_hints(cls).values() for one in dataclasses_in(hint)]


def test_no_config_class_is_missing_on_the_page():
    assert {section.cls for section in made.SECTIONS} == set(dataclasses_under(configs.RunConfig))


@pytest.mark.parametrize("group", made.GROUPS)
def test_every_option_says_what_it_is(group):
    assert [name for name, says in made.options(group).items() if not says] == []


def test_the_committed_page_is_what_the_generator_writes():
    assert made.PAGE.read_text(encoding="utf-8") == made.page(), "run make docs, or python tests/docs/configuring_page.py"


def test_a_comment_is_read_from_its_line_and_goes_on_below():
    said = made.comments("ablation/parts/run")
    assert said["only"].startswith("studies to run; empty: all.")
    assert "cluster: local tries it without Slurm. those of ray.init" in said["launcher_options"].replace("ray: ", "")
    assert made.comments("callbacks/default")["probe.every"] == "0: no probes"
