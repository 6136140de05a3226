"""Checkpoints of other trainers in, by `--model.from dcp:FOLDER` and its like, and DCP out. No pickle runs code."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from hvdtrain.cli.export import main as export
from hvdtrain.errors import ConfigError, TaskError
from hvdtrain.programs import answer
from hvdtrain.state.checkpoint_store import CheckpointStore, load
from hvdtrain.state.tensor_file import write_tensors
from hvdtrain.task import other_trainers
from hvdtrain.task.causal_lm import ModelConfig, causal_lm
from hvdtrain.task.other_trainers import READERS, map_names
from hvdtrain.task.saved_model import find_model
from tests.support.checkpoints import save_in_parts
from tests.support.gallery import LANGUAGE, record_on_threads
from tests.support.launch import TIMEOUT_S
from tests.support.payload import MakesFolder
from tests.support.warm import warm_python

transformers = pytest.importorskip("transformers", reason="the transformers library is not installed")

TIED = transformers.LlamaConfig(
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    vocab_size=320,
    tie_word_embeddings=True,
)


pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture(autouse=True)
def _cache(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache of its own; the child is a fork that has imported torch, except in one test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    if "lightning" not in request.node.name:
        monkeypatch.setattr(
            other_trainers, "answer", lambda argv, limit_s: answer([*warm_python(), *argv[1:]], limit_s)
        )


@pytest.fixture(scope="module", params=["tied", "lora", "pieces of 2 ranks"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, or a checkpoint as two ranks with FSDP write it."""
    folder = tmp_path_factory.mktemp("job")
    (folder / "tied.json").write_text(TIED.to_json_string())
    options = {"tied": [f"--model.config={folder / 'tied.json'}"], "lora": ["--model.lora=rank=4"]}
    more = options.get(request.param, [])
    run = record_on_threads(folder, *LANGUAGE, "--train.steps=2", "--optimizer.lr=0.03", *more, size=2 - len(more)).run
    if more:
        return run
    newest = find_model(str(run)).folder
    files = {name: (newest / name).read_bytes() for name in ("config.json", "tokenizer.json")}
    return save_in_parts(CheckpointStore(folder / "s", pytest.fail, files=files), 2, load(newest), 2, divided=True)


def _state(name: Any, **options: Any) -> dict[str, Tensor]:
    return causal_lm(ModelConfig(from_=str(name), **options), vocabulary=257, seq_len=32).state_dict()


def _assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


@pytest.mark.some(1)
def test_what_is_exported_as_dcp_returns_bit_for_bit(run: Path, tmp_path: Path) -> None:
    assert export([str(run), str(tmp_path / "out"), "--format=dcp"]) == 0
    _assert_equal(_state(f"dcp:{tmp_path / 'out'}"), expected := _state(run))
    found = {name: torch.empty_like(tensor) for name, tensor in expected.items()}
    dcp.load(found, checkpoint_id=tmp_path / "out", no_dist=True)  # as other programs do
    _assert_equal(found, expected)
    copied = find_model(f"dcp:{tmp_path / 'out'}").folder / "tokenizer.json"
    assert copied.read_bytes() == (find_model(str(run)).folder / "tokenizer.json").read_bytes()
    losses = [
        record_on_threads(tmp_path / to, *LANGUAGE, "--train.steps=2", f"--model.from={name}", size=2).losses()
        for to, name in (("one", f"dcp:{tmp_path / 'out'}"), ("two", run))
    ]
    assert losses[0] == losses[1]


def _lightning(state: dict[str, Tensor], folder: Path) -> str:
    more = {"epoch": 3, "optimizer_states": [{"state": {0: {"step": torch.ones(1)}}}], "callbacks": {"a": None}}
    state = {**{f"model.{name}": tensor for name, tensor in state.items()}, "metric.total": torch.ones(1)}
    torch.save({"state_dict": state, **more}, folder / "last.ckpt")
    return f"lightning:{folder / 'last.ckpt'}"


def _accelerate(state: dict[str, Tensor], folder: Path) -> str:
    torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    return f"torch:{folder / 'pytorch_model.bin'}"


