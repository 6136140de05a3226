from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

from hvdtrain.cli.config import main
from hvdtrain.config.options import Options, list_options, to_yaml
from hvdtrain.config.parse import make_parser, parse_argv
from hvdtrain.errors import ConfigError
from hvdtrain.task.base import load_task_function
from hvdtrain.yaml_file import flatten


@dataclass(frozen=True)
class Depth:
    """How deep

    Attributes:
        layers: Layers in all.
    """

    layers: int = 2


@dataclass(frozen=True)
class Shape:
    """What it looks like

    Attributes:
        act: Between layers.
        depth: How deep.
        width: Units: "a # b", 'c' and a very long line that has to be wrapped somewhere since nobody reads lines that
            do not fit on the screen that they have.
    """

    act: Literal["relu", "tanh"] = "relu"
    depth: Depth = field(default_factory=Depth)
    width: int = 3


def hard(
    shape: Shape = Shape(),
    name: str = "off",
    time: str = "10:20",
    text: str = "it's a: #b\n  c",
    many: list[str] | None = None,
    table: dict[str, float] = {"a: b": 1e-9},  # noqa: B006  (only read)
    untyped=7,  # type: ignore[no-untyped-def]
) -> None:
    """A task with what YAML makes hard.

    Args:
        name: Is no boolean.
    """


def plain() -> None:
    """A task without parameters."""


def _options(function: Callable[..., Any]) -> Options:
    return list_options(make_parser(function))


_TASKS: list[Callable[..., Any]] = [load_task_function("language_model"), load_task_function("image"), hard, plain]


@pytest.mark.parametrize("function", _TASKS, ids=lambda function: function.__name__)
def test_the_written_file_reads_back_as_the_defaults(function: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(to_yaml(_options(function), "a task"))
    written = parse_argv(["--config", str(file)], function)
    assert written == parse_argv(["--task", "a task"], function)
    assert written.identity() == parse_argv(["--task", "a task"], function).identity()
    leaves = set(vars(make_parser(function).get_defaults().as_flat())) - {"config"}
    keys = set(flatten(yaml.safe_load(file.read_text())))
    assert {key for key in keys if not key.startswith("table.")} == leaves - {"table"}


def test_an_option_that_has_to_be_given_is_missed_until_it_is(tmp_path: Path) -> None:
    def needs(path: str, size: int = 3) -> None: ...

    file = tmp_path / "run.yaml"
    file.write_text(to_yaml(_options(needs), "t"))
    assert "\n# (text) (required) path: ...\n" in file.read_text()
    with pytest.raises(ConfigError, match="path"):
        parse_argv(["--config", str(file)], needs)
    file.write_text(file.read_text() + "path: x\n")
    assert parse_argv(["--config", str(file)], needs).task_args == {"path": "x", "size": 3}


def test_the_command_writes_the_task_and_its_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text('def build(hidden: int = 64):\n    """B.\n\n    Args:\n        hidden: Units.\n    """\n')
    assert main(["init", "my run.yaml", "--task", "own.py:build"]) == 0
    assert "hvdtrain train --config 'my run.yaml'" in capsys.readouterr().out
    text = Path("my run.yaml").read_text()
    assert "\ntask: own.py:build\n" in text and "\n# Units. (whole number)\nhidden: 64\n" in text
    assert "preset" not in text
    assert main(["init"]) == 0
    assert "\ntask: language_model\n" in Path("run.yaml").read_text()


def test_a_file_that_is_there_is_left_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, dangling = tmp_path / "run.yaml", tmp_path / "link.yaml"
    file.write_text("seed: 3\n")
    dangling.symlink_to(tmp_path / "nowhere")
    for name in (file, dangling):
        assert main(["init", str(name)]) == 1
        assert f"{name} exists already" in capsys.readouterr().err
    assert file.read_text() == "seed: 3\n" and dangling.readlink() == tmp_path / "nowhere"
    assert main(["init", str(tmp_path / "no" / "run.yaml")]) == 1
    assert "cannot write" in capsys.readouterr().err
