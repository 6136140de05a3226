"""The kernel of attention that `--model.attention` asks for, or why it is another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hvdtrain.errors import ConfigError
from hvdtrain.task import sequence
from hvdtrain.task.causal_lm import ModelConfig, causal_lm
from hvdtrain.task.sequence import choose_attention, head_sizes
from tests.support.gallery import LANGUAGE
from tests.support.thread_job import train_on_threads

transformers = pytest.importorskip("transformers", reason="the transformers library is not installed")

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BF16, FP32 = torch.bfloat16, torch.float32


def _model(wanted: str = "auto") -> Any:
    torch.manual_seed(0)
    return causal_lm(ModelConfig(preset="tiny", attention=wanted), vocabulary=257, seq_len=32)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wanted", "device", "dtype", "used", "why"),
    [
        ("auto", CPU, BF16, "sdpa", "needs a GPU"),
        ("auto", CUDA, FP32, "sdpa", "--precision bf16 or fp16"),
        ("auto", CUDA, BF16, "sdpa", "flash_attn library is not installed"),
        ("sdpa", CPU, FP32, "sdpa", ""),
        ("eager", CPU, FP32, "eager", ""),
    ],
)
def test_what_is_used_and_why(wanted: str, device: torch.device, dtype: torch.dtype, used: str, why: str) -> None:
    model = _model(wanted)
    line = choose_attention(model, wanted, device, dtype)
    assert line.startswith(f"attention: {used}") and why in line and ("(" in line) == bool(why)
    assert model.config._attn_implementation == used
    if why:
        with pytest.raises(ConfigError, match=r"--model\.attention flash is not supported here"):
            choose_attention(_model(), "flash", device, dtype)


def test_a_model_without_sdpa() -> None:
    class Old(transformers.LlamaForCausalLM):  # type: ignore[misc,name-defined]
        _supports_sdpa = _supports_flash_attn = False

    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    model = Old._from_config(transformers.LlamaConfig(vocab_size=64, **shape))
    assert choose_attention(model, "auto", CPU, FP32) == "attention: eager (flash attention needs a GPU)"
    with pytest.raises(ConfigError, match="sdpa is not supported") as caught:
        choose_attention(model, "sdpa", CPU, FP32)
    assert caught.value.found == "Old has eager only"


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[int, ...]]]:
    """Pretend that version 2 is installed, and runs on this CPU."""

    def install(accepts: Callable[[Tensor, Tensor], bool]) -> list[tuple[int, ...]]:
        seen: list[tuple[int, ...]] = []

        def kernel(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **how: Any) -> Any:
            seen.append(tuple(query.shape))
            if not accepts(query, value):
                raise RuntimeError("FlashAttention only supports other tensors\nand so on")
            return torch.nn.functional.scaled_dot_product_attention(query, key, value), None

        functions = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
        monkeypatch.setitem(functions._local_mapping, "flash_attention_2", kernel)
        monkeypatch.setattr(sequence, "_is_installed", lambda version: version in (2, 3))
        monkeypatch.setattr(
            transformers.PreTrainedModel,
            "_check_and_adjust_attn_implementation",
            lambda self, name, **how: name or "sdpa",
        )
        original = torch.zeros
        monkeypatch.setattr(torch, "zeros", lambda *size, device=None, **how: original(*size, **how))
        return seen

    return install


def test_flash_is_tried_with_the_sizes_of_the_model(flash: Callable[..., list[tuple[int, ...]]]) -> None:
    """If it fails, the model stays as it was."""
    model = _model()
    model.config.attention_dropout = 0.1  # which only version 2 has
    flash(lambda query, value: False)
    line = choose_attention(model, "auto", CUDA, BF16)
    assert line == "attention: sdpa (flash_attention_2: FlashAttention only supports other tensors)"
    with pytest.raises(ConfigError, match="flash is not supported"):
        choose_attention(model, "flash", CUDA, BF16)
    assert model.config._attn_implementation == "sdpa"
    seen = flash(lambda query, value: query.dtype == BF16 and (query.shape[-1], value.shape[-1]) == (16, 8))
    assert choose_attention(model, "auto", CUDA, BF16) == "attention: flash_attention_2"
    assert seen == [(1, 1, 16, 16)] and model.config._attn_implementation == "flash_attention_2"


def test_sizes_of_heads() -> None:
    assert head_sizes(_model().config) == (16, 8)
    assert head_sizes(transformers.LlamaConfig(hidden_size=64, num_attention_heads=4)) == (16, 16)
    assert head_sizes(transformers.GPT2Config(n_embd=64, n_head=4)) == (16, 16)


def test_a_run_shows_its_attention(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    options = (*LANGUAGE, "--train.stop_at=1", "--checkpoint.every=0", "--parallel.device=cpu")
    train_on_threads(*options, f"--run_dir={tmp_path / 'a'}", size=1)
    assert "attention: sdpa (" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="flash is not supported"):
        train_on_threads(*options, "--model.attention=flash", f"--run_dir={tmp_path / 'b'}", size=1)
    assert not (tmp_path / "b").exists()
