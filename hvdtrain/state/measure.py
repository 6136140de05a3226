"""What makes one evaluation better than another."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from hvdtrain.errors import ConfigError


@dataclass(frozen=True)
class Measure:
    """The held-out loss or a metric of the task, and whether more of it is better."""

    name: str = "loss"
    more: bool = False

    @classmethod
    def parse(cls, text: str) -> Measure:
        """Read ``NAME``, ``NAME:min`` or ``NAME:max``. Errors: ConfigError."""
        name, _, direction = text.partition(":")
        if not name or direction not in ("", "min", "max"):
            raise ConfigError(
                f"invalid --checkpoint.best {text!r}",
                expected="loss, or a metric of the task and what is better: accuracy:max",
            )
        return cls(name, direction == "max")

    def score(self, loss: float | None, metrics: Mapping[str, float]) -> float | None:
        """Return a number that is lower for a better evaluation; None without a finite value."""
        value = loss if self.name == "loss" else metrics.get(self.name)
        if value is None or not math.isfinite(value):
            return None
        return -value if self.more else value

    def check(self, metrics: Mapping[str, float]) -> None:
        """Check that evaluations have the value. Errors: ConfigError, on every rank."""
        if self.name != "loss" and self.name not in metrics:
            raise ConfigError(
                f"--checkpoint.best {self.name}: evaluations have no such value",
                expected=", ".join(["loss", *metrics]),
                everywhere=True,
            )
