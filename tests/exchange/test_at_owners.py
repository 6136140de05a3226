"""The update of a part that several ranks hold: sums at the owners of rows, and equal parameters afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hvdtrain.exchange.at_owners import AtOwners
from hvdtrain.spans import Spans
from tests.support.thread_comm import ThreadComm, on_ranks, per_rank

SHAPES = {"matrix": (3000, 40), "expert": (4, 90, 8), "bias": (7,), "number": ()}


def _train(comm: ThreadComm, bucket_bytes: int, steps: int) -> tuple[dict[str, Tensor], dict[str, Tensor], set[str]]:
    """Add the sums of gradients to parameters; return them, the expected ones, and the names of what it owns."""
    torch.manual_seed(0)
    parameters = {name: nn.Parameter(torch.randn(shape)) for name, shape in SHAPES.items()}
    expected = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    copies = AtOwners(comm, bucket_bytes, Spans(), "part", lambda some: [p is parameters["matrix"] for p in some])
    copies.add([*parameters.items()])
    owned = {name: each for name, each in copies.owned().items() if each.parameter is not None}
    for step in range(steps):
        copies.begin()
        of_ranks = [torch.Generator().manual_seed(10 * step + rank) for rank in range(comm.size)]
        gradients = {name: [torch.randn(shape, generator=each) for each in of_ranks] for name, shape in SHAPES.items()}
        for name, parameter in parameters.items():
            if name != "bias":  # backward has not used it
                parameter.grad = gradients[name][comm.rank]
                copies.add_gradient(name)
                expected[name] += sum(gradients[name]) if step != 1 else 0
        sums = copies.finish()
        assert {id(each) for each in sums} == {
            id(each.parameter.grad) for each in owned.values() if each.parameter is not None
        }
        if step == 1:  # not applied
            continue
        with torch.no_grad():
            for each in owned.values():
                assert each.parameter is not None and each.parameter.grad is not None
                each.parameter.add_(each.parameter.grad)
        for bucket in copies.to_gather():
            bucket.start_gather()
        for bucket in copies.buckets:
            bucket.finish_gather()
    return {name: parameter.detach() for name, parameter in parameters.items()}, expected, set(owned)


@pytest.mark.parametrize("bucket_bytes", [1 << 10, 1 << 20])
@pytest.mark.parametrize("ranks", [2, 3])
def test_all_copies_get_the_sums(ranks: int, bucket_bytes: int) -> None:
    found = on_ranks(ranks, lambda comm: _train(comm, bucket_bytes, steps=3))
    for parameters, expected, _ in found:
        for name, value in parameters.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-6)
            assert torch.equal(value, found[0][0][name])
    owners = [names for _, _, names in found]
    assert set.union(*owners) == set(SHAPES)
    assert sum("matrix" in names for names in owners) == 1  # the optimizer needs all of it


@per_rank(2)
def test_whole_matrices_are_spread_over_the_copies(comm: ThreadComm) -> None:
    """Also where each has a bucket of its own."""
    named = [(f"p{number}", nn.Parameter(torch.zeros(8, 8))) for number in range(4)]
    copies = AtOwners(comm, 1, Spans(), "part", lambda some: [True] * len(some))
    copies.add(named[::-1])
    assert [name for name, each in copies.owned().items() if each.parameter is not None] == [
        f"p{number}" for number in range(comm.rank, 4, 2)
    ]
