"""Stages of a pipeline: what can be one, the order of its passes, and transfers to others. See `engine.stage`."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hvdtrain.errors import ConfigError
from hvdtrain.spans import Spans


class EndOfStage(BaseException):
    """Ends a forward pass after the last block of a rank. No error: code of the task must not catch it."""


class Pass(Enum):
    """What a rank of a pipeline computes at a time, of a micro-batch and a virtual stage."""

    FORWARD = "forward"
    BACKWARD = "backward"


def order_of_passes(stage: int, stages: int, chunks: int, micro_batches: int) -> Iterator[tuple[Pass, int, int]]:
    """Yield the passes of a rank, with the micro-batch and the virtual stage, from 0.

    1F1B: Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training, arXiv:2006.09503; with several virtual
    stages interleaved: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM, arXiv:2104.04473, section 2.2. That needs a multiple of `stages` micro-batches; with others, all
    forward passes come first. Interleaved, twice as many are ahead as stages follow: transfers run meanwhile.
    """
    groups = [range(first, min(first + stages, micro_batches)) for first in range(0, micro_batches, stages)]
    forwards = [(number, chunk) for group in groups for chunk in range(chunks) for number in group]
    backwards = [(number, chunk) for group in groups for chunk in reversed(range(chunks)) for number in group]
    ahead = stages - stage - 1
    if chunks > 1:
        ahead = len(forwards) if micro_batches % stages else 2 * ahead + (chunks - 1) * stages
    first = forwards[:ahead]
    yield from ((Pass.FORWARD, *each) for each in first)
    for place, each in enumerate(forwards[ahead:]):
        yield Pass.FORWARD, *each
        yield Pass.BACKWARD, *backwards[place]
    yield from ((Pass.BACKWARD, *each) for each in backwards[len(forwards) - len(first) :])


def first_blocks(model: nn.Module, blocks: list[nn.Module], count: int) -> list[int]:
    """Return the first of some blocks for each of `count` stages, and the end: stages that multiply about as much.

    A token is multiplied by all matrices of a block, but only by those of the experts that it chooses. The last stage
    also has what comes after the blocks, such as the LM head. Attention scores are left out: each block has them.
    """
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    chosen = getattr(text, "num_experts_per_tok", None)

    def work(parameters: Iterable[nn.Parameter]) -> float:
        sizes = ((p.numel(), p.shape[0], p.dim()) for p in parameters)
        return sum(
            size * min(1.0, (chosen or first) / first) if dims == 3 else size for size, first, dims in sizes if dims > 1
        )

    inside = {parameter for block in blocks for parameter in block.parameters()}
    works = [work(block.parameters()) for block in blocks]
    works[-1] += work(
        parameter
        for module in model.modules()
        if not isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
        if parameter not in inside
    )
    return _divide_evenly(works, count)


def _divide_evenly(works: Sequence[float], count: int) -> list[int]:
    """Divide consecutive works into `count` parts, none of them empty: the largest one as small as possible.

    Of several such divisions, the one with the smallest sum of squares. Returns the starts of the parts, and the end.
    """
    before = [0.0, *accumulate(works)]
    nothing: tuple[float, float, list[int]] = (math.inf, math.inf, [])
    best = [(0.0, 0.0, [0]), *[nothing] * len(works)]  # of the works up to each end
    for part in range(1, count + 1):
        found = [nothing] * part
        for end in range(part, len(works) + 1):
            options = []
            for start in range(part - 1, end):
                largest, squares, starts = best[start]
                own = before[end] - before[start]
                options.append((max(largest, own), squares + own * own, [*starts, end]))
            found.append(min(options))
        best = found
    return best[-1][2]


def stages_of(
    model: nn.Module, blocks: list[nn.Module], firsts: list[int], option: str
) -> dict[nn.Parameter, tuple[int, ...]]:
    """Return the stages of each parameter: `firsts` are the first blocks of the stages, and the end.

    Embeddings that are used after the blocks, too, are on the first stage and the last one: where the LM head has the
    same parameter, or a module of the model has an attribute `takes_embeddings` that is true.

    Errors: ConfigError: parameters before the blocks are not those of embeddings, or blocks have a parameter of others.
    """
    last = len(firsts) - 2
    found: dict[nn.Parameter, tuple[int, ...]] = {}
    for stage, (begin, end) in enumerate(pairwise(firsts)):
        for block in blocks[begin:end]:
            found |= dict.fromkeys(block.parameters(), (stage,))
    uses: dict[nn.Parameter, list[tuple[str, nn.Module]]] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            uses.setdefault(parameter, []).append((f"{prefix}.{name}" if prefix else name, module))
    takes_embeddings = any(getattr(module, "takes_embeddings", False) for module in model.modules())
    is_before = True
    for parameter, named in uses.items():
        (name, module), *others = named
        is_embedding = isinstance(module, nn.Embedding)
        if others and (parameter in found or not (is_before and is_embedding)):
            raise ConfigError(
                f"{option} does not support {name} and {others[0][0]}, which are one parameter",
                expected="one parameter only for an embedding and for what follows the blocks, such as the LM head",
                next_step="use another model, or leave out --parallel.pp",
                everywhere=True,
            )
        if parameter in found:
            is_before = False
            continue
        found[parameter] = (last,)
        if is_before:
            is_after = takes_embeddings or any(not isinstance(module, nn.Embedding) for _, module in others)
            found[parameter] = (0, last) if is_after else (0,)
        if is_before and not is_embedding:
            raise ConfigError(
                f"{option} does not support {name}, a parameter before the blocks",
                expected="only nn.Embedding before the blocks",
                next_step="leave out --parallel.pp",
                everywhere=True,
            )
    return found


class Link:
    """Transfers between neighbours, in one direction.

    Args:
        most: tensors under way. A rank that has sent as many sends another one when the first has arrived.
    """

    def __init__(self, group: dist.ProcessGroup, spans: Spans, most: float = 1, *, through_host: bool = False) -> None:
        self._group, self._spans, self._most, self._through_host = group, spans, most, through_host
        self._running: deque[tuple[dist.Work, Tensor]] = deque()

    def send(self, tensor: Tensor, stage: int) -> None:
        """Begin to send a tensor."""
        while self._running and (len(self._running) >= self._most or self._running[0][0].is_completed()):
            with self._spans.waiting_for(tensor):
                self._running.popleft()[0].wait()
        sent = tensor.detach().cpu() if self._through_host else tensor.detach()
        data = sent.contiguous().view(-1).view(torch.uint8)
        if (work := dist.isend(data, group=self._group, group_dst=stage)) is not None:
            self._running.append((work, data))

    def receive(self, like: Tensor, stage: int) -> Tensor:
        """Wait for a tensor with the shape and dtype of `like`."""
        device = torch.device("cpu") if self._through_host else like.device
        found = torch.empty(like.shape, dtype=like.dtype, device=device)
        with self._spans.waiting_for(like):
            dist.recv(found.view(-1).view(torch.uint8), group=self._group, group_src=stage)
        return found.to(like.device)


def random_state(device: torch.device) -> Tensor:
    """Return the state of torch's random numbers on a device, there: uint8. The host does not wait for the device."""
    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    return state.to(device)


def set_random_state(state: Tensor, device: torch.device) -> None:
    """Set the state of torch's random numbers on a device. The host waits for the device."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state.cpu(), device)
    else:
        torch.set_rng_state(state)
