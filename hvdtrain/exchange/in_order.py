"""Sum gradients in one order on any number of ranks: by the positions of micro-batches, in the tree of `data.tree`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hvdtrain.comm.base import Comm
from hvdtrain.compression.base import BucketShape, Compressor, Phases
from hvdtrain.data.tree import Counter, Positions
from hvdtrain.exchange.buckets import Named, as_gradient, as_real
from hvdtrain.exchange.shard_bucket import ShardBucket, Shared

_Sums = dict[str, Tensor]


class Leaves:
    """The gradients of a rank's micro-batches in a step: each taken alone, then added by position.

    Those in 16 bits are added in fp32.

    Attributes:
        positions: of the step.
        used: names of the parameters that a pass so far has given a gradient.
    """

    def __init__(self, comm: Comm, *, in_turn: bool = False) -> None:
        self._comm, self._in_turn = comm, in_turn
        self.begin(None, 0)

    def begin(self, positions: Positions | None, passes: int) -> None:
        """Start a step of as many passes of this rank; without positions, all ranks have equally many."""
        self.positions = positions = positions or Positions.equal(passes, self._comm.size, in_turn=self._in_turn)
        self.used: set[str] = set()
        self._mine = positions.shares[self._comm.rank]
        self._taken = 0
        self._sums = Counter[_Sums](positions.count, _add_all)
        self.watch(-1, lambda name, gradient: None)

    def watch(self, number: int, see: Callable[[str, Tensor], None]) -> None:
        """Call `see` with the name and the gradient of each parameter that pass `number` of this step gives one."""
        self._watched, self._see = number, see

    def take(self, named: Named) -> None:
        """Take away the gradients of a pass; the next one then makes its own."""
        taken = {}
        for name, parameter in named:
            if parameter.grad is not None:
                taken[name], parameter.grad = as_leaf(parameter.grad), None
                if self._taken == self._watched:
                    self._see(name, taken[name])
        self.used |= taken.keys()
        self._sums.add((self._mine[self._taken], 0), taken)
        self._taken += 1

    def nodes_with(self, name: str, last: Tensor | None) -> list[Tensor | None]:
        """Return the sums of a parameter by node of this rank, with its gradient of the last pass; None for no sum.

        Call it once a step for each parameter.
        """
        own = Counter[Tensor | None](self.positions.count, _add)
        for node, sums in self._sums.parts:
            own.add(node, sums.pop(name, None))
        if self._mine:
            leaf = None if last is None else as_leaf(last)
            if leaf is not None and len(self._mine) == self._watched + 1:
                self._see(name, leaf)
            own.add((self._mine[-1], 0), leaf)
        return [value for _, value in own.parts]

    def give(self, named: Named) -> None:
        """Make the sums the parameters' gradients, where this rank has taken all micro-batches."""
        sums = self._sums.parts[0][1] if self._sums.parts else {}
        for name, parameter in named:
            total = sums.pop(name, None)
            parameter.grad = None if total is None else as_gradient(_final(total), parameter).to(parameter.dtype)


def by_owner(nodes: Sequence[Tensor], ranks: int, segment: int, like: tuple[torch.dtype, torch.device]) -> Tensor:
    """Return what an all-to-all sends: the segments of each owner, (ranks x nodes, segment), from nodes of all."""
    if len(nodes) == 1:
        return nodes[0].view(ranks, segment)
    if not nodes:
        return torch.empty(0, segment, dtype=like[0], device=like[1])
    return torch.cat([node.view(ranks, segment) for node in nodes], 1).view(-1, segment)


def add_all_nodes(rows: Tensor, positions: Positions) -> Tensor:
    """Return the sum of the nodes of all ranks, in rank order, in the memory of the first one."""
    counter = Counter[Tensor](positions.count, Tensor.add_)
    nodes = [node for rank in range(len(positions.shares)) for node in positions.nodes(rank)]
    for node, row in zip(nodes, rows.unbind(), strict=True):
        counter.add(node, row)
    return _final(counter.parts[0][1])


class PassSums:
    """The sums of a step at the owner of a segment: it gets the gradients of all ranks pass by pass.

    The micro-batches of a pass are neighbours.
    """

    def __init__(self, positions: Positions) -> None:
        self._positions, self._passes = positions, 0
        self._sums = Counter[Tensor | None](positions.count, _add)

    def add(self, rows: Tensor | None) -> None:
        """Add a pass: a row for each rank, also for one without a micro-batch; None if no rank has a gradient."""
        of_pass = Counter[Tensor | None](self._positions.count, _add)
        for rank, position in enumerate(self._positions.of_pass(self._passes)):
            if position is not None:
                of_pass.add((position, 0), None if rows is None else rows[rank])
        self._passes += 1
        for node, total in of_pass.parts:
            self._sums.add(node, None if total is None else total.clone())  # the other rows are freed

    @property
    def total(self) -> Tensor | None:
        """The sum, after all passes."""
        found = self._sums.parts[0][1] if self._sums.parts else None
        return None if found is None else _final(found)

    @property
    def nbytes(self) -> int:
        """Memory of the sums."""
        return sum(total.nbytes for _, total in self._sums.parts if total is not None)


