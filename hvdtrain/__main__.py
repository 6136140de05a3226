"""``python -m hvdtrain`` and the command ``hvdtrain``: picks the subcommand, `train` without one."""

from __future__ import annotations

import sys
from importlib import import_module

from hvdtrain import __version__

COMMANDS = {
    "train": ("hvdtrain.cli.train", "train on all ranks of this job (the default)"),
    "launch": ("hvdtrain.cli.launch", "start ranks by what is here: MPI, Slurm, Kubernetes, our own elastic driver"),
    "doctor": ("hvdtrain.cli.doctor", "what does not fit on this machine, with its cure; the tuning chosen"),
    "timeline": ("hvdtrain.cli.timeline", "explain a run: report, merge, diff, whatif; start and stop a window"),
    "verify": ("hvdtrain.cli.verify", "prove a run: every sample once; a resumed run equals one that went through"),
    "config": ("hvdtrain.cli.config", "init: write a file of all options of training, each with what it does"),
    "completion": ("hvdtrain.cli.completion", "completion of commands and options by TAB, for bash, zsh and fish"),
    "build-horovod": ("hvdtrain.cli.build_horovod", "build Horovod for the torch and MPI at hand"),
    "bundle": ("hvdtrain.cli.bundle", "a folder with everything to install where no registry is reached"),
}

USAGE = """\
usage: hvdtrain [COMMAND] [OPTIONS]
       horovodrun -np 2 python -m hvdtrain [OPTIONS]
       mpirun -np 2 python -m hvdtrain [OPTIONS]
       hvdtrain launch -np 2 -- [OPTIONS]

commands:
{commands}

options of train that are wanted most:
  --task NAME|file.py:function|module:function   what to train (language_model)
  --config FILE          options from a YAML file; hvdtrain config init writes one
  --train.steps N        optimizer steps; --train.epochs E instead
  --train.global_batch N samples a step over all ranks
  --optimizer.lr LR      peak learning rate
  --precision fp32|bf16|fp16
  --run_dir DIR          where the run is kept; the same command goes on where it was

all of them:  hvdtrain train --help
"""


def main(argv: list[str] | None = None) -> int:
    """Run a subcommand; its exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments in (["--help"], ["-h"], ["help"]):
        lines = "\n".join(f"  {name:<14} {text}" for name, (_, text) in COMMANDS.items())
        sys.stdout.write(USAGE.format(commands=lines))
        return 0
    if arguments == ["--version"]:
        sys.stdout.write(f"hvdtrain {__version__}\n")
        return 0
    name = "train"
    if arguments and not arguments[0].startswith("-"):
        name, *arguments = arguments
    if name not in COMMANDS:
        sys.stderr.write(f"hvdtrain: there is no command {name!r}; there are {', '.join(COMMANDS)}\n")
        return 2
    try:
        code: int = import_module(COMMANDS[name][0]).main(arguments)
    except Exception as error:  # of a user's code above all, which some commands import
        from hvdtrain.cli.ending import end, show
        from hvdtrain.observe.failure.failure_output import FailureOutput

        return end(error, None, FailureOutput(show))
    return code


if __name__ == "__main__":
    sys.exit(main())
