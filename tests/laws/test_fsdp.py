"""A model that FSDP divides trains as a whole one, and its checkpoints fit any engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hvdtrain import Task
from hvdtrain.data.loader import Stream
from hvdtrain.engine.table import find_engine
from hvdtrain.errors import ConfigError
from tests.laws.test_sharded import SignOfMean
from tests.support.gallery import Gallery, Recorded, train_by_fsdp
from tests.support.stack import STACK, STATISTICS, VARIANTS
from tests.support.thread_job import train_on_threads

FSDP = "--parallel.engine=fsdp"


def _whole(folder: Path, *options: str, size: int = 1) -> Recorded:
    """The same training on ranks that each have the whole model."""
    train_on_threads(*STACK, *options, f"--run_dir={folder / 'run'}", size=size)
    return Recorded(folder, 0, "", "")


def _check_equal(one: Recorded, divided: Recorded) -> None:
    """Losses, held-out losses, and each tensor, to float tolerance."""
    assert divided.losses() == pytest.approx(one.losses(), rel=1e-6)
    held_out = [[event["loss"] for event in job.events("evaluation")] for job in (one, divided)]
    assert len(held_out[0]) > 1 and held_out[1] == pytest.approx(held_out[0], rel=1e-6)
    expected, found = one.state(), divided.state()
    assert found.tensors.keys() == expected.tensors.keys()
    for group, tensors in expected.tensors.items():
        assert found.tensors[group].keys() == tensors.keys()
        for name, tensor in tensors.items():
            torch.testing.assert_close(found.tensors[group][name], tensor, rtol=1e-5, atol=2e-6, msg=f"{group} {name}")
    assert found.values["aliases"] == expected.values["aliases"] != {}


@pytest.mark.parametrize("ranks", ["two", "four"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_law_9_parameters_are_those_of_one_rank(variant: str, ranks: str, gallery: Gallery, tmp_path: Path) -> None:
    """Plain SGD, most of them: a wrong factor of a gradient shows in its parameter."""
    divided = Recorded(gallery["fsdp"].folder / ranks / variant, 0, "", "")
    _check_equal(_whole(tmp_path, *VARIANTS[variant]), divided)
    assert len(divided.events("rolled_back")) == (2 if variant == "back" else 0)


@pytest.mark.parametrize(("ranks", "size"), [("two", 2), ("four", 4)])
def test_repeated_micro_batches_leave_no_trace_in_buffers(
    ranks: str, size: int, gallery: Gallery, tmp_path: Path
) -> None:
    divided = Recorded(gallery["fsdp"].folder / ranks / "statistics", 0, "", "")
    _check_equal(_whole(tmp_path, *STATISTICS, size=size), divided)


def test_each_rank_writes_its_rows(gallery: Gallery) -> None:
    for ranks, count in (("two", 2), ("four", 4)):
        (saved,) = (gallery["fsdp"].folder / ranks / "even" / "run" / "checkpoints").glob("step-*")
        assert len(list(saved.glob("model-*.safetensors"))) == count


@pytest.mark.parametrize("ranks", ["two", "four"])
@pytest.mark.parametrize(("name", "error"), [("fp16", 2e-4), ("bf16", 2e-3), ("int8", 1e-2)])
def test_a_compression_stays_near(name: str, error: float, ranks: str, gallery: Gallery) -> None:
    """Parameters and gradients are rounded on their way; the owner's parameters are not, so the checkpoint has them."""
    plain, coded = (Recorded(gallery["fsdp"].folder / ranks / each, 0, "", "") for each in ("even", name))
    assert coded.losses() != plain.losses() and coded.losses() == pytest.approx(plain.losses(), rel=error)
    for key, tensor in plain.state().tensors["model"].items():
        found = coded.state().tensors["model"][key]
        torch.testing.assert_close(found, tensor, rtol=0, atol=error, msg=key)
        assert tensor.dtype != torch.float32 or tensor.numel() < 9 or not torch.equal(found, found.bfloat16().float())


@pytest.mark.slow
def test_compiled_blocks(tmp_path: Path) -> None:
    options = ("--train.global_batch=6", "--dropout=0")  # compiled dropout draws other numbers
    train_by_fsdp(tmp_path / "two", [("compiled", (*options, "--train.compile=true"))], 2, "mpirun")
    _check_equal(_whole(tmp_path, *options), Recorded(tmp_path / "two" / "compiled", 0, "", ""))


