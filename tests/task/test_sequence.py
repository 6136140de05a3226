"""Models that get a part of each sequence: losses and gradients are those of the whole, and others are refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PretrainedConfig

from hvdtrain.comm.dimensions import Dimensions
from hvdtrain.comm.solo import ImaginedComm, imagined_ranks
from hvdtrain.engine.make import make_engine
from hvdtrain.engine.sequence import _exchange, divide_sequences
from hvdtrain.engine.token_exchange import rows_by_comm
from hvdtrain.errors import ConfigError, TaskError
from hvdtrain.plan.plan import Plan
from hvdtrain.task.base import SequencePart, Task
from hvdtrain.task.causal_lm import ModelConfig, causal_lm
from hvdtrain.task.sequence import _attend, divide_attention
from hvdtrain.task.token_loss import (
    IGNORED,
    MARKS,
    chat_targets,
    joined_targets,
    next_token_loss,
    separate_targets,
    token_loss,
)
from tests.support.thread_comm import ThreadComm, on_ranks
from tests.task.test_documents import a_model

pytest.importorskip("transformers", reason="the transformers library is not installed")

TOKENS = 24
PART = SequencePart(0, 2, lambda tensor, *_: tensor)
ROWS = torch.randint(0, 257, (2, TOKENS + 1), generator=torch.Generator().manual_seed(5))
MODELS = ["deepseek_v3", "llama", "mistral", "qwen3_moe", "gpt2", "gpt_neox", "phi"]
"""Latent attention, two heads for keys and values, a sliding window of 8 tokens, experts, learned positions."""


def sequence_part(comm: Any) -> SequencePart:
    return SequencePart(comm.rank, comm.size, partial(_exchange, rows=rows_by_comm(comm, "sequences"), count=comm.size))


def check_parts(
    make: Callable[[], Any],
    passes: Sequence[torch.Tensor],
    *,
    apart: bool = False,
    metrics: Callable[..., Any] = lambda model, rows, part: (),
    **options: Any,
) -> None:
    """Check that two ranks with a part of each sequence have the losses, metrics and gradients of the whole.

    In the last of the passes: each may have documents of its own.
    """
    tokens = passes[-1].shape[1] - 1

    def run(model: Any, part: SequencePart | None) -> tuple[Any, ...]:
        for rows in passes:
            model.zero_grad()
            loss, weight = token_loss(model, rows, part=part, **options)
            loss.backward()
        return model, loss.item(), float(weight), *(each.item() for each in metrics(model, rows, part=part))

    def body(comm: ThreadComm) -> tuple[Any, ...]:
        model = make()
        divide_attention(model, sequence_part(comm), tokens, apart=apart)
        return run(model, sequence_part(comm))

    whole, *sums = run(make(), None)
    found = on_ranks(2, body)
    assert [sum(each) for each in list(zip(*found, strict=True))[1:]] == pytest.approx(sums, rel=1e-6)
    parts = [dict(model.named_parameters()) for model, *_ in found]
    for key, parameter in whole.named_parameters():
        grads = [part[key].grad for part in parts if part[key].grad is not None]
        if parameter.grad is not None:
            torch.testing.assert_close(torch.stack(grads).sum(dim=0), parameter.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_are_those_of_the_whole(tmp_path: Path, name: str) -> None:
    check_parts(lambda: a_model(tmp_path, name), [ROWS], targets=joined_targets)


def test_targets_of_a_conversation_are_counted_by_part() -> None:
    marked = ROWS << MARKS | (torch.arange(TOKENS + 1) % 5 > 2)

    class Logits(nn.Module):
        def forward(self, input_ids: Any, position_ids: Any = None, use_cache: bool = False) -> Any:
            assert position_ids is None or position_ids.shape[1] == input_ids.shape[1]
            return type("Found", (), {"logits": nn.functional.one_hot(input_ids, 257).float()})

    parts = [SequencePart(index, 3, lambda *_: pytest.fail("nothing to exchange")) for index in range(3)]
    targets = partial(chat_targets, apart=False, config=None)
    losses = [token_loss(Logits(), marked, targets=targets, part=part) for part in (None, *parts)]
    assert sum(loss for loss, _ in losses[1:]).item() == pytest.approx(losses[0][0].item())
    counts = [int(count) for _, count in losses]
    assert sum(counts[1:]) == counts[0] == int((marked[:, 1:] & 1).sum()) and min(counts) > 0 > IGNORED


def test_shares_of_a_dimension_are_exchanged_and_gradients_go_back() -> None:
    def body(comm: ThreadComm) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        sent = (100 * comm.rank + torch.arange(12.0).reshape(1, 6, 2)).requires_grad_()
        found = sequence_part(comm).exchange(sent, 1, 2)
        (found * (1 + comm.rank)).sum().backward()
        return sent.detach(), found.detach(), sent.grad

    found = on_ranks(3, body)
    for rank, (_, received, grad) in enumerate(found):
        assert torch.equal(received, torch.cat([sent[:, 2 * rank : 2 * rank + 2] for sent, _, _ in found], dim=2))
        assert grad is not None
        assert grad[0, :, 0].tolist() == [1, 1, 2, 2, 3, 3]


SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("count", "name", "sizes", "found"),
    [
        (5, "llama", SMALL, "24 tokens of a sequence"),
        (3, "llama", SMALL, "4 heads of attention"),
        (4, "llama", {**SMALL, "num_key_value_heads": 2}, "2 heads of keys of attention"),
        (2, "llama", {**SMALL, "attention_dropout": 0.1}, "dropout of attention weights"),
        (2, "bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4}, "no attention by sdpa"),
        (2, "rwkv", {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}, "attention"),
        (2, "lfm2", {**SMALL, "layer_types": ["conv", "full_attention"]}, "layers other than attention"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    tmp_path: Path, count: int, name: str, sizes: dict[str, Any], found: str
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": name, "vocab_size": 257, **sizes}))
    model = causal_lm(ModelConfig(config=str(config)), vocabulary=257, seq_len=TOKENS)
    with pytest.raises(ConfigError, match=found):
        divide_attention(model, SequencePart(0, count, lambda *_: pytest.fail("refused first")), TOKENS)


def test_eager_attention_and_documents_in_sliding_windows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="eager attention"):
        divide_attention(a_model(tmp_path, "llama", "eager"), PART, TOKENS)
    with pytest.raises(ConfigError, match="sliding_attention of Mistral"):
        divide_attention(a_model(tmp_path, "mistral"), PART, TOKENS, apart=True)


@pytest.mark.parametrize(
    ("heads_of_keys", "options", "found"),
    [(3, {}, "3 heads of attention on a rank"), (4, {"s_aux": 1}, "s_aux"), (4, {"position_bias": 1}, "position_bias")],
)
def test_attention_that_cannot_be_divided_is_refused(heads_of_keys: int, options: Any, found: str) -> None:
    """Ranks that divide matrices have fewer heads than the model; values for each head are not divided."""
    query, key = torch.zeros(1, 6, 4, 8), torch.zeros(1, heads_of_keys, 4, 8)
    with pytest.raises(ConfigError, match=found):
        _attend(nn.Identity(), query, key, key, None, part=PART, inner=None, name="sdpa", **options)


def test_a_kernel_sees_its_own_name_and_the_module() -> None:
    """Flash attention looks up its library by the name in the module's config."""
    heads, module = torch.zeros(1, 4, 4, 8), nn.Linear(1, 1)
    module.config = SimpleNamespace(_attn_implementation="hvdtrain_flash_0", other=3)

    def kernel(seen: Any, query: torch.Tensor, *_: Any, **options: Any) -> tuple[torch.Tensor, None]:
        assert (seen.config._attn_implementation, seen.config.other) == ("flash_attention_2", 3)
        assert seen.in_features == 1 and options == {"sliding_window": 5}
        return query.transpose(1, 2), None

    options = {"position_ids": heads, "sliding_window": 5}
    _attend(module, heads, heads, heads, None, part=PART, inner=kernel, name="flash_attention_2", **options)


