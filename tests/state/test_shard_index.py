"""Further files of a checkpoint: transformers reads the model as it is there, or says why not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hvdtrain.errors import CheckpointError
from hvdtrain.state.checkpoint_store import CheckpointStore, load, may_be_added
from hvdtrain.state.pieces import StateDict
from hvdtrain.state.shard_index import INDEX
from tests.support.checkpoints import save, save_in_parts

transformers = pytest.importorskip("transformers", reason="the transformers library is not installed")


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "vocab_size": 40}
    config = transformers.LlamaConfig(**shape, num_hidden_layers=2, tie_word_embeddings=True)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def _save(folder: Path, model: Any, count: int, *, divided: bool = False) -> Path:
    store = CheckpointStore(folder / "checkpoints", pytest.fail, files={"config.json": _config(model)})
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    state = StateDict({"model": tensors, "optimizer": {}}, {"aliases": {"lm_head.weight": "model.embed_tokens.weight"}})
    return save_in_parts(store, 1, state, count, divided=divided) if count > 1 else save(store, 1, state)


def _config(model: Any) -> bytes:
    return str(model.config.to_json_string()).encode()


@pytest.mark.parametrize("writers", [1, 2, 5])
def test_transformers_reads_whole_tensors_of_any_number_of_files(model: Any, writers: int, tmp_path: Path) -> None:
    folder = _save(tmp_path, model, writers)
    assert (folder / INDEX).exists() == (writers > 1)
    read, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    ids = torch.arange(20).reshape(2, 10)
    assert torch.equal(read(input_ids=ids).logits, model(input_ids=ids).logits)
    if writers > 1:
        stored = load(folder).tensors["model"]
        index = json.loads((folder / INDEX).read_text())
        assert index["weight_map"].keys() == stored.keys()
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in stored.values())


def test_transformers_refuses_pieces_of_tensors(model: Any, tmp_path: Path) -> None:
    folder = _save(tmp_path, model, 2, divided=True)
    assert not (folder / INDEX).exists()
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        transformers.AutoModelForCausalLM.from_pretrained(folder)
    stored = load(folder).tensors["model"]
    assert all(torch.equal(stored[name], tensor) for name, tensor in model.state_dict().items() if name in stored)


@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_every_byte_of_further_files_is_verified(model: Any, name: str, tmp_path: Path) -> None:
    folder = _save(tmp_path, model, 2)
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content.replace(b"m", b"n", 1))
    with pytest.raises(CheckpointError, match=name):
        load(folder)
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=name):
        load(folder)


def test_names_of_further_files() -> None:
    assert all(map(may_be_added, ("config.json", "README.md", "tokenizer.model", "chat_template.jinja")))
    own = ("manifest.json", "state.json", INDEX, "model.safetensors", "x.safetensors", "shard-00001.json")
    assert not any(map(may_be_added, (*own, "", "a", "../config.json", "folder/config.json", ".hidden.json", "a.")))
