"""Which colour stands for what: cool for work, warm for waiting, amber for input, grey for what is none of them."""

from __future__ import annotations

import zlib

_HUES = {
    "data": "data",
    "copy": "copy",
    "forward": "forward",
    "backward": "backward",
    "forward and backward": "forward",
    "optimizer": "optimizer",
    "clip": "clip",
    "clipping": "clip",
    "clipping and optimizer": "optimizer",
    "wait": "transfer",
    "exposed communication": "transfer",
    "waiting for late ranks": "late",
    "negotiation": "negotiation",
    "queue": "queue",
    "fusion copies": "copies",
    "transfer": "transfer",
    "other": "other",
    "gc": "gc",
    "step": "step",
    "aside": "aside",
    "evaluation": "aside",
    "checkpoint": "aside",
    "evaluations and checkpoints": "aside",
    "rest": "rest",
    "nothing under way": "rest",
    "exchange": "queue",
    "other exchange": "other",
}
MORE = ("a", "b", "c", "d")
"""Colours of names that are not known."""


def hue(name: str, *, exposed: bool = False) -> str:
    """The name of a colour of the style sheet; for a name that is not known, the same one each time."""
    known = _HUES.get(name) or _of_horovod(name)
    return known or ("other" if exposed else MORE[zlib.crc32(name.encode(errors="replace")) % len(MORE)])


def _of_horovod(name: str) -> str | None:
    """The colour of a phase as Horovod's Timeline names it."""
    if not name.isupper():
        return None
    if name.startswith("NEGOTIATE"):
        return "negotiation"
    if "QUEUE" in name or name.startswith("WAIT"):
        return "queue"
    return "copies" if "MEMCPY" in name else "transfer"
