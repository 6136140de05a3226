"""Which engine options name, and what each refuses before training."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import pytest

from hvdtrain.comm.dimensions import ONE, Dimensions
from hvdtrain.config.schema import Config, ParallelConfig
from hvdtrain.engine.table import TABLE, engine_of, find_engine, needs_horovod
from hvdtrain.errors import ConfigError


@pytest.mark.parametrize("dp_shard", [None, 8])
def test_with_divided_matrices_a_number_is_rounded_by_itself(dp_shard: int | None) -> None:
    """What such ranks have whole is exchanged next to different matrices, and must stay equal."""
    engine = "horovod" if dp_shard is None else "fsdp"
    assert find_engine(engine, "int8-stochastic", "none", dp_shard, Dimensions(ep=4))
    with pytest.raises(ConfigError, match=r"does not support --parallel.compression int8-stochastic"):
        find_engine(engine, "int8-stochastic", "none", dp_shard, Dimensions(tp=2))


@pytest.mark.parametrize("kind", TABLE, ids=lambda kind: kind.make.partition(":")[2])
def test_each_line_makes_an_engine_and_has_an_option(kind) -> None:  # type: ignore[no-untyped-def]
    assert callable(kind.load())
    options = get_type_hints(ParallelConfig)
    assert kind.name in get_args(options["engine"])
    assert set(kind.shards) <= set(get_args(options["shard"]))
    for compression in kind.compressions:
        for shard in kind.shards:
            dimensions = Dimensions(2 if "tp" in kind.dimensions else 1, 4) if kind.dimensions else ONE
            assert find_engine(kind.name, compression, shard, 2 if kind.groups else None, dimensions) is kind


EP2 = Dimensions(ep=2)


@pytest.mark.parametrize(
    ("options", "what", "next_step"),
    [
        ({"engine": "ddp", "compression": "int8"}, "compression int8", "--parallel.engine horovod"),
        ({"engine": "ddp", "compression": "auto"}, "compression auto", "--parallel.engine horovod"),
        ({"engine": "ddp", "compression": "powersgd:x"}, "invalid compression 'powersgd:x'", ""),
        ({"engine": "ddp", "elastic": True}, "ddp does not support an elastic job", "without --elastic"),
        ({"engine": "fsdp", "elastic": True}, "fsdp does not support an elastic job", "without --elastic"),
        ({"engine": "ddp", "shard": "optimizer"}, "ddp does not support --parallel.shard optimizer", "horovod"),
        ({"engine": "ddp", "dp_shard": 2}, "--parallel.dp_shard 2", "leave it out"),
        ({"engine": "fsdp", "shard": "optimizer"}, "fsdp does not support --parallel.shard optimizer", "horovod"),
        ({"engine": "fsdp", "compression": "topk"}, "--parallel.compression topk", "horovod"),
        ({"engine": "fsdp", "compression": "powersgd"}, "--parallel.compression powersgd", "horovod"),
        ({"engine": "fsdp", "dp_shard": 2, "offload": True}, "--memory.offload", "leave it out"),
        ({"engine": "horovod", "offload": True}, "--memory.offload", "leave it out"),
        ({"engine": "horovod", "shard": "parameters"}, "shard parameters", "engine fsdp --parallel.shard parameters"),
        ({"engine": "horovod", "shard": "optimizer", "compression": "topk"}, "--parallel.compression topk", "horovod"),
        ({"engine": "ddp", "dimensions": EP2}, "--parallel.ep 2", "leave out --parallel.ep 2"),
        ({"engine": "horovod", "shard": "gradients", "dimensions": EP2}, "--parallel.ep 2", "leave out"),
    ],
    ids=lambda value: " ".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_what_an_engine_does_not_support_is_refused(options: dict[str, Any], what: str, next_step: str) -> None:
    with pytest.raises(ConfigError, match=what) as caught:
        find_engine(**options)
    assert next_step in str(caught.value.next_step)


@pytest.mark.parametrize(
    ("options", "balances"),
    [
        ({}, True),
        ({"compression": "powersgd:4"}, True),
        ({"compression": "auto"}, True),
        ({"engine": "ddp", "compression": "bf16"}, True),
        ({"engine": "ddp", "compression": "powersgd:4"}, False),
        ({"shard": "optimizer"}, False),
        ({"shard": "gradients"}, False),
        ({"engine": "fsdp"}, False),
    ],
)
def test_shares_by_speed_need_passes_that_wait_for_no_rank(options: dict[str, Any], balances: bool) -> None:
    config = Config(parallel=ParallelConfig(balance="speed", **options))
    if balances:
        assert engine_of(config).balances
        return
    with pytest.raises(ConfigError, match=r"does not support --parallel\.balance speed") as caught:
        engine_of(config)
    assert "--parallel.balance equal" in str(caught.value.next_step)
    changes_compression = options.get("compression") == "powersgd:4"
    assert ("--parallel.compression none and" in str(caught.value.next_step)) == changes_compression


@pytest.mark.parametrize("engine", ["horovod", "ddp", "fsdp"])
def test_any_engine_may_have_parts_of_sequences_and_one_is_elastic(engine: str) -> None:
    assert not engine_of(Config(parallel=ParallelConfig(engine=engine, cp=2))).dimensions  # type: ignore[arg-type]
    assert needs_horovod(engine) == find_engine(engine).elastic == (engine == "horovod")


@pytest.mark.parametrize(
    ("options", "elastic", "found"),
    [
        ({}, True, "an elastic job"),
        ({"balance": "speed"}, False, "--parallel.cp 2 .*--parallel.balance speed"),
        ({"sync": "diloco:2", "workers": 2}, False, "--parallel.cp 2 .*--parallel.sync"),
    ],
)
def test_what_ranks_with_parts_of_sequences_do_not_support(options: dict[str, Any], elastic: bool, found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        engine_of(Config(parallel=ParallelConfig(cp=2, **options)), elastic=elastic)
