"""The predicted memory is what tensors with values take, in the same two steps of the same engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hvdtrain import Task
from hvdtrain.cli.fit import main
from hvdtrain.comm.solo import ImaginedComm, imagined_ranks
from hvdtrain.config.parse import RunConfig, parse_argv
from hvdtrain.errors import ConfigError
from hvdtrain.fit.imagined_tensors import FusedAttention, LiveBytes
from hvdtrain.fit.memory import Memory, count_bytes, predict_memory
from hvdtrain.fit.ways import sizes_to_try
from hvdtrain.plan.plan import plan_of
from hvdtrain.runtime.environment import RankInfo
from hvdtrain.task.base import load_task_function
from hvdtrain.training.elastic.worker_state import make_worker_state
from tests.support import stack
from tests.support.gallery import LANGUAGE
from tests.support.launch import run
from tests.support.stack import STACK

BLOCKS = (*STACK, "--method=adamw")
SPACE = 512
"""Bytes to which sizes are rounded: a fake tensor may have one storage where a tensor with values has two."""


@pytest.fixture
def ranks() -> Iterator[None]:
    with imagined_ranks(4):
        yield


def _parsed(*options: str) -> tuple[RunConfig, partial[Task]]:
    function = load_task_function(options[0].partition("=")[2] if options[0].startswith("--task") else "language_model")
    run = parse_argv(list(options), function)
    return run, partial(function, **run.task_args)


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize(
    ("task", "size", "options"),
    [
        (LANGUAGE, 2, ("--precision=bf16-weights", "--parallel.shard=optimizer")),
        (BLOCKS, 2, ("--parallel.compression=powersgd:2",)),
        (LANGUAGE, 2, ("--parallel.shard=optimizer", "--memory.checkpointing=full", "--optimizer.name=muon")),
        (BLOCKS, 4, ("--parallel.shard=gradients", "--parallel.compression=bf16")),
        ((*STACK, "--method=adagrad"), 3, ("--parallel.shard=optimizer",)),
        (LANGUAGE, 4, ("--parallel.engine=fsdp", "--precision=bf16")),
        (LANGUAGE, 4, ("--parallel.cp=2", "--model.attention=sdpa")),
        (BLOCKS, 4, ("--parallel.engine=fsdp", "--parallel.dp_shard=2", "--precision=bf16-weights")),
    ],
)
@pytest.mark.some(2)
def test_a_prediction_is_what_tensors_with_values_take(
    task: tuple[str, ...], size: int, options: tuple[str, ...]
) -> None:
    run, build = _parsed(*task, *options)
    predicted = predict_memory(run, build, size)
    worker = make_worker_state(run, plan_of(run.config), build(), torch.device("cpu"), RankInfo("fit"))
    counted = count_bytes(run, worker, LiveBytes(), ImaginedComm(size))
    assert (predicted.model, predicted.optimizer) == (counted.model, counted.optimizer)
    assert predicted.peak == pytest.approx(counted.peak, abs=4 * SPACE, rel=2e-3)
    assert counted.peak > counted.model + counted.optimizer


@pytest.mark.slow
@pytest.mark.usefixtures("ranks")
def test_of_stages_the_one_counts_that_needs_the_most() -> None:
    """The first one keeps activations of more micro-batches."""
    options = ("--model.preset=small", "--parallel.pp=4", "--train.global_batch=8", "--train.micro_batch=1")
    run, build = _parsed(*options, "--model.mtp_layers=1", "--model.dropout=0.1")
    found = []
    for rank in range(4):
        with imagined_ranks(4, rank):
            worker = make_worker_state(run, plan_of(run.config), build(), torch.device("cpu"), RankInfo("fit"))
            found.append(count_bytes(run, worker, LiveBytes(), ImaginedComm(4, rank=rank)))
    predicted, largest = predict_memory(run, build, 4), max(found, key=lambda each: each.peak)
    assert (predicted.model, predicted.optimizer) == (largest.model, largest.optimizer)
    assert predicted.peak == pytest.approx(largest.peak, abs=4 * SPACE, rel=2e-3)
    assert len({each.peak for each in found}) == 4 and found[1].peak > found[2].peak
    assert predicted.bubble == 3 / 11 and not predict_memory(*_parsed(options[0], *options[2:]), 4).bubble
    few = ("--train.global_batch=3", "--train.micro_batch=1")
    with pytest.raises(ConfigError, match=r"a pipeline has 3 micro-batch\(es\)"):
        predict_memory(*_parsed(*options[:-2], *few), 4)


def test_bytes_that_are_freed_do_not_count_and_those_of_a_resize_that_others_make_do() -> None:
    with LiveBytes() as live:
        kept = torch.ones(1000)
        view = kept[:10]
        other = torch.ones(5000)
        del other
        again = torch.ones(2000)
        parts = torch.ones(3000)
        parts.untyped_storage().resize_(0)
        assert live.now == sum(-(-4 * count // SPACE) * SPACE for count in (1000, 2000))
        assert live.peak == live.now + (20000 - 8000) // SPACE * SPACE + SPACE, (len(view), len(again), len(parts))
        before, result = live.now, torch.ones(1).new()
    result.resize_(1000)  # as the C++ of a collective does, unseen
    live.add([result])
    assert live.now == before + -(-4 * 1000 // SPACE) * SPACE


def test_a_prediction_is_what_a_plain_loop_takes() -> None:
    """Of three steps with two micro-batches each."""
    run, build = _parsed(*LANGUAGE, "--train.global_batch=4", "--train.micro_batch=2")
    task = build()
    live = LiveBytes()
    live.add([*task.model.parameters(), *task.model.buffers()])
    with live:
        optimizer = torch.optim.AdamW(task.model.parameters(), fused=True)
        for _ in range(3):
            optimizer.zero_grad()
            for first in (0, 2):
                loss, _ = task.loss(task.model, torch.stack([task.train_data[first], task.train_data[first + 1]]))
                loss.backward()
            del loss
            optimizer.step()
    assert predict_memory(run, build, 1).peak == pytest.approx(live.peak, rel=0.01)


def test_steps_that_depend_on_values_is_refused() -> None:
    def loss(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, int]:
        h = model(batch[0])
        return (h.sum() if h.max() > 0 else h.mean()), 1

    def build() -> Task:
        return Task(nn.Linear(2, 2), loss, torch.utils.data.TensorDataset(torch.ones(8, 2)))

    run = parse_argv(["--train.global_batch=4"], build)
    with pytest.raises(ConfigError, match="depend on values"):
        predict_memory(run, build, 1)


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_attention_of_gpus_keeps_no_scores(precision: str) -> None:
    """Keys have 16 elements and values 8: a CPU keeps a score for each of 2 heads and pair of tokens."""
    length, samples, layers, heads = 256, 2, 2, 2
    options = (*LANGUAGE, f"--data.seq_len={length}", "--train.micro_batch=2", "--train.global_batch=2")
    on_cpu, on_gpu = (
        predict_memory(*_parsed(*options, f"--precision={precision}", f"--parallel.device={device}"), 1)
        for device in ("cpu", "cuda")
    )
    scores = layers * samples * heads * length * length * (4 if precision == "fp32" else 2)
    assert 0.8 * scores < on_cpu.peak - on_gpu.peak < 3 * scores
    assert (on_cpu.model, on_cpu.optimizer) == (on_gpu.model, on_gpu.optimizer)
    eager = predict_memory(
        *_parsed(*options, f"--precision={precision}", "--parallel.device=cuda", "--model.attention=eager"), 1
    )
    assert eager.peak > on_gpu.peak + 0.8 * scores


@pytest.mark.slow
@pytest.mark.usefixtures("ranks")
def test_the_whole_model_before_it_is_divided_does_not_count() -> None:
    options = ("--model.preset=125m", "--data.seq_len=8", "--train.global_batch=4", "--train.micro_batch=1")
    options += ("--optimizer.name=sgd", "--optimizer.momentum=0", "--parallel.engine=fsdp", "--precision=bf16-weights")
    found = predict_memory(*_parsed(*options), 4)
    assert found.peak < 0.95 * 4 * found.model


@pytest.mark.parametrize("sizes", [(16, 16), (16, 8)])
def test_fused_attention_has_the_shapes_of_torch(sizes: tuple[int, int]) -> None:
    key, value = sizes
    shapes = [(2, 3, 5, key), (2, 3, 7, key), (2, 3, 7, value)]
    given = [torch.zeros(shape, requires_grad=True) for shape in shapes]
    expected = torch.nn.functional.scaled_dot_product_attention(*given)
    with FusedAttention():
        found = torch.nn.functional.scaled_dot_product_attention(*given[:2], value=given[2], dropout_p=0.1)
    found.sum().backward()
    assert found.shape == expected.shape
    assert [tensor.grad.shape for tensor in given if tensor.grad is not None] == shapes


@pytest.mark.slow
@pytest.mark.usefixtures("ranks")
def test_an_optimizer_on_the_host_is_not_on_the_device() -> None:
    device, host = (
        predict_memory(*_parsed(*LANGUAGE, "--parallel.shard=optimizer", *more), 2)
        for more in ((), ("--memory.offload=optimizer",))
    )
    assert host.optimizer == 0 and host.host > device.optimizer
    assert device.peak - device.optimizer <= host.peak < device.peak


def test_the_table_says_what_fits(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """By predictions of 1 MiB for each sample of a micro-batch."""

    def predict(run: RunConfig, build: Any, ranks: int) -> Memory:
        return Memory(1000, 1000, run.config.train.micro_batch << 20)

    monkeypatch.setattr("hvdtrain.fit.memory.predict_memory", predict)
    given = ["--ranks", "1,2", "--shards", "none,optimizer", "--gib", "1", "--checkpointing", "none,full", *BLOCKS]
    assert main(given) == 0
    *table, chosen, why = capsys.readouterr().out.splitlines()[2:]
    assert [line.split()[:3] for line in table] == [
        [ranks, shard, mode]
        for ranks, shard in (("1", "none"), ("2", "none"), ("2", "optimizer"))
        for mode in ("none", "full")
    ]
    assert all(line.endswith("fits") for line in table)
    assert "--parallel.shard none" in chosen and "4 ways" in why
    assert main(["--ranks", "1", "--gib", "1e-6", *BLOCKS]) == 1
    assert "too big" in capsys.readouterr().out
    found = ["--ranks", "1", "--json", *BLOCKS, "--largest", "--train.global_batch=8", "--gib"]
    for gib, status, largest in ((6 / 1024, 0, 4), (1e-6, 1, 1)):
        assert main([*found, str(gib)]) == status
        (line,) = json.loads(capsys.readouterr().out)
        assert (line["micro_batch"], line["memory"]["peak"]) == (largest, largest << 20)
    with pytest.raises(ConfigError, match="--largest without"):
        main(found[:-1])
    with pytest.raises(SystemExit):
        main(["--ranks", "two"])
    assert "'two' is not a positive whole number; expected numbers of ranks" in capsys.readouterr().err


EXPERTS = ("--model.preset=tiny", "--data.seq_len=16", "--train.micro_batch=2", "--train.global_batch=16")
WITH_FSDP = ["ep2xfsdp", "tp2xfsdp", "cp2xfsdp", "pp2xfsdp"]


@pytest.mark.parametrize(
    ("mib", "meshes", "proposed"),
    [
        (16, ["none"], "none"),
        (8, ["none", "ep2", "tp2", "cp2", "pp2", *WITH_FSDP], "cp2"),
        (4, ["none", "ep2", "ep4", "tp2", "cp2", "cp4", "pp2", "pp4", *WITH_FSDP], "cp4"),
    ],
)
def test_each_dimension_is_divided_until_it_fits_if_nothing_else_does(
    mib: int, meshes: list[str], proposed: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those that fit, the one is proposed for which ranks wait least."""

    def predict(run: RunConfig, build: Any, ranks: int) -> Memory:
        given = run.config.parallel
        if given.tp == 4:
            raise ConfigError("cannot divide the heads")
        peak = (16 << 20) // (given.ep * given.tp * given.cp * given.pp * (4 if given.engine == "fsdp" else 1))
        waited_for = 3 * (given.ep > 1) + 4 * (given.tp > 1) + 2 * (given.cp > 1) + (given.engine == "fsdp")
        return Memory(0, 0, peak, waited_for=waited_for, bubble=0.3 if given.pp > 1 else 0.0)

    monkeypatch.setattr("hvdtrain.fit.memory.predict_memory", predict)
    options = ["--ranks=4", f"--gib={mib / 1024}", "--shards=none", *EXPERTS, "--json"]
    assert main(options) == 0
    lines = {line["mesh"] or line["shard"]: line for line in json.loads(capsys.readouterr().out)}
    assert [*lines] == meshes and [name for name, line in lines.items() if line["proposed"]] == [proposed]
    for wrong, message in (("--meshes=ep2x4", "invalid --meshes"), ("--parallel.tp=2", "the options have a mesh")):
        with pytest.raises(ConfigError, match=message):
            main([*options, "--meshes=ep2", wrong])


