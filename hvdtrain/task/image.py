"""The task `image`: a ResNet with group norm instead of batch norm classifies images."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from hvdtrain.errors import ConfigError, TaskError
from hvdtrain.task.base import Task, import_library

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.utils.data import TensorDataset


@dataclass(frozen=True)
class ResNetConfig:
    """Architecture.

    Attributes:
        preset: ResNet (He et al., 2015) with group norm: tiny has 0.08 million parameters, enough for digits; resnet18
            has 12 million and resnet50 26 million
    """

    preset: Literal["tiny", "resnet18", "resnet50"] = "tiny"


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


_OPTIONS = ("embedding_size", "hidden_sizes", "depths", "layer_type")
PRESETS = {
    "tiny": (16, [16, 32, 64], [1, 1, 1], "basic"),
    "resnet18": (64, [64, 128, 256, 512], [2, 2, 2, 2], "basic"),
    "resnet50": (64, [256, 512, 1024, 2048], [3, 4, 6, 3], "bottleneck"),
}
_MOST_GROUPS, _LEAST_CHANNELS = 32, 2

_SPLIT_SEED = 0  # constant, so that every run holds out the same images

_ZOOM = 4  # a ResNet's first two layers halve an image twice, so its stages see digits in their original size, 8 x 8

_SYNTHETIC, _SYNTHETIC_CLASSES = 64, 1000
_SMALLEST = 32


def image(model: ResNetConfig = ResNetConfig(), data: ImageConfig = ImageConfig()) -> Task:
    """Train a ResNet to classify images.

    Args:
        model: architecture
        data: training data

    Errors:
        TaskError: a library from the extra `image` is missing.
        ConfigError: an option has an invalid value.
    """
    train, heldout, classes = open_images(data)
    tensors = [*train.tensors, *(heldout.tensors if heldout is not None else ())]
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.numpy().data)
    return Task(
        model=resnet(model, channels=tensors[0].shape[1], classes=classes),
        loss=label_loss,
        train_data=train,
        heldout_data=heldout,
        metrics=accuracy,
        unit="images",
        data_id=digest.hexdigest(),
    )


def label_loss(model: nn.Module, batch: Any) -> tuple[Tensor, float]:
    """Return the summed cross entropy of the labels.

    Args:
        model: takes `pixel_values`, returns an object with `logits` (B, classes).
        batch: images (B, C, H, W), float32, and labels (B,), int64.

    Returns: The sum over B images in nats, in float32 for any dtype of logits; and B.
    """
    from torch.nn.functional import cross_entropy

    images, labels = batch
    logits = model(pixel_values=images).logits
    return cross_entropy(logits.float(), labels, reduction="sum"), float(len(labels))


def accuracy(model: nn.Module, batch: Any) -> dict[str, tuple[Tensor, float]]:
    """Return the number of correct predictions and of images. Arguments as for `label_loss`."""
    images, labels = batch
    guesses = model(pixel_values=images).logits.argmax(-1)
    return {"accuracy": ((guesses == labels).sum(), float(len(labels)))}


def open_images(config: ImageConfig) -> tuple[TensorDataset, TensorDataset | None, int]:
    """Read or generate the images.

    Returns: Pairs of an image (C, H, W), float32, and a label, int64; held-out pairs, or None; the number of classes.

    Errors: ConfigError: an option has an invalid value; TaskError: scikit-learn is missing.
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


def _digits(heldout: float) -> tuple[TensorDataset, TensorDataset | None, int]:
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
    heldout_data = TensorDataset(images[held], labels[held]) if held else None
    return TensorDataset(images[train], labels[train]), heldout_data, len(digits.target_names)


def _synthetic(size: int) -> tuple[TensorDataset, None, int]:
    import torch
    from torch.utils.data import TensorDataset

    generator = torch.Generator().manual_seed(0)
    images = torch.randn(_SYNTHETIC, 3, size, size, generator=generator)
    labels = torch.randint(_SYNTHETIC_CLASSES, (_SYNTHETIC,), generator=generator)
    return TensorDataset(images, labels), None, _SYNTHETIC_CLASSES


def resnet(config: ResNetConfig, *, channels: int, classes: int) -> nn.Module:
    """Create the model in float32 on the CPU. The weights depend only on torch's global seed.

    Errors: TaskError: transformers is missing.
    """
    transformers = import_library("transformers", "the image task", "image")
    options = dict(zip(_OPTIONS, PRESETS[config.preset], strict=True))
    described = transformers.ResNetConfig(**options, num_channels=channels, num_labels=classes)
    model = with_group_norm(transformers.ResNetForImageClassification(described))
    model.train()
    return model


def with_group_norm(model: nn.Module) -> nn.Module:
    """Replace each batch norm in `model` by a group norm (Wu and He, 2018). Changes `model`.

    The output of a batch norm depends on the samples in the same forward pass, and so on micro-batch and world size.
    The output of a group norm depends only on the sample.

    Returns `model`, or a group norm if `model` is itself a batch norm.
    """
    from torch import nn

    if isinstance(model, nn.BatchNorm2d):
        return nn.GroupNorm(count_groups(model.num_features), model.num_features, eps=model.eps, affine=model.affine)
    for name, child in model.named_children():
        setattr(model, name, with_group_norm(child))
    return model


def count_groups(channels: int) -> int:
    """Return the most groups, at most 32, that divide `channels` into parts of two or more; otherwise 1."""
    most = min(_MOST_GROUPS, channels // _LEAST_CHANNELS)
    return max((n for n in range(1, most + 1) if channels % n == 0), default=1)
