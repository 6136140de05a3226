"""Request traces of a running job, from any machine that has access to the run's folder."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from pathlib import Path

from hvdtrain.errors import RunDirectoryError
from hvdtrain.observe.live_window import Answer, Request, read_answer, write_request
from hvdtrain.observe.past_journal import is_finished
from hvdtrain.run_layout import RunLayout

SEEN_WITHIN_S = 15.0
"""A job polls for requests every 0.5 s. A shared file system may delay them by some seconds."""
_LOOK_EVERY_S = 0.1


def ask_window(
    run: Path, request: Request, *, patience_s: float, sleep: Callable[[float], None] = time.sleep
) -> Answer:
    """Start recording at the next step, and return when it is known; or stop, and return when the files are written.

    Args:
        run: the run's folder.
        request: to stop takes three steps.
        patience_s: seconds to wait for the current step to end.
        sleep: waits.

    Errors:
        RunDirectoryError: there is no such run, no job answers, or it cannot record, or is not recording.
    """
    folder = _folder(run)
    try:
        folder.mkdir(exist_ok=True)
        write_request(folder, request)
    except OSError as error:
        raise RunDirectoryError(f"{folder} cannot be written: {error.strerror}") from error
    waited_s, has_answered = 0.0, False
    while waited_s < (patience_s if has_answered else SEEN_WITHIN_S):
        found = read_answer(folder)
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
