"""How a command ends after an error: the message and the exit code."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback

from hvdtrain.errors import HvdtrainError, exit_code
from hvdtrain.observe.failure.fault import is_installed
from hvdtrain.observe.output import FailureOutput
from hvdtrain.runtime.environment import RankInfo, rank_label

EXIT_OF_SIGNAL = {"SIGTERM": 143, "SIGINT": 130}
_WAIT_FOR_OTHERS_S = 5.0


def end(error: BaseException, info: RankInfo | None, output: FailureOutput | None = None) -> int:
    """Print the error to stderr, unless the failure card of `output` did, and return the exit code.

    In a job of several ranks, end this process immediately; the launcher ends the others. Each rank prints its own
    error if there is no shared run folder yet. Rank 0 prints an error that all ranks have.
    """
    several = info is not None and info.size > 1
    if output is None or not output.reported:
        is_consequence = getattr(error, "consequence", False) or type(error).__name__ == "HorovodInternalError"
        is_of_rank_0 = getattr(error, "everywhere", False) and info is not None and info.rank != 0
        if several and (is_consequence or is_of_rank_0):  # another rank has the same error, or a more specific one
            # Let the other rank print first: the launcher ends it as soon as this one exits. If nothing ends this rank
            # in the meantime, it was the only one with the error. A launcher that ends ranks by SIGTERM may report
            # their exit code as that of the job.
            signal.signal(signal.SIGTERM, lambda *_: os._exit(_code(error)))
            time.sleep(_WAIT_FOR_OTHERS_S)
        show(_report(error, info))
    sys.stdout.flush()
    if several:
        # A normal exit would wait for the other ranks in Horovod's shutdown, while they wait for this one.
        os._exit(_code(error))
    return _code(error)


def show(text: str) -> None:
    """Write to stderr and flush."""
    sys.stderr.write(text)
    sys.stderr.flush()


def _code(error: BaseException) -> int:
    return EXIT_OF_SIGNAL["SIGINT"] if isinstance(error, KeyboardInterrupt) else exit_code(error)


def _report(error: BaseException, info: RankInfo | None) -> str:
    label = f" on {rank_label(info)}" if info and info.size > 1 else ""
    if isinstance(error, HvdtrainError):
        return f"hvdtrain: {type(error).__name__}{label}: {error}\n"
    if isinstance(error, KeyboardInterrupt):
        return "hvdtrain: interrupted\n"
    if isinstance(error, SyntaxError) and error.filename and not is_installed(error.filename):
        text = "".join(traceback.format_exception_only(error))
        return f"{text}hvdtrain: {error.filename} cannot be imported{label}, see above\n"
    trace = traceback.TracebackException.from_exception(error)
    users = [number for number, frame in enumerate(trace.stack) if not is_installed(frame.filename)]
    if users:
        last = trace.stack[users[-1]]
        del trace.stack[: users[0]]
        where = f"{last.name}, {last.filename}:{last.lineno}"
        return f"{''.join(trace.format())}hvdtrain: {type(error).__name__}{label} in {where}, see above\n"
    return f"{''.join(trace.format())}hvdtrain: unexpected error{label}, see above\n"
