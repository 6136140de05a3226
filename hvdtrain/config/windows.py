"""Windows of steps: the values ``FIRST:LAST``, ``all`` and ``off`` of options that record a part of a run."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hvdtrain.errors import ConfigError

FORM = "off, all or FIRST:LAST (step numbers, 1 <= FIRST <= LAST)"
AUTO = "auto"


@dataclass(frozen=True)
class Window:
    """Steps `first` to `last`, both included. Steps count from 1."""

    first: int = 1
    last: int | None = None  # None means the run's last. If it is below `first`, the window is empty and false

    def __contains__(self, step: int) -> bool:
        return self.first <= step and (self.last is None or step <= self.last)

    def __bool__(self) -> bool:
        return not self.is_over(self.first)

    def is_over(self, step: int) -> bool:
        """Return whether `step` is after the window."""
        return self.last is not None and step > self.last


ALL = Window()
OFF = Window(last=0)


def parse_window(text: str, option: str, *words: str) -> Window:
    """Read a window of steps: ``off``, ``all`` or ``FIRST:LAST``.

    Errors: ConfigError: it is none of these, FIRST is 0, or FIRST is after LAST. The message names `option`, and
    `words`, its other values, which the caller handles.
    """
    if text in ("off", "all"):
        return OFF if text == "off" else ALL
    found = re.fullmatch(r"([1-9][0-9]{0,17}):([1-9][0-9]{0,17})", text)
    if found and int(found[1]) <= int(found[2]):
        return Window(int(found[1]), int(found[2]))
    raise ConfigError(f"--{option} is {text!r}, which is not a window of steps", expected=", ".join((*words, FORM)))
