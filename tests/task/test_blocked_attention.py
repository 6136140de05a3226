"""Attention under a mask by blocks of tokens is that of torch under one mask of all tokens, which then never exists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hvdtrain.task import blocked_attention
from hvdtrain.task.blocked_attention import NAME, use_blocks
from hvdtrain.task.token_loss import positions
from tests.support.gallery import record_on_threads
from tests.task.test_chunked_loss import Largest
from tests.task.test_documents import END, a_model, documents

pytest.importorskip("transformers", minversion="5.23")

LENGTHS = (9, 1, 14, 3, 20, 2)


@pytest.fixture(autouse=True)
def _blocks_of_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked_attention, "BLOCK", 8)


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The first keys of the blocks of each mask that is none of all tokens."""
    found: list[list[int]] = []

    class Noted(blocked_attention.Masked):
        def __init__(self, sees: Any, rows: int, first: list[int], device: Any) -> None:
            found.append(first)
            super().__init__(sees, rows, first, device)

    monkeypatch.setattr(blocked_attention, "Masked", Noted)
    return found


def _rows() -> tuple[Tensor, Tensor]:
    """Two rows of 49 tokens, with other documents, and their positions."""
    rows = torch.stack([torch.cat(documents(*LENGTHS)), torch.cat(documents(*reversed(LENGTHS)))])
    return rows, positions((rows == END).roll(1, dims=1))


def _run(model: Any, **given: Any) -> list[Tensor]:
    logits = model(use_cache=False, **given).logits
    model.zero_grad()
    logits.square().sum().backward()
    return [logits.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("name", ["deepseek_v3", "llama", "gpt2", "mistral", "qwen3_moe", "gemma3_text"])
def test_it_is_attention_under_one_mask(name: str, blocks: list[list[int]], tmp_path: Path) -> None:
    """Latent attention, groups of heads, sliding windows; two rows with other documents."""
    model = a_model(tmp_path, name)
    rows, places = _rows()
    whole = _run(model, input_ids=rows, position_ids=places)
    assert use_blocks(model) and not blocks
    for found, expected in zip(_run(model, input_ids=rows, position_ids=places), whole, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    if name == "llama":
        assert blocks == [[0, 0, 2, 22, 25, 27, 40]], "of the row in which the first document of a block begins first"


def test_no_mask_of_all_tokens_exists(tmp_path: Path) -> None:
    sizes = []
    for by_blocks in (False, True):
        model = a_model(tmp_path, "llama")
        rows, places = (each.repeat(1, 20) for each in _rows())
        assert not by_blocks or use_blocks(model)
        with Largest() as seen:
            model.model(input_ids=rows, position_ids=places, use_cache=False)
        sizes.append(seen.most)
    assert sizes[0] >= rows.numel() * rows.shape[1] > 4 * sizes[1]


def test_where_torch_needs_no_mask_there_is_none(blocks: list[list[int]], tmp_path: Path) -> None:
    model = a_model(tmp_path, "llama")
    rows, _ = _rows()
    whole = _run(model, input_ids=rows)
    use_blocks(model)
    assert all(map(torch.equal, _run(model, input_ids=rows), whole)) and not blocks


@pytest.mark.parametrize("how", ["padding", "few tokens", "later tokens"])
def test_other_masks_are_whole(how: str, blocks: list[list[int]], tmp_path: Path) -> None:
    """Of padding, of few tokens, and of a model that sees later tokens."""
    model = a_model(tmp_path, "llama")
    rows, places = _rows()
    given: dict[str, Any] = {"input_ids": rows, "position_ids": places}
    if how == "padding":
        given = {"input_ids": rows, "attention_mask": (torch.arange(49) < torch.tensor([[30], [49]])).long()}
    if how == "few tokens":
        given = {name: each[:, :16] for name, each in given.items()}
    whole = _run(model, **given)
    use_blocks(model)
    if how == "later tokens":
        sees = lambda row, head, query, key: (query // 12 >= key // 12) | (row < 0)  # noqa: E731
        found = blocked_attention._mask(2, 49, 49, mask_function=sees, allow_is_causal_skip=False)
        assert isinstance(found, Tensor) and found.shape == (2, 1, 49, 49)
    else:
        for found, expected in zip(_run(model, **given), whole, strict=True):
            torch.testing.assert_close(found, expected)
    assert not blocks


def test_compiled_blocks_have_tensors_as_masks(blocks: list[list[int]], tmp_path: Path) -> None:
    model = a_model(tmp_path, "llama")
    rows, places = _rows()
    use_blocks(model)
    model.model.layers[0].compile(backend="eager")
    with torch.no_grad():
        model(input_ids=rows, position_ids=places, use_cache=False)
    assert model.config._attn_implementation == "sdpa" and not blocks


def test_without_values_each_block_sees_all_before(blocks: list[list[int]], tmp_path: Path) -> None:
    model = a_model(tmp_path, "llama")
    use_blocks(model)
    rows, places = _rows()
    with FakeTensorMode(allow_non_fake_inputs=True):
        model(input_ids=rows, position_ids=places, use_cache=False)
    assert blocks == [[0] * 7]


def test_a_training(blocks: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With full checkpoints of activations, too; blocks of 8 tokens, and of all."""
    np.save(tmp_path / "tokens.npy", torch.cat(documents(*LENGTHS * 30)).numpy())
    given = ["--model.preset=tiny", "--data.seq_len=32", "--train.global_batch=4", "--train.micro_batch=2"]
    given += [
        f"--data.tokens={tmp_path}/tokens.npy",
        "--data.documents=separate",
        f"--data.end_token={END}",
        "--train.steps=3",
        "--checkpoint.every=0",
    ]
    by = record_on_threads(tmp_path / "by", *given, "--memory.checkpointing=full", size=2)
    assert blocks
    monkeypatch.setattr(blocked_attention, "BLOCK", 16)
    whole = record_on_threads(tmp_path / "whole", *given, size=2)
    assert by.losses() == pytest.approx(whole.losses(), rel=1e-6)


def test_its_name_is_that_of_the_registries(tmp_path: Path) -> None:
    model = a_model(tmp_path, "llama")
    assert use_blocks(model) and model.config._attn_implementation == NAME
    assert not use_blocks(model), "it is no torch attention any more"
