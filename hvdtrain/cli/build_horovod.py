"""``hvdtrain build-horovod``: build Horovod for the installed torch and MPI."""

from __future__ import annotations

import dataclasses
import sys

from hvdtrain.cli.parser import Parser
from hvdtrain.errors import HvdtrainError
from hvdtrain.install.build import build, pending, prove
from hvdtrain.install.build_plan import GPU_MEANINGS, HOROVOD, plan
from hvdtrain.install.build_probe import probe
from hvdtrain.install.prerequisites import GPU_CHOICES
from hvdtrain.install.record import PROVE_NOW
from hvdtrain.runtime.environment import environ


def parser() -> Parser:
    """Declare the options."""
    what = f"Build Horovod {HOROVOD} for the installed torch and MPI, install it, and test an allreduce on 2 ranks."
    made = Parser(prog="hvdtrain build-horovod", description=what)
    gpu = (
        "how to exchange GPU tensors: nccl, auto (nccl if torch has CUDA), or none (with nvcc through CPU memory,"
        " without it not at all) (default: auto)"
    )
    made.add_argument("--gpu", choices=GPU_CHOICES, default="auto", help=gpu)
    prove = (
        "when to start the two ranks of the test: after the build; later, as on a login node that forbids mpirun; or"
        " now, without a build, as in a job on a compute node (default: after)"
    )
    made.add_argument("--prove", choices=("after", "later", "now"), default="after", help=prove)
    dry_run = "print the settings, files and commands of the build and exit"
    made.add_argument("--dry-run", action="store_true", help=dry_run)
    return made


def main(argv: list[str]) -> int:
    """Run the subcommand and return its exit status."""
    options = parser().parse_args(argv)
    try:
        variables = environ()
        found, later = probe(variables), options.prove == "later"
        if options.prove == "now":
            prove(found, variables, _say)
            print("Two ranks summed a tensor.")
            return 0
        planned = plan(found, gpu=options.gpu)
        if options.dry_run:
            print(dataclasses.replace(planned, steps=pending(planned, prove=not later)))
            return 0
        gpu = GPU_MEANINGS[planned.gpu]
        _say("\n".join([f"Horovod {planned.version} (GPU operations: {gpu}; log: {planned.log})", *planned.notes]))
        build(planned, variables, say=_say, progress=_progress, prove=not later)
    except HvdtrainError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    tested = f"Two ranks summed a tensor with {planned.label.mpi}."
    if later or not planned.provable:
        tested = f"It is not tested. Inside a job: {PROVE_NOW}"
    print(f"Horovod {planned.version} is installed. {tested}")
    return 0


def _say(text: str) -> None:
    print(text, flush=True)


def _progress(text: str) -> None:
    """Overwrite the last line on a terminal; print nothing elsewhere."""
    if sys.stdout.isatty():
        print(f"  {text}", end="\r", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
