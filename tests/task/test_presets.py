"""The presets have the sizes that the help of their option promises."""

from __future__ import annotations

import pytest
import torch

from hvdtrain.task.language_model import ModelConfig, causal_lm

pytest.importorskip("transformers", reason="the transformers library is not installed")


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
