"""The options to tune, and their values. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hvdtrain.config.schema import Config
from hvdtrain.errors import ConfigError

SPEED = (
    *("train.micro_batch", "train.compile", "parallel.bucket_mib", "parallel.engine", "parallel.shard"),
    *("memory.checkpointing", "memory.offload", "loader.workers"),
)
"""Options that change the time of a step, but not the losses."""

_LOGARITHMIC = 8.0
"""Ranges are tried by ratio instead of difference if the largest value is this many times the smallest."""


@dataclass(frozen=True)
class Range:
    """All numbers from `low` to `high`; whole ones if both are whole."""

    name: str
    low: float
    high: float
    is_whole: bool

    def suggest(self, trial: Any) -> float | int:
        """Return the value of a trial."""
        by_ratio = self.low > 0 and self.high / self.low >= _LOGARITHMIC
        if self.is_whole:
            return int(trial.suggest_int(self.name, int(self.low), int(self.high), log=by_ratio))
        return float(trial.suggest_float(self.name, self.low, self.high, log=by_ratio))

    def examples(self) -> list[float | int]:
        """Return the smallest and the largest value."""
        return [int(end) if self.is_whole else end for end in (self.low, self.high)]

    def __str__(self) -> str:
        return f"{self.name}={self.low:g}:{self.high:g}"


@dataclass(frozen=True)
class Choice:
    """One of several values."""

    name: str
    values: tuple[str, ...]

    def suggest(self, trial: Any) -> str:
        """Return the value of a trial."""
        return str(trial.suggest_categorical(self.name, list(self.values)))

    def examples(self) -> list[str]:
        """Return all values."""
        return list(self.values)

    def __str__(self) -> str:
        return f"{self.name}={'|'.join(self.values)}"


Space = Sequence[Range | Choice]


def parse_space(text: str, config: Config, size: int) -> Space:
    """Return the options in ``optimizer.lr=1e-4:1e-2,parallel.compression=none|fp16`` for runs on `size` ranks.

    A name alone has the values of `_default`. Errors: ConfigError: wrong syntax, or a name without default values.
    """
    found = [_parse(part.strip(), config, size) for part in text.split(",")]
    names = [each.name for each in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"--over names {twice[0]} twice")
    return found


def is_about_speed(space: Space) -> bool:
    """Return whether no option changes the losses."""
    return all(each.name in SPEED for each in space)


def _parse(part: str, config: Config, size: int) -> Range | Choice:
    name, _, values = part.removeprefix("--").partition("=")
    if not re.fullmatch(r"[a-z_]\w*(\.[a-z_]\w*)*", name) or (not values and "=" in part):
        raise _wrong(part)
    if not values:
        return _default(name, config, size)
    if ":" not in values:
        choices = tuple(value.strip() for value in values.split("|"))
        if "" in choices or len(set(choices)) < 2 or len(set(choices)) < len(choices):
            raise _wrong(part)
        return Choice(name, choices)
    ends = values.split(":")
    try:
        low, high = map(float, ends)
    except ValueError:
        raise _wrong(part) from None
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise _wrong(part)
    return Range(name, low, high, all(re.fullmatch(r"[+-]?\d+", end.strip()) for end in ends))


def _default(name: str, config: Config, size: int) -> Range | Choice:
    if name == "optimizer.lr":
        return Range(name, config.optimizer.peak_lr / 10, config.optimizer.peak_lr * 10, is_whole=False)
    if name == "train.micro_batch":
        share = max(1, config.train.global_batch // size)
        return Choice(name, tuple(str(1 << power) for power in range(share.bit_length())))
    if name == "parallel.compression":
        return Choice(name, ("none", "fp16", "int8"))
    if name == "parallel.bucket_mib":
        return Choice(name, ("1", "4", "16", "64"))
    raise ConfigError(
        f"--over {name} needs its values",
        expected=f"{name}=LOW:HIGH or {name}=A|B|C",
        found="no values, and hvdtrain has default ones only for optimizer.lr, train.micro_batch, "
        "parallel.compression and parallel.bucket_mib",
    )


def _wrong(part: str) -> ConfigError:
    return ConfigError(
        "--over is invalid",
        expected="NAME, NAME=LOW:HIGH or NAME=A|B|C, joined by commas, such as optimizer.lr=1e-4:1e-2",
        found=repr(part),
    )
