"""The presets have the sizes that the help of their option promises."""

from __future__ import annotations

import re

import pytest
import torch

from hvdtrain.task.language_model import ModelConfig, causal_lm
from hvdtrain.task.presets import _ROWS

pytest.importorskip("transformers", reason="the transformers library is not installed")

_UNITS = {"million": 1e6, "m": 1e6, "billion": 1e9, "b": 1e9}


def _promised(preset: str) -> tuple[float, float | None]:
    """Return the number of parameters, and of active ones, in the help."""
    text = " ".join(str(ModelConfig.__doc__).partition("config:")[0].split())
    entry = re.search(rf"\b{preset} \(([^)]*)\)", text)
    about = entry[1] if entry else ""
    assert preset in text
    size = re.fullmatch(r"(\d+)(m|b)", preset) or re.search(r"([\d.]+) (million) parameters", about)
    active = re.search(r"([\d.]+) (billion)[a-z ]* active", about)
    numbers = [float(found[1]) * _UNITS[found[2]] if found else None for found in (size, active)]
    assert numbers[0] is not None
    return numbers[0], numbers[1]


@pytest.mark.parametrize("preset", [name for name in _ROWS if name != "tiny"])
def test_sizes(preset: str) -> None:
    with torch.device("meta"):
        model = causal_lm(ModelConfig(preset=preset), vocabulary=64, seq_len=16)  # type: ignore[arg-type]
    config = model.config
    every = sum(p.numel() for p in model.parameters()) - 2 * config.vocab_size * config.hidden_size  # type: ignore[union-attr,operator]
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    active = every - experts + experts * config.num_experts_per_tok / config.n_routed_experts  # type: ignore[union-attr,operator]
    promised, promised_active = _promised(preset)
    assert every == pytest.approx(promised, rel=0.06)
    assert promised_active is None or active == pytest.approx(promised_active, rel=0.05)
    assert (promised_active is not None) == (every > 5e8)


def test_the_largest_is_deepseek_v3() -> None:
    """With its vocabulary, and without its layer for multi-token prediction."""
    with torch.device("meta"):
        model = causal_lm(ModelConfig(preset="671b"), vocabulary=129280, seq_len=16)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(671e9, rel=1e-4)
