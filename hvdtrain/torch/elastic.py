"""All of `horovod.torch.elastic`; `run` tells our optimizers when the ranks have changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvdtrain.comm import horovod
from hvdtrain.comm.horovod import hvd


def __getattr__(name: str) -> Any:
    """Whatever is not ours is Horovod's, but for what makes it a package."""
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(hvd.elastic, name)


def run(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a training function go on among the ranks that are left or have come: `hvd.elastic.run`."""
    wrapped: Callable[..., Any] = hvd.elastic.run_fn(function, _reset)
    return wrapped


def _reset() -> None:
    hvd.shutdown()
    hvd.init()
    horovod.begin_session()
