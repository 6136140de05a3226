"""How many ranks divide the experts, or each matrix, of a model, and which hold copies of the same part. Pure.

Ranks that divide a matrix (tp) are neighbours, because they exchange the most; then those that divide the experts (ep).
The others are copies of them, with other samples.
"""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.errors import ConfigError


@dataclass(frozen=True)
class Dimensions:
    """Numbers of ranks.

    Attributes:
        tp: that divide each matrix of a block, and have the same samples.
        ep: that divide the experts of a layer; a multiple of `tp`, or 1.
    """

    tp: int = 1
    ep: int = 1

    def __bool__(self) -> bool:
        return self != ONE

    @property
    def experts(self) -> int:
        """Number of ranks that divide the experts: those of `tp`, too, because they have the same samples."""
        return self.ep if self.ep > 1 else self.tp

    @property
    def options(self) -> str:
        """The options of the command line."""
        return " ".join(f"--parallel.{name} {value}" for name, value in vars(self).items() if value > 1)

    def check(self, size: int) -> None:
        """Check that `size` ranks have these dimensions.

        Errors:
            ConfigError: they do not; with the nearest ones that fit.
        """
        if self._fits(size):
            return
        pairs = [Dimensions(tp, ep) for tp in range(1, size + 1) for ep in range(1, size + 1)]
        fitting = [each for each in pairs if each and each._fits(size)]
        nearest = min(fitting, key=lambda each: abs(each.tp - self.tp) + abs(each.ep - self.ep), default=None)
        raise ConfigError(
            f"{size} rank(s) do not have the dimensions {self.options}",
            expected="--parallel.tp and --parallel.ep that divide the number of ranks, and a --parallel.ep that is 1 or"
            " a multiple of --parallel.tp",
            next_step=f"{nearest.options}, or another number of ranks" if nearest else "start more ranks",
            everywhere=True,
        )

    def _fits(self, size: int) -> bool:
        return size % self.tp == 0 and size % self.ep == 0 and (self.ep == 1 or self.ep % self.tp == 0)

    def block(self, rank: int, width: int) -> list[int]:
        """Return the ranks that together hold what `width` ranks divide, with this one."""
        first = rank // width * width
        return list(range(first, first + width))

    def copies(self, rank: int, size: int, width: int) -> list[int]:
        """Return the ranks that hold the same part, with this one, of what `width` of `size` ranks divide."""
        return list(range(rank % width, size, width))

    def groups(self, size: int) -> list[list[int]]:
        """Return the ranks of each group that exchanges apart. Errors: ConfigError: see `check`."""
        if not self or size == 1:
            return []
        self.check(size)
        found = [self.copies(rank, size, self.tp) for rank in range(self.tp)]
        found += [self.copies(rank, size, self.experts) for rank in range(self.experts)]
        found += [self.block(rank, self.experts) for rank in range(0, size, self.experts)]
        return [list(ranks) for ranks in dict.fromkeys(map(tuple, found)) if 1 < len(ranks) < size]

    def table(self, size: int) -> list[str]:
        """Return lines that say which of `size` ranks do what together."""
        rows = [("the same samples, and a part of each matrix", self.tp), ("a part of the experts", self.experts)]
        lines = [f"{size // self.tp} of {size} ranks have other samples"]
        for what, width in rows:
            if width > 1:
                blocks = [f"{first}-{first + width - 1}" for first in range(0, size, width)]
                shown = ", ".join(blocks[:4]) + (", ..." if blocks[4:] else "")
                lines.append(f"  {what}: ranks {shown}; {size // width} x each part")
        return lines

    def samples(self, rank: int, size: int) -> tuple[int, int, bool]:
        """Return the place of a rank among those with other samples, their number, and whether its loss counts.

        Of the ranks with the same samples, one counts.
        """
        return rank // self.tp, size // self.tp, rank % self.tp == 0


ONE = Dimensions()
"""Data-parallel ranks only: each holds the whole model, unless its engine divides it."""
