"""Stages of a pipeline, which divide the blocks of a model: each micro-batch passes through the ranks of a pipeline.

Each rank calls the task's loss function with the whole batch. Blocks of other stages do nothing: the first block of a
rank gets the output of the stage before, and the pass ends after its last block. Parameters before the blocks are those
of the first stage, parameters after them those of the last one, which alone has a loss. Embeddings that are used after
the blocks, too, are on both of these stages: their gradients are summed.

The order of passes is 1F1B: Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training, arXiv:2006.09503.
torch.distributed.pipelining is not used: its stages are modules from tensors to tensors, it splits batches along a
dimension of tensors, and keeps the shapes of the first step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hvdtrain.comm.base import Comm
from hvdtrain.comm.dimensions import Dimensions
from hvdtrain.comm.torch_group import lasting_group
from hvdtrain.engine.blocks import require_blocks
from hvdtrain.engine.division import distribute, divide_model, ties_of
from hvdtrain.engine.mesh import MeshEngine
from hvdtrain.engine.sequence import dropout_of
from hvdtrain.engine.stages import EndOfStage, first_blocks, refuse_what_has_no_stages, stages_of
from hvdtrain.engine.table import EngineParts
from hvdtrain.errors import ConfigError, TaskError
from hvdtrain.spans import Spans
from hvdtrain.state.divided import OnStages


class PipelineEngine(MeshEngine):
    """Ranks of a pipeline divide the blocks of a model; other pipelines have copies, with other samples.

    Args:
        parts: the model's parameters become those of rank 0.
    """

    def __init__(self, parts: EngineParts) -> None:
        self._stage = Stage(parts.model, parts.comm, parts.dimensions, parts.device, parts.spans)
        super().__init__(parts, place=self._stage.place)

    def forward(self, call: Callable[[], Any]) -> Any:
        """Run this rank's part of a forward pass. Collective: yes."""
        self._stage.begin(call)
        return super().forward(call)

    def accumulate(self, passes: Iterable[Callable[[], Callable[[], None]]]) -> None:
        """Run the passes; a forward pass for each later stage is under way before the first backward pass."""
        ahead: deque[Callable[[], None]] = deque()
        for forward in passes:
            ahead.append(forward())
            if len(ahead) >= self._stage.to_end:
                ahead.popleft()()
        while ahead:
            ahead.popleft()()

    def _run_backward(self, loss: Tensor) -> None:
        self._stage.backward(loss)

    def close(self) -> None:
        """Remove the hooks."""
        super().close()
        self._stage.close()


