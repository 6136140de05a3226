"""The task `image`: image classification."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hvdtrain.task.base import Task
from hvdtrain.task.image_data import ImageConfig, open_images
from hvdtrain.task.resnet import ResNetConfig, resnet

if TYPE_CHECKING:
    from torch import Tensor, nn


def image(model: ResNetConfig = ResNetConfig(), data: ImageConfig = ImageConfig()) -> Task:  # noqa: B008
    """Train a ResNet to classify images.

    Args:
        model: architecture
        data: training data

    Errors:
        TaskError: a library from the extra `image` is missing.
        ConfigError: an option has an invalid value.
    """
    images = open_images(data)
    return Task(
        model=resnet(model, channels=images.channels, classes=images.classes),
        loss=label_loss,
        train_data=images.train,
        heldout_data=images.heldout,
        metrics=accuracy,
        unit="images",
        data_id=images.digest,
    )


def label_loss(model: nn.Module, batch: Any) -> tuple[Tensor, float]:
    """Return the summed cross entropy of the labels.

    Args:
        model: takes `pixel_values`, returns an object with `logits` (B, classes).
        batch: images (B, C, H, W), float32, and labels (B,), int64.

    Returns:
        The sum over B images in nats, in float32 for any dtype of logits; and B.
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