def _zero(state: dict[str, Tensor], folder: Path) -> str:
    (folder / "latest").write_text("global_step2\n")
    (folder / "global_step2").mkdir()
    shapes = [{name: tensor.shape for name, tensor in state.items()}]
    module = {f"module.{name}": tensor for name, tensor in state.items()}
    values = {"module": module, "param_shapes": shapes, "ds_version": "0.17", "optimizer": None}
    torch.save(values, folder / "global_step2/mp_rank_00_model_states.pt")
    return f"deepspeed:{folder}"


def _universal(state: dict[str, Tensor], folder: Path) -> str:
    (folder / "latest").write_text("global_step2_universal")
    for name, tensor in state.items():
        (part := folder / "global_step2_universal/zero" / name).mkdir(parents=True)
        torch.save({"param": tensor}, part / "fp32.pt")
        torch.save({"param": tensor * 0}, part / "exp_avg.pt")
    return f"deepspeed:{folder}"


def _dcp_of_fsdp(state: dict[str, Tensor], folder: Path) -> str:
    """As accelerate and torch's recipes write it, with the state of an optimizer and what is no tensor."""
    compiled = {name.replace("model.", "model._orig_mod.", 1): tensor for name, tensor in state.items()}
    moments = {name: {"exp_avg": tensor * 0, "step": 2} for name, tensor in state.items()}
    dcp.save({"model": compiled, "optim": {"state": moments}, "ema": state, "args": MakesFolder(folder / "was here")},
             checkpoint_id=folder, no_dist=True)  # fmt: skip
    return f"dcp:{folder}"


WRITERS: dict[Callable[[dict[str, Tensor], Path], str], str] = {
    _lightning: "callbacks, epoch, metric.total and 1 more",
    _accelerate: "",
    _zero: "ds_version, optimizer, param_shapes",
    _universal: "",
    _dcp_of_fsdp: "args, ema.lm_head.weight, ema.model.embed_tokens.weight and",
}
"""Checkpoints of other trainers, and what of them has no place in the model."""


@pytest.fixture(scope="module")
def state() -> dict[str, Tensor]:
    state: dict[str, Tensor] = transformers.LlamaForCausalLM(TIED).state_dict()
    return state


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__[1:])
@pytest.mark.some(2)
def test_weights_of_other_trainers(
    write: Callable[[dict[str, Tensor], Path], str], state: dict[str, Tensor], tmp_path: Path
) -> None:
    config = tmp_path / ("config.json" if write is _dcp_of_fsdp else "a.json")
    (folder := tmp_path / "there").mkdir()
    name = write(state, folder)
    with pytest.raises(ConfigError, match=r"no config.json that describes the model"):
        find_model(name)
    config.write_text(TIED.to_json_string())
    options = {} if config.name == "config.json" else {"config": str(config)}
    _assert_equal(_state(name, **options), state)
    left = f"; without a place in the model: {WRITERS[write]}" if WRITERS[write] else ""
    assert find_model(name, **options).note.startswith(f"weights of {name}{left}")
    assert not (folder / "was here").exists(), "what is no tensor is not read"


_TWO_RANKS = """
import os, sys, torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
state = {name: distribute_tensor(t, mesh, [Shard(0)]) for name, t in load_file(f"{folder}/whole").items()}
dcp.save({"model": state}, checkpoint_id=f"{folder}/dcp")
os._exit(0)  # threads of torch may call Python until the end: one that waits for the interpreter then aborts
"""


