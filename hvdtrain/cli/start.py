"""``python -m hvdtrain.cli.start -np 2 -- ARGS``, which `make train` calls: ``python -m hvdtrain ARGS`` as a job."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

from hvdtrain.errors import HvdtrainError
from hvdtrain.install import record
from hvdtrain.install.build_probe import has_remote_shell, mpi_at_hand
from hvdtrain.install.launcher import launch
from hvdtrain.runtime.environment import environ


def main(argv: list[str]) -> int:
    """Print the command line, then become it."""
    parser = argparse.ArgumentParser(prog="python -m hvdtrain.cli.start")
    parser.add_argument("-np", type=int, default=2, help="number of ranks on this machine")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="after --: arguments of python -m hvdtrain")
    options = parser.parse_args(argv)
    arguments = options.arguments[1:] if options.arguments[:1] == ["--"] else options.arguments
    variables = dict(environ())
    try:
        record.check()
        mpi = mpi_at_hand(variables)
        program = ["python", "-m", "hvdtrain", *arguments]
        shell = has_remote_shell(variables)
        chosen = launch(mpi.build if mpi else None, options.np, program, not os.geteuid(), remote_shell=shell)
    except HvdtrainError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    assert mpi is not None
    if chosen.reason:
        print(chosen.reason)
    added = [f"{name}={value}" for name, value in chosen.environment]
    print("+", shlex.join([*added, *chosen.argv]), flush=True)
    folders = [str(Path(sys.executable).parent), str(mpi.mpirun.parent), variables.get("PATH", os.defpath)]
    variables.update(chosen.environment, PATH=os.pathsep.join(folders))
    os.execvpe(chosen.argv[0], chosen.argv, variables)  # noqa: S606  (no shell, by intent)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
