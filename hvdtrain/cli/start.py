"""``python -m hvdtrain.cli.start -np 2 -- ARGS``, for `make train`: run ``python -m hvdtrain ARGS`` on this machine."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hvdtrain.errors import HvdtrainError, LaunchError
from hvdtrain.install import record
from hvdtrain.install.versions import has_remote_shell
from hvdtrain.launch.choose import AUTO, choose
from hvdtrain.launch.detect import detect_machine
from hvdtrain.launch.spec import Command, JobSpec
from hvdtrain.launch.targets import TARGETS
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
        start = _start(options.np, arguments, variables)
    except HvdtrainError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("+", start, flush=True)
    variables |= start.variables
    os.execvpe(start.argv[0], start.argv, variables)  # noqa: S606  (no shell, by intent)


def _start(ranks: int, arguments: Sequence[str], variables: dict[str, str]) -> Command:
    """Return the start by horovodrun, or by mpirun where horovodrun cannot drive the MPI; complete PATH for it.

    Errors: LaunchError: there is no MPI, or `ranks` is below 1.
    """
    if ranks < 1:
        raise LaunchError("a job needs at least one rank", expected="NP=1 or more", found=f"NP={ranks}")
    machine = replace(detect_machine(variables), in_slurm=False)  # the ranks are on this machine
    choice = choose("horovodrun", (), machine)
    if choice.mpi is None:
        choice = choose(AUTO, (), machine)
    if choice.mpi is None:
        raise LaunchError(
            "there is no MPI to start ranks with",
            expected="mpirun of Open MPI, MPICH or Intel MPI, of the MPI that Horovod was built with",
            found=choice.why,
            next_step="make setup   (or start one process without MPI: python -m hvdtrain)",
        )
    if choice.target != "horovodrun":
        print(f"horovodrun supports only Open MPI 4: using mpirun of {choice.mpi}")
    path = variables.get("PATH", os.defpath)
    mpirun = shutil.which(choice.mpi.mpirun, path=path) or choice.mpi.mpirun
    variables["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), str(Path(mpirun).parent), path])
    spec = JobSpec(
        arguments=tuple(arguments),
        ranks=ranks,
        mpi=choice.mpi,
        is_root=os.geteuid() == 0,
        remote_shell=has_remote_shell(variables),
    )
    start = TARGETS[choice.target].render(spec)
    assert isinstance(start, Command)
    return start


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