@pytest.mark.parametrize(("one", "other"), [("even", "halves"), ("int8", "int8_halves")])
def test_law_2_resumed_equals_uninterrupted(one: str, other: str, gallery: Gallery) -> None:
    whole, halves = (Recorded(gallery["fsdp"].folder / "two" / name, 0, "", "") for name in (one, other))
    assert halves.losses() == whole.losses()
    for name, tensor in whole.state().tensors["model"].items():
        assert torch.equal(halves.state().tensors["model"][name], tensor), name


def test_law_10_a_checkpoint_fits_any_engine(gallery: Gallery, tmp_path: Path) -> None:
    """FSDP on 2 ranks, 1 rank, FSDP on 4 ranks, a divided optimizer on 2 ranks."""
    resized = Recorded(gallery["fsdp"].folder / "resized", 0, "", "")
    assert [event["size"] for event in resized.events("started")] == [2, 1, 4, 2]
    one = _whole(tmp_path)
    assert resized.losses() == pytest.approx(one.losses(), rel=1e-6)
    crossed, coded = (Recorded(gallery["fsdp"].folder / "two" / name, 0, "", "") for name in ("crossed", "int8"))
    assert crossed.losses()[:3] == coded.losses()[:3]
    assert crossed.losses() == pytest.approx(one.losses(), rel=5e-3) and len(crossed.losses()) == 6
    for name, tensor in one.state().tensors["model"].items():
        torch.testing.assert_close(resized.state().tensors["model"][name], tensor, rtol=1e-5, atol=2e-6, msg=name)


def test_ranks_with_fewer_micro_batches_repeat_one() -> None:
    for size in (2, 3, 4):
        streams = [Stream([0] * 9, 7, 5, 2, rank, size, uniform=True) for rank in range(size)]  # type: ignore[arg-type]
        for position in (0, 5):
            passes = [[*stream.step(position), *stream.repeated(position)] for stream in streams]
            assert {len(each) for each in passes} == {-(-3 // size)}
            assert sum(len(stream.step(position)) for stream in streams) == 3
            assert len(list(streams[-1].keys(position, 1))) == len(passes[-1])


def _task(model: nn.Module, make: Callable[[Any], torch.optim.Optimizer] | None = None) -> Callable[[int], Task]:
    data = torch.utils.data.TensorDataset(torch.ones(8, 1))
    optimizer = make(model.parameters()) if make else None
    return lambda rank: Task(model, lambda model, batch: (model(batch[0]).sum(), 1), data, optimizer=optimizer)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        self.layers[1].weight = self.layers[0].weight


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2)])
        self.scale = nn.Parameter(torch.ones(()))


BLOCKS = nn.Sequential(nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("build", "size", "options", "message"),
    [
        (_task(BLOCKS), 1, (), "divides the model among ranks"),
        (_task(BLOCKS), 1, ("--parallel.shard=parameters",), "divides the model among ranks"),
        (_task(BLOCKS), 2, ("--parallel.compression=topk",), "does not support --parallel.compression topk"),
        (_task(BLOCKS), 2, ("--parallel.compression=powersgd",), "does not support --parallel.compression powersgd"),
        (_task(BLOCKS), 2, ("--parallel.shard=optimizer",), "does not support --parallel.shard optimizer"),
        (_task(nn.Linear(1, 1)), 2, (), "has no blocks to divide"),
        (_task(Tied()), 2, (), r"layers\.0\.weight and layers\.1\.weight are one parameter"),
        (_task(Scalar()), 2, (), "scale has no dimension"),
        (_task(nn.Sequential(nn.Embedding(3, 3, sparse=True))), 2, (), "0 makes sparse gradients"),
        (_task(BLOCKS, SignOfMean), 2, (), "the optimizer may need whole tensors"),
        (_task(BLOCKS), 2, ("--parallel.bucket_mib=8",), "has no buckets"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    build: Callable[[int], Task], size: int, options: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        train_on_threads(*STACK[1:], FSDP, *options, f"--run_dir={tmp_path / 'run'}", size=size, build=build)


def test_an_elastic_job_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not support an elastic job"):
        find_engine("fsdp", elastic=True)


def test_other_engines_do_not_divide_parameters() -> None:
    with pytest.raises(ConfigError, match=r"does not support --parallel\.shard parameters") as caught:
        find_engine("horovod", shard="parameters")
    assert "--parallel.engine fsdp --parallel.shard parameters" in str(caught.value)
