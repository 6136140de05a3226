"""Any causal model of transformers trains from a config.json, with every engine; tied word embeddings stay tied."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hvdtrain.task.causal_lm import ModelConfig, causal_lm
from tests.support.gallery import Recorded, record_on_threads

pytest.importorskip("transformers", reason="the transformers library is not installed")

SHAPE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "vocab_size": 260, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, tied": {"model_type": "llama", "tie_word_embeddings": True},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 8},
    "qwen3_moe": {**_EXPERTS, "head_dim": 8},
    "mistral": {"sliding_window": 8, "head_dim": 8},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma2": {"head_dim": 8, "tie_word_embeddings": True, "sliding_window": 8},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "resid_pdrop": 0.1},
    "gpt_neox": {"hidden_dropout": 0.1},
    "phi": {},
    "deepseek_v2": {
        "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "kv_lora_rank": 16,
        "q_lora_rank": None, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "n_group": 1,
        "topk_group": 1, "num_key_value_heads": 4, "first_k_dense_replace": 1,
    },
}  # fmt: skip
ENGINES = ("--parallel.shard=none", "--parallel.shard=optimizer", "--parallel.shard=gradients")


def _train(folder: Path, model: str, *options: str, size: int) -> Recorded:
    folder.mkdir(exist_ok=True)
    config = folder / "config.json"
    config.write_text(json.dumps({**SHAPE, "model_type": model, **MODELS[model]}))
    common = ("--train.steps=3", "--train.global_batch=4", "--train.micro_batch=1", "--data.seq_len=16")
    common += ("--optimizer.warmup_steps=1", "--train.eval_samples=2", "--optimizer.name=sgd")
    return record_on_threads(folder, *common, f"--model.config={config}", *options, size=size)


def _check_that_transformers_reads(job: Recorded) -> None:
    """Its newest checkpoint, as it is: with the run's weights, and the logits of a model that has them."""
    from transformers import AutoModelForCausalLM

    (folder,) = (job.run / "checkpoints").glob("step-*")
    read, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    stored = job.state()
    for name, source in {**{n: n for n in stored.tensors["model"]}, **stored.values["aliases"]}.items():
        assert torch.equal(read.state_dict()[name], stored.tensors["model"][source]), name
    own = causal_lm(ModelConfig(config=str(job.folder / "config.json")), vocabulary=257, seq_len=16).eval()
    own.load_state_dict(dict(stored.tensors["model"]), strict=False)
    ids = torch.arange(32).reshape(2, 16)
    assert torch.equal(read(input_ids=ids).logits, own(input_ids=ids).logits)


FAST = ("llama, tied", "gpt2", "mixtral")


@pytest.mark.parametrize(
    "model", [model if model in FAST else pytest.param(model, marks=pytest.mark.slow) for model in MODELS]
)
def test_law_1_and_tied_embeddings(model: str, tmp_path: Path) -> None:
    one = _train(tmp_path / "one", model, size=1)
    for number, engine in enumerate(ENGINES if "tie_word_embeddings" in MODELS[model] else ENGINES[:1]):
        two = _train(tmp_path / str(number), model, engine, size=2)
        assert two.losses() == pytest.approx(one.losses(), rel=2e-6), engine
        assert two.state().values["aliases"] == one.state().values["aliases"]
        _check_that_transformers_reads(two)
    _check_that_transformers_reads(one)
    assert bool(one.state().values["aliases"]) == (model == "gpt2" or "tie_word_embeddings" in MODELS[model])
    assert one.losses()[-1] != one.losses()[0]


@pytest.mark.parametrize(
    ("preset", "promised", "promised_active"),
    [("small", 7e6, None), ("125m", 125e6, None), ("1b", 1e9, 0.2e9), ("16b", 16e9, 2.2e9), ("671b", 671e9, 36e9)],
)
def test_sizes_without_the_vocabulary(preset: str, promised: float, promised_active: float | None) -> None:
    with torch.device("meta"):
        model = causal_lm(ModelConfig(preset=preset), vocabulary=64, seq_len=16)  # type: ignore[arg-type]
    config = model.config
    every = sum(p.numel() for p in model.parameters()) - 2 * config.vocab_size * config.hidden_size  # type: ignore[union-attr,operator]
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    active = every - experts + experts * config.num_experts_per_tok / config.n_routed_experts  # type: ignore[union-attr,operator]
    assert every == pytest.approx(promised, rel=0.06)
    assert promised_active is None or active == pytest.approx(promised_active, rel=0.05)


def test_the_largest_is_deepseek_v3() -> None:
    """With its vocabulary, and without its layer for multi-token prediction."""
    with torch.device("meta"):
        model = causal_lm(ModelConfig(preset="671b"), vocabulary=129280, seq_len=16)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(671e9, rel=1e-4)
