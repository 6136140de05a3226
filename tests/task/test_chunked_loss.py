"""A loss by chunks of tokens is that of whole logits, which then never exist."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from hvdtrain.observe.flops import FlopCount
from hvdtrain.task import chunked_loss as module
from hvdtrain.task.chunked_loss import chunked_loss, loss_in_head, returns_product_of_head
from hvdtrain.task.token_loss import IGNORED, joined_targets, token_loss
from tests.support.gallery import record_on_threads

transformers = pytest.importorskip("transformers", minversion="5.23")

WORDS, WIDTH, TOKENS = 300, 16, 50
LLAMA = {"hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
LLAMA |= {"vocab_size": WORDS, "num_key_value_heads": 2}


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the most elements of a result."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.most = max(self.most, out.numel() if isinstance(out, Tensor) else 0)
        return out


def _model(kind: str = "llama", **options: Any) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **LLAMA, **options))


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Chunks of 7 tokens; the numbers of tokens of losses that were computed so."""
    found: list[int] = []

    def noted(head: Any, hidden_TD: Tensor, *others: Any) -> Tensor:
        found.append(len(hidden_TD))
        return chunked_loss(head, hidden_TD, *others)

    monkeypatch.setattr(module, "CPU_BYTES", 7 * 4 * WORDS)
    monkeypatch.setattr(module, "chunked_loss", noted)
    return found


@pytest.mark.parametrize("frozen", [(), ("weight",), ("bias",), ("weight", "bias")])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
def test_loss_and_gradients(dtype: torch.dtype, tolerance: float, frozen: tuple[str, ...]) -> None:
    """In bf16 the gradients of weights are off by less than those of whole logits: chunks are summed in fp32."""
    torch.manual_seed(0)
    head, given = nn.Linear(WIDTH, WORDS), torch.randn(TOKENS, WIDTH)
    targets = torch.randint(0, WORDS, (TOKENS,)).index_fill(0, torch.arange(0, TOKENS, 3), IGNORED)
    for name in frozen:
        getattr(head, name).requires_grad_(False)

    def run(by_chunks: bool) -> list[Tensor]:
        hidden = given.clone().requires_grad_()
        head.zero_grad()
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            if by_chunks:
                loss = chunked_loss(head, hidden, targets, 7, [*head.parameters()])
            else:
                loss = cross_entropy(head(hidden).float(), targets, reduction="sum", ignore_index=IGNORED)
        (3 * loss).backward()
        return [loss.detach(), *(p.grad for p in [hidden, *head.parameters()] if p.grad is not None)]

    for found, expected in zip(run(True), run(False), strict=True):
        assert found.dtype == torch.float32
        assert (found - expected).norm() <= tolerance * expected.norm()
    assert torch.allclose(run(True)[0], run(False)[0], rtol=1e-6)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral", "mamba", "gemma2", "cohere", "granite"])
def test_models_that_change_their_logits(kind: str) -> None:
    """The last three do. It is found where nothing has a value yet, too."""
    is_plain = kind not in ("gemma2", "cohere", "granite")
    with torch.device("meta"):
        assert returns_product_of_head(_model(kind)) == is_plain
    model = _model(kind)
    assert returns_product_of_head(model) == is_plain
    before = model(input_ids=torch.tensor([[1, 2]])).logits
    assert before.shape == (1, 2, WORDS), "the model is as it was"


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_never_has_its_logits(tied: bool, chunks: list[int]) -> None:
    rows = torch.randint(0, WORDS, (2, TOKENS + 1))
    found: list[Any] = []
    for by_chunks in (False, True):
        model = _model(tie_word_embeddings=tied)
        with Largest() as seen, FlopCount() as counted:
            loss, weight = token_loss(model, rows, targets=joined_targets, chunks=by_chunks)
        loss.backward()
        assert weight == 2 * TOKENS
        assert (seen.most < 2 * TOKENS * WORDS) == by_chunks
        found.append((loss.item(), [p.grad for p in model.parameters()], counted.flops))
    (whole, before, flops), (by, after, same) = found
    assert chunks == [2 * TOKENS] and by == pytest.approx(whole, rel=1e-6) and same == flops
    for one, other in zip(before, after, strict=True):
        assert (other - one).norm() <= 1e-6 * one.norm()
    with torch.no_grad():
        assert token_loss(model, rows, chunks=True)[0].item() == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize("how", ["a head of its own forward", "fp16", "few tokens", "a part of the rows"])
def test_whole_logits_where_chunks_do_not_fit(how: str, chunks: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model(tie_word_embeddings=False)
    rows = torch.randint(0, WORDS, (2, 5 if how == "few tokens" else TOKENS))
    if how == "a head of its own forward":
        monkeypatch.setattr(model.lm_head, "forward", partial(nn.Linear.forward, model.lm_head))
    if how == "a part of the rows":
        model.lm_head.weight = nn.Parameter(model.lm_head.weight[:200].detach())
    with torch.autocast("cpu", torch.float16, enabled=how == "fp16"), loss_in_head(model, [rows]):
        assert model(input_ids=rows).logits.shape[:2] == rows.shape
    assert not chunks and ("forward" in vars(model.lm_head)) == (how == "a head of its own forward")


@pytest.mark.parametrize("options", [["--model.mtp_layers=1"], ["--parallel.shard=gradients", "--precision=bf16"]])
def test_trainings(options: list[str], chunks: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["--model.preset=tiny", "--data.seq_len=32", "--train.global_batch=4", "--train.micro_batch=2", *options]
    given += ["--train.steps=4", "--train.eval_samples=4", "--checkpoint.every=0"]
    by = record_on_threads(tmp_path / "by", *given, size=2)
    passes = 4 * 2 * (1 + ("--model.mtp_layers=1" in options))
    assert set(chunks) == {2 * 32} and len(chunks) > passes, "in evaluations, too"
    monkeypatch.setattr(module, "CPU_BYTES", 1 << 40)
    whole = record_on_threads(tmp_path / "whole", *given, size=2)
    assert by.losses() == pytest.approx(whole.losses(), rel=1e-6 if "--precision=bf16" not in options else 1e-4)
