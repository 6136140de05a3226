"""``hvdtrain doctor`` as a process, on a machine and an installation that are made worse."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.host import UnavailableError, required, tool
from tests.support.launch import ENVIRONMENT, TIMEOUT_S, command

_PATIENT = """
import subprocess, sys
from hvdtrain.cli.doctor import main
ask = subprocess.Popen.communicate
subprocess.Popen.communicate = lambda child, given=None, timeout=None: ask(child, given, timeout and max(timeout, %d))
sys.exit(main(sys.argv[1:]))
"""
DOCTOR = ("-c", _PATIENT % TIMEOUT_S)
"""What Python runs as ``hvdtrain doctor`` that gives its children time, however slow the machine is."""
Findings = Mapping[str, Mapping[str, Any]]
"""What was found, by the name of the check."""


def look(
    *options: str,
    environment: Mapping[str, str] | None = None,
    without: Sequence[str] = (),
    before: Sequence[str] = (),
    launcher: str = "none",
    size: int = 1,
) -> Findings:
    """What doctor finds with other variables, less the variables `without`, started by `before` and a launcher.

    The environment of this Python is active, unless PATH says otherwise.
    """
    beside = os.pathsep.join([str(Path(sys.executable).parent), ENVIRONMENT["PATH"]])
    variables = ENVIRONMENT | {"PATH": beside} | dict(environment or {})
    argv = (*before, *command(size, launcher=launcher), sys.executable, *DOCTOR, "--json", *options)
    return _found(argv, tuple(sorted((name, value) for name, value in variables.items() if name not in without)))


@functools.cache
def _found(argv: Sequence[str], variables: tuple[tuple[str, str], ...]) -> Findings:
    done = subprocess.run(
        argv, env=dict(variables), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    start = done.stdout.find('{"format"')
    assert start >= 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    said, _ = json.JSONDecoder().raw_decode(done.stdout[start:])
    return {check["name"]: check for check in said["checks"]}


def on_path(folder: Path) -> dict[str, str]:
    """A PATH that begins with a folder."""
    return {"PATH": os.pathsep.join([str(folder), str(Path(sys.executable).parent), ENVIRONMENT["PATH"]])}


def program(folder: Path, name: str, says: str) -> Path:
    """Make a program that says something, whatever it is asked."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / name
    file.write_text(f"#!/bin/sh\ncat <<'END'\n{says}\nEND\n")
    file.chmod(0o755)
    return file


def horovod_of_version(folder: Path, version: str) -> dict[str, str]:
    """Variables under which the installed Horovod is taken for one of another version."""
    metadata = folder / "horovod-0.28.1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: horovod\nVersion: {version}\n")
    return {"PYTHONPATH": str(folder)}


def horovod_that_does(folder: Path, code: str) -> dict[str, str]:
    """Variables under which ``import horovod.torch`` runs some code."""
    (folder / "horovod/torch").mkdir(parents=True)
    (folder / "horovod/__init__.py").write_text("__version__ = '0.28.1'\n")
    (folder / "horovod/torch/__init__.py").write_text(code)
    return horovod_of_version(folder, "0.28.1")


def as_in_a_container(shm: str, name: str) -> list[str]:
    """What starts a program where /dev/shm is small and the host has a name that nobody knows. Needs root."""
    with required():
        setup = f'{tool("mount")} -t tmpfs -o size={shm} tmpfs /dev/shm && {tool("hostname")} {name} && exec "$@"'
        before = [tool("unshare"), "--mount", "--uts", "sh", "-c", setup, "sh"]
        done = subprocess.run([*before, "true"], capture_output=True, text=True)
        if done.returncode:
            raise UnavailableError(done.stderr.strip())
    return before
