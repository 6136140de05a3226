"""How many ranks divide the matrices, sequences, experts or layers, and which hold copies of the same part. Pure.

Ranks that divide a matrix (tp) are neighbours, because they exchange the most; then those that divide a sequence (cp),
and those that divide the experts (ep); then copies of them, with other samples. All of these have the same layers: they
are a stage of a pipeline (pp). The stages follow each other, because they exchange the least.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product, starmap
from typing import Any

from hvdtrain.errors import ETC, ConfigError, listed


@dataclass(frozen=True)
class Dimensions:
    """Numbers of ranks."""

    tp: int = 1  # that divide each matrix of a block, and have the same samples
    ep: int = 1  # that divide the experts of a layer; a multiple of `tp`, or 1
    cp: int = 1  # that divide each sequence, and have the same samples
    pp: int = 1  # that divide the layers, as stages of a pipeline, and have the same samples
    virtual_stages: int = 1  # no number of ranks, but of the groups of layers that each rank of a pipeline has

    @staticmethod
    def of(options: Mapping[str, Any]) -> Dimensions:
        """Return those of the options of `--parallel`; a config may lack some."""
        return Dimensions(**{name: options.get(name, default) for name, default in vars(ONE).items()})

    def __bool__(self) -> bool:
        return self != ONE

    @property
    def divides_model(self) -> bool:
        """Whether ranks hold parts of the model; else each has all of it, unless its engine divides it."""
        return max(self.tp, self.ep, self.pp) > 1

    @property
    def experts(self) -> int:
        """Number of ranks that divide the experts: those of `tp`, too, because they have the same samples."""
        return self.ep if self.ep > 1 else self.tp

    @property
    def same_samples(self) -> int:
        """Number of ranks that have the same samples: together they run a pass."""
        return self.tp * self.cp * self.pp

    @property
    def options(self) -> str:
        """The options of the command line."""
        return " ".join(f"--parallel.{name} {value}" for name, value in vars(self).items() if value > 1)

    def check(self, size: int, where: str = "") -> None:
        """Check that `size` ranks have these dimensions; `where` they are, if they are not all.

        Errors: ConfigError: they do not; with the nearest ones that fit.
        """
        if self.virtual_stages > 1 and self.pp == 1:
            raise ConfigError(
                f"--parallel.virtual_stages {self.virtual_stages} without a pipeline",
                expected="--parallel.pp 2 or more",
                next_step="set it, or leave out --parallel.virtual_stages",
            )
        if self._fits(size):
            return
        divisors = [n for n in range(1, size + 1) if size % n == 0]
        fitting = [each for each in starmap(Dimensions, product(divisors, repeat=4)) if each and each._fits(size)]

        def distance(other: Dimensions) -> int:
            return sum(abs(value - getattr(other, name)) for name, value in vars(self).items())

        nearest = min(fitting, key=distance, default=None)
        raise ConfigError(
            f"{size} rank(s){where and f' {where}'} do not have the dimensions {self.options}",
            expected="--parallel.pp divides the number of ranks; --parallel.tp times --parallel.cp, and --parallel.ep"
            " divide the ranks of a stage; --parallel.ep is 1 or a multiple of --parallel.tp",
            next_step=f"{nearest.options}, or another number of ranks" if nearest else "start more ranks",
        )

    def check_passes(self, size: int, passes: int) -> None:
        """Check that each pipeline has as many of the `passes` of a step as stages, or none would be busy.

        Errors: ConfigError: it has fewer.
        """
        own = self.own_passes(size, passes)
        if self.pp > 1 and own < self.pp:
            raise ConfigError(
                f"{self.options}, but a pipeline has {own} micro-batch(es) in a step",
                expected=f"{self.pp} or more, as many as stages; four times as many keep them busy",
                next_step="a larger --train.global_batch, a smaller --train.micro_batch, or fewer stages",
            )
        if self.virtual_stages > 1 and passes % (self.pp * (size // self.same_samples)):
            raise ConfigError(
                f"{self.options}, but {size // self.same_samples} pipeline(s) have {passes} micro-batches in a step",
                expected=f"a multiple of {self.pp} micro-batches for each pipeline, the number of stages",
                next_step="another --train.global_batch or --train.micro_batch, or leave out --parallel.virtual_stages",
            )

    def bubble(self, size: int, passes: int) -> float:
        """Return the share of a step with `passes`, of all pipelines, in which stages wait at least."""
        wait = self.pp - 1
        return wait / (wait + self.own_passes(size, passes) * self.virtual_stages) if wait else 0.0

    def own_passes(self, size: int, passes: int) -> int:
        """Return how many of the `passes` of a step each group of ranks with the same samples has at least."""
        return passes // max(1, size // self.same_samples)

    def _fits(self, size: int) -> bool:
        fits_stages = size % self.same_samples == 0 and size % (self.ep * self.pp) == 0
        return fits_stages and (self.ep == 1 or self.ep % self.tp == 0)

    def block(self, rank: int, width: int) -> list[int]:
        """Return the ranks that together hold what `width` ranks divide, with this one."""
        first = rank // width * width
        return list(range(first, first + width))

    def copies(self, rank: int, size: int, width: int, within: int | None = None) -> list[int]:
        """Return the ranks that hold the same part, with this one, of what `width` ranks of its stage divide.

        `within`: only those of its block of this size, which have the whole model.
        """
        ranks = self.stage(rank, size) if within is None else self.block(rank, within)
        return list(ranks[rank % width :: width])

    def stage(self, rank: int, size: int) -> range:
        """Return the ranks with the same layers as this one of `size`."""
        length = size // self.pp
        first = rank // length * length
        return range(first, first + length)

    def ends(self, rank: int, size: int) -> list[int]:
        """Return the ranks that hold what the first stage and the last one have whole, with this one if it does."""
        return [other for end in (0, size - 1) for other in self.stage(end, size)[rank % self.tp :: self.tp]]

    def pipeline(self, rank: int, size: int) -> list[int]:
        """Return the ranks that a micro-batch of this one passes through, in this order."""
        length = size // self.pp
        return list(range(rank % length, size, length))

    def sequence(self, rank: int) -> list[int]:
        """Return the ranks that divide the sequences of a rank, with it, in the order of the parts."""
        width = self.tp * self.cp
        first = rank // width * width + rank % self.tp
        return list(range(first, first + width, self.tp))

    def groups(self, size: int, within: int | None = None) -> list[list[int]]:
        """Return the ranks of each group that exchanges apart; `within`: see `copies`. Errors: those of `check`."""
        if not self or size == 1:
            return []
        self.check(size)
        if within is not None:
            self.check(within, IN_GROUP)
            return [
                [first + rank for rank in ranks] for first in range(0, size, within) for ranks in self.groups(within)
            ]
        stages, widths = self.pipeline(0, size), (1, self.tp, self.experts)
        found = [self.copies(first + part, size, each) for first in stages for each in widths for part in range(each)]
        found += [self.ends(part, size) for part in range(self.tp) if self.pp > 1]
        found += [self.block(rank, self.experts) for rank in range(0, size, self.experts)]
        found += [self.sequence(rank) for rank in range(size)]
        return [list(ranks) for ranks in dict.fromkeys(map(tuple, found)) if 1 < len(ranks) < size]

    def table(self, size: int) -> list[str]:
        """Return lines that say which of `size` ranks do what together."""
        groups = size // self.same_samples
        own = f"{groups} groups of ranks have their own samples" if groups > 1 else "all ranks have the same samples"
        lines = [own if self.same_samples > 1 else "each rank has its own samples"]
        tensors, experts = ([self.block(rank, width) for rank in range(size)] for width in (self.tp, self.experts))
        length = size // self.pp
        if self.pp > 1:
            stages = [self.stage(rank, size) for rank in self.pipeline(0, size)]
            groups_each = f"; {self.virtual_stages} groups of layers each" if self.virtual_stages > 1 else ""
            lines.append(f"  the layers of a stage, in this order: ranks {_first_few(stages)}{groups_each}")
        for what, found, copies in (
            ("the same samples, and a part of each matrix", tensors, f"; {length // self.tp} x each part"),
            ("a part of each sequence", [self.sequence(rank) for rank in range(size)], ""),
            ("a part of the experts", experts, f"; {length // self.experts} x each part"),
        ):
            if len(found[0]) > 1:
                lines.append(f"  {what}: ranks {_first_few(found)}{copies}")
        return lines

    def samples(self, rank: int, size: int) -> tuple[int, int, bool]:
        """Return the place of a rank among those with other samples, their number, and whether it records them.

        Of the ranks with the same samples, one does.
        """
        stage, width = self.stage(rank, size), self.tp * self.cp
        place, within = divmod(rank - stage[0], width)
        return place, len(stage) // width, within == 0 and not stage[0]

    def loss_counts(self, rank: int, size: int) -> bool:
        """Return whether the loss of a rank of `size` counts: of a pipeline, only the last stage has it."""
        return self.pass_counts(rank) and self.stage(rank, size)[-1] == size - 1

    def pass_counts(self, rank: int) -> bool:
        """Return whether what a rank counts in a pass counts: of those that divide matrices, all count the same."""
        return rank % self.tp == 0


def check_divides(option: str, ranks: int, count: int, what: str, next_step: str | None = None) -> None:
    """Check that `ranks` divide `count` things, equally many for each.

    Errors: ConfigError: they do not; with numbers of ranks that do.
    """
    if count % ranks:
        fitting = [str(each) for each in range(1, count + 1) if count % each == 0]
        raise ConfigError(
            f"{option}: {ranks} ranks cannot divide the {count} {what}",
            expected=f"one of {listed(fitting, 12, ETC)}",
            next_step=next_step,
        )


def _first_few(groups: Iterable[Sequence[int]]) -> str:
    shown: dict[str, None] = {}
    for ranks in groups:
        consecutive = ranks[-1] - ranks[0] == len(ranks) - 1 > 0
        shown[f"{ranks[0]}-{ranks[-1]}" if consecutive else "+".join(map(str, ranks))] = None
    return listed(shown, 4, ETC)


IN_GROUP = "in a group of --parallel.dp_shard"
"""Where ranks are that have dimensions of their own; see `Dimensions.check`."""

ONE = Dimensions()  # data-parallel ranks only: each holds the whole model, unless its engine divides it
