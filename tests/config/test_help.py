"""``hvdtrain train --help``: short, in the order that a newcomer needs, and readable in 80 columns."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest

from hvdtrain.config.options import list_options
from hvdtrain.config.parse import make_parser, parse_argv
from hvdtrain.task.base import NAMED, load_task_function

_ORDER = ["model", "data", "train", "optimizer", "parallel", "memory", "checkpoint", "loader", "elastic", "observe"]


@dataclass(frozen=True)
class Augment:
    """Changes of the images.

    Attributes:
        flip: mirror 50% of the images
    """

    flip: bool = True


def own(path: str, hidden: int = 3, augment: Augment = Augment()) -> None:
    """A task.

    Args:
        path: folder of the images
        hidden: width of the middle layer
    """


@pytest.fixture(params=[*NAMED, "own"])
def text(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", "80")
    return make_parser(own if request.param == "own" else load_task_function(request.param)).format_help()


def test_help_has_one_usage_line_and_fits_80_columns(text: str) -> None:
    usage, empty, *_ = text.splitlines()
    assert usage.startswith("usage: hvdtrain train ")
    assert empty == ""
    assert max(map(len, text.splitlines())) <= 80


def test_help_shows_no_noise_of_the_parser(text: str) -> None:
    assert not re.search(r"(?<!model\.config )CONFIG", text)
    assert "type:" not in text
    assert "Literal" not in text


def test_help_shows_the_default_once(text: str) -> None:
    options = re.split(r"\n  (?=--)", text.partition("--task TASK   ")[2])
    assert len(options) > 30
    for option in options:
        assert option.count("(default:") + option.count("(required)") == 1, option


def test_sections_come_in_the_order_of_need(text: str) -> None:
    heads = re.findall(r"^(\w[\w ]*?)(?: \(.*\))?:$", text, flags=re.MULTILINE)
    assert heads[0] == "task and run"
    assert [head for head in heads if head in _ORDER] == [name for name in _ORDER if name in heads]
    assert text.index("--task ") < text.index("--seed ") < text.index("\ntrain (")


def test_the_options_of_the_task_itself_come_before_sections_and_its_own_sections_last() -> None:
    names = [option.name for option in list_options(make_parser(own)).options]
    assert names.index("log_level") < names.index("path") < names.index("hidden") < names.index("train.steps")
    assert names[-1] == "augment.flip"
    text = make_parser(own).format_help()
    assert "folder of the images (required)" in " ".join(text.split())
    assert "mirror 50% of the images (default: true)" in " ".join(text.split())


def test_options_that_help_omits_are_accepted() -> None:
    found = parse_argv(["--path=x", "--optimizer", '{"lr": 0.5}'], own)
    assert found.config.optimizer.lr == 0.5


def test_every_option_has_a_description() -> None:
    for function in map(load_task_function, NAMED):
        for option in list_options(make_parser(function)).options:
            assert option.effect, option.name
            assert option.default is not None or "(default: " in option.effect, option.name
