"""The engines by name: how each is made, and what it supports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING

from hvdtrain.comm.dimensions import ONE, Dimensions
from hvdtrain.comm.mesh import mesh_groups
from hvdtrain.compression.table import TABLE as COMPRESSIONS
from hvdtrain.compression.table import parse, parse_outer
from hvdtrain.config.sync import outer_plan
from hvdtrain.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer

    from hvdtrain.comm.base import Comm
    from hvdtrain.config.schema import Config
    from hvdtrain.engine.base import Engine
    from hvdtrain.spans import Spans

AUTO = "auto"
"""Option value: choose the compression that pays, in the first steps."""

BF16_WEIGHTS = "bf16-weights"
"""Option value of the precision: forward and backward get bf16 copies of the fp32 parameters that are updated."""


@dataclass(frozen=True)
class EngineParts:
    """What an engine is made of.

    Attributes:
        parameters: of the optimizer, with their names in the model, in its order.
        variables: of this process's environment.
        shard: what is divided among ranks; one of the engine's `shards`.
        device: of training; the model is there already, unless the engine places it.
        elastic: whether ranks may join and leave.
        weights: format in which forward and backward get the parameters; None for their own.
        offload: whether this rank's optimizer keeps its state, and what it updates, in the memory of the host.
        dp_shard: number of ranks that divide the parameters, if each group of that size has a copy; None for one group.
        dimensions: numbers of ranks that divide matrices, experts, sequences and layers.
        plan: of the task, how to divide them; empty for that of the model.
    """

    model: nn.Module
    optimizer: Optimizer
    parameters: list[tuple[str, nn.Parameter]]
    comm: Comm
    compression: str
    spans: Spans | None
    bucket_mib: float | None
    variables: Mapping[str, str]
    shard: str
    device: torch.device
    elastic: bool = False
    dp_shard: int | None = None
    weights: torch.dtype | None = None
    offload: bool = False
    dimensions: Dimensions = ONE
    plan: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class EngineKind:
    """One line of the table.

    Attributes:
        name: its name in options.
        make: "module:name" of a function from `EngineParts` to an engine for several ranks.
        compressions: names of the supported compressions, and `AUTO` if it is.
        shards: what it divides among ranks, as values of `--parallel.shard`, the usual one first. Name, shard and
            `groups` make one engine.
        groups: whether groups of `--parallel.dp_shard` ranks have copies of what is divided.
        dimensions: how ranks may divide the model: its matrices ("tp"), experts ("ep"), layers ("pp"). Ranks of any
            engine may divide sequences (`--parallel.cp`).
        elastic: whether ranks may join and leave.
        horovod: whether it needs Horovod, so that torchrun cannot start its ranks.
        casts_weights: whether it gives parameters in another format than the optimizer's to forward and backward. For
            other engines, the trainer does.
        places_model: whether it moves the model to the device, part by part: the whole need not fit there.
        offloads: whether it can keep the optimizer in the memory of the host.
        periodic: whether ranks of workers that train apart can use it.
        balances: names of the compressions with which the passes of a rank wait for no other rank, so that its speed
            can be measured.
    """

    name: str
    make: str
    compressions: tuple[str, ...]
    shards: tuple[str, ...] = ("none",)
    groups: bool = False
    dimensions: tuple[str, ...] = ()
    elastic: bool = False
    horovod: bool = False
    casts_weights: bool = False
    places_model: bool = False
    offloads: bool = False
    periodic: bool = False
    balances: tuple[str, ...] = ()

    def load(self) -> Callable[[EngineParts], Engine]:
        """Return the function that makes the engine. Imports torch."""
        module, _, name = self.make.partition(":")
        return getattr(import_module(module), name)  # type: ignore[no-any-return]


_CODED = tuple(kind.name for kind in COMPRESSIONS.values() if kind.coding)
"""Compressions for engines that divide parameters."""

_WITHOUT_FEEDBACK = tuple(name for name, kind in COMPRESSIONS.items() if not kind.feedback)
"""Compressions for engines that keep no residuals."""

_BY_ELEMENT = ("none", "fp16", "bf16")
"""Compressions for ranks that divide matrices. What such ranks have whole is in buckets with different parts, and must
stay equal: what becomes of a number depends on no other one."""

_BY_ROWS = tuple(name for name in COMPRESSIONS if name != "powersgd")
"""Compressions of rows of parameters."""

TABLE = (
    EngineKind(
        "horovod",
        "hvdtrain.engine.make:make_exchange",
        (*COMPRESSIONS, AUTO),
        elastic=True,
        horovod=True,
        periodic=True,
        balances=(*COMPRESSIONS, AUTO),
    ),
    EngineKind(
        "horovod",
        "hvdtrain.engine.sharded:make_sharded",
        ("none", *_CODED),
        ("optimizer", "gradients"),
        elastic=True,
        horovod=True,
        offloads=True,
    ),
    *(
        EngineKind(
            "horovod",
            "hvdtrain.engine.mesh:make_mesh_engine",
            compressions,
            dimensions=dimensions,
            horovod=True,
            places_model=True,
        )
        for dimensions, compressions in ((("ep", "pp"), _WITHOUT_FEEDBACK), (("tp", "ep", "pp"), _BY_ELEMENT))
    ),
    EngineKind(
        "horovod",
        "hvdtrain.engine.mesh:make_mesh_engine",
        ("none",),
        ("optimizer",),
        dimensions=("tp", "ep", "pp"),
        horovod=True,
        places_model=True,
    ),
    EngineKind(
        "ddp",
        "hvdtrain.engine.ddp:make_ddp",
        ("none", "fp16", "bf16", "powersgd"),
        balances=("none", "fp16", "bf16"),  # torch's PowerSGD waits for its sums in backward
    ),
    # It always divides the parameters, so that this need not be said.
    EngineKind(
        "fsdp",
        "hvdtrain.engine.fsdp:make_fsdp",
        ("none", *_CODED),
        ("parameters", "none"),
        casts_weights=True,
        places_model=True,
        offloads=True,
    ),
    EngineKind(
        "fsdp",
        "hvdtrain.engine.mesh_fsdp:make_mesh_fsdp",
        ("none",),
        ("parameters", "none"),
        dimensions=("tp", "ep", "pp"),
        casts_weights=True,
        places_model=True,
    ),
    *(
        EngineKind(
            "fsdp",
            "hvdtrain.engine.mesh_fsdp:make_mesh_hybrid",
            compressions,
            ("parameters", "none"),
            groups=True,
            dimensions=dimensions,
            casts_weights=True,
            places_model=True,
        )
        for dimensions, compressions in ((("ep",), _BY_ROWS), (("tp", "ep"), _BY_ELEMENT))
    ),
    EngineKind(
        "fsdp",
        "hvdtrain.engine.hybrid:make_hybrid",
        _BY_ROWS,
        ("parameters", "none"),
        groups=True,
        casts_weights=True,
        places_model=True,
    ),
)


def dimensions_of(config: Config) -> Dimensions:
    """Return how many ranks of a run divide matrices, experts, sequences and layers."""
    return Dimensions.of(vars(config.parallel))


def groups_of(config: Config) -> Callable[[int], list[list[int]]]:
    """Return what gives the ranks of each group that exchanges apart, of a number of ranks."""
    from hvdtrain.data.workers import worker_groups  # which imports numpy

    parallel = config.parallel
    dimensions, workers = dimensions_of(config), worker_groups(parallel.workers)
    within = parallel.dp_shard if dimensions.divides_model else None
    return lambda size: [*mesh_groups(size, parallel.dp_shard), *workers(size), *dimensions.groups(size, within)]


def uses_torch_in_passes(config: Config) -> bool:
    """Return whether torch has exchanges in passes on GPUs: of activations, or of FSDP's parameters, uncompressed."""
    parallel = config.parallel
    by_fsdp = parallel.engine == "fsdp" and (parallel.compression == "none" or parallel.dp_shard is not None)
    return by_fsdp or parallel.tp > 1 or parallel.pp > 1


