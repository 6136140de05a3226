"""Compressors and the reducer on a CUDA device: the CPU's sums, and no waiting by the host while backward runs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn

from hvdtrain.comm.base import Comm
from hvdtrain.comm.solo import SoloComm
from hvdtrain.compression.base import commit_all
from hvdtrain.compression.table import TABLE, Compression, parse
from hvdtrain.exchange.bucket import SideStream
from hvdtrain.exchange.buckets import lay_out
from hvdtrain.exchange.reducer import Reducer
from hvdtrain.exchange.rows import RowBucket
from hvdtrain.plan.buckets import BucketPlan
from tests.support.compression import bucket, drive, gradients
from tests.support.compression_contract import CLAUSES

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 8))


@contextmanager
def no_waiting() -> Iterator[None]:
    """Any wait of the host for the device is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _step(reducer: Reducer, model: nn.Module, x: torch.Tensor) -> None:
    model.zero_grad()
    reducer.begin()
    reducer.collect()
    model(x).pow(2).sum().backward()
    reducer.finish()


@pytest.mark.parametrize("name", TABLE)
def test_the_sums_are_the_cpus(name: str) -> None:
    found = []
    for device in ("cpu", "cuda"):
        model = _model().to(device)
        reducer = Reducer(lambda m=model: list(m.named_parameters()), SoloComm(), parse(name))  # type: ignore[misc]
        x = torch.linspace(-1, 1, 64 * 16).view(16, 64).to(device)
        for _ in range(3):
            _step(reducer, model, x)
            reducer.commit(applied=True)
        found.append([p.grad.cpu() for p in model.parameters() if p.grad is not None])
    for on_cpu, on_device in zip(*found, strict=True):
        # Devices draw other random numbers; a gradient and its sum are rounded, each by at most 1/127 of the largest.
        atol = 4 / 127 if "stochastic" in name else 2e-2
        torch.testing.assert_close(on_device, on_cpu, rtol=2e-2, atol=atol * float(on_cpu.abs().max()))


@pytest.mark.parametrize("name", TABLE)
def test_the_host_waits_for_nothing_in_backward_and_exchange(name: str) -> None:
    model = _model().cuda()
    reducer = Reducer(lambda: list(model.named_parameters()), SoloComm(), parse(name))
    x = torch.randn(16, 64, device="cuda")
    _step(reducer, model, x)  # makes the buckets
    reducer.commit(applied=True)
    torch.cuda.synchronize()
    with no_waiting():
        _step(reducer, model, x)


def test_backward_on_a_stream_of_its_own_is_followed() -> None:
    """A bucket packed behind a slow kernel on another stream is exchanged after that kernel."""
    model = _model().cuda()
    plain = copy.deepcopy(model)
    x = torch.randn(16, 64, device="cuda")
    plain(x).pow(2).sum().backward()
    reducer = Reducer(lambda: list(model.named_parameters()), SoloComm(), parse("int8"))
    side = torch.cuda.Stream()
    for _ in range(3):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            _step(reducer, model, x)
            norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None])
        torch.cuda.current_stream().wait_stream(side)
        reducer.commit(applied=False)
    expected = torch.stack([p.grad.norm() for p in plain.parameters() if p.grad is not None])
    torch.testing.assert_close(norm, expected, rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("exact", [True, False], ids=["as they are", "halves"])
def test_rows_are_exchanged_after_the_kernels_that_made_them(exact: bool) -> None:
    """A slow kernel is in front of the gradient; the exchange, on its own stream, sends what comes after it."""
    parameter = nn.Parameter(torch.zeros(4096, 130, device="cuda"))
    layout = lay_out(BucketPlan((("rows",),)), {"rows": parameter}, "g")[0]
    bucket, side = RowBucket(layout, 3.0, SoloComm(), exact=exact, as_views=True), SideStream(parameter.device)
    expected = torch.zeros_like(parameter)
    expected[5:4096:500] = torch.linspace(-1, 1, 130, device="cuda")
    torch.cuda._sleep(20_000_000)
    parameter.grad = expected * 2
    bucket.pack(0, 0.5)
    side.record_packed()
    assert not bucket.eager, "it asks the host how many rows there are"
    side.run(bucket.start)
    while bucket.running:
        side.run(bucket.wait)
    side.join()
    bucket.set_gradients()
    assert parameter.grad is not None
    torch.testing.assert_close(parameter.grad, 3 * expected, rtol=1e-3, atol=1e-3)
    assert bucket.count == 9


EVERY = pytest.mark.parametrize("compression", [*map(parse, TABLE), parse("topk:0.2"), parse("topk:1e-5")], ids=str)


@pytest.mark.parametrize("clause", CLAUSES, ids=lambda c: c.__name__)
@EVERY
def test_the_contract_holds_on_a_device(compression: Compression, clause: Callable[[Comm, Compression], None]) -> None:
    with torch.device("cuda"):
        clause(SoloComm(), compression)


@EVERY
def test_an_exchange_does_not_wait_for_the_device(compression: Compression) -> None:
    with torch.device("cuda"):
        compressor = compression.load()(bucket(((400, 300), (7,), (400, 300))), SoloComm())
        values = gradients(compressor.shape, 1)
        for context in (nullcontext(), no_waiting()):  # the first step may set things up
            with context:
                for index, value in enumerate(values):
                    compressor.pack(index, value, 0.5)
                drive(compressor)
            commit_all([compressor], applied=True)
