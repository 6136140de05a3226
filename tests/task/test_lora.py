"""LoRA: which layers are adapted, what stays as it was, how large checkpoints are, and values that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hvdtrain.errors import ConfigError
from hvdtrain.task.causal_lm import ModelConfig, causal_lm
from hvdtrain.task.language_model import language_model
from hvdtrain.task.lora import LoraOptions, add_adapters, parse_lora
from hvdtrain.task.text_config import TextConfig
from hvdtrain.task.token_loss import next_token_loss
from tests.support.gallery import LANGUAGE, Recorded, record_on_threads

pytest.importorskip("transformers", reason="the transformers library is not installed")
pytest.importorskip("peft", reason="the peft library is not installed")

TOKENS = torch.randint(0, 257, (4, 33), generator=torch.Generator().manual_seed(1))


def _model(preset: str = "tiny", lora: str | None = None) -> Any:
    torch.manual_seed(0)
    model = causal_lm(ModelConfig(preset=preset), vocabulary=257, seq_len=32)  # type: ignore[arg-type]
    if lora is not None:
        add_adapters(model, parse_lora(lora))
    return model


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("rank=16", LoraOptions(16, 32.0)),
        ("alpha=8, rank=1", LoraOptions(1, 8.0)),
        ("rank=2,alpha=0.5,dropout=0.05,targets=q_proj+v_proj", LoraOptions(2, 0.5, 0.05, ("q_proj", "v_proj"))),
    ],
)
def test_values(text: str, options: LoraOptions) -> None:
    assert parse_lora(text) == options


@pytest.mark.parametrize(
    "text",
    ["", "16", "rank=", "rank=0", "rank=1.5", "alpha=16", "rank=4,alpha=0", "rank=4,alpha=inf", "rank=4,alpha=nan",
     "rank=4,dropout=1", "rank=4,dropout=-0.1", "rank=4,rank=8", "rank=4,layers=2", "rank=4,targets=a+", "rank=4,"],
)  # fmt: skip
def test_values_that_are_wrong(text: str, tmp_path: Path) -> None:
    """They are refused before data is looked for."""
    with pytest.raises(ConfigError, match=r"invalid --model\.lora"):
        language_model(ModelConfig(lora=text), TextConfig(text=str(tmp_path / "none")))


def test_all_linear_layers_but_the_head_are_adapted() -> None:
    model = _model(lora="rank=2")
    adapted = {name.partition(".lora_A")[0] for name, _ in model.named_parameters() if ".lora_A" in name}
    linear = {name for name, each in _model().named_modules() if isinstance(each, nn.Linear)}
    assert adapted == linear - {"lm_head"} and any("shared_experts" in name for name in adapted)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained and all(".lora_" in name for name in trained)


def test_targets_are_ends_of_names() -> None:
    model = _model(lora="rank=2,targets=o_proj+shared_experts.up_proj")
    adapted = {name.partition(".lora_")[0] for name, p in model.named_parameters() if p.requires_grad}
    assert adapted == {f"model.layers.{i}.self_attn.o_proj" for i in (0, 1)} | {
        "model.layers.1.mlp.shared_experts.up_proj"
    }
    for wrong in ("experts", "a_proj"):  # no linear layer, and the end of q_a_proj only
        with pytest.raises(ConfigError, match=f"no linear layer '{wrong}'") as caught:
            _model(lora=f"rank=2,targets=o_proj+{wrong}")
        assert "o_proj" in str(caught.value.expected)
    with pytest.raises(ConfigError, match="no linear layers to adapt"):
        add_adapters(nn.Sequential(nn.Embedding(3, 3)), LoraOptions(2, 4.0))


def test_a_new_adapter_changes_nothing_and_learns_without_the_base() -> None:
    base, model = _model(), _model(lora="rank=4,dropout=0.5")
    model.eval()
    exact, _ = next_token_loss(base.eval(), TOKENS)
    loss, _ = next_token_loss(model, TOKENS)
    assert loss.item() == exact.item()
    model.train()
    next_token_loss(model, TOKENS)[0].backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name
        assert ".lora_B" not in name or parameter.grad.any(), name
    kept = dict(base.named_parameters())
    found = {name.replace(".base_layer", ""): p for name, p in model.named_parameters() if not p.requires_grad}
    assert found.keys() == kept.keys() and all(torch.equal(p, found[name]) for name, p in kept.items())


def _train(folder: Path, *options: str, size: int = 1, stop: int) -> Recorded:
    options = (*LANGUAGE, "--optimizer.lr=0.03", *options, f"--train.stop_at={stop}")
    return record_on_threads(folder, *options, size=size)


def _size(job: Recorded) -> int:
    (saved,) = (job.run / "checkpoints").glob("step-*")
    return sum(file.stat().st_size for file in saved.iterdir())


def test_a_checkpoint_has_at_most_a_twentieth_of_the_full_one(tmp_path: Path) -> None:
    small = ("--model.preset=small", "--data.seq_len=16", "--train.global_batch=1", "--train.micro_batch=1")
    full, lora = (_train(tmp_path / str(len(more)), *small, *more, stop=1) for more in ((), ("--model.lora=rank=16",)))
    assert 0 < _size(lora) <= 0.05 * _size(full)
    (started,) = lora.events("started")
    assert 0.03 < started["trained"] / started["parameters"] < 0.04
    assert full.events("started")[0]["trained"] == full.events("started")[0]["parameters"]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return _train(tmp_path_factory.mktemp("lora") / "one", "--model.lora=rank=4", stop=5)


@pytest.mark.parametrize("engine", [f"--parallel.shard={each}" for each in ("none", "gradients")])
def test_laws_1_and_2(engine: str, one: Recorded, tmp_path: Path) -> None:
    lora = ("--model.lora=rank=4", engine)
    two = _train(tmp_path / "two", *lora, size=2, stop=5)
    assert two.losses() == pytest.approx(one.losses(), rel=2e-6)
    assert one.losses()[-1] < one.losses()[0] - 0.1, "adapters learn"
    for stop in (2, 5):
        parts = _train(tmp_path / "parts", *lora, size=2, stop=stop)
    assert parts.losses() == two.losses()
    wanted, found = two.state(), parts.state()
    assert found.values["frozen"] == wanted.values["frozen"] == one.state().values["frozen"]
    for group, tensors in wanted.tensors.items():
        assert all(torch.equal(found.tensors[group][name], tensor) for name, tensor in tensors.items())
        assert all(".lora_" in name or "bias" in name for name in tensors)
    assert wanted.tensors["model"].keys() == one.state().tensors["model"].keys()


def test_law_1_holds_with_dropout(tmp_path: Path) -> None:
    lora = "--model.lora=rank=4,dropout=0.2"
    one, two = (_train(tmp_path / str(n), lora, size=n, stop=3).losses() for n in (1, 2))
    assert two == pytest.approx(one, rel=2e-6)


def test_transformers_refuses_a_checkpoint_of_adapters(one: Recorded) -> None:
    """It would fill in random values for the other weights."""
    from transformers import AutoModelForCausalLM

    (folder,) = (one.run / "checkpoints").glob("step-*")
    with pytest.raises(ValueError, match="Unrecognized model"):
        AutoModelForCausalLM.from_pretrained(folder)
