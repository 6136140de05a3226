"""Asking a job that is running for a window of its traces, from any machine that sees the run's folder."""

from __future__ import annotations

import secrets
import shlex
import time
from collections.abc import Callable
from pathlib import Path

from hvdtrain.errors import RunDirectoryError
from hvdtrain.observe.past_journal import is_finished
from hvdtrain.observe.window_files import Answer, Request, read_answer, write_request
from hvdtrain.run_layout import RunLayout

SEEN_WITHIN_S = 15.0
"""A job looks for requests each half second; shared file systems may show it what is new only some seconds later."""
_LOOK_EVERY_S = 0.1


def request_window(
    run: Path,
    *,
    steps: int = 0,
    profile: bool = False,
    patience_s: float,
    sleep: Callable[[float], None] = time.sleep,
) -> Answer:
    """Begin a window at the next step; returns once its first step is known.

    Args:
        run: the run's folder.
        steps: after which it ends by itself; 0 for `stop_window`.
        profile: record torch.profiler too.
        patience_s: for how long to wait for the step under way to end.
        sleep: waits.

    Errors:
        RunDirectoryError: there is no such run, no job answers, or it has nothing to record with.
    """
    found = _ask(run, Request(_new_id(), "start", steps, profile), ("open", "over"), patience_s, sleep)
    if found.state == "none":
        raise RunDirectoryError(
            f"the job of {run} records nothing of it: {found.lacks}", next_step="start it with --observe.timeline auto"
        )
    return found


def stop_window(run: Path, *, patience_s: float, sleep: Callable[[float], None] = time.sleep) -> Answer:
    """End the window that is open; returns once its files are written, three steps later.

    Errors:
        RunDirectoryError: there is no such run, no job answers, or no window is open.
    """
    found = _ask(run, Request(_new_id(), "stop"), ("over",), patience_s, sleep)
    if found.state == "none":
        raise RunDirectoryError(
            f"no window is open in {run}",
            next_step="hvdtrain timeline start {0}, or: hvdtrain timeline report {0}".format(shlex.quote(str(run))),
        )
    return found


def _new_id() -> str:
    return secrets.token_hex(8)


def _ask(
    run: Path, request: Request, wanted: tuple[str, ...], patience_s: float, sleep: Callable[[float], None]
) -> Answer:
    folder = _folder(run)
    try:
        folder.mkdir(exist_ok=True)
        write_request(folder, request)
    except OSError as error:
        raise RunDirectoryError(f"{folder} cannot be written: {error.strerror}") from error
    waited_s, seen = 0.0, False
    while waited_s < (patience_s if seen else SEEN_WITHIN_S):
        found = read_answer(folder)
        if found is not None and found.id == request.id:
            if found.state in (*wanted, "none"):
                return found
            seen = True
        sleep(_LOOK_EVERY_S)
        waited_s += _LOOK_EVERY_S
    if seen:
        raise RunDirectoryError(
            f"the job of {run} has taken the request, but has done no further step within {patience_s:g} s",
            next_step="wait: it acts on it at the end of the step it is doing; --patience_s SECONDS waits longer",
        )
    raise RunDirectoryError(
        f"no job answers in {run}",
        expected="a job that trains there",
        found=f"no answer within {SEEN_WITHIN_S:g} s",
        next_step=f"hvdtrain timeline report {shlex.quote(str(run))} explains what it has left",
    )


def _folder(run: Path) -> Path:
    layout = RunLayout(run)
    if not layout.is_run:
        raise RunDirectoryError(
            f"{run} is not the folder of a run",
            expected=f"a folder with a {layout.journal.name}",
            found="no such folder" if not run.exists() else "none in it",
            next_step="give the run_dir that the job printed, runs/NAME",
        )
    if is_finished(layout.journal):
        raise RunDirectoryError(f"the run in {run} is finished", next_step=f"hvdtrain timeline report {run}")
    return layout.timeline.folder
