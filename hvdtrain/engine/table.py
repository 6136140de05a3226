"""The engines by name: how each is made, and what it supports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from hvdtrain.compression.table import TABLE as COMPRESSIONS
from hvdtrain.compression.table import parse
from hvdtrain.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from hvdtrain.comm.base import Comm
    from hvdtrain.engine.base import Engine
    from hvdtrain.spans import Spans

AUTO = "auto"
"""Option value: choose the compression that pays, in the first steps."""


@dataclass(frozen=True)
class EngineParts:
    """What an engine is made of.

    Attributes:
        parameters: of the optimizer, with their names in the model, in its order.
        variables: of this process's environment.
    """

    model: nn.Module
    optimizer: Optimizer
    parameters: list[tuple[str, nn.Parameter]]
    comm: Comm
    compression: str
    spans: Spans | None
    bucket_mib: float | None
    variables: Mapping[str, str]


@dataclass(frozen=True)
class EngineKind:
    """One line of the table.

    Attributes:
        name: its name in options.
        make: "module:name" of a function from `EngineParts` to an engine for several ranks.
        compressions: names of the supported compressions, and `AUTO` if it is.
        shards: what it divides among ranks, as values of `--parallel.shard`.
        elastic: whether ranks may join and leave.
        horovod: whether it needs Horovod, so that torchrun cannot start its ranks.
    """

    name: str
    make: str
    compressions: tuple[str, ...]
    shards: tuple[str, ...] = ("none",)
    elastic: bool = False
    horovod: bool = False

    def load(self) -> Callable[[EngineParts], Engine]:
        """Return the function that makes the engine. Imports torch."""
        module, _, name = self.make.partition(":")
        return getattr(import_module(module), name)  # type: ignore[no-any-return]


TABLE = {
    kind.name: kind
    for kind in (
        EngineKind(
            "horovod",
            "hvdtrain.engine.make:make_exchange",
            (*COMPRESSIONS, AUTO),
            ("none", "optimizer", "gradients"),
            elastic=True,
            horovod=True,
        ),
        EngineKind("ddp", "hvdtrain.engine.ddp:make_ddp", ("none", "fp16", "bf16", "powersgd")),
    )
}


def check_engine(engine: str, compression: str, shard: str = "none", *, elastic: bool = False) -> None:
    """Check that an engine supports the compression and the shards that options name, and the job.

    Errors:
        ConfigError: it does not, or there is no such compression.
    """
    kind = TABLE[engine]
    check_compression(compression)
    name = compression.partition(":")[0]
    if name not in kind.compressions:
        raise ConfigError(
            f"--parallel.engine {engine} does not support --parallel.compression {compression}",
            expected=", ".join(kind.compressions),
            next_step=f"choose one of these, or --parallel.engine {_with(lambda k: name in k.compressions)}",
        )
    if shard not in kind.shards:
        raise ConfigError(
            f"--parallel.engine {engine} does not support --parallel.shard {shard}",
            expected=", ".join(kind.shards),
            next_step=f"choose one of these, or --parallel.engine {_with(lambda k: shard in k.shards)}",
        )
    if elastic and not kind.elastic:
        raise ConfigError(
            f"--parallel.engine {engine} does not support an elastic job",
            expected="a job with a constant number of ranks",
            next_step=f"start the job without --elastic, or use --parallel.engine {_with(lambda k: k.elastic)}",
        )


def check_compression(text: str) -> None:
    """Check that an option names a compression, or is `AUTO`.

    Errors:
        ConfigError: it does neither.
    """
    try:
        if text != AUTO:
            parse(text)
    except ConfigError as error:
        raise ConfigError(error.what, expected=f"{error.expected}, {AUTO}", next_step=error.next_step) from None


def _with(supports: Callable[[EngineKind], bool]) -> str:
    return " or ".join(kind.name for kind in TABLE.values() if supports(kind))
