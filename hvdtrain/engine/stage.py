"""A stage of a pipeline, which has some of the blocks of a model: each micro-batch passes through all of them.

Each rank calls the task's loss function with the whole batch. Blocks of other stages do nothing: the first block of a
rank gets the output of the stage before, and the pass ends after its last block. Parameters before the blocks are those
of the first stage, parameters after them those of the last one, which alone has a loss. Embeddings that are used after
the blocks, too, are on both of these stages: their gradients are summed. The order of passes is in `stages`.

torch.distributed.pipelining is not used: its stages are modules from tensors to tensors, it splits batches along a
dimension of tensors, and keeps the shapes of the first step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.comm.base import Comm
from hvdtrain.comm.dimensions import Dimensions
from hvdtrain.comm.solo import ImaginedComm
from hvdtrain.comm.torch_group import lasting_group
from hvdtrain.engine.blocks import stage_blocks
from hvdtrain.engine.division import distribute, divide_model, ties_of
from hvdtrain.engine.parts import EngineParts
from hvdtrain.engine.sequence import dropout_of
from hvdtrain.engine.stages import (
    EndOfStage,
    Link,
    Pass,
    first_blocks,
    order_of_passes,
    random_state,
    set_random_state,
    stages_of,
)
from hvdtrain.errors import ConfigError, TaskError
from hvdtrain.spans import Spans
from hvdtrain.state.divided import OnStages


class Stage:
    """The blocks of this rank, and the exchange with the stages before and after. Collective: yes.

    With virtual stages, a rank has several groups of blocks, and other ranks have those between: each micro-batch
    passes through all ranks once for each group. Rank n has the virtual stages n, n + stages, and so on.

    Attributes:
        option: of the command line.
        chunks: number of virtual stages of a rank; 1 without them.
        chunk: the one that is running, from 0; None outside of a step.
        on_start, on_end: called before and after each function of the task.
        device: of the blocks.

    Errors: ConfigError: the model cannot be divided into stages.
    """

    def __init__(
        self, model: nn.Module, comm: Comm, dimensions: Dimensions, device: torch.device, spans: Spans | None = None
    ) -> None:
        self.option, self.chunks, self._count = dimensions.options, dimensions.virtual_stages, dimensions.pp
        blocks = stage_blocks(model)
        is_imagined = isinstance(comm, ImaginedComm)  # its tensors have no values
        self._model = model
        # On GPUs the host waits for the state of random numbers.
        self._drops = not is_imagined and (device.type == "cpu" or bool(dropout_of(model)))
        ranks = dimensions.pipeline(comm.rank, comm.size)
        self._number = ranks.index(comm.rank)
        firsts = first_blocks(model, blocks, self._count * self.chunks)
        # The groups of blocks of this rank, from a position to the next group's.
        self._blocks = [*pairwise(firsts)][self._number :: self._count]
        by_parameter = stages_of(model, blocks, firsts, self.option)
        self._stages_of = {p: tuple(stage % self._count for stage in each) for p, each in by_parameter.items()}
        self._ranks = tuple(tuple(dimensions.stage(rank, comm.size)) for rank in ranks)
        # Apart, so that a transfer to the next stage and one from it cannot wait for each other; nor can one from the
        # last rank to the first, which are neighbours the other way round if they are two.
        uses = ("onward", "back", *(("onward/around", "back/around") if self.chunks > 1 else ()))
        through_host, most = getattr(comm, "through_host", False), 1 if self.chunks == 1 else math.inf
        self._links = {
            use: Link(lasting_group(comm, ranks, use), spans or Spans(), most, through_host=through_host)
            for use in uses
        }
        self._passes: dict[tuple[int, int], dict[str, Tensor]] = {}  # under way, by micro-batch and virtual stage
        self._dry: float | None = None  # value of embeddings in a dry pass; None in others
        self._others: list[Tensor] = []
        self.device = device
        # The first stage has all that blocks get.
        self._unchecked = set(range(self.chunks)) if self._number and not is_imagined else set()
        self.on_start: Callable[[], None] = lambda: None
        self.on_end: Callable[[], None] = lambda: None
        self.use(None)
        self.start()
        self._hooks: list[Any] = [blocks[0].register_forward_pre_hook(self._count_run, prepend=True)]
        for position, block in enumerate(blocks):
            if any(first <= position < end for first, end in self._blocks):
                self._hooks.append(block.register_forward_pre_hook(partial(self._before, position), with_kwargs=True))
            block.forward = partial(self._forward, position, block.forward)
        for name, module in model.named_modules() if self._number else ():
            if isinstance(module, nn.Embedding) and 0 in (
                stages := self._stages_of[model.get_parameter(f"{name}.weight")]
            ):
                own = module.forward if self._number in stages else None
                module.forward = partial(self._embed, module, own)  # type: ignore[method-assign]

    def place(
        self, parts: EngineParts, hosts: list[Any], divide: Callable[[nn.Module], object] | None = None
    ) -> set[str]:
        """Give each rank its stage of rank 0's values; see `divide_model`. Collective: yes."""
        self._divides = divide is not None
        whole = dict(parts.model.named_parameters())
        # With the names of tied parameters.
        named = parts.model.named_parameters(remove_duplicate=False)
        self._stages_by_name = {name: self._stages_of[parameter] for name, parameter in named}
        self._stages_of = {}
        if divide is not None and (name := next((n for n, s in self._stages_by_name.items() if len(s) > 1), "")):
            raise ConfigError(
                f"{self.option} with --parallel.engine fsdp does not support {name}, which the first stage and the last"
                " one use, as tied embeddings are",
                next_step="untie it, by tie_word_embeddings: false in a model's config, or --parallel.engine horovod",
                everywhere=True,
            )
        if parts.plan.dimensions.experts > 1:
            return divide_model(parts, hosts, divide, layers=self)
        distribute(parts, whole, ties_of(parts.model), self.take, divide)
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
        held = value.to(self.device) if is_held else value.new_empty(0, *value.shape[1:], device=self.device)
        if is_held and self._divides:
            return held
        return OnStages(tuple(value.shape), self._stages_by_name[name], self._ranks).of(held)

    def order(self, micro_batches: int) -> Iterator[tuple[Pass, int, int]]:
        """Return `order_of_passes` of this rank."""
        return order_of_passes(self._number, self._count, self.chunks, micro_batches)

    def use(self, chunk: int | None, micro_batch: int = 0) -> None:
        """Let the next pass be that of a virtual stage; None outside of a step."""
        self.chunk, self._pass = chunk, (micro_batch, chunk or 0)
        self._first, self._end = self._blocks[chunk or 0]

    def start(self) -> None:
        """Begin a function of the task, which runs the model once."""
        self._runs, self._is_after = 0, False
        self.on_start()

    def end(self) -> None:
        """End a function of the task."""
        if self._dry is None:
            self.on_end()

    def _count_run(self, *_: object) -> None:
        self._runs += 1
        if self._runs > 1:
            raise TaskError(
                f"{self.option} does not support a task that runs the blocks of the model more than once",
                expected="one forward pass in the loss function, one in the metrics function, and no activation"
                " checkpointing but --memory.checkpointing",
                next_step="leave out --parallel.pp",
            )

    @property
    def is_first(self) -> bool:
        """Whether this is the first stage."""
        return not self._number

    @property
    def _virtual(self) -> int:
        """The number of the virtual stage that is running, among those of all ranks."""
        return (self.chunk or 0) * self._count + self._number

    def begin(self, call: Callable[[], Any]) -> None:
        """Begin a pass of a step; `call` runs it. Before the first one, check what blocks of this rank get.

        Errors: TaskError: a block gets more than the stage before sends.
        """
        if (self.chunk or 0) in self._unchecked:
            self._unchecked.remove(self.chunk or 0)
            found = []
            for value in (0.0, 1.0):
                self._dry, self._others = value, []
                try:
                    with torch.no_grad(), torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
                        call()
                finally:
                    self._dry = None
                found.append(self._others)
            first, second = found
            if len(first) != len(second) or not all(map(torch.equal, first, second)):
                raise TaskError(
                    f"{self.option} does not support this model: a block takes values that depend on parameters of"
                    " earlier stages, besides the output of the block before",
                    expected="blocks that pass on one tensor",
                    next_step="leave out --parallel.pp",
                )
        self._passes[self._pass] = {}

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of the one in use; stages before the last one may add to the loss, too."""
        passed = self._passes.pop(self._pass)
        if (sent := passed.get("sent")) is None:
            torch.autograd.backward(loss)
        else:
            link, stage = self._link("back", after=True)
            gradients = {sent: link.receive(sent, stage), loss: torch.ones_like(loss)}
            if gradients := {output: gradient for output, gradient in gradients.items() if output.requires_grad}:
                torch.autograd.backward([*gradients], [*gradients.values()])
        if (received := passed.get("received")) is not None:
            gradient = torch.zeros_like(received) if received.grad is None else received.grad
            link, stage = self._link("back", after=False)
            link.send(gradient, stage)

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _link(self, direction: str, *, after: bool) -> tuple[Link, int]:
        """Return the link to the virtual stage after the one that is running, or before it, and the rank there."""
        other = self._virtual + 1 if after else self._virtual - 1
        is_around = max(other, self._virtual) % self._count == 0
        return self._links[f"{direction}/around" if is_around else direction], other % self._count

    def _before(
        self, position: int, block: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Check what a block gets. The first one of a stage gets the output of the stage before."""
        if not self._first <= position < self._end:
            return None
        self._check_inputs(block, arguments, keywords)
        if self._dry is not None or position != self._first:
            return None
        self._is_after = True
        received = (self._receive(arguments[0]), *arguments[1:]) if self._virtual else arguments
        self._state = self._seen_state()
        return received, keywords

    def _check_inputs(self, block: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Refuse a block that gets another tensor with a gradient. Note all others before the first pass."""
        if not (arguments and isinstance(arguments[0], Tensor)):
            raise TaskError(
                f"{self.option} does not support {type(block).__name__}",
                expected="blocks that get the output of the block before, a tensor, as the first positional argument",
                next_step="leave out --parallel.pp",
            )
        others = list(_tensors([arguments[1:], keywords]))
        if any(other.requires_grad for other in others):
            raise TaskError(
                f"{self.option} does not support {type(block).__name__}: it takes two tensors with gradients",
                expected="blocks that pass on one tensor",
                next_step="leave out --parallel.pp",
            )
        if self._dry is not None:
            self._others += others

    def _forward(
        self, position: int, inner: Callable[..., Any], hidden: Tensor, *arguments: Any, **keywords: Any
    ) -> Any:
        """Run a block, if it is of the virtual stage that is running; end the pass at the next one."""
        if position < self._first:
            return hidden
        if position >= self._end:
            self._send(hidden)
            raise EndOfStage
        if self._dry is not None:
            if position + 1 == self._end:
                raise EndOfStage
            return hidden
        output = inner(hidden, *arguments, **keywords)
        if position + 1 == self._end and (state := self._seen_state()) is not None:
            self._check_drawn(state)
        if not isinstance(output, Tensor) or (output.shape, output.dtype) != (hidden.shape, hidden.dtype):
            kind = f"{tuple(output.shape)} {output.dtype}" if isinstance(output, Tensor) else type(output).__name__
            raise TaskError(
                f"{self.option} does not support blocks that change the form of what they pass on",
                expected=f"an output like the input: {tuple(hidden.shape)} {hidden.dtype}",
                found=kind,
                next_step="leave out --parallel.pp",
            )
        return output

    def _receive(self, like: Tensor) -> Tensor:
        """Return the output of the stage before."""
        link, stage = self._link("onward", after=False)
        received = link.receive(like, stage)
        if self._draws:
            set_random_state(link.receive(random_state(self.device), stage), self.device)
        if torch.is_grad_enabled():
            self._passes[self._pass]["received"] = received.requires_grad_()
        return received

    def _send(self, hidden: Tensor) -> None:
        """Send the output of the last block to the next stage."""
        if torch.is_grad_enabled():
            self._passes[self._pass]["sent"] = hidden
        link, stage = self._link("onward", after=True)
        link.send(hidden, stage)
        if self._draws:
            link.send(random_state(self.device), stage)

    def _seen_state(self) -> Tensor | None:
        """Return the state of a GPU's random numbers where it is not sent, because the model has no known dropout."""
        is_seen = self.device.type == "cuda" and self._model.training and not self._drops
        return torch.cuda.get_rng_state(self.device) if is_seen else None

    def _check_drawn(self, state: Tensor) -> None:
        """Check that no block has drawn random numbers since the first one. Errors: TaskError: one has."""
        if self._state is not None and not torch.equal(state, self._state):
            raise TaskError(
                f"{self.option} does not support blocks that draw random numbers on GPUs without a sign of it",
                expected="dropout by nn.Dropout, or with a probability in the config of the model",
                next_step="use one of them, or leave out --parallel.pp",
            )

    @property
    def _draws(self) -> bool:
        """Whether this pass draws random numbers: each stage continues with the state of the one before."""
        return self._drops and self._model.training

    def _embed(self, module: nn.Embedding, inner: Callable[[Tensor], Tensor] | None, ids: Tensor) -> Tensor:
        """Return embeddings, or where only the first stage has them, what has their form: its values do not count.

        Errors: TaskError: they are used after the blocks.
        """
        if inner is not None and self._dry is None:
            return inner(ids)
        if self._is_after:
            raise TaskError(
                f"{self.option} does not support this task: it uses an embedding after the blocks, or runs them again",
                expected="one forward pass of the model in a function; for embeddings that it uses after the blocks, an"
                " attribute takes_embeddings = True of the model",
                next_step="set it, or leave out --parallel.pp",
            )
        return module.weight.new_full((*ids.shape, module.embedding_dim), self._dry or 0.0)


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(each)
