"""The plan of a job: who holds what of the model, who sums gradients, and what others must know of it. Pure.

All that depends on options of the job and on its number of ranks is asked here: `resolve` makes the plan, and checks
that its parts go together. What an elastic round or a choice in the first steps changes is a `replace` of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.comm.dimensions import ONE, Dimensions
from hvdtrain.comm.mesh import mesh_groups
from hvdtrain.compression.table import Compression, parse
from hvdtrain.config.schema import Config
from hvdtrain.config.sync import OuterPlan, outer_plan

ENGINES = ("horovod", "ddp", "fsdp")
"""What may sum gradients."""

AUTO = "auto"
"""Option value: choose the compression that pays, in the first steps."""

BITS = "bits"
"""Option value of what is reproducible: every bit, on any number of ranks."""

BF16_WEIGHTS = "bf16-weights"
"""Option value of the precision: forward and backward get bf16 copies of the fp32 parameters that are updated."""


@dataclass(frozen=True)
class Ranks:
    """World size and ranks per host."""

    size: int
    per_host: int

    @property
    def hosts(self) -> int:
        """The number of hosts."""
        return -(-self.size // self.per_host)


@dataclass(frozen=True)
class Plan:
    """What follows from a job's options.

    Attributes:
        shard: what ranks divide by rows instead of holding copies: none, optimizer, gradients (of the optimizer and of
            sums), parameters (and those).
        dp_shard: number of ranks that divide the parameters, if each group of that size has a copy; None for one group.
    """

    engine: str = "horovod"  # what sums gradients: horovod (ours), ddp or fsdp
    compression: str = "none"  # of the exchange, as in options
    shard: str = "none"
    dp_shard: int | None = None
    dimensions: Dimensions = ONE  # numbers of ranks that divide matrices, experts, sequences and layers
    offload: bool = False  # whether the optimizer has its state, and what it updates, in the memory of the host
    precision: str = "fp32"  # of forward and backward
    bucket_mib: float | None = None  # largest bucket; None for the default of the compression
    outer: OuterPlan | None = None  # of workers that train apart; None if ranks exchange in each step
    balance: str = "equal"  # how micro-batches are divided among ranks
    buffers: str = "mean"  # what becomes of persistent buffers that differ
    compiled: bool = False  # whether blocks are compiled
    averaged: bool = False  # whether an average of the parameters is kept
    elastic: bool = False  # whether ranks may join and leave
    bits: bool = False  # whether sums have the same bits on any number of ranks
    verifies: bool = False  # whether ranks repeat micro-batches of each other
    micro_batches: int = 0  # of a step over all ranks; 0 until their size is known

    @property
    def by_horovod(self) -> bool:
        """Whether it needs Horovod; torchrun, too, can start the ranks of others."""
        return self.engine == "horovod"

    @property
    def places_model(self) -> bool:
        """Whether the engine moves the model to the device, part by part: the whole need not fit there."""
        return self.engine == "fsdp" or self.dimensions.divides_model

    @property
    def copies_weights(self) -> bool:
        """Whether the trainer has bf16 copies of the parameters; FSDP makes its own."""
        return self.precision == BF16_WEIGHTS and self.engine != "fsdp"

    @property
    def torch_in_passes(self) -> bool:
        """Whether torch has exchanges in passes on GPUs: of activations, or of FSDP's parameters, uncompressed."""
        by_fsdp = self.engine == "fsdp" and (self.compression == "none" or self.dp_shard is not None)
        return by_fsdp or self.dimensions.tp > 1 or self.dimensions.pp > 1

    @property
    def first_compression(self) -> Compression:
        """The compression at the start. Errors: ConfigError: there is no such one."""
        return parse("none" if self.compression == AUTO else self.compression)

    @property
    def engine_and_shard(self) -> tuple[str, str]:
        """What sums gradients, and what is divided by rows."""
        return self.engine, self.shard

    @property
    def sums_each_pass(self) -> bool:
        """Whether gradients are summed in each pass, so that a rank never holds all of them."""
        return self.shard in ("gradients", "parameters")

    @property
    def deals_in_turn(self) -> bool:
        """Whether neighbouring micro-batches go to different ranks: then owners add up each pass in their order."""
        return self.bits and self.sums_each_pass

    def summing(self, ranks: Ranks, share: float) -> Ranks:
        """Return the ranks that sum what this share of all `ranks` has: neighbours have other parts of the model."""
        size = round(ranks.size * share)
        if ranks.hosts == 1:
            return Ranks(size, size)
        stage = ranks.size // self.dimensions.pp
        return Ranks(size, max(1, min(stage, ranks.per_host) * min(size, stage) // stage))

    def groups(self, size: int) -> list[list[int]]:
        """Return the ranks of each group of `size` that exchanges apart. Errors: ConfigError: they cannot form them."""
        from hvdtrain.data.order import Workers  # which imports numpy

        count = self.outer.workers if self.outer else None
        workers = Workers(count, size).groups() if count is not None else []
        within = self.dp_shard if self.dimensions.divides_model else None
        return [*mesh_groups(size, self.dp_shard), *workers, *self.dimensions.groups(size, within)]


def plan_of(config: Config, *, elastic: bool = False) -> Plan:
    """Return the plan of a run, unchecked. Errors: ConfigError: the options of workers contradict each other."""
    parallel, train = config.parallel, config.train
    return Plan(
        engine=parallel.engine,
        compression=parallel.compression,
        shard="parameters" if parallel.engine == "fsdp" and parallel.shard == "none" else parallel.shard,
        dp_shard=parallel.dp_shard,
        dimensions=Dimensions.of(vars(parallel)),
        offload=config.memory.offload != "none",
        precision=config.precision,
        bucket_mib=parallel.bucket_mib,
        outer=outer_plan(config),
        balance=parallel.balance,
        buffers=parallel.buffers,
        compiled=train.compile,
        averaged=train.ema is not None,
        elastic=elastic,
        bits=train.reproducible == BITS,
        verifies=train.verify_every > 0,
        micro_batches=-(-train.global_batch // train.micro_batch),
    )
