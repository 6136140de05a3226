"""Colours by name: cool for work, warm for waiting, amber for input, grey for the rest."""

from __future__ import annotations

import zlib

_OWN = ("data", "copy", "forward", "backward", "optimizer", "clip", "negotiation", "queue", "transfer", "other", "gc")
_HUES = {name: name for name in (*_OWN, "step", "aside", "rest")} | {
    "forward and backward": "forward",
    "clipping": "clip",
    "clipping and optimizer": "optimizer",
    "wait": "transfer",
    "exposed communication": "transfer",
    "waiting for late ranks": "late",
    "fusion copies": "copies",
    "evaluation": "aside",
    "checkpoint": "aside",
    "evaluations and checkpoints": "aside",
    "nothing under way": "rest",
    "exchange": "queue",
    "other exchange": "other",
}
MORE = ("a", "b", "c", "d")
"""Colours of unknown names."""


def hue(name: str, *, exposed: bool = False) -> str:
    """Return the name of a colour of the style sheet. An unknown name always gets the same one."""
    known = _HUES.get(name) or _of_horovod(name)
    return known or ("other" if exposed else MORE[zlib.crc32(name.encode(errors="replace")) % len(MORE)])


def _of_horovod(name: str) -> str | None:
    """Return the colour of a phase by its name in Horovod's Timeline."""
    if not name.isupper():
        return None
    if name.startswith("NEGOTIATE"):
        return "negotiation"
    if "QUEUE" in name or name.startswith("WAIT"):
        return "queue"
    return "copies" if "MEMCPY" in name else "transfer"
