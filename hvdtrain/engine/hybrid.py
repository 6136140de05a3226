"""The engine of groups of ranks: FSDP2 divides the model in each group, and our exchange sums gradients between groups.

torch's own hybrid sharding, by a mesh of two dimensions, is not used: it cannot compress between groups, and takes no
custom collectives inside them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

from torch import Tensor, nn

from hvdtrain.comm.mesh import Mesh, make_mesh
from hvdtrain.comm.torch_group import TorchComm
from hvdtrain.engine.base import Loss
from hvdtrain.engine.blocks import before_forward
from hvdtrain.engine.fsdp import FsdpEngine
from hvdtrain.engine.fsdp_checks import check_fsdp
from hvdtrain.engine.fsdp_collectives import FsdpCollectives, make_collectives
from hvdtrain.engine.make import prepare_exchange, resolve_compression
from hvdtrain.engine.parts import EngineParts
from hvdtrain.errors import ConfigError
from hvdtrain.exchange.between_copies import BetweenCopies
from hvdtrain.spans import Spans
from hvdtrain.state.pieces import Place


class HybridEngine(FsdpEngine):
    """Each group of ranks has the whole model, divided among them; rank i of every group has the same part.

    In the last backward pass of a step, the sums of a group are exchanged with the other groups in buckets, as soon as
    they have arrived; those of a module that ran several times in the pass, after it.

    Args:
        parts: its compression is that of the exchange between groups.
        mesh: with `replicas`.
        collectives: in the group, as of `FsdpEngine`.
    """

    def __init__(self, parts: EngineParts, mesh: Mesh, collectives: FsdpCollectives | None) -> None:
        super().__init__(parts, mesh, collectives)
        assert mesh.replicas is not None
        compression = resolve_compression(parts.plan.compression, parts.device, parts.variables)
        limit = prepare_exchange(compression, mesh.replicas, parts.variables, parts.plan.bucket_mib)
        outside, *blocks = self._names.values()  # the gradients outside of blocks are the last ones
        order = [name for names in [*reversed(blocks), outside] for name in reversed(names) if name in self._owned]
        rows = [(name, rows) for name in order if (rows := self._owned[name].parameter) is not None]
        trained = [(name, parameter) for name, parameter in rows if parameter.requires_grad]
        self._between = BetweenCopies(trained, mesh.replicas, compression, limit, parts.spans or Spans(), "replicas")
        self._remaining = 0  # backward passes of this step
        self._is_backward = False
        self._runs: Counter[str] = Counter()  # forward passes of each module in this pass
        self._undo: list[Callable[[], object]] = []
        for name, module in self._modules.items():
            self._undo.append(before_forward(cast(nn.Module, module), partial(self._count_run, name)))
        if collectives is not None:
            collectives.on_sum = lambda module: self._on_sum(module, self._names[module])
        else:
            self._undo += [self._call_on_sum(module, name) for module in self._names for name in self._names[module]]

    def _call_on_sum(self, module: str, name: str) -> Callable[[], object]:
        """Let torch call `_on_sum` for a parameter; return what ends this."""
        if (parameter := self._parameters.get(name)) is None or not parameter.requires_grad:
            return lambda: None
        hook = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            lambda _: self._on_sum(module, [name])
        )
        return hook.remove  # type: ignore[no-any-return]

    def begin(self, micro_batches: int) -> None:
        """Clear gradients; all ranks have the same number of passes."""
        super().begin(micro_batches)
        self._remaining = micro_batches
        self._between.begin()

    def forward(self, call: Callable[[], Loss]) -> Loss:
        """Run a forward pass of a step. Collective: yes."""
        self._runs.clear()
        return super().forward(call)

    def backward(self, loss: Tensor) -> None:
        """Sum the gradients of `loss` in the group; in the last pass, between groups. Collective: yes."""
        self._end_pass()
        self._remaining -= 1
        self._is_backward = True
        super().backward(loss)
        self._is_backward = False

    def _count_run(self, module: str) -> None:
        if not self._is_backward:  # which computes checkpointed activations again
            self._runs[module] += 1

    def _on_sum(self, module: str, names: Sequence[str]) -> None:
        """Exchange sums that have arrived, if they are the last ones of the step: a module has one for each run."""
        if self._remaining or self._runs[module] != 1:
            return
        for name in names:
            if name in self._parameters:
                self._take(name)
                self._hand_over(name)

    def _hand_over(self, name: str) -> None:
        """Let the exchange between groups have the sum of all passes."""
        rows = self._owned[name].parameter
        if name in self._sums and rows is not None:
            rows.grad = self._sums.pop(name)
            self._between.add_gradient(name)

    def _deliver(self) -> list[Tensor]:
        """Wait for the sums of all groups, which become the gradients of the optimizer. Collective: yes."""
        for name in list(self._sums):
            self._hand_over(name)
        return self._between.finish()

    def commit(self, *, applied: bool) -> None:
        """Keep or discard the new residuals."""
        self._between.commit(applied=applied)

    def rescale(self, factor: float) -> None:
        """Multiply the residuals."""
        self._between.rescale(factor)

    def synchronize_state(self) -> None:
        """Make the residuals equal in all groups. Collective: yes."""
        self._between.synchronize_state()

    def synchronized_state(self) -> dict[str, Tensor]:
        """Return the residuals as if they were synchronized. Collective: yes."""
        return self._between.synchronized_state()

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the residuals of this rank's rows."""
        tensors, values = self._between.state_dict()
        return tensors, {**values, "plan": None}  # it follows from the model

    def state_place(self, key: str) -> Place | None:
        """Return the place of a residual."""
        return self._owned[key.rpartition("/")[0]].place

    def residual_ranks(self, key: str) -> Sequence[int]:
        """Return the ranks with the same rows, one of each group."""
        own = self._owned.get(key.rpartition("/")[0])
        return () if own is None or own.place is None else own.place.ranks

    def load_state_dict(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Load residuals, of whole parameters or of this rank's rows."""
        rows = {}
        for key, tensor in tensors.items():
            own = self._owned.get(key.rpartition("/")[0])
            if own is not None and own.parameter is not None:
                rows[key] = own.cut(tensor).clone()
        self._between.load(rows, int(values["ranks"]))

    def parameters_by_collective(self) -> dict[str, list[str]]:
        """Return the names of the parameters in each collective by our communicators."""
        return {**super().parameters_by_collective(), **self._between.parameter_names()}

    def buffers(self) -> list[Tensor]:
        """Return the buckets."""
        return self._between.buffers()

    def close(self) -> None:
        """Remove the hooks."""
        for undo in self._undo:
            undo()


def make_hybrid(parts: EngineParts) -> FsdpEngine:
    """Make the engine. Collective: yes.

    Errors:
        ConfigError: there is one rank, or the ranks, the model or the optimizer cannot be divided.
        LaunchError: a group that fits on one host is on several.
    """
    check_fsdp(parts)
    return make_between_groups(parts, HybridEngine, FsdpEngine)


def make_between_groups(
    parts: EngineParts,
    several: type[HybridEngine],
    one: Callable[[EngineParts, Mesh, FsdpCollectives | None], FsdpEngine],
) -> FsdpEngine:
    """Make the engine of `several` groups of ranks, or of `one`. Collective: yes.

    Errors:
        ConfigError: the ranks cannot form groups, or torchrun started them and they compress.
        LaunchError: a group that fits on one host is on several.
    """
    mesh = make_mesh(parts.comm, parts.plan.dp_shard)
    inside = parts.uncompressed(mesh.shard)
    if mesh.replicas is None:
        return one(parts.uncompressed(), mesh, make_collectives(inside))
    if isinstance(parts.comm, TorchComm) and parts.device.type == "cuda" and parts.plan.compression != "none":
        raise ConfigError(
            f"--parallel.dp_shard with --parallel.compression {parts.plan.compression}, but torchrun started the ranks",
            expected="one of Horovod's launchers: on GPUs, NCCL needs one order of all collectives",
            next_step="hvdtrain launch, mpirun or srun; or leave out --parallel.compression",
        )
    return several(parts, mesh, make_collectives(inside))
