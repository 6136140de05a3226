"""Data-parallel PyTorch training on Horovod and MPI.

The names below are imported at their first use, so that ``import hvdtrain`` and ``--help`` do not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "train": "hvdtrain.training.api",
    "Result": "hvdtrain.training.result",
    "Config": "hvdtrain.config.schema",
    "Task": "hvdtrain.task.base",
    "HvdtrainError": "hvdtrain.errors",
    "Callback": "hvdtrain.training.callbacks.base",
}

__all__ = ["Callback", "Config", "HvdtrainError", "Result", "Task", "__version__", "train"]

if TYPE_CHECKING:
    from hvdtrain.config.schema import Config
    from hvdtrain.errors import HvdtrainError
    from hvdtrain.task.base import Task
    from hvdtrain.training.api import train
    from hvdtrain.training.callbacks.base import Callback
    from hvdtrain.training.result import Result


def __getattr__(name: str) -> Any:
    """Import a public name from its module on first use."""
    if name not in _HOME:
        raise AttributeError(f"module 'hvdtrain' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
