"""The loss of a language model by chunks of tokens, so that the logits of a whole micro-batch never exist.

Logits are tokens times vocabulary: often more than all other memory. The head computes those of a chunk, and at once
their loss and its gradients, as Liger does (Hsu et al., arXiv 2410.10989). It does so within its own module, so that
hooks see it: those that gather its weights, for instance.

Libraries rejected: `torch.nn.functional.linear_cross_entropy` (torch 2.13) returns the sum in the format of its inputs,
which is off by 1% in bf16; Liger's kernel runs only on GPUs with Triton, and needs the weights outside of the module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn.functional import cross_entropy

CPU_BYTES, GPU_BYTES = 256 << 20, 1 << 30
"""Of the logits of a chunk, in fp32: fewer cost time, because each adds to the gradient of all weights of the head."""


def summed_loss(logits_TV: Tensor, targets_T: Tensor) -> Tensor:
    """Return the sum of the cross entropy in nats, in float32 for any dtype of logits. A target of -100 has none."""
    return cross_entropy(logits_TV.float(), targets_T, reduction="sum")


def returns_product_of_head(model: Any) -> bool:
    """Return whether a model of transformers returns as logits just what its head computes.

    Some scale it, or limit it. The model runs without its layers and the head: on any device, also without values.
    """
    decoder, head = getattr(model, "get_decoder", lambda: None)(), model.get_output_embeddings()
    if decoder is None or decoder is model or not _is_plain(head) or "forward" in vars(decoder):
        return False
    made = torch.zeros(1, 2, 4)
    decoder.forward, head.forward = lambda *given, **named: _Hidden(), lambda hidden: made
    try:
        with torch.no_grad():
            found = model(input_ids=torch.zeros(1, 2, dtype=torch.int64), use_cache=False).logits
    except Exception:  # what the model needs of its layers is not known
        return False
    finally:
        del decoder.forward, head.forward
    return found is made and not made._version


class _Hidden:
    """A fake output of a model's layers. All of its attributes but the hidden states are None."""

    last_hidden_state = torch.zeros(1, 2, 4)

    def __getitem__(self, place: Any) -> Tensor:
        return self.last_hidden_state

    def __getattr__(self, name: str) -> None:
        return None


def _is_plain(head: Any) -> bool:
    """Return whether a head is a matrix product, with weights of its own that no other code multiplies."""
    return isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward and "forward" not in vars(head)


@contextmanager
def loss_in_head(model: Any, targets: Sequence[Tensor]) -> Iterator[None]:
    """Have the head return a loss instead of logits, where these are large: a tensor without dimensions.

    Args:
        model: for which `returns_product_of_head` is true.
        targets: (B, T) of each call of the head, in order.
    """
    head = model.get_output_embeddings()
    limit = CPU_BYTES if targets[0].device.type == "cpu" else GPU_BYTES
    if not _is_plain(head) or 4 * targets[0].numel() * head.out_features <= 2 * limit:
        yield
        return
    whole, left, chunk = head.forward, iter(targets), max(1, limit // (4 * head.out_features))

    def forward(hidden_BTD: Tensor) -> Tensor:
        # Ranks that divide the head have a part of its rows. In fp16 a loss has to be scaled before its gradients.
        divided = hasattr(head.weight, "device_mesh") or len(head.weight) < head.out_features
        kind = hidden_BTD.device.type
        in_fp16 = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16
        if divided or in_fp16 or hidden_BTD.dtype == torch.float16:
            logits_BTV: Tensor = whole(hidden_BTD)
            return logits_BTV
        return chunked_loss(whole, hidden_BTD.flatten(0, 1), next(left).flatten(), chunk, [*head.parameters()])

    head.forward = forward
    try:
        yield
    finally:
        del head.forward


def chunked_loss(
    head: Callable[[Tensor], Tensor], hidden_TD: Tensor, targets_T: Tensor, chunk: int, weights: Sequence[Tensor]
) -> Tensor:
    """Return `summed_loss` of the logits of hidden states, for `chunk` tokens at a time.

    `head`: computes logits, with `weights`.
    """
    needed = torch.is_grad_enabled()
    total: Tensor = _Chunked.apply(head, targets_T, chunk, needed, hidden_TD, *weights)  # type: ignore[no-untyped-call]
    return total


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, head: Any, targets_T: Tensor, chunk: int, needed: bool, *inputs: Tensor) -> Tensor:
        hidden_TD, *weights = inputs
        trained = [each for each in weights if each.requires_grad] if needed else []
        total = torch.zeros((), device=hidden_TD.device)
        by_token = torch.empty_like(hidden_TD)
        sums: list[Tensor] = []  # of many chunks: in fp32
        parts = zip(*(torch.split(each, chunk) for each in (hidden_TD, by_token, targets_T)), strict=True)
        for hidden_CD, found_CD, targets_C in parts:
            with torch.set_grad_enabled(needed):
                given_CD = hidden_CD.detach().requires_grad_(needed)
                loss = summed_loss(head(given_CD), targets_C)
            total += loss.detach()
            if needed:
                gradient_CD, *gradients = torch.autograd.grad(loss, [given_CD, *trained])
                found_CD.copy_(gradient_CD)
                if sums:
                    torch._foreach_add_(sums, gradients)
                sums = sums or [gradient.float() for gradient in gradients]
        if needed:
            each = iter(sums)
            ctx.gradients = [by_token, *(next(each) if w.requires_grad else None for w in weights)]  # type: ignore[attr-defined]
        return total

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> Any:
        found, ctx.gradients = ctx.gradients, None  # once: they are as large as the weights
        return None, None, None, None, *(None if each is None else each.mul_(given[0]) for each in found)
