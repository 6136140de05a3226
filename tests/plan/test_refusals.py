"""Which parts of a plan go together, and what an error proposes instead."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from hvdtrain.comm.dimensions import Dimensions
from hvdtrain.compression.table import TABLE
from hvdtrain.config.schema import Config, MemoryConfig, ParallelConfig, TrainConfig
from hvdtrain.errors import ConfigError
from hvdtrain.plan.plan import AUTO, ENGINES, Plan, plan_of
from hvdtrain.plan.refusals import INSTEAD, changed_by, compressions, nearest, refusals, resolve

BALANCE = {"balance": "speed"}


def config(
    *, offload: str = "none", train: TrainConfig | None = None, precision: Any = "fp32", **parallel: Any
) -> Config:
    return Config(
        train=train or TrainConfig(),
        parallel=ParallelConfig(**parallel),
        memory=MemoryConfig(offload=offload),  # type: ignore[arg-type]
        precision=precision,
    )


@pytest.mark.parametrize(
    ("options", "supported"),
    [
        ({}, (*TABLE, AUTO)),
        ({"shard": "optimizer"}, ("none", "fp16", "bf16", "int8")),
        ({"shard": "gradients"}, ("none", "fp16", "bf16", "int8")),
        ({"engine": "ddp"}, ("none", "fp16", "bf16", "powersgd")),
        ({"engine": "fsdp"}, ("none", "fp16", "bf16", "int8")),
        ({"engine": "fsdp", "dp_shard": 4}, tuple(name for name in TABLE if name != "powersgd")),
        ({"engine": "fsdp", "dp_shard": 4, "ep": 2}, tuple(name for name in TABLE if name != "powersgd")),
        ({"engine": "fsdp", "dp_shard": 4, "tp": 2}, ("none", "fp16", "bf16")),
        ({"engine": "fsdp", "tp": 2}, ("none",)),
        ({"ep": 2}, tuple(name for name, kind in TABLE.items() if not kind.feedback)),
        ({"pp": 2}, tuple(name for name, kind in TABLE.items() if not kind.feedback)),
        ({"tp": 2, "ep": 4}, ("none", "fp16", "bf16")),
        ({"shard": "optimizer", "tp": 2}, ("none",)),
        ({"cp": 2}, (*TABLE, AUTO)),
    ],
    ids=str,
)
def test_what_may_be_compressed(options: dict[str, Any], supported: tuple[str, ...]) -> None:
    """With divided matrices a number is rounded by itself: what such ranks have whole must stay equal."""
    assert compressions(plan_of(config(**options))) == supported
    for name in (*TABLE, AUTO):
        assert bool(refusals(plan_of(config(compression=name, **options)))) == (name not in supported)


@pytest.mark.parametrize(
    ("options", "first", "next_step"),
    [
        (
            {"engine": "ddp", "shard": "optimizer"},
            "engine ddp does not support --parallel.shard optimizer",
            "engine hor",
        ),
        ({"engine": "ddp", "dp_shard": 2}, "--parallel.dp_shard 2", "--parallel.dp_shard null"),
        ({"engine": "ddp", "ep": 2}, "engine ddp does not support --parallel.ep 2", "--parallel.engine horovod"),
        (
            {"engine": "fsdp", "shard": "optimizer"},
            "engine fsdp does not support --parallel.shard optimizer",
            "horovod",
        ),
        ({"engine": "fsdp", "dp_shard": 2, "offload": "optimizer"}, "--memory.offload", "--memory.offload none"),
        ({"engine": "fsdp", "dp_shard": 2, "pp": 2}, "dp_shard 2 does not support --parallel.pp 2", "--parallel.pp 1"),
        ({"engine": "fsdp", "bucket_mib": 8.0}, "exchanges each block by itself", "--parallel.bucket_mib null"),
        ({"compression": "fp8"}, "invalid compression 'fp8'", ""),
        ({"engine": "ddp", "compression": "powersgd:x"}, "invalid compression 'powersgd:x'", ""),
        *(({"cp": 2, **more}, "cp 2 does not support", "") for more in (BALANCE, {"sync": "diloco:2", "workers": 2})),
        *(
            (({**more, **BALANCE}), "speed cannot be measured", "balance equal")
            for more in (
                {"engine": "ddp", "compression": "powersgd:4"},
                {"shard": "gradients"},
                {"engine": "fsdp"},
                {"pp": 2},
            )
        ),
    ],
    ids=str,
)
def test_what_does_not_go_together(options: dict[str, Any], first: str, next_step: str) -> None:
    with pytest.raises(ConfigError, match=first) as caught:
        resolve(config(**options))
    assert next_step in (caught.value.next_step or "") and caught.value.everywhere


@pytest.mark.parametrize("options", [{}, {"compression": "powersgd:4"}, {"compression": "auto"}, {"engine": "ddp"}])
def test_shares_by_speed_need_passes_that_wait_for_no_rank(options: dict[str, Any]) -> None:
    assert resolve(config(**options, **BALANCE)).balance == "speed"


@pytest.mark.parametrize(
    "options", [{"engine": "ddp"}, {"engine": "fsdp"}, *({name: 2} for name in ("tp", "ep", "cp", "pp"))], ids=str
)
def test_ranks_come_and_go_where_each_has_the_whole_model(options: dict[str, Any]) -> None:
    assert resolve(config(shard="gradients"), elastic=True).elastic
    with pytest.raises(ConfigError, match="does not support an elastic job") as caught:
        resolve(config(**options), elastic=True)
    assert "start the job without --elastic" in str(caught.value.next_step)


def test_an_error_names_all_reasons_and_the_fewest_changes() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(config(engine="ddp", shard="optimizer", tp=2, **BALANCE))
    assert all(word in str(caught.value) for word in ("--parallel.shard", "--parallel.tp", "--parallel.balance"))
    wrong = config(shard="gradients", pp=2, compression="topk", offload="optimizer")
    for changes in nearest(wrong, refusals(plan_of(wrong)), elastic=False):
        assert len(changes) == 2 and not refusals(plan_of(changed_by(wrong, changes)))


def test_whatever_is_refused_has_a_way_out() -> None:
    """Of many options at once, too."""
    divisions = product(ENGINES, INSTEAD["parallel.shard"], (1, 2), ("none", "optimizer"), ("none", "topk"), (0, 1))
    for engine, shard, tp, offload, name, elastic in divisions:
        asked = config(engine=engine, shard=shard, tp=tp, offload=offload, compression=name)
        found = refusals(plan_of(asked, elastic=bool(elastic)))
        ways = nearest(asked, found, elastic=bool(elastic)) if found else [{}]
        assert ways, (asked, found)


@pytest.mark.parametrize("engine", ENGINES)
def test_what_others_ask_of_a_plan(engine: str) -> None:
    plan = plan_of(config(engine=engine, cp=2, precision="bf16-weights"))
    assert plan.by_horovod == (engine == "horovod") and plan.places_model == plan.torch_in_passes == (engine == "fsdp")
    assert plan.copies_weights == (engine != "fsdp") and plan.dimensions == Dimensions(cp=2)
    assert plan.shard == ("parameters" if engine == "fsdp" else "none")


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"compression": "int8"}, "--parallel.compression int8"),
        ({"compression": AUTO}, "--parallel.compression auto"),
        ({"engine": "ddp"}, "--parallel.engine ddp"),
        ({"engine": "fsdp", "dp_shard": 2}, "--parallel.dp_shard 2"),
        ({"engine": "fsdp", "offload": "optimizer"}, "--parallel.engine fsdp with --memory.offload optimizer"),
        *(({name: 2}, f"--parallel.{name} 2") for name in ("tp", "ep", "cp", "pp")),
        ({"sync": "diloco:2", "workers": 2}, "--parallel.sync diloco:2"),
        ({"train": TrainConfig(compile=True)}, "--train.compile true"),
    ],
    ids=str,
)
def test_what_cannot_keep_bits_is_named_with_the_nearest_that_can(options: dict[str, Any], found: str) -> None:
    train = replace(options.get("train", TrainConfig()), reproducible="bits")
    with pytest.raises(ConfigError, match=f"--train.reproducible bits does not support {found}: ") as caught:
        resolve(config(**{**options, "train": train}))
    assert f"{found.split()[-2]} " in str(caught.value.next_step)
    assert "--train.reproducible none" in str(caught.value.next_step)


def test_groups_that_exchange_apart() -> None:
    assert Plan().groups(4) == []
    assert [0, 1] in Plan("fsdp", shard="parameters", dp_shard=2).groups(4)
    assert [0, 2] in Plan(dimensions=Dimensions(tp=2)).groups(4)
    workers = plan_of(config(sync="diloco:2", workers=2))
    assert workers.groups(4) == [[0, 1], [2, 3], [0, 2]]
