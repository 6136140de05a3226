"""Losses of next-token prediction, also of samples with several documents that do not see each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hvdtrain.errors import TaskError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hvdtrain.task.base import SequencePart

IGNORED = -100
"""Target of a position without a loss."""

COUNTED, FIRST, MARKS = 1, 2, 2
"""Marks of a token of a conversation, in the lowest `MARKS` bits before its id: it has a loss; it is the first one."""


def next_token_loss(model: nn.Module, tokens_BT: Any, part: SequencePart | None = None) -> tuple[Tensor, float]:
    """Return the summed cross entropy of each token, given the tokens before it.

    Args:
        model: takes `input_ids`, returns an object with `logits`.
        tokens_BT: ids (B, T + 1), int64.
        part: of the T tokens; the model attends to those of other parts. None for all.

    Returns:
        The sum over B * T predicted tokens in nats, in float32 for any dtype of logits; and B * T.
    """
    # Slice the ids, not the logits: these are as large as all other memory, and slicing would copy them.
    inputs_BT, targets_BT, places_BT = _own(part, tokens_BT[:, :-1], tokens_BT[:, 1:])
    return _summed(model, inputs_BT, targets_BT, places_BT), float(targets_BT.numel())


def separate_loss(model: nn.Module, tokens_BT: Any, *, end: int, config: Any) -> tuple[Tensor, Tensor]:
    """Return the summed cross entropy of each token, given the tokens before it in its document.

    The first token of a document has no loss. Positions restart with each document, from which transformers makes masks
    of attention.

    Args:
        model: takes `input_ids` and `position_ids`, returns an object with `logits`.
        tokens_BT: ids (B, T + 1), int64.
        end: id of the last token of each document.
        config: of the model, with the kernel of attention.

    Returns:
        The sum, and the number of tokens in it.
    """
    inputs_BT = tokens_BT[:, :-1]
    ends_BT = inputs_BT == end
    starts_BT = ends_BT.roll(1, dims=1)
    targets_BT = tokens_BT[:, 1:].masked_fill(ends_BT, IGNORED)
    return masked_loss(model, inputs_BT, targets_BT, positions(starts_BT), config=config)


def chat_loss(
    model: nn.Module, marked_BT: Any, *, separate: bool, config: Any, part: SequencePart | None = None
) -> tuple[Tensor, Tensor]:
    """Return the summed cross entropy of the tokens that are marked as counted, given the tokens before them.

    Args:
        model: takes `input_ids` and `position_ids`, returns an object with `logits`.
        marked_BT: ids with marks (B, T + 1), int64.
        separate: whether conversations do not see each other.
        config: of the model, with the kernel of attention.
        part: as of `next_token_loss`; only of conversations that are not separate.

    Returns:
        The sum, and the number of tokens in it.
    """
    ids_BT, counted_BT, starts_BT = marked_BT >> MARKS, (marked_BT & COUNTED).bool(), (marked_BT & FIRST).bool()
    targets_BT = ids_BT[:, 1:].masked_fill(~counted_BT[:, 1:], IGNORED)
    if separate:
        return masked_loss(model, ids_BT[:, :-1], targets_BT, positions(starts_BT[:, :-1]), config=config)
    inputs_BT, targets_BT, places_BT = _own(part, ids_BT[:, :-1], targets_BT)
    return _summed(model, inputs_BT, targets_BT, places_BT), (targets_BT != IGNORED).sum()


def masked_loss(
    model: nn.Module, inputs_BT: Any, targets_BT: Any, positions_BT: Any, *, config: Any
) -> tuple[Tensor, Tensor]:
    """Return the summed cross entropy of the targets that are not `IGNORED`, and their number.

    Args:
        model: takes `input_ids` and `position_ids`, returns an object with `logits`.
        inputs_BT: ids, int64.
        targets_BT: the id after each, or `IGNORED`.
        positions_BT: position of each token in its document.
        config: of the model, with the kernel of attention.
    """
    if config._attn_implementation.startswith("flash"):
        # transformers tells documents apart for flash attention in batches of one row only.
        inputs_BT, targets_BT, positions_BT = (x.reshape(1, -1) for x in (inputs_BT, targets_BT, positions_BT))
    return _summed(model, inputs_BT, targets_BT, positions_BT), (targets_BT != IGNORED).sum()


def positions(starts_BT: Any) -> Tensor:
    """Return the position of each token in its document, by marks of first tokens. Each row begins a document."""
    import torch

    places_T = torch.arange(starts_BT.shape[1], device=starts_BT.device)
    return places_T - torch.where(starts_BT, places_T, 0).cummax(dim=1).values


def _own(part: SequencePart | None, inputs_BT: Any, targets_BT: Any) -> tuple[Any, Any, Any]:
    """Return the inputs and targets of a part, and their positions; None for those of all tokens."""
    import torch

    if part is None:
        return inputs_BT, targets_BT, None
    places_1T = torch.arange(inputs_BT.shape[1], device=inputs_BT.device)[None]
    return part.of(inputs_BT), part.of(targets_BT), part.of(places_1T)


def _summed(model: nn.Module, inputs_BT: Any, targets_BT: Any, positions_BT: Any = None) -> Tensor:
    from torch.nn.functional import cross_entropy

    given = {} if positions_BT is None else {"position_ids": positions_BT}
    logits_BTV = model(input_ids=inputs_BT, use_cache=False, **given).logits
    return cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten(), reduction="sum", ignore_index=IGNORED)


def check_separation(model: Any) -> None:
    """Check on a few tokens that the model tells documents apart by their positions; on the CPU, without gradients.

    The logits of a document after another one must be those of the document alone.

    Errors:
        TaskError: the model ignores the positions, such as one with a recurrent state.
    """
    import torch

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