def test_a_mask_of_the_task_is_refused(tmp_path: Path) -> None:
    model = a_model(tmp_path, "llama")
    divide_attention(model, PART, TOKENS)
    with pytest.raises(TaskError, match="attention mask"):
        model(input_ids=ROWS, attention_mask=torch.ones_like(ROWS).tril(), use_cache=False)


def test_a_check_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    model = a_model(tmp_path, "llama").train()
    model.model.norm.eval()
    divide_attention(model, SequencePart(0, 1, lambda tensor, *_: tensor), TOKENS)
    assert model.training and not model.model.norm.training
    whole = a_model(tmp_path, "llama")
    assert next_token_loss(model, ROWS)[0] == next_token_loss(whole, ROWS)[0]


def _drops_by_config() -> nn.Module:
    model = nn.Linear(1, 1)
    model.config = PretrainedConfig(attention_dropout=0.25)
    return model


BY_PART: dict[str, Any] = {"by_part": lambda part: None}


@pytest.mark.parametrize(
    ("model", "more", "found"),
    [
        (nn.Linear(1, 1), {}, "cannot divide sequences"),
        (nn.Linear(1, 1), {**BY_PART, "metrics": lambda m, b: {}}, "has metrics"),
        (nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.25)), BY_PART, "dropout, which 1 sets"),
        (_drops_by_config(), BY_PART, r"dropout, which config\.attention_dropout sets"),
    ],
)
def test_a_task_that_cannot_divide_sequences_is_refused(model: nn.Module, more: dict[str, Any], found: str) -> None:
    with pytest.raises(ConfigError, match=found), imagined_ranks(2):
        task, plan = Task(model, next_token_loss, [1], **more), Plan(dimensions=Dimensions(cp=2))
        divide_sequences(task, ImaginedComm(2), plan.dimensions, torch.device("cpu"))
        make_engine(torch.optim.SGD(model.parameters()), model, ImaginedComm(2), plan)


def test_metrics_are_those_of_the_parts() -> None:
    def loss(model: nn.Module, batch: Any) -> tuple[torch.Tensor, float]:
        return torch.zeros(()), 1.0

    def metrics(model: nn.Module, batch: Any) -> dict[str, tuple[float, float]]:
        return {}

    more: dict[str, Any] = {"by_part": lambda part: (loss, metrics), "metrics": lambda model, batch: {}}
    task = Task(nn.Linear(1, 1), next_token_loss, [1], **more)
    with imagined_ranks(2):
        found = divide_sequences(task, ImaginedComm(2), Dimensions(cp=2), torch.device("cpu"))
    assert (found.loss, found.metrics) == (loss, metrics)


@pytest.mark.parametrize("name", ["deepseek_v3", "llama", "gpt2"])
@pytest.mark.parametrize("ends", [(), (3, 11, 12, 20)])
def test_separate_documents_do_not_see_each_other_across_parts(
    tmp_path: Path, name: str, ends: tuple[int, ...]
) -> None:
    """The second row has other documents; one of the first is in both parts."""
    rows = ROWS.clone().clamp(min=2)
    rows[0, list(ends)] = rows[1, 17] = 1
    targets = partial(separate_targets, end=1, config=SimpleNamespace(_attn_implementation="sdpa"))
    check_parts(lambda: a_model(tmp_path, name), [rows.flip(0), rows], apart=True, targets=targets)
