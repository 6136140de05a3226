"""``hvdtrain build-horovod``: build Horovod for the installed torch and MPI."""

from __future__ import annotations

import dataclasses
import sys

from hvdtrain.cli.parser import Parser
from hvdtrain.errors import HvdtrainError
from hvdtrain.install.build import build, pending
from hvdtrain.install.build_plan import HOROVOD, plan
from hvdtrain.install.build_probe import probe
from hvdtrain.install.prerequisites import GPU_CHOICES
from hvdtrain.runtime.environment import environ


def parser() -> Parser:
    """Declare the options."""
    what = f"Build Horovod {HOROVOD} for the installed torch and MPI, install it, and test an allreduce on 2 ranks."
    made = Parser(prog="hvdtrain build-horovod", description=what)
    gpu = (
        "how to exchange GPU tensors: nccl, none (through CPU memory), or auto (nccl if torch has CUDA and nvcc is"
        " found, otherwise none) (default: auto)"
    )
    made.add_argument("--gpu", choices=GPU_CHOICES, default="auto", help=gpu)
    dry_run = "print the settings, files and commands of the build and exit"
    made.add_argument("--dry-run", action="store_true", help=dry_run)
    return made


def main(argv: list[str]) -> int:
    """Run the subcommand and return its exit status."""
    options = parser().parse_args(argv)
    try:
        variables = environ()
        planned = plan(probe(variables), gpu=options.gpu)
        if options.dry_run:
            print(dataclasses.replace(planned, steps=pending(planned)))
            return 0
        print(f"Horovod {planned.version} (GPU operations: {planned.gpu}; log: {planned.log})", flush=True)
        build(planned, variables, say=lambda line: print(line, flush=True), progress=_progress)
    except HvdtrainError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"Horovod {planned.version} is installed. Two ranks summed a tensor with {planned.label.mpi}.")
    return 0


def _progress(text: str) -> None:
    """Overwrite the last line on a terminal; print nothing elsewhere."""
    if sys.stdout.isatty():
        print(f"  {text}", end="\r", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
