"""Muon equals torch's on matrices, torch's AdamW on all others, and itself however matrices are stacked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hvdtrain import muon
from hvdtrain.config.schema import OptimizerConfig
from hvdtrain.errors import ConfigError
from hvdtrain.muon import Muon, orthogonalize
from hvdtrain.training.start.optimizers import make_optimizer

CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")])
OPTIONS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95}


def _train(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], steps: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=generator).to(p.device)
        optimizer.step()
    return [p.detach() for p in parameters]


def _parameters(*shapes: tuple[int, ...], device: str = "cpu") -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(device)) for shape in shapes]


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_matrices_change_as_by_torch(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16, as torch computes on each device; wide, tall, thin, and two of equal shape."""
    shapes = ((8, 24), (24, 8), (24, 8), (1, 5), (16, 16))
    monkeypatch.setattr(muon, "iteration_dtype", lambda device: torch.bfloat16)
    ours, theirs = _parameters(*shapes, device=device), _parameters(*shapes, device=device)
    found = _train(Muon([{"params": ours, "matrices": True}], **OPTIONS), ours)
    expected = _train(torch.optim.Muon(theirs, adjust_lr_fn="match_rms_adamw", **OPTIONS), theirs)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-4)


def test_the_iteration_finds_the_orthogonal_factor() -> None:
    matrices = torch.randn(3, 20, 50, generator=torch.Generator().manual_seed(0))
    u, s, vh = torch.linalg.svd(matrices, full_matrices=False)
    found = u.mT @ orthogonalize(matrices, torch.float32) @ vh.mT
    diagonal = torch.diagonal(found, dim1=-2, dim2=-1)
    assert s.std() > 1 and diagonal.min() > 0.65 and diagonal.max() < 1.25
    torch.testing.assert_close(found, torch.diag_embed(diagonal), atol=1e-4, rtol=0)
    low = orthogonalize(matrices, torch.bfloat16)
    torch.testing.assert_close(low.float(), orthogonalize(matrices, torch.float32), atol=0.03, rtol=0)


@pytest.mark.parametrize("elements", [1, 700, 1 << 20])
def test_experts_change_as_the_matrices_that_they_are(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, on any rank that has some of them, in batches of any size."""
    (experts,) = _parameters((5, 12, 20))
    gradient = torch.randn(5, 12, 20)
    whole = nn.Parameter(experts.detach().clone())
    parts = [nn.Parameter(part.clone()) for part in (*experts.detach()[:3], experts.detach()[3:])]
    for parameters, gradients in (([whole], [gradient]), (parts, [*gradient[:3], gradient[3:]])):
        optimizer = Muon([{"params": parameters, "matrices": True}], **OPTIONS)
        for _ in range(2):
            for p, g in zip(parameters, gradients, strict=True):
                p.grad = g.clone()
            optimizer.step()
        monkeypatch.setattr(muon, "_BATCH_ELEMENTS", {"cpu": elements})
    found = torch.cat([p.detach().view(-1, 12, 20) for p in parts])
    assert torch.equal(found, whole.detach()) and not torch.equal(found, experts.detach())


@pytest.mark.parametrize("fused", [True, False])
def test_other_parameters_change_as_by_adamw(fused: bool) -> None:
    shapes = ((8, 24), (7,), ())
    ours, theirs = _parameters(*shapes), _parameters(*shapes)
    given: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "fused": fused}
    found = _train(Muon([{"params": ours}], **given), ours)
    expected = _train(torch.optim.AdamW(theirs, **given), theirs)
    assert all(map(torch.equal, found, expected))


def test_on_a_gpu_it_iterates_in_bf16_without_waiting_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake tensors have a device and no values: reading one would be an error."""
    seen: list[tuple[torch.Size, torch.dtype]] = []
    whole = orthogonalize
    monkeypatch.setattr(muon, "orthogonalize", lambda x, dtype: seen.append((x.shape, dtype)) or whole(x, dtype))
    with FakeTensorMode():
        parameters = [nn.Parameter(torch.empty(shape, device="cuda")) for shape in ((4, 8, 6), (8, 6), (8,))]
        optimizer = Muon([{"params": parameters[:2], "matrices": True}, {"params": parameters[2:]}], fused=True)
        for p in parameters:
            p.grad = torch.empty_like(p)
        optimizer.step()
    assert seen == [((5, 8, 6), torch.bfloat16)]


class Model(nn.Module):
    """A block with all kinds of parameters; its linear layer `tied` is also used outside."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4)
        block = nn.ModuleDict({"linear": nn.Linear(4, 4), "conv": nn.Conv1d(4, 4, 3), "positions": nn.Embedding(5, 4)})
        block.experts = nn.Parameter(torch.randn(2, 4, 4))
        block.experts_bias = nn.Parameter(torch.randn(2, 4))
        block["tied"] = nn.Linear(4, 9)
        self.layers = nn.ModuleList([block])
        self.head = nn.Linear(4, 9)
        self.head.weight = block["tied"].weight


def test_matrices_are_the_weights_inside_of_blocks() -> None:
    model = Model()
    optimizer = make_optimizer(model, OptimizerConfig(name="muon"))
    names = {p: name for name, p in model.named_parameters()}
    found = [[names[p] for p in group["params"]] for group in optimizer.param_groups if group["matrices"]]
    assert found == [["layers.0.experts", "layers.0.linear.weight"]]
    assert names.keys() == {p for group in optimizer.param_groups for p in group["params"]}
    assert isinstance(optimizer, Muon) and optimizer.needs_whole() == {model.layers[0]["linear"].weight}  # type: ignore[index]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(3, 3), "the model has no blocks to take matrices from"),
        (nn.Sequential(nn.Conv2d(3, 3, 3), nn.LayerNorm(3)), "the blocks of the model have no matrix to train"),
        (nn.Sequential(nn.Linear(3, 3)).requires_grad_(False), "the blocks of the model have no matrix to train"),
    ],
)
def test_a_model_without_matrices_is_refused(model: nn.Module, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_optimizer(model, OptimizerConfig(name="muon"))


def test_a_parameter_that_is_no_matrix_is_refused() -> None:
    with pytest.raises(ValueError, match=r"found a parameter of shape \(2, 3, 1, 1\)"):
        Muon([{"params": _parameters((2, 3), (2, 3, 1, 1)), "matrices": True}])
