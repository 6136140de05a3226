"""A model that FSDP divides trains as a whole one, and its checkpoints fit any engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from hvdtrain.data.loader import Stream
from hvdtrain.engine.make import make_engine
from hvdtrain.errors import ConfigError
from hvdtrain.muon import Muon
from hvdtrain.plan.plan import Plan
from tests.laws.test_laws import record
from tests.laws.test_sharded import SignOfMean
from tests.support.gallery import Gallery, Recorded, train_by_fsdp
from tests.support.stack import STACK, STATISTICS, VARIANTS
from tests.support.thread_comm import ThreadComm, per_rank


def train_whole(folder: Path, *options: str, size: int = 1, common: tuple[str, ...] = STACK) -> Recorded:
    """The same training on ranks that each have the whole model."""
    return record(folder, *common, *options, size=size)


def check_equal(one: Recorded, divided: Recorded) -> None:
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
    assert found.values["aliases"] == expected.values["aliases"]


def _recorded(gallery: Gallery, job: str, name: str) -> Recorded:
    """Return one of the trainings of a job, which is called RECORDING/RANKS."""
    recording, _, ranks = job.partition("/")
    return Recorded(gallery[recording].folder / ranks / name, 0, "", "")


JOBS = {
    **dict.fromkeys(("fsdp/two", "hybrid/four"), tuple(VARIANTS)),
    "fsdp/four": ("uneven",),
    "by_torchrun/four": ("even", "uneven", "scaled"),
    "by_torchrun/groups": ("even", "uneven", "back"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "job"), [(variant, job) for job, variants in JOBS.items() for variant in variants])
def test_law_9_parameters_are_those_of_one_rank(variant: str, job: str, gallery: Gallery, tmp_path: Path) -> None:
    """Plain SGD, most of them: a wrong factor of a gradient shows in its parameter."""
    divided = _recorded(gallery, job, variant)
    assert divided.state().values["aliases"] != {}
    check_equal(train_whole(tmp_path, *VARIANTS[variant]), divided)
    assert len(divided.events("rolled_back")) == (2 if variant == "back" else 0)
    whole = [event["text"] for event in divided.events("warning") if "built the whole model" in event["text"]]
    assert [text[:30] for text in whole] == (["1 rank(s) besides rank 0 have "] if variant == "uneven" else [])


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "size"), [("two", 2), ("four", 4)])
def test_repeated_micro_batches_leave_no_trace_in_buffers(
    ranks: str, size: int, gallery: Gallery, tmp_path: Path
) -> None:
    divided = _recorded(gallery, f"fsdp/{ranks}", "statistics")
    check_equal(train_whole(tmp_path, *STATISTICS, size=size), divided)


@pytest.mark.slow
@pytest.mark.parametrize(("job", "count"), [("fsdp/two", 2), ("fsdp/four", 4), ("hybrid/four", 4)])
def test_each_rank_writes_its_rows(job: str, count: int, gallery: Gallery) -> None:
    (saved,) = (_recorded(gallery, job, "even").run / "checkpoints").glob("step-*")
    assert len(list(saved.glob("model-*.safetensors"))) == count


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "job"),
    [("offload", "fsdp/two"), ("recomputed", "fsdp/two"), ("int8/offload", "fsdp/two"),
     ("offload", "by_torchrun/four"), ("recomputed", "hybrid/four"), ("recomputed", "by_torchrun/groups")],
)  # fmt: skip
def test_options_of_memory_have_the_same_bits(option: str, job: str, gallery: Gallery) -> None:
    plain, found = (_recorded(gallery, job, each) for each in (option.rpartition("/")[0] or "even", option))
    assert found.losses() == plain.losses()
    for name, tensor in plain.state().tensors["model"].items():
        assert torch.equal(found.state().tensors["model"][name], tensor), name


ERRORS = {"fp16": 2e-4, "bf16": 2e-3, "int8": 1e-2, "weights": 1e-2, "int8_weights": 2e-2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "job"),
    [*((name, "fsdp/two") for name in ERRORS), ("int8", "fsdp/four"),
     ("bf16", "by_torchrun/four"), ("int8_weights", "by_torchrun/four")],
)  # fmt: skip
def test_rounded_parameters_stay_near(name: str, job: str, gallery: Gallery) -> None:
    """Parameters and gradients are rounded on their way; the owner's parameters are not, so the checkpoint has them."""
    plain, coded, error = *(_recorded(gallery, job, each) for each in ("even", name)), ERRORS[name]
    assert coded.losses() != plain.losses() and coded.losses() == pytest.approx(plain.losses(), rel=error)
    for key, tensor in plain.state().tensors["model"].items():
        found = coded.state().tensors["model"][key]
        torch.testing.assert_close(found, tensor, rtol=0, atol=error, msg=key)
        assert tensor.dtype != torch.float32 or tensor.numel() < 9 or not torch.equal(found, found.bfloat16().float())


