"""Find the user's own code in stack traces."""

from __future__ import annotations

import os
import re
import sysconfig
from pathlib import Path

_FRAME = re.compile(r'^\s*File "(?P<file>[^"\n]+)", line (?P<line>\d+),? in (?P<name>.+)$', re.MULTILINE)
"""A frame as Python's traceback module writes it, or as faulthandler does (without the second comma)."""


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
