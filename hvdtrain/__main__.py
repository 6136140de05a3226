"""``python -m hvdtrain`` and the command ``hvdtrain``: run a subcommand, by default `train`."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
from importlib import import_module
from pathlib import Path

from hvdtrain import __version__
from hvdtrain.files import allow_open_files

COMMANDS = {
    "train": ("hvdtrain.cli.train", "train on all ranks of this job (default)"),
    "launch": ("hvdtrain.cli.launch", "start ranks with MPI, Slurm, PBS, LSF, Kubernetes or hvdtrain's driver"),
    "doctor": ("hvdtrain.cli.doctor", "check this machine and installation; show how to fix it"),
    "preflight": ("hvdtrain.cli.preflight", "measure the hosts of a job with its ranks; name bad ones"),
    "timeline": ("hvdtrain.cli.timeline", "explain where a run spent its time; predict changes"),
    "compare": ("hvdtrain.cli.compare", "compare the losses, step times, options and costs of runs"),
    "fit": ("hvdtrain.cli.fit", "predict the memory of a rank, without a GPU and before the job runs"),
    "plan": ("hvdtrain.cli.plan", "say which ranks hold and send what; which options do not go together"),
    "data": ("hvdtrain.cli.data", "make the tokens of a language model's data before a job"),
    "export": ("hvdtrain.cli.export", "write a run's model for transformers, as safetensors, DCP or ONNX"),
    "evaluate": ("hvdtrain.cli.evaluate", "compute the held-out loss and metrics of a checkpoint"),
    "verify": ("hvdtrain.cli.verify", "prove that a run lost no sample and resumes exactly"),
    "replay": ("hvdtrain.cli.replay", "repeat steps of a run with the same bits; find where two runs part"),
    "build-horovod": ("hvdtrain.cli.build_horovod", "build Horovod for the installed torch and MPI"),
    "bundle": ("hvdtrain.cli.bundle", "make a folder to install from without a network"),
}

USAGE = """\
usage: hvdtrain [COMMAND] [OPTIONS]

Train a PyTorch model on one process or on many ranks.

examples:
  hvdtrain --train.steps 100                     train in one process
  hvdtrain launch -np 2 -- --train.steps 100     train on 2 ranks on this host
  mpirun -np 2 python -m hvdtrain [OPTIONS]      the same with your own mpirun
  horovodrun -np 2 python -m hvdtrain [OPTIONS]  the same with horovodrun

commands:
{commands}

common options of train:
  --task TASK             what to train: language_model (default), image,
                          file.py:function or module:function
  --config FILE           read options from a YAML file
                          (hvdtrain train --print_config > FILE writes one)
  --train.steps N         number of optimizer steps; or --train.epochs E
  --train.global_batch N  samples per step, summed over all ranks
  --optimizer.lr LR       peak learning rate
  --precision P           fp32, bf16 or fp16
  --run_dir DIR           folder of the run; the same command resumes it

hvdtrain COMMAND --help lists the options of a command.
Option names accept - and _ alike.
"""


def main(argv: list[str] | None = None) -> int:
    """Run a subcommand and return its exit code: 130 after an interrupt, 141 if the reader of stdout has closed it."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments in (["--help"], ["-h"], ["help"]):
        wrapped = [textwrap.wrap(f"{name:<14} {text}", 77) for name, (_, text) in COMMANDS.items()]
        lines = "\n".join("  " + ("\n" + " " * 17).join(each) for each in wrapped)
        sys.stdout.write(USAGE.format(commands=lines))
        return 0
    allow_open_files()
    if arguments == ["--version"]:
        sys.stdout.write(f"hvdtrain {__version__}\n")
        return 0
    try:
        Path.cwd()
    except OSError as error:
        sys.stderr.write(
            f"hvdtrain: the working directory cannot be used: {error.strerror}\n  next: cd to another one\n"
        )
        return 2
    name = "train"
    if arguments and not arguments[0].startswith("-"):
        name, *arguments = arguments
    if name not in COMMANDS:
        from hvdtrain.cli.parser import unknown_command

        sys.stderr.write(unknown_command(name, COMMANDS))
        return 2
    try:
        code: int = import_module(COMMANDS[name][0]).main(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.stderr.write("hvdtrain: interrupted\n")
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader, such as `head`, has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the interpreter's flush at exit
        return 128 + signal.SIGPIPE
    except Exception as error:  # mostly of the user's code, which some commands import
        from hvdtrain.cli.parser import end

        return end(error, None)
    return code


if __name__ == "__main__":
    sys.exit(main())