@pytest.mark.slow
def test_bf16_weights_are_those_of_other_engines(gallery: Gallery, tmp_path: Path) -> None:
    """torch's own mixed precision is the reference: the same inputs are cast."""
    check_equal(train_whole(tmp_path, "--precision=bf16-weights"), _recorded(gallery, "fsdp/two", "weights"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "error", "job"),
    [*((*each, "hybrid/four") for each in (("fp16", 2e-4), ("bf16", 2e-3), ("int8", 2e-3), ("topk:0.5", 0.05))),
     ("int8", 2e-3, "by_torchrun/groups"), ("topk:0.5", 0.05, "by_torchrun/groups")],
)  # fmt: skip
def test_groups_exchange_compressed_gradients(name: str, error: float, job: str, gallery: Gallery) -> None:
    """Inside a group nothing is rounded, and parameters are not sent between groups."""
    plain, coded = (_recorded(gallery, job, each) for each in ("even", name))
    assert coded.losses()[0] == plain.losses()[0]
    assert coded.losses() != plain.losses() and coded.losses() == pytest.approx(plain.losses(), rel=error)


@pytest.mark.slow
def test_groups_share_the_residuals_of_their_ranks(gallery: Gallery, tmp_path: Path) -> None:
    """Groups of a run with int8 save residuals of rows; one rank resumes them, and groups resume those of two ranks."""
    plain = _recorded(gallery, "hybrid/four", "even").losses()
    for name, sizes in (("crossed", [4, 1]), ("joined", [2, 4])):
        both = _recorded(gallery, "hybrid/four", name)
        assert [event["size"] for event in both.events("started")] == sizes
        assert both.losses() == pytest.approx(plain, rel=2e-3)
    saved = _recorded(gallery, "hybrid/four", "int8").state().tensors
    residuals, shapes = saved["exchange"], {name: t.shape for name, t in saved["model"].items()}
    assert {key.rpartition("/")[0] for key in residuals} > {"layers.0.inner.weight", "embedding.weight"}
    for key, residual in residuals.items():
        assert residual.shape == (2, *shapes[key.rpartition("/")[0]])  # of each group
        assert residual.abs().sum() > 0 or "never" in key or "sometimes" in key or residual.numel() < 9, key


@pytest.mark.slow
def test_law_3_a_replica_that_differs_is_found(gallery: Gallery) -> None:
    """By a hash before a step; only rank 1 of the other group has the same rows as rank 3."""
    (line, *_) = [text for text in gallery["hybrid"].out.splitlines() if "wandering" in text]
    assert "layers.0.inner.weight differs on rank(s) 3" in line
    assert len(_recorded(gallery, "hybrid/four", "wandering").losses()) == 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "more"), [(2, ()), (2, ("--memory.checkpointing=selective",)), (4, ("--parallel.dp_shard=2",))]
)
def test_compiled_blocks(size: int, more: tuple[str, ...], tmp_path: Path) -> None:
    options = ("--train.global_batch=6", "--dropout=0")  # compiled dropout draws other numbers
    train_by_fsdp(tmp_path / "job", [("compiled", (*options, "--train.compile=true"))], size, "mpirun", *more)
    check_equal(train_whole(tmp_path, *options), Recorded(tmp_path / "job" / "compiled", 0, "", ""))


