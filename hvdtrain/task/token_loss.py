"""Losses of next-token prediction, also of samples with several documents that do not see each other."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from hvdtrain.errors import TaskError
from hvdtrain.task.base import SequencePart
from hvdtrain.task.chat import COUNTED, FIRST, MARKS
from hvdtrain.task.chunked_loss import loss_in_head, summed_loss

IGNORED = -100  # target of a position without a loss, as torch has it


class Targets(NamedTuple):
    """Tokens of a batch, with what a model has to predict."""

    inputs_BT: Any  # ids, int64
    targets_BT: Any  # the id after each, or `IGNORED`
    places_BT: Any = None  # of each token in its document, for masks of attention; None if documents see each other
    counted: float | None = None  # number of targets that are not ignored; None if it has to be counted

    def weight(self) -> Tensor | float:
        """Return the number of targets that are not ignored."""
        return (self.targets_BT != IGNORED).sum() if self.counted is None else self.counted


def joined_targets(tokens_BT: Any) -> Targets:
    """Return the targets of ids (B, T + 1), int64: each token but the first, given all tokens before it."""
    # Slice the ids, not the logits: these are as large as all other memory, and slicing would copy them.
    inputs_BT, targets_BT = tokens_BT[:, :-1], tokens_BT[:, 1:]
    return Targets(inputs_BT, targets_BT, counted=float(targets_BT.numel()))


def separate_targets(tokens_BT: Any, *, end: int, config: Any) -> Targets:
    """Return the targets of ids (B, T + 1), int64: each token but the first one of its document, given those before it.

    `end`: id of the last token of each document. `config`: of the model, with the kernel of attention.
    """
    inputs_BT = tokens_BT[:, :-1]
    ends_BT = inputs_BT == end
    starts_BT = ends_BT.roll(1, dims=1)
    targets_BT = tokens_BT[:, 1:].masked_fill(ends_BT, IGNORED)
    return _for_kernel(Targets(inputs_BT, targets_BT, positions(starts_BT)), config)


def chat_targets(marked_BT: Any, *, apart: bool, config: Any) -> Targets:
    """Return the targets of ids with marks (B, T + 1), int64: the tokens that are marked as counted.

    `apart`: whether conversations do not see each other. `config`: of the model, with the kernel of attention.
    """
    ids_BT, counted_BT, starts_BT = marked_BT >> MARKS, (marked_BT & COUNTED).bool(), (marked_BT & FIRST).bool()
    inputs_BT, targets_BT = ids_BT[:, :-1], ids_BT[:, 1:].masked_fill(~counted_BT[:, 1:], IGNORED)
    if not apart:
        return Targets(inputs_BT, targets_BT)
    return _for_kernel(Targets(inputs_BT, targets_BT, positions(starts_BT[:, :-1])), config)


def _for_kernel(found: Targets, config: Any) -> Targets:
    """Make one row of all: for flash attention, transformers separates documents only in batches of one row."""
    if not config._attn_implementation.startswith("flash"):
        return found
    return Targets(*(each.reshape(1, -1) for each in found[:3]))


def next_token_loss(
    model: nn.Module, tokens_BT: Any, part: SequencePart | None = None
) -> tuple[Tensor, Tensor | float]:
    """Return the summed cross entropy of each token, given the tokens before it, and the number of tokens.

    `model`: takes `input_ids`, returns an object with `logits`. `part`: of the T tokens; the model attends to those of
    other parts. None for all.
    """
    return token_loss(model, tokens_BT, targets=joined_targets, part=part)


def token_loss(
    model: nn.Module,
    batch: Any,
    *,
    targets: Callable[[Any], Targets] = joined_targets,
    part: SequencePart | None = None,
    mtp: tuple[int, float] = (0, 0.0),
    chunks: bool = False,
) -> tuple[Tensor, Tensor | float]:
    """Return the summed cross entropy of a batch's targets, and their number.

    `model`: takes `input_ids`, and `position_ids` if documents are separate; returns an object with `logits`. `part`:
    as of `next_token_loss`. `mtp`: number of layers that predict tokens after the next one (`multi_token`), and the
    weight of the mean of their losses. In training it adds their gradients; the sum is without them. `chunks`: whether
    the logits may be computed by chunks of tokens: see `chunked_loss`.

    Returns the sum in nats, in float32 for any dtype of logits; and the number.
    """
    count, weight = mtp
    passes = _run(model, targets(batch), count if model.training else 0, part, chunks)
    loss, *ahead = (_summed(logits_BTV, found.targets_BT) for logits_BTV, found in passes)
    if ahead:
        added = weight / count * torch.stack(ahead).sum()
        loss = loss + (added - added.detach())
    return loss, passes[0][1].weight()


def mtp_metrics(
    model: nn.Module,
    batch: Any,
    *,
    targets: Callable[[Any], Targets],
    count: int,
    part: SequencePart | None = None,
    chunks: bool = False,
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the mean loss of the tokens further ahead, over all layers for them, as `Task.metrics` does."""
    ahead = _run(model, targets(batch), count, part, chunks)[1:]
    losses = [_summed(logits_BTV, found.targets_BT) for logits_BTV, found in ahead]
    counted = [(found.targets_BT != IGNORED).sum() for _, found in ahead]
    return {"mtp_loss": (torch.stack(losses).sum(), torch.stack(counted).sum())}


