"""A bucket of shards that are sent encoded: gradients to their owners, and parameters from there."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hvdtrain.comm.base import Handle, kept_for_stream
from hvdtrain.compression.base import Phases
from hvdtrain.compression.coding import Coding
from hvdtrain.exchange.residuals import residual_key
from hvdtrain.exchange.shard_bucket import ShardBucket, Shared
from hvdtrain.state.exchange_state import MASTER, ROUNDED


class CodedShardBucket(ShardBucket):
    """Encodes gradients on their way to the owners, and updates of parameters on their way to all ranks.

    **Gradients**: an alltoall sends encoded shards to their owners, which sum them in fp32. With error feedback, a rank
    keeps what its encoding has lost, and adds it to the next gradients, as `compression.feedback` does.

    **Parameters**: an owner updates exact parameters of its own. Then it sends how much they differ from the model's,
    encoded, and all ranks, itself included, add that to the model's. So all ranks have the same bits, and what one
    encoding loses is part of the next difference.

    Args:
        shared: as of `ShardBucket`.
        coding: of shards.
        keep_error: whether to use error feedback.

    Attributes:
        applied: 0 on the device if the last update was skipped there; None or 1 if not.
    """

    def __init__(self, shared: Shared, coding: Coding, *, keep_error: bool) -> None:
        super().__init__(shared)
        self._coding = coding
        self._residual = self._zeros(self.layout.shape.length) if keep_error else None
        self._left: Tensor | None = None  # what the exchanges of this step have not delivered
        self._spread: Handle | None = None
        self._seen: list[Tensor] | None = None  # the model's values of the owned shards, as they arrived
        self.applied: Tensor | None = None

    def _zeros(self, length: int) -> Tensor:
        return torch.zeros(length, device=self.layout.shape.device)

    def _own_values(self, values: Tensor) -> Tensor:
        return super()._own_values(values) if self._on_host else values.clone()

    @property
    def keeps_error(self) -> bool:
        """Whether it uses error feedback."""
        return self._residual is not None

    def _pack(self, index: int, gradient: Tensor | None, weight: float) -> None:
        self._check_dense(index, gradient)
        if self._work is None:
            self._work = self._zeros(self.layout.shape.length)  # gaps are zero: they are part of a block
        for shard in self._by_index.get(index, ()):
            view = shard.part.view(self._work)
            if gradient is not None:
                view.add_(shard.rows.of(gradient), alpha=weight)
            if (undelivered := self._undelivered()) is not None:
                view.add_(shard.part.view(undelivered))

    def _undelivered(self) -> Tensor | None:
        return self._residual if self._left is None else self._left

    def _exchange(self) -> Phases:
        if (work := self._work) is None:  # all parameters are frozen
            return
        self._work = None
        sent = self._coding.encode(kept_for_stream(work).view(self._comm.size, -1))
        if self.keeps_error:
            self._keep_error(work, sent)
        received = yield self._comm.alltoall(sent, name=f"{self.layout.shape.name}/shares")
        sums = torch.empty(self._segment, device=work.device)
        self._coding.sum(received, sums)
        self._summed = sums if self._summed is None else self._summed.add_(sums)

    def _keep_error(self, work: Tensor, sent: Tensor) -> None:
        """Keep what was not sent: of frozen parameters everything."""
        decoded = torch.empty_like(work)
        self._coding.decode(sent, decoded.view(self._comm.size, -1))
        work.sub_(decoded)
        undelivered = self._undelivered()
        assert undelivered is not None
        for shard in self._shards:
            if not self.layout.parameters[shard.rows.index].requires_grad:
                shard.part.view(work).copy_(shard.part.view(undelivered))
        self._left = work

    def commit(self, *, applied: bool) -> None:
        """End the step: keep the new residuals if it was applied, else the old ones."""
        if applied and self._left is not None:
            self._residual = self._left
        self._left = None

    def start_gather(self) -> None:
        """Start to send how much this rank's parameters differ from the model's. Collective: yes."""
        difference = self._zeros(self._segment)
        for shard in self._own:
            exact = shard.exact.to(difference.device)
            torch.sub(exact, self._model(shard), out=self._own_part(shard).view(difference))
        if self.applied is not None:
            difference.mul_(self.applied)
        sent = self._coding.encode(difference.view(1, -1))
        self._spread = self._comm.allgather(sent, name=f"{self.layout.shape.name}/parameters")

    def finish_gather(self) -> None:
        """Wait for the differences of all ranks, if they are under way, and add them to the model."""
        if self._spread is None:
            return
        handle, self._spread = self._spread, None
        received = handle.wait()
        decoded = torch.empty(self.layout.shape.length, device=received.device)
        self._coding.decode(received, decoded.view(self._comm.size, -1))
        # In place: autograd then refuses a backward pass for which a parameter was read too early.
        torch._foreach_add_(list(map(self._model, self._shards)), [shard.part.view(decoded) for shard in self._shards])
        self._remember()

    def take_changes(self) -> None:
        """Make exact what a program has written to the model's parameters since their last exchange."""
        for index, shard in enumerate(self._own):
            model, exact = self._model(shard), shard.exact
            if self._seen is None:
                exact.copy_(model)
            else:
                torch.where(model == self._seen[index], exact, model, out=exact)
        self._seen = self._seen or []
        self._remember()

    def _remember(self) -> None:
        if self._seen is not None:
            self._seen = [self._model(shard).clone() for shard in self._own]

    def gather_exactly(self) -> None:
        """Give all ranks the exact parameters, not encoded. Collective: yes."""
        super().start_gather()
        super().finish_gather()
        for shard in self._own:
            self._model(shard).copy_(shard.exact)
        self._remember()

    def masters(self) -> dict[str, Tensor]:
        """Return the exact parameters that this rank owns, not copied."""
        return {shard.part.name + MASTER: shard.exact for shard in self._own}

    def rescale(self, factor: float) -> None:
        """Multiply the residuals."""
        if self._residual is not None:
            self._residual.mul_(factor)

    def synchronize_state(self) -> None:
        """Give every rank the mean of the residuals. Collective: yes."""
        if self._residual is not None:
            self._average(self._residual)

    def _average(self, residual: Tensor) -> None:
        self._comm.allreduce(residual, name=f"{self.layout.shape.name}/residual").wait()
        residual.div_(self._comm.size)

    def residuals(self, *, averaged: bool = False) -> dict[str, Tensor]:
        """Return the residuals of whole parameters, or their mean over ranks. Collective: yes, if `averaged`."""
        if (residual := self._residual) is None:
            return {}
        if averaged:
            self._average(residual := residual.clone())
        found = {}
        for index, shards in self._by_index.items():
            part, views = self.layout.shape.parts[index], [shard.part.view(residual) for shard in shards]
            found[residual_key(part.name)] = (torch.cat(views) if views[1:] else views[0]).view(part.shape)
        return found

    def load_state_dict(self, state: Mapping[str, Tensor], ranks: int) -> None:
        """Load residuals of a job of `ranks`, their sum stays, and exact parameters; without these, the model's."""
        if self._residual is not None:
            self._residual.zero_()
            for shard in self._shards:
                if (saved := state.get(residual_key(shard.part.name))) is not None:
                    shard.part.view(self._residual).copy_(shard.rows.of(saved)).mul_(ranks / self._comm.size)
        for shard in self._own:
            exact, saved = shard.exact, state.get(shard.part.name + MASTER, self._model(shard))
            exact.copy_(saved if saved.shape == exact.shape else shard.rows.of(saved))  # or whole, from other ranks

    def load_rounded(self, state: Mapping[str, Tensor]) -> None:
        """Give the model the values that it had in training; the exact parameters stay."""
        for parameter, part in zip(self.layout.parameters, self.layout.shape.parts, strict=True):
            if (saved := state.get(part.name + ROUNDED)) is not None:
                parameter.detach().copy_(saved)
        self._remember()

    def buffers(self) -> list[Tensor]:  # noqa: D102
        return [*super().buffers(), *(t for t in (self._residual, self._left) if t is not None), *(self._seen or ())]
