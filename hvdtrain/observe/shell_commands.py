"""Commands for the user to type."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from hvdtrain.install.versions import NO_SHELL, REMOTE_SHELL
from hvdtrain.run_layout import RunLayout
from hvdtrain.runtime.environment import RankInfo, launch_options
from hvdtrain.runtime.host import read_host

_LONGEST = 400
"""Characters of a program's command line at most. A longer one, or one with several lines, is not shown."""


def program_path(name: str) -> str:
    """Return a program's path next to this interpreter, so that it works without an activated environment."""
    path = Path(sys.executable).with_name(name)
    if not path.exists():
        return name
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def command_line(name: str, *arguments: str) -> str:
    """Return a command line for a shell, with the program's path from `program_path` and quoted words."""
    return shlex.join([program_path(name), *arguments])


def relative_to_start(path: Path, info: RankInfo) -> Path:
    """Return a path relative to the folder in which the program was started, if it is inside."""
    return path.relative_to(info.folder) if path.is_relative_to(info.folder) else path


def resume_command(run_dir: Path, info: RankInfo, options: str = "") -> str:
    """Return the command that resumes a run on as many ranks, from its last checkpoint or from the start.

    A shell comment names what the command lacks: several hosts, or another launcher than mpirun.
    """
    run_dir = relative_to_start(run_dir, info)
    arguments = ["--config", str(RunLayout(run_dir).config), "--run_dir", str(run_dir), *options.split()]
    launched = launch_options(info.variables)
    if launched is not None:
        return command_line("hvdtrain", "launch", *launched, "--", *arguments)
    return _launched(command_line("python", "-m", "hvdtrain", *arguments), info)


def resume_program(run_dir: Path, info: RankInfo, argv: Sequence[str]) -> str:
    """Return the command that resumes a program that calls `hvdtrain.train`: the same program again.

    `argv`: of the interpreter, its own name first: `sys.orig_argv`.
    """
    again = command_line("python", *argv[1:])
    if len(argv) < 2 or "\n" in again or len(again) > _LONGEST:
        again = "# the same program again"
    return _launched(again, info, f"with run_dir set to {shlex.quote(str(relative_to_start(run_dir, info)))}")


def _launched(line: str, info: RankInfo, note: str = "") -> str:
    notes = [note] if note else []
    if info.size > 1:
        if info.launcher == "openmpi" and info.one_host and not line.startswith("#"):
            flags = "" if os.geteuid() else " --allow-run-as-root"
            if info.size > read_host(info.variables).cores:  # or mpirun, without hosts, finds too few slots
                flags += " --oversubscribe"
            settings = "".join(f"{name}={NO_SHELL} " for name in REMOTE_SHELL if info.variables.get(name) == NO_SHELL)
            line = f"{settings}{shlex.quote(program_path('mpirun'))}{flags} -np {info.size} {line}"
        else:
            notes.append(f"on {info.size} ranks, started by {info.started_by.command} as before")
    if not notes:
        return line
    return f"{line}{',' if line.startswith('#') else '  #'} {', '.join(notes)}"
