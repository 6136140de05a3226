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
    """Return the innermost frame of the user's code in a trace's text, as ``my_loss, /home/me/own.py:13``.

    The innermost frame of all where none is the user's; empty where the text has no frame. A text and not a traceback
    object, because the error of a DataLoader's worker process carries its trace in its message only.
    """
    frames = list(_FRAME.finditer(trace))
    if not innermost_first:
        frames.reverse()
    own = [frame for frame in frames if not is_installed(frame["file"])]
    return next((f"{f['name']}, {f['file']}:{f['line']}" for f in [*own, *frames]), "")
