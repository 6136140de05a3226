"""A model without memory is the same model, and its task draws the same random numbers."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hvdtrain.state.checkpoint_store import CheckpointStore
from hvdtrain.state.pieces import StateDict
from hvdtrain.state.placeholder import Placeholder, parameters_without_memory, refuse_other_placeholders
from hvdtrain.task.causal_lm import ModelConfig, causal_lm
from tests.support.checkpoints import save


class Initialised(nn.Module):
    """Every initial value of torch, in place, of views and of other dtypes; tied and frozen parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.square = nn.Parameter(torch.zeros(6, 6))
        for fill in (nn.init.orthogonal_, nn.init.trunc_normal_, nn.init.eye_, nn.init.kaiming_normal_):
            fill(self.square)
        nn.init.trunc_normal_(self.square, 0.0, 1.0, 2.0, 3.0)
        nn.init.sparse_(self.square, 0.3)
        for draw in (Tensor.uniform_, Tensor.exponential_, Tensor.cauchy_, Tensor.log_normal_):
            draw(self.square.data)
        self.square.data.bernoulli_(0.3).mul_(self.square.data.norm())
        self.square.data.geometric_(0.3)
        self.square.data.random_(5)
        self.square.data[:, :3].normal_()
        self.square.data.t()[1:].normal_()
        self.square.data += 0.02 * torch.randn_like(self.square) + torch.rand(6, device=self.square.device)
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.listed = nn.ParameterList([torch.randn(3), torch.randn(2, 2).double()])
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.recurrent = nn.LSTM(4, 5)
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
        self.image = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.statistics = nn.BatchNorm1d(3)
        self.register_buffer("angles", torch.arange(0, 8, 2).float().exp(), persistent=False)
        self.half().to("cpu", torch.bfloat16)
        self.load_state_dict({name: torch.zeros(tensor.shape) for name, tensor in self.state_dict().items()})


def _transformer(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    kind = getattr(transformers, f"{name}Config")
    return transformers.AutoModel.from_config(kind(**small, intermediate_size=8))  # type: ignore[no-any-return]


def _preset(pretrained: str | None = None) -> nn.Module:
    return causal_lm(ModelConfig(preset="tiny", from_=pretrained), vocabulary=64, seq_len=8)


def _pretrained(folder: Path) -> nn.Module:
    if not (folder / "config.json").exists():
        _preset().save_pretrained(folder)  # type: ignore[operator]
    return _preset(str(folder))


def _saved(folder: Path) -> nn.Module:
    if not (folder / "checkpoints").exists():
        made: Any = _preset()
        state = StateDict({"model": made.state_dict(), "optimizer": {}}, {"aliases": {}})
        files = {"config.json": made.config.to_json_string().encode()}
        save(CheckpointStore(folder / "checkpoints", pytest.fail, files=files), 1, state)
    return _preset(str(folder))


MODELS: dict[str, Callable[[Path], nn.Module]] = {
    "initial values": lambda folder: Initialised(),
    "DeepSeek": lambda folder: _preset(),
    "a folder": _pretrained,
    "a run": _saved,
    "ViT": lambda folder: _transformer("ViT"),  # truncated
    "Mamba": lambda folder: _transformer("Mamba"),  # looks at the device of its parameters
}


@pytest.mark.parametrize("name", MODELS)
def test_data_after_the_model_is_the_same(name: str, tmp_path: Path) -> None:
    make = MODELS[name]
    make(tmp_path)  # writes the folder
    torch.manual_seed(1)
    model, data = make(tmp_path), torch.rand(5)
    torch.manual_seed(1)
    with parameters_without_memory() as made:
        empty, same = make(tmp_path), torch.rand(5)
    assert torch.equal(data, same) and made
    assert nn.Linear(1, 1).weight.numel() == 1 and not isinstance(nn.Linear(1, 1).weight, Placeholder)
    expected, found = (dict(m.named_parameters(remove_duplicate=False)) for m in (model, empty))
    assert found.keys() == expected.keys()
    for key, parameter in expected.items():
        other = found[key]
        assert isinstance(other, Placeholder) and isinstance(other, nn.Parameter)
        for fact in ("shape", "dtype", "requires_grad", "device", "is_meta"):
            assert getattr(other, fact) == getattr(parameter, fact), (key, fact)
        assert other.stride() == parameter.stride()
    names = [[n for n, _ in m.named_parameters()] for m in (model, empty)]  # a tied one once
    assert names[0] == names[1]
    buffers, others = dict(model.named_buffers()), dict(empty.named_buffers())
    assert buffers.keys() == others.keys() and all(torch.equal(b, others[n]) for n, b in buffers.items())
    refuse_other_placeholders(empty)


def test_what_the_optimizer_makes_has_values() -> None:
    with parameters_without_memory():
        model = nn.Linear(3, 2)
        optimizer = torch.optim.Adagrad(model.parameters(), initial_accumulator_value=0.5)
    assert optimizer.param_groups[0]["params"][0] is model.weight
    assert torch.equal(optimizer.state[model.weight]["sum"], torch.full((2, 3), 0.5))


VALUES: dict[str, Callable[[nn.Parameter], object]] = {
    "a number": lambda p: p.sum().item(),
    "a decision": lambda p: bool((p > 0).any()),
    "equal": lambda p: torch.equal(p, p),
    "a list": lambda p: p.tolist(),
    "an array": lambda p: p.detach().numpy(),
    "a selection": lambda p: p[torch.ones(2, 3) > 0],
    "a copy": lambda p: torch.zeros(2, 3).copy_(p),
    "a sum": lambda p: torch.zeros(2, 3).add_(p.detach()),
    "rows": lambda p: torch.zeros(2, 3).__setitem__(0, p.detach()[0]),
    "several": lambda p: torch._foreach_add_([torch.zeros(2, 3)], [p.detach()]),
    "out": lambda p: torch.add(p.detach(), 1, out=torch.zeros(2, 3)),
    "an address": lambda p: p.data_ptr(),
    "a file": lambda p: torch.save(p, io.BytesIO()),
    "draws": lambda p: torch.multinomial(p.detach().abs(), 1),
    "another shape": lambda p: p.data.t_(),
}


@pytest.mark.parametrize("what", VALUES)
def test_what_needs_values_raises(what: str) -> None:
    """Never a wrong result in silence."""
    with parameters_without_memory():
        model = nn.Linear(3, 2)
    with pytest.raises((NotImplementedError, RuntimeError)):
        VALUES[what](model.weight)


@pytest.mark.parametrize("keep", [lambda p: p.detach().clone(), lambda p: p.data, lambda p: torch.ones(2, 2) @ p])
def test_what_is_kept_of_a_parameter_is_found(keep: Callable[[nn.Parameter], Tensor]) -> None:
    with parameters_without_memory():
        model = nn.Linear(3, 2)
        kept = [keep(model.weight)]
    with pytest.raises(RuntimeError, match=r"of shape \(2, 3\) is computed from parameters"):
        refuse_other_placeholders(model)
    kept.clear()
    refuse_other_placeholders(model)
