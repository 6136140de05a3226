"""Training data of an image model: options, and the images that they select."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from hvdtrain.errors import ConfigError, TaskError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.utils.data import Dataset


@dataclass(frozen=True)
class ImageConfig:
    """Training data.

    Attributes:
        source: images to train on: digits are scikit-learn's 1797 handwritten digits; synthetic are random images of
            1000 random classes, for measuring speed without reading data
        size: height and width of synthetic images in pixels
        heldout: fraction of the digits to hold out for evaluation
    """

    source: Literal["digits", "synthetic"] = "digits"
    size: int = 224
    heldout: float = 0.2


@dataclass(frozen=True)
class Images:
    """Images with labels, split.

    Args:
        train: pairs of an image (C, H, W), float32, and a label, int64.
        heldout: held-out pairs, or None.
        channels: channels of an image.
        classes: number of classes; labels are smaller.
        digest: a hash of the images, equal on all hosts with the same images.
    """

    train: Dataset[Any]
    heldout: Dataset[Any] | None
    channels: int
    classes: int
    digest: str


_SPLIT_SEED = 0
"""Constant, so that every run holds out the same images."""

_ZOOM = 4
"""A ResNet's first two layers halve an image twice, so its stages see digits in their original size, 8 x 8."""

_SYNTHETIC, _SYNTHETIC_CLASSES = 64, 1000
_SMALLEST = 32


def open_images(config: ImageConfig) -> Images:
    """Read or generate the images.

    Errors:
        ConfigError: an option has an invalid value.
        TaskError: scikit-learn is missing.
    """
    if not 0 <= config.heldout < 1:
        raise ConfigError("invalid --data.heldout", expected="0 or more, and less than 1", found=str(config.heldout))
    if config.size < _SMALLEST:
        raise ConfigError("invalid --data.size", expected=f"{_SMALLEST} pixels or more", found=str(config.size))
    return _digits(config.heldout) if config.source == "digits" else _synthetic(config.size)


def split(count: int, heldout: float) -> tuple[list[int], list[int]]:
    """Return random indices to train on, and to hold out. They depend only on the arguments."""
    import numpy as np

    # numpy guarantees that the stream of RandomState never changes.
    order = np.random.RandomState(_SPLIT_SEED).permutation(count).tolist()
    held = min(round(count * heldout), count - 1)
    return order[held:], order[:held]


def _digits(heldout: float) -> Images:
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise TaskError(
            "--data.source digits needs scikit-learn",
            next_step='pip install "hvdtrain[image]", or train on --data.source synthetic',
        ) from error
    import torch
    from torch.utils.data import TensorDataset

    digits = load_digits()  # pixels of 0 to 16
    pixels = torch.tensor(digits.images, dtype=torch.float32) / 8 - 1
    images = pixels[:, None].repeat_interleave(_ZOOM, 2).repeat_interleave(_ZOOM, 3)
    labels = torch.tensor(digits.target, dtype=torch.int64)
    train, held = split(len(labels), heldout)
    return Images(
        train=TensorDataset(images[train], labels[train]),
        heldout=TensorDataset(images[held], labels[held]) if held else None,
        channels=1,
        classes=10,
        digest=_digest(images[train], labels[train], images[held], labels[held]),
    )


def _synthetic(size: int) -> Images:
    import torch
    from torch.utils.data import TensorDataset

    generator = torch.Generator().manual_seed(0)
    images = torch.randn(_SYNTHETIC, 3, size, size, generator=generator)
    labels = torch.randint(_SYNTHETIC_CLASSES, (_SYNTHETIC,), generator=generator)
    return Images(TensorDataset(images, labels), None, 3, _SYNTHETIC_CLASSES, _digest(images, labels))


def _digest(*tensors: Tensor) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.numpy().data)
    return digest.hexdigest()
