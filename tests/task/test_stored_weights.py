"""Weights that are read one by one equal those of `from_pretrained`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from hvdtrain.errors import TaskError
from hvdtrain.state.placeholder import Placeholder, values_read_later
from hvdtrain.task.causal_lm import ModelConfig, causal_lm, read_config
from hvdtrain.task.saved_model import model_to_read

transformers = pytest.importorskip("transformers", minversion="5.23")
SIZES = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}  # fmt: skip
CONFIGS = {
    "llama": {"num_hidden_layers": 2, "tie_word_embeddings": True},
    "deepseek_v3": {
        "num_hidden_layers": 12, "first_k_dense_replace": 11, "n_routed_experts": 12, "num_experts_per_tok": 2,
        "n_group": 1, "topk_group": 1, "moe_intermediate_size": 8, "kv_lora_rank": 8, "q_lora_rank": 8,
        "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
    },
}  # fmt: skip


@pytest.fixture(params=[*CONFIGS])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The folder of a model, in several files; the experts of one have numbers of two digits."""
    config = transformers.AutoConfig.for_model(request.param, **SIZES, **CONFIGS[request.param])
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for buffer in model.buffers():
        buffer.copy_(torch.rand_like(buffer.float()).to(buffer))
    model.save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    return tmp_path / "saved"


def _to_read(folder: Path) -> Any:
    config = read_config(folder / "config.json", "--model.from")
    return model_to_read(transformers.AutoModelForCausalLM, folder, config, {})


def _edit(folder: Path, name: str, change: Any) -> None:
    """Replace a tensor of the folder by what `change` returns for it; None to remove it."""
    index = folder / "model.safetensors.index.json"
    files = json.loads(index.read_text())
    path = folder / files["weight_map"][name]
    tensors = load_file(path)
    tensors[name] = change(tensors[name])
    if tensors[name] is None:
        del tensors[name], files["weight_map"][name]
        index.write_text(json.dumps(files))
    save_file(tensors, path, metadata={"format": "pt"})


def test_each_parameter_is_that_of_the_whole_model(folder: Path) -> None:
    model = _to_read(folder)
    found: dict[str, Any] = dict(model.named_parameters())
    assert all(isinstance(parameter, Placeholder) for parameter in found.values())
    values = {name: parameter.read() for name, parameter in found.items()}
    assert str(folder) not in Path("/proc/self/maps").read_text(), "no value is in a mapped file"
    expected = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert values.keys() == dict(expected.named_parameters()).keys()
    for name, parameter in expected.named_parameters():
        assert torch.equal(values[name], parameter) and values[name].dtype == torch.float32, name
    buffers = dict(model.named_buffers())
    assert all(torch.equal(buffers[name], buffer) for name, buffer in expected.named_buffers())


def test_a_folder_without_a_tensor_is_read_as_a_whole_which_names_it(folder: Path) -> None:
    _edit(folder, "model.layers.0.self_attn.o_proj.weight", lambda tensor: None)
    assert _to_read(folder) is None
    with values_read_later() as later, pytest.raises(TaskError, match=r"layers\.0\.self_attn\.o_proj"):
        causal_lm(ModelConfig(from_=str(folder)), vocabulary=64, seq_len=8, may_read_later=True)
    assert not later


def test_a_tensor_of_another_shape_is_an_error(folder: Path) -> None:
    _edit(folder, "model.norm.weight", lambda tensor: tensor[:-1].clone())
    model = _to_read(folder)
    with pytest.raises(TaskError, match=r"model\.norm\.weight cannot be read from .*\.safetensors") as caught:
        model.model.norm.weight.read()
    assert "has shape (15,) in the folder, and (16,) in the model" in str(caught.value.found)


@pytest.mark.parametrize("may", [False, True])
def test_it_is_read_later_only_if_job_and_task_may(folder: Path, may: bool) -> None:
    def made(*, may_read_later: bool) -> nn.Module:
        return causal_lm(ModelConfig(from_=str(folder)), vocabulary=64, seq_len=8, may_read_later=may_read_later)

    assert not any(isinstance(p, Placeholder) for p in made(may_read_later=True).parameters()), "the job does not"
    with values_read_later() as later:
        model = made(may_read_later=may)
    assert all(isinstance(p, Placeholder) == may for p in model.parameters()) and later == [model][:may]


def test_a_quantized_model_is_read_as_a_whole(folder: Path) -> None:
    config = read_config(folder / "config.json", "--model.from")
    config.quantization_config = {"quant_method": "fp8"}
    assert model_to_read(transformers.AutoModelForCausalLM, folder, config, {}) is None