class InOrder(Compressor):
    """Sums in the order of the tree, on any number of ranks with the same bits; nothing is encoded.

    Each rank sends the sums of its nodes to the owner of each segment, which finishes the tree; then all gather the
    segments. With one node a rank this sends what an all-reduce sends.
    """

    def __init__(self, shape: BucketShape, comm: Comm, leaves: Leaves) -> None:
        self._leaves = leaves
        self._rest: list[tuple[Tensor, list[Tensor]]] = []  # further nodes, each as `work` and `views`
        super().__init__(shape, comm)

    def make_work(self) -> Tensor:
        """Return a buffer for one node, with segments of equal length."""
        length = -(-self.shape.length // self.comm.size) * self.comm.size
        return self.shape.zeros(length, torch.promote_types(self.shape.dtype, torch.float32))

    def make_out(self) -> Tensor:
        """Return a part of `work`, if that has the dtype of the gradients."""
        return self.work[: self.shape.length] if self.work.dtype == self.shape.dtype else self.shape.zeros()

    def pack(self, index: int, gradient: Tensor | None, weight: float = 1.0) -> None:
        """Pack the sums of all nodes of a part; `gradient` is that of the last pass."""
        assert weight == 1.0
        sums = self._leaves.nodes_with(self.shape.parts[index].name, gradient)
        while len(self._rest) < len(sums) - 1:
            work = self.make_work()
            self._rest.append((work, [part.view(work) for part in self.shape.parts]))
        for total, views in zip(sums, [self.views, *(views for _, views in self._rest)], strict=False):
            if total is None:
                views[index].zero_()
            else:
                views[index].copy_(total)

    def exchange(self, out: Tensor) -> Phases:
        """An all-to-all of nodes, then an all-gather of sums."""
        size, positions = self.comm.size, self._leaves.positions
        own = len(positions.nodes(self.comm.rank))
        works = [self.work, *(work for work, _ in self._rest)][:own]
        sent = by_owner(works, size, len(self.work) // size, like=(self.work.dtype, self.work.device))
        received = yield self.comm.alltoall(sent, name=self.shape.name, rows=[own] * size)
        total = add_all_nodes(received, positions)
        gathered = yield self.comm.allgather(total, name=f"{self.shape.name}/sums")
        out.copy_(gathered[: self.shape.length])

    def buffers(self) -> list[Tensor]:  # noqa: D102
        return [*super().buffers(), *(work for work, _ in self._rest)]


def as_leaf(gradient: Tensor) -> Tensor:
    """Return a gradient as it is summed: real numbers in fp32 or more."""
    real = as_real(gradient)
    return real.to(torch.promote_types(real.dtype, torch.float32))


def _final(total: Tensor) -> Tensor:
    """Make 0.0 of -0.0: whether a sum of zeros is one or the other depends on who sends zeros for what is missing."""
    return total.add_(0.0)


def _add(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    return left if right is None else right if left is None else left.add_(right)


def _add_all(left: _Sums, right: _Sums) -> _Sums:
    if both := [name for name in right if name in left]:
        torch._foreach_add_([left[name] for name in both], [right[name] for name in both])
    return {**right, **left}


class InOrderShardBucket(ShardBucket):
    """The rest of the tree at the owners of rows: each gets the nodes of all ranks in an all-to-all.

    Args:
        shared: as of `ShardBucket`.
        leaves: this rank's passes.
        each_pass: whether a pass is summed by itself. Then its micro-batches, one a rank, are neighbours.
    """

    def __init__(self, shared: Shared, leaves: Leaves, *, each_pass: bool) -> None:
        self._leaves, self._each_pass = leaves, each_pass
        super().__init__(shared)
        self._sum_dtype = torch.promote_types(self._sum_dtype, torch.float32)
        self.clear()

    def clear(self) -> None:  # noqa: D102
        super().clear()
        self._nodes: list[Tensor] = []  # what this rank sends, by node
        self._passes: PassSums | None = None

    def _pack(self, index: int, gradient: Tensor | None, weight: float) -> None:
        assert weight == 1.0
        self._check_dense(index, gradient)
        shape = self.layout.shape
        sums = [gradient] if self._each_pass else self._leaves.nodes_with(shape.parts[index].name, gradient)
        while len(self._nodes) < len(sums):
            self._nodes.append(torch.empty(shape.length, dtype=self._sum_dtype, device=shape.device))
        for total, node in zip(sums, self._nodes, strict=True):
            for shard in self._by_index.get(index, ()):
                view = shard.part.view(node)
                if total is None:
                    view.zero_()
                else:
                    view.copy_(shard.rows.of(total))

    def _exchange(self) -> Phases:
        if not self.is_trained:
            return
        positions, shape, size = self._leaves.positions, self.layout.shape, self._comm.size
        sent, self._nodes = self._nodes, []
        received = yield self._comm.alltoall(
            by_owner(sent, size, self._segment, like=(self._sum_dtype, shape.device)),
            name=shape.name,
            rows=[len(sent)] * size,
        )
        if self._each_pass:
            self._passes = self._passes or PassSums(positions)
            self._passes.add(received)
        else:
            self._summed = add_all_nodes(received, positions).clone()  # the rest of what was received is freed

    def _sums(self) -> list[Tensor]:
        if self._passes is not None:
            self._summed = self._passes.total
        return super()._sums()

    @property
    def kept_bytes(self) -> int:  # type: ignore[override]  # noqa: D102
        return super().kept_bytes if self._passes is None else self._passes.nbytes

    def buffers(self) -> list[Tensor]:  # noqa: D102
        return [*super().buffers(), *self._nodes]
