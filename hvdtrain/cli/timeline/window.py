"""``hvdtrain timeline start RUN`` and ``hvdtrain timeline stop RUN``: a window in a job that is running."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from hvdtrain.cli.parser import Parser
from hvdtrain.observe.window_files import Answer
from hvdtrain.timeline.window import request_window, stop_window

_PATIENCE_S = 300.0
_WHAT = {
    "start": "Record steps from the next one on, on all ranks: spans, and Horovod's Timeline where the job can.",
    "stop": "End the window that is being recorded.",
}


def main(command: str, argv: list[str]) -> int:
    """Ask, wait for the answer, print it."""
    options = parser(command).parse_args(argv)
    run: Path = options.run
    if command == "start":
        found = request_window(run, steps=options.steps, profile=options.profile, patience_s=options.patience_s)
        print(_begun(run, found))
    else:
        print(_ended(run, stop_window(run, patience_s=options.patience_s)))
    return 0


def parser(command: str) -> Parser:
    """Declare the options."""
    made = Parser(prog=f"hvdtrain timeline {command}", description=_WHAT[command])
    made.add_argument("run", type=Path, metavar="RUN", help="folder of the run, as the job printed it")
    if command == "start":
        made.add_argument("--steps", type=_count, default=0, metavar="N", help="end by itself after N steps")
        made.add_argument("--profile", action="store_true", help="record torch.profiler too, which slows these steps")
    made.add_argument(
        "--patience_s", type=float, default=_PATIENCE_S, help="for how long a step may take (%(default)g)"
    )
    return made


def _begun(run: Path, found: Answer) -> str:
    name = shlex.quote(str(run))
    if found.last is None:
        text = f"recording from step {found.first} on; end it: hvdtrain timeline stop {name}"
    else:
        text = f"recording steps {found.first} to {found.last}; then: hvdtrain timeline report {name}"
    return text + (f"\nnot recorded: {found.lacks}" if found.lacks else "")


def _ended(run: Path, found: Answer) -> str:
    until = "the end of the run" if found.last is None else str(found.last)
    lines = [f"recorded: steps {found.first} to {until}", *(f"  {file}" for file in found.files)]
    if found.lacks:
        lines.append(f"not recorded: {found.lacks}")
    return "\n".join([*lines, f"explain it: hvdtrain timeline report {shlex.quote(str(run))}"])


def _count(text: str) -> int:
    number = int(text)
    if not 0 < number < 1 << 31:
        raise argparse.ArgumentTypeError("a number of steps, 1 or more")
    return number