def needs_horovod(engine: str) -> bool:
    """Return whether an engine needs Horovod."""
    return any(kind.horovod for kind in TABLE if kind.name == engine)


def casts_weights(engine: str) -> bool:
    """Return whether an engine gives bf16 parameters to forward and backward itself."""
    return any(kind.casts_weights for kind in TABLE if kind.name == engine)


def find_engine(
    engine: str,
    compression: str = "none",
    shard: str = "none",
    dp_shard: int | None = None,
    dimensions: Dimensions = ONE,
    *,
    offload: bool = False,
    elastic: bool = False,
) -> EngineKind:
    """Return the engine that options name, and check that it supports the compression and the job.

    Errors:
        ConfigError: it does not, or there is no such compression.
    """
    check_compression(compression)
    name = compression.partition(":")[0]
    needed = dimensions.model_dimensions
    every = [kind for kind in TABLE if needed <= {*kind.dimensions} and bool(needed) == bool(kind.dimensions)]
    kinds = [kind for kind in every if kind.name == engine and shard in kind.shards]
    kind = next((kind for kind in kinds if kind.groups == (dp_shard is not None)), None)
    options = f"--parallel.engine {engine}" + (f" with --parallel.shard {shard}" if shard != "none" else "")
    if dimensions.divides_model and kind is None:
        groups = f" with --parallel.dp_shard {dp_shard}" if dp_shard is not None else ""
        raise ConfigError(
            f"{options}{groups} does not support {dimensions.options}",
            expected="--parallel.engine horovod with --parallel.shard none or optimizer, or --parallel.engine fsdp"
            " (with --parallel.pp without --parallel.dp_shard)",
            next_step=f"choose one of these, or leave out {dimensions.options}",
        )
    options += f" with {dimensions.options}" if dimensions else ""
    if kind is None and kinds:
        raise ConfigError(
            f"{options} does not support --parallel.dp_shard {dp_shard}: it does not divide among groups of ranks",
            next_step=f"leave it out, or {_with(dimensions, lambda k: k.groups)}",
        )
    if kind is None:
        raise ConfigError(
            f"--parallel.engine {engine} does not support --parallel.shard {shard}",
            expected=", ".join(shard for kind in TABLE if kind.name == engine for shard in kind.shards),
            next_step=f"choose one of these, or {_with(dimensions, lambda k: shard in k.shards)}",
        )
    options += f" with --parallel.dp_shard {dp_shard}" if dp_shard is not None else ""
    if name not in kind.compressions:
        raise ConfigError(
            f"{options} does not support --parallel.compression {compression}",
            expected=", ".join(kind.compressions),
            next_step=f"choose one of these, or {_with(dimensions, lambda k: name in k.compressions)}",
        )
    if offload and not kind.offloads:
        raise ConfigError(
            f"{options} does not support --memory.offload optimizer",
            next_step=f"leave it out, or {_with(dimensions, lambda k: k.offloads)}",
        )
    if elastic and (not kind.elastic or dimensions):
        raise ConfigError(
            f"{options} does not support an elastic job",
            expected="a job with a constant number of ranks",
            next_step=f"start the job without --elastic, or {_with(dimensions, lambda k: k.elastic)}",
        )
    return kind


