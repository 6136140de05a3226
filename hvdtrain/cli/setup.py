"""``python3 -m hvdtrain.cli.setup``, called by `make setup`: create the virtual environment for the other targets."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

from hvdtrain.errors import HvdtrainError
from hvdtrain.install import venv as environment
from hvdtrain.runtime.environment import environ


def main(argv: list[str]) -> int:
    """Bring the environment up to date and return the exit status."""
    parser = argparse.ArgumentParser(prog="python3 -m hvdtrain.cli.setup")
    parser.add_argument("--venv", type=Path, default=Path(".venv"))
    parser.add_argument("--chosen", action="store_true", help="the user chose this interpreter (make PYTHON=...)")
    parser.add_argument("--build", default="", help="options of hvdtrain build-horovod, as in a shell")
    options = parser.parse_args(argv)
    project, venv = Path.cwd(), Path.cwd() / options.venv
    _become_the_right_interpreter(venv, argv, options.chosen)
    if environment.is_current(project, venv):
        return 0
    started = time.monotonic()
    try:
        environment.install(project, venv, environ(), lambda line: print(line, flush=True))
    except HvdtrainError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    build = [venv / "bin" / "python", "-m", "hvdtrain.cli.build_horovod", *shlex.split(options.build)]
    done = subprocess.run(build, check=False)
    if done.returncode != 0:
        return done.returncode
    environment.finish(project, venv)
    print(f"{options.venv} is ready after {time.monotonic() - started:.0f} s: source {options.venv}/bin/activate")
    return 0


def _become_the_right_interpreter(venv: Path, argv: list[str], chosen: bool) -> None:
    """Continue in the interpreter that created the environment, unless the user chose another one.

    Never continue in the environment's own interpreter: the environment may have to be removed.
    """
    inside = Path(sys.prefix).resolve() == venv.resolve()
    if chosen and not inside:
        return
    base = str(getattr(sys, "_base_executable", sys.executable)) if inside else sys.executable
    right = environment.recorded_interpreter(venv) or base
    if right != sys.executable:
        os.execv(right, [right, "-m", "hvdtrain.cli.setup", "--chosen", *argv])  # noqa: S606  (no shell, by intent)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
