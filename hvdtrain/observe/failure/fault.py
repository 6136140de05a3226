"""An error by its parts, as a statement holds it, and the user's own line in its trace.

It works for errors of any class, even with a broken ``__str__``.
"""

from __future__ import annotations

import os
import re
import sysconfig
import traceback
from pathlib import Path

from msgspec import Struct

from hvdtrain.errors import HvdtrainError
from hvdtrain.observe.output import encodable

_OUTER = ("hvdtrain.training.diagnostics.failure_report", "hvdtrain.training.session")
_LONGEST = 20_000
"""Characters of a message or a traceback. The middle of a longer one is left out."""

_DEVICE_ERRORS = ("CUDA error", "CUBLAS_STATUS_", "CUDNN_STATUS_", "CUSPARSE_STATUS_", "cuDNN error")
"""Parts of the messages that torch raises when the device has failed."""

_FRAME = re.compile(r'^\s*File "(?P<file>[^"\n]+)", line (?P<line>\d+),? in (?P<name>.+)$', re.MULTILINE)
"""A frame as Python's traceback module writes it, or as faulthandler does (without the second comma)."""


class Fault(Struct, frozen=True):
    """An error by its parts."""

    type: str
    message: str
    parts: dict[str, str] = {}  # what, expected, found and next of an `HvdtrainError`; empty for other errors
    everywhere: bool = False  # every rank raises the same error
    consequence: bool = False  # the error only reports that another rank failed or died, or that Horovod ended
    memory: bool = False
    traceback: str = ""
    frame: str = ""  # the user's innermost frame, see `user_frame`


def fault(error: BaseException) -> Fault:
    """Describe an error. If the device failed several times, describe the first failure."""
    error = first_of_device(error)
    parts = {}
    if isinstance(error, HvdtrainError):
        named = {"what": error.what, "expected": error.expected, "found": error.found, "next": error.next_step}
        parts = {name: encodable(str(text)) for name, text in named.items() if text}
    inner = error.__traceback__  # without the outer frames that every run has, unless the error was raised in one
    while inner is not None and inner.tb_next and inner.tb_frame.f_globals.get("__name__") in _OUTER:
        inner = inner.tb_next
    trace = "".join(traceback.format_exception(type(error), error, inner))
    is_of_horovod = any(type(e).__name__ == "HorovodInternalError" for e in _chain(error))
    return Fault(
        type=type(error).__name__,
        message=_shortened(_message(error)),
        parts=parts,
        everywhere=getattr(error, "everywhere", False),
        consequence=getattr(error, "consequence", False) or is_of_horovod,
        memory=out_of_memory(error),
        traceback=_shortened(trace),
        frame=encodable(user_frame(trace)),
    )


def first_of_device(error: BaseException) -> BaseException:
    """Return the first failure of the device, where `error` was raised while another one was handled.

    After one failure every call of the device fails, also in cleanup. Other errors are returned unchanged.
    """
    runtime = [one for one in _chain(error) if isinstance(one, RuntimeError)]
    faults = [one for one in runtime if any(sign in _message(one) for sign in _DEVICE_ERRORS)]
    return faults[-1] if faults and faults[0] is error else error


def bare_fault(error: BaseException) -> Fault:
    """Describe an error by its class alone."""
    name = type(error).__name__
    return Fault(name, "", memory=isinstance(error, MemoryError), traceback=f"{name} (no details available)")


def out_of_memory(error: BaseException) -> bool:
    """Return whether memory of the host or the device ran out."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    signs = ("can't allocate memory", "cannot allocate memory", "out of memory")
    return isinstance(error, (RuntimeError, OSError)) and any(sign in _message(error).lower() for sign in signs)


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # the user's own __str__ may raise
        return "(its __str__ failed)"


def _chain(error: BaseException | None) -> list[BaseException]:
    """Return an error, the error that it was raised from or while handling, and so on."""
    chain: list[BaseException] = []
    while error is not None and not any(error is one for one in chain):
        chain.append(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return chain


def _shortened(text: str) -> str:
    half = _LONGEST // 2
    if len(text) > _LONGEST:
        text = f"{text[:half]}\n... {len(text) - 2 * half} characters ...\n{text[-half:]}"
    return encodable(text)


def is_installed(file: str) -> bool:
    """Return whether a source file belongs to hvdtrain, Python or an installed library, not to the user."""
    ours = str(Path(__file__).parents[2])
    folders = [ours, *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))]
    return file.startswith(("<", *(folder + os.sep for folder in folders)))


def user_frame(trace: str, *, innermost_first: bool = False) -> str:
    """Return the innermost frame of the user's code in a trace, as ``my_loss, /home/me/own.py:13``; empty without one.

    It reads text, because an error of a DataLoader's worker process has its trace only in its message.
    """
    own = [frame for frame in _FRAME.finditer(trace) if not is_installed(frame["file"])]
    if not own:
        return ""
    frame = own[0 if innermost_first else -1]
    return f"{frame['name']}, {frame['file']}:{frame['line']}"