@pytest.mark.slow
@pytest.mark.parametrize("job", ["fsdp/two", "hybrid/four"])
@pytest.mark.parametrize(("one", "other"), [("even", "halves"), ("int8", "int8_halves"), ("remade", "remade_halves")])
def test_law_2_resumed_equals_uninterrupted(one: str, other: str, job: str, gallery: Gallery) -> None:
    whole, halves = (_recorded(gallery, job, name) for name in (one, other))
    assert halves.losses() == whole.losses()
    assert ("layers.1.inner.weight" in whole.state().tensors["model"]) == (one != "remade")
    for name, tensor in whole.state().tensors["model"].items():
        assert torch.equal(halves.state().tensors["model"][name], tensor), name


@pytest.mark.slow
def test_law_10_a_checkpoint_fits_any_engine(gallery: Gallery, tmp_path: Path) -> None:
    """FSDP on 2 ranks, 1 rank, FSDP on 4 ranks, a divided optimizer on 2 ranks."""
    resized = Recorded(gallery["fsdp"].folder / "resized", 0, "", "")
    assert [event["size"] for event in resized.events("started")] == [2, 1, 4, 2]
    one = train_whole(tmp_path)
    assert resized.losses() == pytest.approx(one.losses(), rel=1e-6)
    crossed, coded = (_recorded(gallery, "fsdp/two", name) for name in ("crossed", "int8"))
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


BLOCKS = nn.Sequential(nn.Linear(1, 1))


def _tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    return model


def _with_parameter(value: Tensor) -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_parameter("own", nn.Parameter(value))
    return model


class _Declared(SignOfMean):
    updates_by_element = True


def _muon(parameters: Any) -> Muon:
    return Muon([{"params": [p for p in parameters if p.dim() == 2], "matrices": True}], lr=1e-3)


@pytest.mark.parametrize(
    ("size", "model", "make", "options", "message"),
    [
        (1, BLOCKS, SGD, {}, "divides the model among ranks"),
        (1, BLOCKS, SGD, {"dp_shard": 2}, "divides the model among ranks"),
        (2, nn.Linear(1, 1), SGD, {}, "has no blocks"),
        (2, _tied(), SGD, {}, r"0\.weight and 1\.weight are one parameter"),
        (2, _with_parameter(torch.ones(())), SGD, {}, "own has no dimension"),
        (2, _with_parameter(torch.ones(2, 3).t()), SGD, {}, "own is not contiguous"),
        (2, nn.Sequential(nn.Embedding(3, 3, sparse=True)), SGD, {}, "0 makes sparse gradients"),
        (2, _with_parameter(torch.zeros(0, 3)), SGD, {}, "own has no elements"),
        (2, nn.Sequential(_with_parameter(torch.zeros(2).double())), SGD, {}, r"but 0\.0\.weight has another"),
        (2, nn.Sequential(nn.Linear(1, 1).double()), SGD, {"precision": "bf16-weights"}, r"but 0\.weight has another"),
        (2, _with_parameter(torch.zeros(2, dtype=torch.complex64)), SGD, {}, "own is complex"),
        (2, BLOCKS, SignOfMean, {}, "(?s)may need whole tensors.*updates_by_element = True"),
        (2, BLOCKS, _muon, {}, "may need whole tensors"),
        (2, BLOCKS, torch.optim.Adafactor, {}, "may need whole tensors"),
        (4, BLOCKS, SGD, {"dp_shard": 3}, "4 ranks cannot form groups of --parallel.dp_shard 3"),
        (2, BLOCKS, _Declared, {"dp_shard": 4}, "2 ranks cannot form groups of --parallel.dp_shard 4"),
    ],
)
@per_rank()
def test_what_cannot_be_divided_is_refused(
    comm: ThreadComm,
    size: int,
    model: nn.Module,
    make: Callable[[Any], Optimizer],
    options: dict[str, Any],
    message: str,
) -> None:
    """Further options: tests/plan."""
    with pytest.raises(ConfigError, match=message):
        make_engine(make(model.parameters()), model, comm, Plan("fsdp", shard="parameters", **options))
