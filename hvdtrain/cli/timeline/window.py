"""``hvdtrain timeline start RUN`` and ``hvdtrain timeline stop RUN``: record traces of a running job.

From any machine that has access to the run's folder.
"""

from __future__ import annotations

import secrets
import shlex
import time
from collections.abc import Callable
from pathlib import Path

from hvdtrain.cli.parser import Parser, local, positive
from hvdtrain.errors import RunDirectoryError
from hvdtrain.observe.live_window import Answer, Request, read_message, write_message
from hvdtrain.observe.past_journal import is_finished
from hvdtrain.run_layout import RunLayout

SEEN_WITHIN_S = 15.0
"""A job polls for requests every 0.5 s. A shared file system may delay them by some seconds."""
_LOOK_EVERY_S = 0.1
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
        made.add_argument("--steps", type=positive, default=0, metavar="N", help=steps)
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
    lines += [f"not recorded: {found.lacks}"] if found.lacks else []
    return "\n".join([*lines, f"next: hvdtrain timeline report {shlex.quote(str(run))}"])


def ask_window(
    run: Path, request: Request, *, patience_s: float, sleep: Callable[[float], None] = time.sleep
) -> Answer:
    """Start recording at the next step, and return when it is known; or stop, and return when the files are written.

    It waits `patience_s` for the current step to end; to stop takes three steps.

    Errors: RunDirectoryError: there is no such run, no job answers, or it cannot record, or is not recording.
    """
    folder = _folder(run)
    try:
        folder.mkdir(exist_ok=True)
        write_message(folder, request)
    except OSError as error:
        raise RunDirectoryError(f"{folder} cannot be written: {error.strerror}") from error
    waited_s, has_answered = 0.0, False
    while waited_s < (patience_s if has_answered else SEEN_WITHIN_S):
        found = read_message(folder, Answer)
        if found is not None and found.id == request.id:
            if found.state == "none":
                raise _refusal(run, request, found)
            if found.state == "over" or (found.state == "open" and request.action == "start"):
                return found
            has_answered = True
        sleep(_LOOK_EVERY_S)
        waited_s += _LOOK_EVERY_S
    if has_answered:
        raise RunDirectoryError(
            f"the job of {run} accepted the request but finished no step within {patience_s:g} s",
            next_step="it records after the current step; --patience_s SECONDS waits longer",
        )
    raise RunDirectoryError(
        f"no job answers in {run}",
        expected="a running job",
        found=f"no answer within {SEEN_WITHIN_S:g} s",
        next_step=f"hvdtrain timeline report {shlex.quote(str(run))} analyses its files",
    )


def _refusal(run: Path, request: Request, found: Answer) -> RunDirectoryError:
    if request.action == "start":
        return RunDirectoryError(
            f"the job of {run} cannot record: {found.lacks}", next_step="start it with --observe.timeline auto"
        )
    return RunDirectoryError(
        f"the job of {run} is not recording",
        next_step="hvdtrain timeline start {0}, or: hvdtrain timeline report {0}".format(shlex.quote(str(run))),
    )


def _folder(run: Path) -> Path:
    layout = RunLayout(run)
    if not layout.is_run:
        raise RunDirectoryError(
            f"{run} is not a run folder",
            expected=f"a folder with a {layout.journal.name}",
            found="no such folder" if not run.exists() else "no such file",
            next_step="name the run_dir that the job printed, such as runs/NAME",
        )
    if is_finished(layout.journal):
        raise RunDirectoryError(
            f"the run in {run} is finished, so there is nothing to record", next_step=f"hvdtrain timeline report {run}"
        )
    return layout.timeline.folder