@pytest.mark.slow
def test_meshes_take_less_memory(tmp_path: Path) -> None:
    """In a process of its own: torch keeps groups of matrices that are divided by name."""
    options = ("--ranks=4", "--meshes=ep2,ep4,tp2,tp4,cp2,cp2xfsdp", "--shards=none", *EXPERTS, "--json")
    printed = run(["-m", "hvdtrain", "fit", *options], cwd=tmp_path).stdout
    every: dict[str, Any] = {line["mesh"] or line["shard"]: line for line in json.loads(printed)}
    assert "cannot divide the 2 num_attention_heads" in every.pop("tp4")["refused"]
    peaks = {name: line["memory"]["peak"] for name, line in every.items()}
    assert peaks["tp2"] < peaks["cp2"] < min(peaks["ep4"], peaks["ep2"], peaks["none"])
    assert every["cp2xfsdp"]["memory"]["optimizer"] < 0.6 * every["cp2"]["memory"]["optimizer"]
    assert not any(line["proposed"] for line in every.values()), "without --gib"


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("passes", [1, *(pytest.param(number, marks=pytest.mark.slow) for number in (2, 4))])
def test_what_a_rank_sends_is_counted(passes: int) -> None:
    """Gradients once a step, or once a pass; tokens four times a pass: to their experts and back, in both passes."""

    def memory(*options: str) -> Any:
        batch = f"--train.global_batch={4 * 2 * passes}"
        return predict_memory(*_parsed(*EXPERTS, batch, *options), 4)

    model: Any = _parsed(*EXPERTS)[1]().model
    held = 4 * sum(p.numel() for p in model.parameters())
    plain = memory()
    assert plain.sent == pytest.approx(2 * held, rel=0.01) and plain.waited_for == 0
    assert memory("--parallel.shard=gradients").sent == pytest.approx((passes + 1) * held, rel=0.1)
    config, experts = model.config, memory("--parallel.ep=4")
    layers = config.num_hidden_layers - config.first_k_dense_replace
    pairs = 2 * 16 * config.num_experts_per_tok
    assert experts.waited_for == 4 * passes * layers * pairs * config.hidden_size * 4
    assert experts.sent < plain.sent + experts.waited_for
    if passes == 2:
        assert memory("--parallel.compression=fp16").sent == pytest.approx(held, rel=0.01)
        assert memory("--parallel.engine=fsdp").waited_for == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--parallel.sync=diloco:8", "--parallel.workers=2"), r"--parallel.sync diloco:8"),
        (("--parallel.engine=ddp", "--parallel.compression=int8"), r"--parallel.compression int8"),
    ],
)
def test_what_cannot_be_predicted_is_refused(options: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        predict_memory(*_parsed(*LANGUAGE, *options), 2)


WIDE = (f"--task={Path(stack.__file__)}:wide", "--train.micro_batch=2")
"""Four parameters of 1 MiB, in one bucket."""


@pytest.mark.parametrize(
    ("compression", "passes", "mib"),
    [
        ("none", 1, 4 + 4 + 1),
        ("none", 2, 4 + 4 + 4 + 1),
        ("fp16", 1, 4 + 4 + 1 + 2),
        ("bf16", 1, 4 + 4 + 1 + 2),
        ("powersgd:2", 2, 4 + 4 + 1 + 3 * 4),
    ],
)
def test_ddp_takes_what_real_jobs_take(compression: str, passes: int, mib: int) -> None:
    """Parameters, buckets and gradients that are not in these yet; halves, or old and new errors and a copy.

    `benchmarks/fit.py` counted real jobs.
    """
    ddp = ("--parallel.engine=ddp", f"--parallel.compression={compression}")
    found = predict_memory(*_parsed(*WIDE, f"--train.global_batch={4 * passes}", *ddp), 2)
    assert found.peak == pytest.approx(mib * 2**20, rel=0.1)


def test_gpus_decode_values_of_all_ranks_at_once() -> None:
    options = (*WIDE, "--train.global_batch=8", "--parallel.compression=topk:0.1", "--parallel.device")
    on_cpu, on_gpu = (predict_memory(*_parsed(*options[:-1], f"{options[-1]}={d}"), 4) for d in ("cpu", "cuda"))
    indices = 4 * 0.1 * (4 << 20) / 4 * 8
    assert on_gpu.peak > on_cpu.peak + indices / 2


@pytest.mark.parametrize(
    ("global_batch", "ranks", "sizes"),
    [(16, 1, [1, 2, 4, 8, 16]), (16, 2, [1, 2, 4, 8]), (24, 2, [1, 2, 4]), (10, 2, [1, 2]), (3, 4, [1])],
)
def test_sizes_divide_the_work_evenly(global_batch: int, ranks: int, sizes: list[int]) -> None:
    """Micro-batches of 8 would give one of two ranks 16 of 24 samples."""
    assert sizes_to_try(global_batch, ranks) == sizes


@pytest.mark.slow
def test_an_average_of_the_parameters_counts() -> None:
    plain, averaged = (predict_memory(*_parsed(*BLOCKS, *more), 1) for more in ((), ("--train.ema=0.9",)))
    trained = [p for p in _parsed(*BLOCKS)[1]().model.parameters() if p.requires_grad]
    assert averaged.model - plain.model == sum(p.nbytes for p in trained)
    assert abs(averaged.peak - plain.peak - (averaged.model - plain.model)) <= SPACE * len(trained)
