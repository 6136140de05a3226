"""Files of a checkpoint: who writes them, and that transformers reads the model as it is there, or says why not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.errors import CheckpointError
from hvdtrain.state.checkpoint_store import CheckpointStore, load, may_be_added
from hvdtrain.state.pieces import StateDict
from hvdtrain.state.shard_files import INDEX, count_writers, file_group, select_shard, shard_file_name
from tests.support.checkpoints import save, save_in_parts


@pytest.fixture(scope="module")
def transformers() -> Any:
    return pytest.importorskip("transformers", reason="the transformers library is not installed")


@pytest.fixture(scope="module")
def model(transformers: Any) -> Any:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "vocab_size": 40}
    config = transformers.LlamaConfig(**shape, num_hidden_layers=2, tie_word_embeddings=True)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def _save(folder: Path, model: Any, count: int, *, divided: bool = False) -> Path:
    config = str(model.config.to_json_string()).encode()
    store = CheckpointStore(folder / "checkpoints", pytest.fail, files={"config.json": config})
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    state = StateDict({"model": tensors, "optimizer": {}}, {"aliases": {"lm_head.weight": "model.embed_tokens.weight"}})
    return save_in_parts(store, 1, state, count, divided=divided) if count > 1 else save(store, 1, state)


@pytest.mark.parametrize("writers", [1, 2, 5])
def test_transformers_reads_whole_tensors_of_any_number_of_files(
    transformers: Any, model: Any, writers: int, tmp_path: Path
) -> None:
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


def test_transformers_refuses_pieces_of_tensors(transformers: Any, model: Any, tmp_path: Path) -> None:
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
    for _ in range(2):  # once changed, once missing
        with pytest.raises(CheckpointError, match=name):
            load(folder)
        (folder / name).unlink(missing_ok=True)


def test_names_of_further_files() -> None:
    assert all(map(may_be_added, ("config.json", "README.md", "tokenizer.model", "chat_template.jinja")))
    own = ("manifest.json", "state.json", INDEX, "model.safetensors", "x.safetensors", "shard-00001.json")
    assert not any(map(may_be_added, (*own, "", "a", "../config.json", "folder/config.json", ".hidden.json", "a.")))


def _bytes_of(sizes: dict[str, list[int]]) -> StateDict:
    tensors = {g: {f"{g}.{n}": torch.zeros(s, dtype=torch.uint8) for n, s in enumerate(of)} for g, of in sizes.items()}
    return StateDict(tensors, {"step": 1})


SIZES = st.fixed_dictionaries(
    {"model": st.lists(st.integers(0, 1000), max_size=30), "optimizer": st.lists(st.integers(0, 1000), max_size=30)}
)


@given(SIZES, st.integers(1, 7))
def test_a_partition_of_about_equal_parts(sizes: dict[str, list[int]], count: int) -> None:
    state = _bytes_of(sizes)
    parts = [select_shard(state, number, count) for number in range(count)]
    named = [(g, n) for part in parts for g, tensors in part.tensors.items() for n in tensors]
    assert sorted(named) == sorted((g, n) for g, tensors in state.tensors.items() for n in tensors)
    loads = [sum(t.numel() for tensors in part.tensors.values() for t in tensors.values()) for part in parts]
    assert max(loads) - min(loads) <= max([0, *sizes["model"], *sizes["optimizer"]])
    assert parts[0].tensors.keys() == state.tensors.keys(), "a group without tensors is one all the same"


def test_small_states_have_one_writer() -> None:
    state = _bytes_of({"model": [100, 100], "optimizer": []})
    assert count_writers(state.nbytes, 8) == 1
    assert count_writers(state.nbytes, 8, min_bytes=50) == 4
    assert count_writers(state.nbytes, 2, min_bytes=1) == 2
    assert count_writers(0, 8) == 1


@given(st.sampled_from(["model", "optimizer", "a-of-b", "x-00001"]), st.integers(0, 99999), st.integers(2, 99999))
def test_names_of_files_tell_the_group(group: str, number: int, count: int) -> None:
    assert file_group(shard_file_name(group, number, count)) == group
    assert file_group(shard_file_name("model", 0, 1)) == "model"