def engine_of(config: Config, *, elastic: bool = False) -> EngineKind:
    """Return the engine of a run. Errors: those of `find_engine`."""
    parallel, offload = config.parallel, config.memory.offload != "none"
    dimensions = dimensions_of(config)
    options = parallel.engine, parallel.compression, parallel.shard, parallel.dp_shard, dimensions
    kind = find_engine(*options, offload=offload, elastic=elastic)
    divided = f" with {dimensions.options}" if dimensions else ""
    name = parallel.compression.partition(":")[0]
    if parallel.balance == "speed" and (name not in kind.balances or dimensions):
        others = "" if name in ("none", *kind.balances) else "--parallel.compression none and "
        raise ConfigError(
            f"--parallel.engine {kind.name} with --parallel.shard {parallel.shard}{divided} and --parallel.compression"
            f" {parallel.compression} does not support --parallel.balance speed",
            expected="passes in which a rank waits for no other, so that its speed can be measured",
            next_step=f"--parallel.balance equal, or {others}{_with(dimensions, lambda k: bool(k.balances))}",
        )
    plan = outer_plan(config)
    if plan is not None:
        parse_outer(plan.coding)
    if plan is not None and (not kind.periodic or dimensions):
        raise ConfigError(
            f"--parallel.engine {kind.name} with --parallel.shard {parallel.shard}{divided} does not support"
            f" --parallel.sync {parallel.sync}",
            expected="an engine that gives each rank whole parameters",
            next_step=f"--parallel.sync every_step, or {_with(dimensions, lambda k: k.periodic)}",
        )
    return kind


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


def _with(dimensions: Dimensions, supports: Callable[[EngineKind], bool]) -> str:
    """Return the options of the engines that support something; of those without `dimensions`."""
    if dimensions:
        return f"leave out {dimensions.options}"
    found = [f"--parallel.engine {kind.name} --parallel.shard {kind.shards[0]}" for kind in TABLE if supports(kind)]
    return " or ".join(dict.fromkeys(found))
