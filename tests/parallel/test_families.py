"""The gradients of families of transformers' models that ranks divide are those of one rank.

Plans of some families leave out parameters, or sum a gradient after each pass.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.comm.base import Comm
from hvdtrain.config.parse import parse_argv, task_spec
from hvdtrain.task import chunked_loss
from hvdtrain.task.base import load_task_function
from hvdtrain.verify.plan import compare_gradients, for_plan
from tests.parallel.conftest import INFO

_SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "vocab_size": 512, "head_dim": 8, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_EXPERTS = {
    "n_routed_experts": 4, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    "num_mtp_layers": 0, "use_qk_norm": True,
}  # fmt: skip
_FAMILIES: dict[str, dict[str, Any]] = {
    "apertus": {},
    "exaone4": {"sliding_window": 8, "sliding_window_pattern": 2},
    "gemma3_text": {"sliding_window": 8},
    "glm4_moe": _EXPERTS,
    "gpt_oss": {**_EXPERTS, "sliding_window": 8},
    "mixtral": _EXPERTS,
    "olmo2": {},
    "phi3": {},
    "qwen3": {},
    "qwen3_moe": _EXPERTS,
}


@pytest.mark.parametrize("family", _FAMILIES)
def test_matrices(family: str, job: Comm, tmp_path: Path) -> None:
    _compare(family, "tp", job, tmp_path)


@pytest.mark.parametrize("family", [name for name, options in _FAMILIES.items() if "num_experts" in options])
def test_experts(family: str, job: Comm, tmp_path: Path) -> None:
    _compare(family, "ep", job, tmp_path)


@pytest.mark.parametrize("family", ["gemma3_text", "gpt2"])
def test_layers(family: str, job: Comm, tmp_path: Path) -> None:
    """Both use their embeddings as LM head; GPT-2 has dropout."""
    _compare(family, "pp", job, tmp_path)


def test_layers_for_tokens_further_ahead(job: Comm) -> None:
    """They use the embeddings of the first stage."""
    _compare_gradients(["--model.preset=tiny", "--model.mtp_layers=1", "--parallel.pp=2"], job)


def _compare(family: str, dimension: str, job: Comm, folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({**_SIZES, **_FAMILIES.get(family, {}), "model_type": family}))
    _compare_gradients([f"--model.config={folder / 'config.json'}", f"--parallel.{dimension}=2"], job)


def _compare_gradients(options: list[str], job: Comm) -> None:
    if job.size != 2:
        pytest.skip("2 ranks divide the model: mpirun -np 2")
    pytest.importorskip("transformers.distributed.expert_parallel", reason="transformers is older than 5.23")
    argv = [*options, "--data.seq_len=16", "--parallel.device=cpu"]
    function = load_task_function(task_spec(argv))
    run = for_plan(parse_argv(argv, function))
    found = compare_gradients(run, partial(function, **run.task_args), job, INFO)
    assert found and not [(each.parameter, each.wrong) for each in found if each.wrong]


@pytest.mark.parametrize("options", ["tp=2", "ep=2", "pp=2", "engine=fsdp", "shard=optimizer"])
def test_a_loss_by_chunks(options: str, job: Comm, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head gives it to hooks of any division; ranks that divide the head itself have whole logits."""
    monkeypatch.setattr(chunked_loss, "CPU_BYTES", 4 * 256 * 3)
    _compare_gradients(["--model.preset=tiny", f"--parallel.{options}"], job)