@pytest.mark.slow
def test_a_checkpoint_that_two_ranks_have_written(state: dict[str, Tensor], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(TIED.to_json_string())
    write_tensors(tmp_path / "whole", state, lambda: None)
    argv = [sys.executable, "-c", _TWO_RANKS]
    ranks = [subprocess.Popen([*argv, str(rank), str(tmp_path)]) for rank in range(2)]
    assert [rank.wait(TIMEOUT_S) for rank in ranks] == [0, 0]
    assert len([*(tmp_path / "dcp").glob("*.distcp")]) == 2
    _assert_equal(_state(f"dcp:{tmp_path / 'dcp'}"), state)


def _hostile(folder: Path, form: str) -> Path:
    """A checkpoint of a format with a pickle that makes a folder when it is loaded."""
    evil = MakesFolder(folder / "was here")
    if form == "dcp":
        (folder / ".metadata").write_bytes(pickle.dumps(evil))
        return folder
    path = folder / ("mp_rank_00_model_states.pt" if form == "deepspeed" else "last.ckpt")
    torch.save({"state_dict": {}, "module": {}, "more": evil}, path)
    return folder if form == "deepspeed" else path


@pytest.mark.parametrize("form", READERS)
def test_a_pickle_that_could_run_code_is_refused_by_its_names(form: str, tmp_path: Path) -> None:
    path = _hostile(tmp_path, form)
    with pytest.raises(TaskError, match="more than tensors and plain values") as caught:
        READERS[form](path)
    assert caught.value.found == ("pathlib.Path.mkdir" if form == "dcp" else "getattr")  # by the pickle's protocol
    assert not (tmp_path / "was here").exists()


def test_what_is_refused_in_the_child_is_the_error_of_the_rank(state: dict[str, Tensor], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(TIED.to_json_string())
    path = _hostile(tmp_path, "lightning")
    with pytest.raises(TaskError, match="more than tensors and plain values"):
        _state(f"lightning:{path}")
    wrong = {**state, "model.layers.2.mlp.up_proj.weight": torch.ones(1)}
    for change, found in (
        (wrong, "weights of unknown parameters model.layers.2.mlp.up_proj.weight"),
        ({n: t for n, t in state.items() if "norm" not in n}, "no weights of model.layers.0.input_layernorm.weight"),
        ({**state, "model.norm.weight": torch.ones(3)}, "other shapes: model.norm.weight (3,), not (16,)"),
    ):
        with pytest.raises(TaskError, match="are not those of the model") as caught:
            _state(_accelerate(change, tmp_path))
        assert found in str(caught.value.found)


def test_what_is_not_whole_is_refused(state: dict[str, Tensor], tmp_path: Path) -> None:
    (tmp_path / "zero_pp_rank_0_mp_rank_00_model_states.pt").touch()
    with pytest.raises(TaskError, match="no file with a whole model") as caught:
        READERS["deepspeed"](tmp_path)
    assert "python zero_to_fp32.py . OUT --safe_serialization" in str(caught.value.next_step)
    dcp.save(dict(state), checkpoint_id=tmp_path, no_dist=True)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    metadata.state_dict_metadata["model.norm.weight"].chunks.clear()
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=r"model.norm.weight is not complete"):
        READERS["dcp"](tmp_path)


def test_parts_of_one_state_dict_are_read_together(state: dict[str, Tensor], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(TIED.to_json_string())
    names = [*state]
    for part, some in enumerate((names[:3], names[3:])):
        torch.save({name: state[name] for name in some}, tmp_path / f"pytorch_model-0000{part + 1}-of-00002.bin")
    _assert_equal(_state(f"torch:{tmp_path}"), state)
    torch.save({name: tensor + 1 for name, tensor in state.items()}, tmp_path / "pytorch_model.bin")
    _assert_equal(_state(f"torch:{tmp_path}"), {name: tensor + 1 for name, tensor in state.items()})


@pytest.mark.parametrize(
    ("form", "text"), [("dcp", "no checkpoint of torch.distributed.checkpoint"), ("torch", "there is no checkpoint in")]
)
def test_a_folder_without_a_checkpoint_says_what_is_there(form: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(TaskError, match=text) as caught:
        READERS[form](tmp_path)
    assert caught.value.found == "model.safetensors"


@pytest.mark.parametrize("content", [b"{}", b""])
def test_a_file_of_another_format_is_named(content: bytes, tmp_path: Path) -> None:
    (path := tmp_path / "model.bin").write_bytes(content)
    with pytest.raises(TaskError, match=r"model.bin is no file of torch.save"):
        READERS["torch"](path)


def test_names_of_wrapped_models() -> None:
    own = {"model.a.weight": (2, 3), "head.weight": (3,)}
    for prefix in ("", "module.", "net.model."):
        stored = {f"{prefix}{name}": shape for name, shape in own.items()}
        more = {f"ema.{name}": shape for name, shape in own.items()} | {"optimizer.model.a.weight.exp_avg": (2, 3)}
        assert map_names({**more, **stored}, own) == {f"{prefix}{name}": name for name in own}
    assert map_names({"a.weight": (9,)}, own) == {"a.weight": "a.weight"}, "names that transformers may know"
