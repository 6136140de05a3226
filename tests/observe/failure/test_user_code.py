"""The user's own frame in traces of Python, of faulthandler and of a DataLoader's worker."""

from __future__ import annotations

import importlib.util
import sysconfig

import pytest

from hvdtrain.observe.failure import fault
from hvdtrain.observe.failure.fault import is_installed, user_frame

LIBRARY = f"{sysconfig.get_path('purelib')}/torch/nn/modules/module.py"

RAISED = f"""Traceback (most recent call last):
  File "{fault.__file__}", line 3, in run
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
    assert all(map(is_installed, (fault.__file__, LIBRARY, "<frozen runpy>")))
    assert not is_installed(__file__)
    assert all(importlib.util.find_spec(name) for name in fault._OUTER)
