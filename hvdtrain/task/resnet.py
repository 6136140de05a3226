"""Residual networks from transformers, with group norm instead of batch norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from hvdtrain.errors import TaskError

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class ResNetConfig:
    """Architecture.

    Attributes:
        preset: ResNet (He et al., 2015) with group norm: tiny has 0.08 million parameters, enough for digits; resnet18
            has 12 million and resnet50 26 million
    """

    preset: Literal["tiny", "resnet18", "resnet50"] = "tiny"


PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {"embedding_size": 16, "hidden_sizes": [16, 32, 64], "depths": [1, 1, 1], "layer_type": "basic"},
    "resnet18": {
        "embedding_size": 64,
        "hidden_sizes": [64, 128, 256, 512],
        "depths": [2, 2, 2, 2],
        "layer_type": "basic",
    },
    "resnet50": {
        "embedding_size": 64,
        "hidden_sizes": [256, 512, 1024, 2048],
        "depths": [3, 4, 6, 3],
        "layer_type": "bottleneck",
    },
}
_MOST_GROUPS, _LEAST_CHANNELS = 32, 2


def resnet(config: ResNetConfig, *, channels: int, classes: int) -> nn.Module:
    """Create the model in float32 on the CPU. The weights depend only on torch's global seed.

    Args:
        config: architecture.
        channels: channels of the images.
        classes: number of labels.

    Errors:
        TaskError: transformers is missing.
    """
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise TaskError(
            "the image task needs the transformers library", next_step='pip install "hvdtrain[image]"'
        ) from error
    options: dict[str, Any] = {**PRESETS[config.preset], "num_channels": channels, "num_labels": classes}
    model = with_group_norm(transformers.ResNetForImageClassification(transformers.ResNetConfig(**options)))
    model.train()
    return model


def with_group_norm(model: nn.Module) -> nn.Module:
    """Replace each batch norm in `model` by a group norm (Wu and He, 2018). Changes `model`.

    The output of a batch norm depends on the samples in the same forward pass, and so on micro-batch and world size.
    The output of a group norm depends only on the sample.

    Returns:
        `model`, or a group norm if `model` is itself a batch norm.
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
