"""``hvdtrain timeline start RUN`` and ``hvdtrain timeline stop RUN``: record traces of a running job."""

from __future__ import annotations

import argparse
import secrets
import shlex
from pathlib import Path

from hvdtrain.cli.parser import Parser, local
from hvdtrain.observe.live_window import Answer, Request
from hvdtrain.timeline.window import ask_window

_PATIENCE_S = 300.0
_DESCRIPTIONS = {
    "start": "Record all ranks from the next step on: spans, and Horovod's Timeline if the job supports it.",
    "stop": "Stop the recording and wait for its files.",
}


def main(command: str, argv: list[str]) -> int:
    """Send the request, wait for the answer, print it."""
    options = parser(command).parse_args(argv)
    run: Path = options.run
    if command == "start":
        request = Request(secrets.token_hex(8), "start", options.steps, options.profile)
        print(_begun(run, ask_window(run, request, patience_s=options.patience_s)))
    else:
        request = Request(secrets.token_hex(8), "stop")
        print(_ended(run, ask_window(run, request, patience_s=options.patience_s)))
    return 0


def parser(command: str) -> Parser:
    """Declare the options."""
    made = Parser(prog=f"hvdtrain timeline {command}", description=_DESCRIPTIONS[command])
    made.add_argument("run", type=local, metavar="RUN", help="the run's folder, as the job printed it")
    if command == "start":
        steps = "stop after N steps (default: record until stopped)"
        made.add_argument("--steps", type=_count, default=0, metavar="N", help=steps)
        made.add_argument("--profile", action="store_true", help="record torch.profiler too, which slows these steps")
    patience = "maximum seconds to wait for the job to finish its current step (default: %(default)g)"
    made.add_argument("--patience_s", type=float, default=_PATIENCE_S, metavar="S", help=patience)
    return made


def _begun(run: Path, found: Answer) -> str:
    name = shlex.quote(str(run))
    if found.last is None:
        text = f"recording from step {found.first} on; to stop: hvdtrain timeline stop {name}"
    else:
        text = f"recording steps {found.first} to {found.last}; then: hvdtrain timeline report {name}"
    return text + (f"\nnot recorded: {found.lacks}" if found.lacks else "")


def _ended(run: Path, found: Answer) -> str:
    until = "the end of the run" if found.last is None else str(found.last)
    lines = [f"recorded: steps {found.first} to {until}", *(f"  {file}" for file in found.files)]
    if found.lacks:
        lines.append(f"not recorded: {found.lacks}")
    return "\n".join([*lines, f"next: hvdtrain timeline report {shlex.quote(str(run))}"])


def _count(text: str) -> int:
    number = int(text)
    if not 0 < number < 1 << 31:
        raise argparse.ArgumentTypeError("expected a number of steps >= 1")
    return number