def _run(
    model: nn.Module, whole: Targets, count: int, part: SequencePart | None, chunks: bool
) -> list[tuple[Tensor, Targets]]:
    """Return the logits of the next token with its targets, then those of `count` layers for tokens after it.

    Instead of logits it may be their loss, a tensor without dimensions.
    """
    found, *ahead = (_own(part, _shifted(whole, number)) for number in range(count + 1))
    given = {} if found.places_BT is None else {"position_ids": found.places_BT}
    with loss_in_head(model, [each.targets_BT for each in (found, *ahead)]) if chunks else nullcontext():
        if not ahead:
            return [(model(input_ids=found.inputs_BT, use_cache=False, **given).logits, found)]
        mtp_ids = [each.inputs_BT for each in ahead]
        logits_BTV, more = model(input_ids=found.inputs_BT, use_cache=False, mtp_ids=mtp_ids, **given)
        return [(logits_BTV, found), *zip(more, ahead, strict=True)]


def _shifted(found: Targets, by: int) -> Targets:
    """Return the ids that layer number `by` gets, from 1, and its targets, which are as many places ahead."""
    if not by:
        return found
    ids_BT = pad(found.inputs_BT[:, by:], (0, by))
    targets_BT = pad(found.targets_BT[:, by:], (0, by), value=IGNORED)
    if (places_BT := found.places_BT) is not None:
        same_BT = pad(places_BT[:, by:], (0, by), value=-1) == places_BT + by
        targets_BT = targets_BT.where(same_BT, IGNORED)
    return Targets(ids_BT, targets_BT, places_BT)


def positions(starts_BT: Any) -> Tensor:
    """Return the position of each token in its document, by marks of first tokens. Each row begins a document."""
    places_T = torch.arange(starts_BT.shape[1], device=starts_BT.device)
    return places_T - torch.where(starts_BT, places_T, 0).cummax(dim=1).values


def _own(part: SequencePart | None, found: Targets) -> Targets:
    """Return the targets of a part, with their positions in the document or the whole sequence."""
    if part is None:
        return found
    places_BT = found.places_BT
    if places_BT is None:
        places_BT = torch.arange(found.inputs_BT.shape[1], device=found.inputs_BT.device)[None]
    counted = None if found.counted is None else found.counted / part.count
    return Targets(part.of(found.inputs_BT), part.of(found.targets_BT), part.of(places_BT), counted)


def _summed(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    return summed_loss(logits_BTV.flatten(0, 1), targets_BT.flatten()) if logits_BTV.dim() else logits_BTV


def check_separation(model: Any) -> None:
    """Check on a few tokens that the model tells documents apart by their positions; on the CPU, without gradients.

    The logits of a document after another one must be those of the document alone.

    Errors: TaskError: the model ignores the positions, such as one with a recurrent state.
    """
    ids = torch.arange(1, 9)[None] % model.config.get_text_config().vocab_size
    joined_T = torch.arange(8)[None]
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            alone, together, apart = (
                model(input_ids=given, position_ids=places, use_cache=False).logits[0, -4:].float()
                for given, places in ((ids[:, 4:], joined_T[:, :4]), (ids, joined_T), (ids, joined_T % 4))
            )
    except TypeError as error:  # no such argument
        raise _not_separate(model, str(error)) from error
    finally:
        model.train(was_training)
    if not (apart - alone).norm() <= 0.01 * (together - alone).norm():
        raise _not_separate(model, "logits that depend on the document before")


def _not_separate(model: Any, found: str) -> TaskError:
    return TaskError(
        f"{type(model).__name__} cannot keep the documents of a sample separate",
        expected="a model of transformers in which position_ids that restart separate documents",
        found=found,
        next_step="use --data.documents joined, or another model",
        everywhere=True,
    )
