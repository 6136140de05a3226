"""Several data sets with weights as one."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import gcd, isfinite, lcm
from typing import Any

from torch.utils.data import ConcatDataset, Dataset

from hvdtrain.data.order import SampleOrder
from hvdtrain.errors import DataError

_LARGEST_SUM = 10_000


class Mixture(ConcatDataset[Any]):
    """Data sets, each with the fraction of samples that training takes from it; see `SampleOrder`.

    torch's WeightedRandomSampler draws from a list with a weight of every sample, and forgets its position.

    `datasets`: map-style, at least one sample each. `weights`: of each data set, relative to their sum.

    Errors: DataError: an invalid weight, or another number of weights than of data sets.
    """

    def __init__(self, datasets: Sequence[Dataset[Any]], weights: Sequence[float]) -> None:
        super().__init__(datasets)
        self.weights = whole_weights(weights, len(datasets))

    @property
    def sources(self) -> list[list[int]]:
        """Length and weight of each data set."""
        lengths = [len(dataset) for dataset in self.datasets]  # type: ignore[arg-type]
        return [list(source) for source in zip(lengths, self.weights, strict=True)]


def sample_order(dataset: Dataset[Any], samples: int, seed: int) -> SampleOrder:
    """Return the order of a data set with `samples` samples."""
    return SampleOrder(samples, dataset.sources if isinstance(dataset, Mixture) else [], seed)


def whole_weights(weights: Sequence[float], count: int) -> tuple[int, ...]:
    """Return the smallest whole numbers with the ratios of `count` weights. Errors: DataError: see `Mixture`."""
    if len(weights) != count or not all(isfinite(weight) and weight > 0 for weight in weights):
        raise DataError(
            "invalid weights of the data",
            expected=f"{count} numbers above 0, one for each source",
            found=", ".join(f"{weight:g}" for weight in weights) or "none",
        )
    exact = [Fraction(str(weight)) for weight in weights]
    scale = lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    whole = [weight // gcd(*whole) for weight in whole]
    if sum(whole) > _LARGEST_SUM:
        shares = [float(weight / sum(exact)) for weight in exact]
        raise DataError(
            "the weights of the data have too many digits",
            expected=f"ratios of whole numbers with a sum of {_LARGEST_SUM:,} or less",
            found=f"whole numbers with a sum of {sum(whole):,}",
            next_step=f"round them, such as [{', '.join(f'{max(share, 0.001):.3f}' for share in shares)}]",
        )
    return tuple(whole)
