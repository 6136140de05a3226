from __future__ import annotations

import importlib.util
import sysconfig

import pytest
import torch

from hvdtrain.errors import DataError, NonFiniteError
from hvdtrain.observe.failure import fault as fault_module
from hvdtrain.observe.failure.fault import bare_fault, fault, is_installed, out_of_memory, user_frame


class HorovodInternalError(RuntimeError):
    """Known by its name: only one module imports Horovod."""


def _raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except BaseException as caught:
        return caught


def test_an_error_by_its_parts() -> None:
    found = fault(_raised(DataError("what", expected="this", found="that")))
    assert (found.type, found.parts) == ("DataError", {"what": "what", "expected": "this", "found": "that"})
    assert not found.everywhere
    assert fault(_raised(NonFiniteError("inf"))).everywhere
    other = fault(_raised(ValueError("no")))
    assert (other.message, other.parts) == ("no", {})
    assert "test_fault.py" in other.traceback and other.traceback.endswith("ValueError: no\n")
    assert len(fault(_raised(ValueError("x" * 1_000_000))).traceback) < 30_000, "an endless one is cut"


@pytest.mark.parametrize(
    ("error", "ran_out"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), True),
        (OSError(12, "Cannot allocate memory"), True),
        (RuntimeError("no"), False),
        (ValueError("out of memory is what this is not"), False),
    ],
)
def test_memory_that_ran_out_is_known(error: Exception, ran_out: bool) -> None:
    assert out_of_memory(error) == ran_out
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50)
    assert out_of_memory(caught.value), "torch's own"


def _while_handling(error: BaseException, handled: BaseException, *, hidden: bool = False) -> BaseException:
    try:
        try:
            raise handled
        except BaseException:
            if hidden:
                raise error from None
            raise error  # noqa: B904
    except BaseException as caught:
        return caught


def test_what_follows_from_another_ranks_end_is_a_consequence() -> None:
    ended = HorovodInternalError("shut down")
    assert fault(_raised(ended)).consequence
    assert fault(_raised(ValueError("no"), ended)).consequence
    assert not fault(_raised(RuntimeError("no"))).consequence
    assert fault(_while_handling(ValueError("no"), ended)).consequence
    assert fault(_while_handling(KeyError("k"), _while_handling(ValueError("no"), ended))).consequence
    assert not fault(_while_handling(ValueError("no"), ended, hidden=True)).consequence


def test_the_first_of_several_device_faults_is_reported() -> None:
    first = RuntimeError("CUDA error: device-side assert triggered")
    blas = RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(...)`")
    later = RuntimeError("CUDA error: an illegal memory access was encountered")
    found = fault(_while_handling(later, _while_handling(blas, first)))
    assert found.message == str(first) and "illegal memory" not in found.traceback
    for other in (KeyError("k"), HorovodInternalError("shut down")):
        assert fault(_while_handling(later, other)).message == str(later)
    assert fault(_while_handling(ValueError("no"), first)).type == "ValueError", "no fault of the device itself"


class Mute(ValueError):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_what_is_no_text_is_escaped_and_a_failing_str_costs_the_text_alone() -> None:
    broken = b"/data/caf\xe9".decode("utf-8", errors="surrogateescape")
    for found in (fault(_raised(OSError(broken))), fault(_raised(DataError("what", found=broken)))):
        for text in (found.message, found.traceback, *found.parts.values()):
            text.encode("utf-8")
        assert "\\udce9" in found.message
    found = fault(_raised(Mute()))
    assert found.type == "Mute" and "_raised" in found.traceback and not out_of_memory(Mute())
    assert bare_fault(Mute()).type == "Mute" and bare_fault(MemoryError()).memory


LIBRARY = f"{sysconfig.get_path('purelib')}/torch/nn/modules/module.py"

RAISED = f"""Traceback (most recent call last):
  File "{fault_module.__file__}", line 3, in run
    step()
  File "/home/me/own.py", line 13, in my_loss
    return model(x)
  File "{LIBRARY}", line 1779, in _call_impl
    return forward_call(*args)
ValueError: no
"""
WORKER = f"""Traceback (most recent call last):
  File "{LIBRARY}", line 5, in reraise
    raise exception
ValueError: Caught ValueError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "{LIBRARY}", line 9, in fetch
    data = self.dataset[index]
  File "/home/me/data.py", line 7, in __getitem__
    raise ValueError("no")
ValueError: no
"""
CRASH = f"""Fatal Python error: Segmentation fault

Current thread 0x1 (most recent call first):
  File "{LIBRARY}", line 5 in apply
  File "/home/me/own.py", line 13 in my_loss
  File "/home/me/own.py", line 40 in main
"""


@pytest.mark.parametrize(
    ("trace", "innermost_first", "frame"),
    [
        (RAISED, False, "my_loss, /home/me/own.py:13"),
        (WORKER, False, "__getitem__, /home/me/data.py:7"),
        (CRASH, True, "my_loss, /home/me/own.py:13"),
        (RAISED.replace("/home/me/own.py", "<string>"), False, ""),
        ("", False, ""),
    ],
    ids=["raised", "worker", "crash", "none is the user's", "empty"],
)
def test_the_users_frame(trace: str, innermost_first: bool, frame: str) -> None:
    assert user_frame(trace, innermost_first=innermost_first) == frame


def test_what_is_installed() -> None:
    assert all(map(is_installed, (fault_module.__file__, LIBRARY, "<frozen runpy>")))
    assert not is_installed(__file__)
    assert all(importlib.util.find_spec(name) for name in fault_module._OUTER)