class Stage:
    """The blocks of this rank, and the exchange with the stages before and after. Collective: yes.

    Attributes:
        to_end: number of stages from this one on.

    Errors:
        ConfigError: the model cannot be divided into stages.
    """

    def __init__(
        self, model: nn.Module, comm: Comm, dimensions: Dimensions, device: torch.device, spans: Spans | None = None
    ) -> None:
        self._option, count = dimensions.options, dimensions.pp
        found = require_blocks(model, self._option, "divide", "leave out --parallel.pp")
        blocks = [block for block in found if not getattr(block, "takes_embeddings", False)]
        if len(blocks) < count:
            raise ConfigError(
                f"{self._option}, but the model has {len(blocks)} block(s)",
                expected="at most as many stages as blocks",
                next_step=f"--parallel.pp {len(blocks)} or fewer",
                everywhere=True,
            )
        refuse_what_has_no_stages(model, self._option)
        self._model, self._drops = model, bool(dropout_of(model))
        ranks = dimensions.pipeline(comm.rank, comm.size)
        self._number = ranks.index(comm.rank)
        self.to_end = count - self._number
        firsts = first_blocks(model, blocks, count)
        self._stages_of = stages_of(model, blocks, firsts, self._option)
        self._ranks = tuple(tuple(dimensions.stage(rank, comm.size)) for rank in ranks)
        # Apart, so that a transfer to the next stage and one from it cannot wait for each other.
        groups = (lasting_group(comm, ranks, use) for use in ("onward", "back"))
        through_host = getattr(comm, "through_host", False)
        self._onward, self._back = (Link(group, spans or Spans(), through_host=through_host) for group in groups)
        self._passes: deque[dict[str, Tensor]] = deque()
        self._dry: float | None = None  # value of embeddings in a dry pass; None in others
        self._others: list[Tensor] = []
        self._device = device
        self._is_checked = not self._number  # the first stage computes all that its blocks get
        self._hooks: list[Any] = []
        for position, block in enumerate(blocks):
            # What a block computes is compiled below, without what it sends and gets.
            is_compiled, block._compiled_call_impl = block._compiled_call_impl is not None, None
            if firsts[self._number] <= position < firsts[self._number + 1]:
                self._hooks.append(block.register_forward_pre_hook(self._check_inputs, with_kwargs=True))
                if self._number and position == firsts[self._number]:
                    self._hooks.append(block.register_forward_pre_hook(self._receive))
                inner = torch.compile(block.forward) if is_compiled else block.forward
                block.forward = partial(self._own_forward, inner, position + 1 == firsts[self._number + 1])
                continue
            is_next = position == firsts[self._number + 1]
            block.forward = self._end if is_next else _skip
        for name, module in model.named_modules() if self._number else ():
            if isinstance(module, nn.Embedding) and 0 in (
                stages := self._stages_of[model.get_parameter(f"{name}.weight")]
            ):
                own = module.forward if self._number in stages else None
                module.forward = partial(self._embed, module, own)  # type: ignore[method-assign]

    def place(self, parts: EngineParts, hosts: list[Any]) -> set[str]:
        """Give each rank its stage of rank 0's values; see `divide_model`. Collective: yes."""
        whole = dict(parts.model.named_parameters())
        # With the names of tied parameters.
        named = parts.model.named_parameters(remove_duplicate=False)
        self._stages_by_name = {name: self._stages_of[parameter] for name, parameter in named}
        self._stages_of = {}
        if parts.dimensions.experts > 1:
            return divide_model(parts, hosts, layers=self)
        distribute(parts, whole, ties_of(parts.model), self.take)
        return set()

    def holds(self, name: str) -> bool:
        """Return whether this rank has a parameter, or a part of it."""
        return self._number in self._stages_by_name[name]

    def at_both_ends(self, name: str) -> bool:
        """Return whether a parameter is on the first stage and the last one, or a module has only such parameters."""
        stages = {s for each, s in self._stages_by_name.items() if each == name or each.startswith(f"{name}.")}
        return bool(stages) and all(len(each) > 1 for each in stages)

    def take(self, name: str, value: Tensor) -> Tensor:
        """Return the whole parameter on the device, or on ranks of other stages one without elements."""
        is_held = self.holds(name)
        held = value.to(self._device) if is_held else value.new_empty(0, *value.shape[1:], device=self._device)
        return OnStages(tuple(value.shape), self._stages_by_name[name], self._ranks).of(held)

    def begin(self, call: Callable[[], Any]) -> None:
        """Begin a pass of a step; `call` runs it. Before the first one, check what blocks of this rank get.

        Errors:
            TaskError: a block gets more than the stage before sends.
        """
        if not self._is_checked:
            self._is_checked, found = True, []
            for value in (0.0, 1.0):
                self._dry, self._others = value, []
                try:
                    with torch.no_grad(), torch.random.fork_rng([self._device] if self._device.type == "cuda" else []):
                        call()
                finally:
                    self._dry = None
                found.append(self._others)
            if not _equal(*found):
                raise TaskError(
                    f"{self._option} does not support this model: a block takes values that depend on parameters of"
                    " earlier stages, besides the output of the block before",
                    expected="blocks that pass on one tensor",
                    next_step="leave out --parallel.pp",
                )
        self._passes.append({})

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of the oldest forward pass; `loss` has gradients if this stage adds to it."""
        passed = self._passes.popleft()
        gradients = {loss: torch.ones_like(loss)}
        if (sent := passed.get("sent")) is not None:
            gradients[sent] = self._back.receive(sent, self._number + 1)
        if gradients := {output: gradient for output, gradient in gradients.items() if output.requires_grad}:
            torch.autograd.backward([*gradients], [*gradients.values()])
        if (received := passed.get("received")) is not None:
            gradient = torch.zeros_like(received) if received.grad is None else received.grad
            self._back.send(gradient, self._number - 1)

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _check_inputs(self, block: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Refuse a block that gets another tensor with a gradient. Note all others before the first pass."""
        if not (arguments and isinstance(arguments[0], Tensor)):
            raise TaskError(
                f"{self._option} does not support {type(block).__name__}",
                expected="blocks that get the output of the block before, a tensor, as the first positional argument",
                next_step="leave out --parallel.pp",
            )
        others = list(_tensors([arguments[1:], keywords]))
        if any(other.requires_grad for other in others):
            raise TaskError(
                f"{self._option} does not support {type(block).__name__}: it takes two tensors with gradients",
                expected="blocks that pass on one tensor",
                next_step="leave out --parallel.pp",
            )
        if self._dry is not None:
            self._others += others

    def _own_forward(
        self, inner: Callable[..., Any], is_last: bool, hidden: Tensor, *arguments: Any, **keywords: Any
    ) -> Any:
        if self._dry is not None:
            if is_last:
                raise EndOfStage
            return hidden
        output = inner(hidden, *arguments, **keywords)
        if not isinstance(output, Tensor) or (output.shape, output.dtype) != (hidden.shape, hidden.dtype):
            kind = f"{tuple(output.shape)} {output.dtype}" if isinstance(output, Tensor) else type(output).__name__
            raise TaskError(
                f"{self._option} does not support blocks that change the form of what they pass on",
                expected=f"an output like the input: {tuple(hidden.shape)} {hidden.dtype}",
                found=kind,
                next_step="leave out --parallel.pp",
            )
        return output

    def _receive(self, block: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Replace the input of this rank's first block by the output of the stage before."""
        if self._dry is not None:
            return arguments
        received = self._onward.receive(arguments[0], self._number - 1)
        if self._draws:
            set_random_state(self._onward.receive(random_state(self._device), self._number - 1), self._device)
        if torch.is_grad_enabled():
            self._passes[-1]["received"] = received.requires_grad_()
        return received, *arguments[1:]

    def _end(self, hidden: Tensor, *_: Any, **__: Any) -> Any:
        """Send the output of this rank's last block to the next stage."""
        if torch.is_grad_enabled():
            self._passes[-1]["sent"] = hidden
        self._onward.send(hidden, self._number + 1)
        if self._draws:
            self._onward.send(random_state(self._device), self._number + 1)
        raise EndOfStage

    @property
    def _draws(self) -> bool:
        """Whether this pass draws random numbers: each stage continues with the state of the one before."""
        return self._drops and self._model.training

    def _embed(self, module: nn.Embedding, inner: Callable[[Tensor], Tensor] | None, ids: Tensor) -> Tensor:
        """Return embeddings, or where only the first stage has them, what has their form: its values do not count."""
        if inner is not None and self._dry is None:
            return inner(ids)
        return module.weight.new_full((*ids.shape, module.embedding_dim), self._dry or 0.0)


class Link:
    """Transfers between neighbours, in one direction. A rank sends a tensor when the one before has arrived."""

    def __init__(self, group: dist.ProcessGroup, spans: Spans, *, through_host: bool = False) -> None:
        self._group, self._spans, self._through_host = group, spans, through_host
        self._running: tuple[dist.Work | None, Tensor] | None = None

    def send(self, tensor: Tensor, stage: int) -> None:
        """Begin to send a tensor."""
        if self._running is not None and self._running[0] is not None:
            with self._spans.waiting_for(tensor):
                self._running[0].wait()
        sent = tensor.detach().cpu() if self._through_host else tensor.detach()
        data = sent.contiguous().view(-1).view(torch.uint8)
        self._running = dist.isend(data, group=self._group, group_dst=stage), data

    def receive(self, like: Tensor, stage: int) -> Tensor:
        """Wait for a tensor with the shape and dtype of `like`."""
        device = torch.device("cpu") if self._through_host else like.device
        found = torch.empty(like.shape, dtype=like.dtype, device=device)
        with self._spans.waiting_for(like):
            dist.recv(found.view(-1).view(torch.uint8), group=self._group, group_src=stage)
        return found.to(like.device)


def random_state(device: torch.device) -> Tensor:
    """Return the state of torch's random numbers on a device, there: uint8."""
    return torch.cuda.get_rng_state(device).to(device) if device.type == "cuda" else torch.get_rng_state()


def set_random_state(state: Tensor, device: torch.device) -> None:
    """Set the state of torch's random numbers on a device."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state.cpu(), device)
    else:
        torch.set_rng_state(state)


def _skip(hidden: Tensor, *_: Any, **__: Any) -> Tensor:
    return hidden


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(each)


def _equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
