"""Stretches of steps: what ``FIRST:LAST``, ``all`` and ``off`` mean in options that record a part of a run."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hvdtrain.errors import ConfigError

FORM = "off, all or FIRST:LAST (numbers of steps, 1 <= FIRST <= LAST)"
AUTO = "auto"


@dataclass(frozen=True)
class Window:
    """Steps `first` to `last`, both of them included; steps count from 1.

    Attributes:
        first: the first step of the window.
        last: its last step; None for the run's last. Below `first`, no step is in it, and it is false.
    """

    first: int = 1
    last: int | None = None

    def __contains__(self, step: int) -> bool:
        return self.first <= step and not self.is_over(step)

    def __bool__(self) -> bool:
        return not self.is_over(self.first)

    def is_over(self, step: int) -> bool:
        """Whether `step` comes after the window."""
        return self.last is not None and step > self.last


ALL = Window()
OFF = Window(last=0)


def parse_window(text: str, option: str, *words: str) -> Window:
    """Read a window of steps.

    Args:
        text: ``off``, ``all`` or ``FIRST:LAST``.
        option: whose value it is, named in the error.
        words: what else the option may be, which the caller has looked for already.

    Errors:
        ConfigError: it is none of them, or FIRST is 0 or after LAST.
    """
    if text in ("off", "all"):
        return OFF if text == "off" else ALL
    found = re.fullmatch(r"([1-9][0-9]{0,17}):([1-9][0-9]{0,17})", text)
    if found and int(found[1]) <= int(found[2]):
        return Window(int(found[1]), int(found[2]))
    raise ConfigError(f"--{option} has a value that makes no sense", expected=", ".join((*words, FORM)), found=text)
