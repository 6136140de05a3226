"""What TAB completes: asked of the shells themselves."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from hvdtrain.__main__ import COMMANDS
from hvdtrain.__main__ import main as hvdtrain_main
from hvdtrain.cli.completion import combined_parser, main, script
from hvdtrain.config.parse import make_parser
from tests.support.host import required, tool
from tests.support.launch import TIMEOUT_S


def task(hidden: int = 3, act: Literal["relu", "tanh"] = "relu", path: Path | None = None) -> None:
    """A task.

    Args:
        hidden: 100% of "it", in `units` [of] $HOME: all 'quoted'
    """


def _shell(name: str) -> str:
    with required():
        return tool(name)


@pytest.fixture(scope="module")
def bash(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("completion") / "hvdtrain"
    file.write_text(script("bash", task))
    return file


def _completed(file: Path, *lines: list[str], cwd: Path | None = None) -> list[list[str]]:
    """What bash offers for the last word of each line. No program is found: a TAB starts none."""
    asked = "\n".join(
        f"COMP_WORDS=({shlex.join(line)}); COMP_CWORD={len(line) - 1}; COMPREPLY=(); $how; "
        "printf '%s\\n' \"${COMPREPLY[@]}\" --end--"
        for line in lines
    )
    set_up = f"PATH=/nonexistent; source {shlex.quote(str(file))}; how=$(complete -p hvdtrain); how=${{how#*-F }}"
    program = f"{set_up}; how=${{how% hvdtrain}}; {asked}"
    argv, none = [_shell("bash"), "--norc", "-c", program], {"PATH": "/nonexistent"}
    done = subprocess.run(argv, capture_output=True, text=True, cwd=cwd, env=none)
    assert (done.returncode, done.stderr) == (0, "")
    return [part.split("\n")[:-1] for part in done.stdout.split("--end--\n")[:-1]]


def _commands(
    parser: argparse.ArgumentParser, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], set[str]]]:
    """Each command with its long options."""
    yield path, {option for action in parser._actions for option in action.option_strings if option.startswith("--")}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from _commands(inner, (*path, name))


def test_every_command_and_every_option_is_completed(bash: Path, capsys: pytest.CaptureFixture[str]) -> None:
    declared = dict(_commands(combined_parser(task)))
    assert {path[0] for path in declared if path} == COMMANDS.keys()
    assert {("timeline", "report"), ("verify", "data"), ("config", "init")} < declared.keys()
    found = _completed(bash, *(["hvdtrain", *path, "--"] for path in declared))
    assert {path: set(options) for path, options in zip(declared, found, strict=True)} == declared
    for command in ("doctor", "timeline report", "launch", "build-horovod"):
        with pytest.raises(SystemExit):
            hvdtrain_main([*command.split(), "--help"])
        shown = capsys.readouterr().out
        assert all(option in shown for option in declared[tuple(command.split())])


def test_the_options_of_train_are_those_of_its_parser() -> None:
    declared = dict(_commands(combined_parser(task)))
    parser = make_parser(task)
    leaves = {f"--{name}" for name in vars(parser.get_defaults().as_flat())} | {"--help", "--print_config"}
    assert declared["train",] == leaves
    assert declared["train",] <= declared[()]  # without a command they are train's


_STEPS, _PRECISIONS = ["--train.steps", "--train.stop_at"], ["fp32", "bf16", "fp16", "bf16-weights"]
_OFFERED = {
    "launch --el": ["--elastic", "--elastic-timeout"],
    "--train.st": _STEPS,
    "--train.steps 5 --checkpoint.k": ["--checkpoint.keep"],
    "train --precision ": _PRECISIONS,
    "train --precision = b": ["bf16", "bf16-weights"],  # bash makes three words of --precision=b
    "train --precision =": _PRECISIONS,
    "train --train.compile ": ["true", "false"],
    "train --act ": ["relu", "tanh"],
    "launch -np 2 -- --config ru": ["run 1.yaml"],
    "verify ": ["data", "plan", "resume"],
    "completion ": ["bash", "zsh", "fish"],
}


def test_bash_offers(bash: Path, tmp_path: Path) -> None:
    (tmp_path / "run 1.yaml").touch()
    found = _completed(bash, *(["hvdtrain", *line.split(" ")] for line in _OFFERED), cwd=tmp_path)
    assert dict(zip(_OFFERED, found, strict=True)) == _OFFERED


_FP16 = ["--precision", "fp16"]
_KEYS = [
    ("hvdtrain tr\t", ["train"]),
    ("hvdtrain launch --restart\t2", ["launch", "--restarts", "2"]),
    ("hvdtrain train --train.ste\t3", ["train", "--train.steps", "3"]),
    ("hvdtrain train --precision fp3\t", ["train", "--precision", "fp32"]),
    ("hvdtrain train --config ru\t", ["train", "--config", "run 1.yaml"]),
    ("hvdtrain launch -np 2 -- --train.ste\t3", ["launch", "-np", "2", "--", "--train.steps", "3"]),
    ("hvdtrain launch -np 2 -- --seed 1 --precision f\t16", ["launch", "-np", "2", "--", "--seed", "1", *_FP16]),
    ("hvdtrain timeline rep\tru\t", ["timeline", "report", "run 1.yaml"]),
]
"""What is typed, and what the command then gets."""


@pytest.mark.parametrize("name", ["bash", "zsh"])
def test_typed_into_a_terminal(name: str, bash: Path, tmp_path: Path) -> None:
    shell, work = _shell(name), tmp_path / "work"
    for folder in ("bin", "functions", "work"):
        (tmp_path / folder).mkdir()
    (work / "run 1.yaml").touch()
    program = tmp_path / "bin" / "hvdtrain"
    program.write_text(f'#!/bin/sh\n(printf "%s\\037" "$@"; echo) >> {shlex.quote(str(tmp_path / "got"))}\n')
    program.chmod(0o755)
    if name == "bash":
        argv, first = [shell, "--norc", "-i"], f"source {shlex.quote(str(bash))}"
    else:
        (tmp_path / "functions" / "_hvdtrain").write_text(script("zsh", task))
        functions = shlex.quote(str(tmp_path / "functions"))
        argv, first = [shell, "-f", "-i"], f"fpath=({functions} $fpath); autoload -U compinit; compinit -u -D"
    environment = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "HOME": str(tmp_path), "TERM": "xterm"}
    keys = "\n".join([first, *(line for line, _ in _KEYS), "exit", ""])
    terminal = [_shell("script"), "--quiet", "--command", shlex.join(argv), "/dev/null"]
    shown = subprocess.run(
        terminal, input=keys.encode(), stdout=subprocess.PIPE, env=environment, cwd=work, timeout=TIMEOUT_S
    ).stdout
    got = [line.split("\037")[:-1] for line in (tmp_path / "got").read_text().splitlines()]
    assert got == [words for _, words in _KEYS], shown


def test_fish_offers(tmp_path: Path) -> None:
    fish = _shell("fish")
    file = tmp_path / "hvdtrain.fish"
    file.write_text(script("fish", task))
    for line, offered in (
        ("hvdtrain tr", "train"),
        ("hvdtrain launch --restar", "--restarts"),
        ("hvdtrain train --train.ste", "--train.steps"),
        ("hvdtrain train --precision fp3", "fp32"),
        ("hvdtrain timeline rep", "report"),
    ):
        argv = [fish, "--no-config", "-c", f"source {shlex.quote(str(file))}; complete -C {shlex.quote(line)}"]
        home = {**os.environ, "HOME": str(tmp_path)}
        done = subprocess.run(argv, capture_output=True, text=True, env=home)
        assert done.stderr == ""
        assert [found.partition("\t")[0] for found in done.stdout.splitlines()] == [offered]


def test_the_script_has_the_parameters_of_a_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text("def build(colour: int = 3): ...\n")
    assert main(["bash", "--task", f"{tmp_path}/mine.py:build"]) == 0
    printed = capsys.readouterr().out
    assert "--colour" in printed and "--model.preset" not in printed
