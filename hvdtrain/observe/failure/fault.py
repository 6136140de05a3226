"""An error by its parts, as a statement holds it; made of any error, however strange."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field
from types import TracebackType

from hvdtrain.errors import HvdtrainError
from hvdtrain.observe.encodable import encodable

_OUTER = ("hvdtrain.training.diagnostics.failures", "hvdtrain.training.session")
_LONGEST = 20_000
"""Characters of a message or a traceback; the middle of a longer one is left out."""


_OF_DEVICE = ("CUDA error", "CUBLAS_STATUS_", "CUDNN_STATUS_", "CUSPARSE_STATUS_", "cuDNN error")
"""In the text of the errors that torch raises where the device has failed."""


@dataclass(frozen=True)
class Fault:
    """An error by its parts.

    Attributes:
        type: name of its class.
        message: its text.
        parts: what, expected, found and next of an `HvdtrainError`; empty for others.
        everywhere: every rank raises the same.
        consequence: it tells only that another rank went, or Horovod ended.
        memory: it was raised for want of memory.
        traceback: as Python prints it.
    """

    type: str
    message: str
    parts: dict[str, str] = field(default_factory=dict)
    everywhere: bool = False
    consequence: bool = False
    memory: bool = False
    traceback: str = ""


def fault(error: BaseException) -> Fault:
    """An error by its parts; of several faults of the device the first."""
    error = first_of_device(error)
    parts = {}
    if isinstance(error, HvdtrainError):
        named = {"what": error.what, "expected": error.expected, "found": error.found, "next": error.next_step}
        parts = {name: encodable(str(text)) for name, text in named.items() if text}
    return Fault(
        type=type(error).__name__,
        message=_shortened(_message(error)),
        parts=parts,
        everywhere=getattr(error, "everywhere", False),
        consequence=any(type(e).__name__ == "HorovodInternalError" for e in _chain(error)),
        memory=out_of_memory(error),
        traceback=_shortened("".join(traceback.format_exception(type(error), error, _inner(error.__traceback__)))),
    )


def first_of_device(error: BaseException) -> BaseException:
    """Return the fault of the device that came first, where `error` was raised while another was handled.

    After one fault every call of the device fails, those that clean up too. Any other error is returned as it is.
    """
    faults = [found for found in _chain(error) if _is_of_device(found)]
    return faults[-1] if faults and faults[0] is error else error


def _is_of_device(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and any(sign in _message(error) for sign in _OF_DEVICE)


def bare_fault(error: BaseException) -> Fault:
    """An error by its class alone."""
    name = type(error).__name__
    return Fault(name, "", memory=isinstance(error, MemoryError), traceback=f"{name} (nothing more can be told of it)")


def out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, the host's or the device's."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = _message(error).lower()
    return isinstance(error, (RuntimeError, OSError)) and (
        "can't allocate memory" in text or "cannot allocate memory" in text or "out of memory" in text
    )


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # a __str__ of a user's own
        return "(its text cannot be made)"


def _inner(trace: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames that every run goes through, unless the error is of these."""
    while trace is not None and trace.tb_next and trace.tb_frame.f_globals.get("__name__") in _OUTER:
        trace = trace.tb_next
    return trace


def _chain(error: BaseException | None) -> list[BaseException]:
    """An error, what it was raised from or while handling, and so on."""
    found: list[BaseException] = []
    while error is not None and not any(error is one for one in found):
        found.append(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return found


def _shortened(text: str) -> str:
    half = _LONGEST // 2
    if len(text) > _LONGEST:
        text = f"{text[:half]}\n... {len(text) - 2 * half} characters ...\n{text[-half:]}"
    return encodable(text)
