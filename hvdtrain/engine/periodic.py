"""The engine of workers that train apart: every H steps they exchange the changes of their parameters.

Wraps the engine of the ranks that serve a worker. Local SGD (Stich, 2019, arXiv 1805.09767), DiLoCo (Douillard et al.,
2023, 2311.08105), streaming DiLoCo (2501.18512) and SparseLoCo (2508.15706) are settings of one algorithm
(`OuterPlan`). torchft's and OpenDiLoCo's are not used: their workers are processes, so that a run depends on their
number.
"""

from __future__ import annotations

import socket
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.comm.base import Comm, GroupingComm, TimelineComm
from hvdtrain.comm.mesh import subset
from hvdtrain.comm.objects import allgather_json
from hvdtrain.comm.solo import SoloComm
from hvdtrain.compression.outer import OuterCoding
from hvdtrain.compression.table import parse_outer
from hvdtrain.config.sync import OuterPlan
from hvdtrain.data.order import Workers
from hvdtrain.engine.base import Engine
from hvdtrain.engine.make import named_parameters
from hvdtrain.engine.outer import Links, OuterExchange, OuterFacts, divide
from hvdtrain.engine.schedule import Schedule
from hvdtrain.engine.sums import Sums
from hvdtrain.errors import ConfigError, TaskError
from hvdtrain.runtime.threads import lower_priority
from hvdtrain.state.pieces import Place, StateDict
from hvdtrain.state.train_state import as_saved, as_slot

_PREFIX = "worker"
_NUMBER_TYPES = {bool: torch.bool, int: torch.int64}
_STEPS_APART = 16
"""Most steps until all ranks agree on signals, and the journal gets its lines."""

KEY = "workers"
"""Entry of the exchange's plain values that says how many workers there are."""


@dataclass
class _Worker:
    """What a worker has of its own."""

    parameters: list[Tensor]
    buffers: list[Tensor]
    slots: defaultdict[Any, dict[str, Any]] = field(default_factory=lambda: defaultdict(dict))


class PeriodicEngine(Engine):
    """Workers train apart from step `plan.start_steps` on; before, all ranks exchange gradients in each step.

    The model has the shared parameters, those of the last outer step, except between `activate` and `park`. The
    optimizer has no state then.

    Args:
        make: makes the engine of some ranks, with the compression's name; collective among them.
        compression: of gradients, among the ranks that exchange them.
        coding: of the outer exchange.

    Attributes:
        inner: the engine of the ranks that serve a worker; before workers have begun, that of all ranks.
        links: the communicators.
        begun: whether workers train apart.
        steps: that they have trained apart.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: OuterPlan,
        links: Links,
        make: Callable[[Comm, str], Engine],
        compression: str,
        coding: OuterCoding | None,
    ) -> None:
        self._model = model
        self.plan, self.links, self._make, self._compression, self._coding = plan, links, make, compression, coding
        self.inner: Engine = make(links.everyone, compression)
        self.optimizer = self.inner.optimizer
        self._named = [(name, p) for name, p in named_parameters(self.optimizer, model) if p.requires_grad]
        self.begun, self.steps, self._joined = False, 0, False
        self._loaded: tuple[dict[str, Tensor], dict[str, Any]] | None = None  # state of the group's engine
        self._merged = (0, 0)
        self._tokens = [0.0] * plan.workers  # of each worker since the last outer step
        self._due: dict[int, int] = {}  # when a fragment is applied, in `steps`
        self._shared: list[Tensor] = []
        self._shared_buffers: list[Tensor] = []
        self._workers: dict[int, _Worker] = {}
        self._active: int | None = None
        self._outer: OuterExchange | None = None
        self._places: dict[str, Place] = {}

    @property
    def sums(self) -> Sums:  # type: ignore[override]
        """Those of `inner`."""
        return self.inner.sums

    @property
    def schedule(self) -> Schedule:  # type: ignore[override]
        """That of `inner`."""
        return self.inner.schedule

    @property
    def compression(self) -> str:  # noqa: D102
        return self._compression

    def buffers(self) -> list[Tensor]:  # noqa: D102
        found = [*self.inner.buffers()]
        for worker in self._workers.values():
            found += [*worker.parameters, *worker.buffers]
            found += [value for slots in worker.slots.values() for value in slots.values() if isinstance(value, Tensor)]
        if self._outer is not None:
            found += [*self._outer.momentum, *self._outer.residuals.values()]
        return found

    # Workers

    def begin_workers(self, step: int) -> None:
        """Let workers train apart after step `step`: each gets the parameters and the state of the optimizer.

        Collective: yes.
        """
        self._make_workers()
        self.join_group()
        self._merged = (step, step)
        for worker in self.links.served:
            held = self._workers[worker]
            for parameter, slots in self.optimizer.state.items():
                held.slots[parameter] = {
                    slot: value.clone() if isinstance(value, Tensor) else value for slot, value in slots.items()
                }
        self.optimizer.state = defaultdict(dict)

    def join_group(self) -> None:
        """Replace the engine of all ranks by that of this rank's group, if workers have begun. Collective: yes."""
        if not self.begun or self._joined:
            return
        self.inner.close()
        group = self.links.group
        self.inner = self._make(group, self._compression if group.size > 1 else "none")
        self._joined = True
        if self._loaded is not None and group.size > 1:
            self.inner.load_state_dict(*self._loaded)
        self._loaded = None

    def _make_workers(self) -> None:
        """Make the workers, with the model's values."""
        self.begun = True
        self._shared = [parameter.data for _, parameter in self._named]
        self._buffer_places = [
            (module, name)
            for module in self._model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in module._non_persistent_buffers_set
        ]
        self._shared_buffers = self._buffers_now()
        for worker in self.links.served:
            parameters = [tensor.clone() for tensor in self._shared]
            self._workers[worker] = _Worker(parameters, [buffer.clone() for buffer in self._shared_buffers])
        everyone = self.links.everyone
        on_cpu = all(tensor.device.type == "cpu" for tensor in self._shared)
        if self.plan.delay and self.links.group.size == 1 and on_cpu and isinstance(everyone, TimelineComm):
            # They only exchange fragments while the same cores compute: MPI polls while a transfer runs. A rank that
            # waits leaves them its core, whatever their priority.
            lower_priority(everyone.started_threads)
        fragments = divide([tensor.numel() for tensor in self._shared], self.plan.fragments)
        self._outer = OuterExchange(self.plan, self.links, self._shared, fragments, self._coding)

    def _buffers_now(self) -> list[Tensor]:
        return [buffer for module, name in self._buffer_places if (buffer := module._buffers[name]) is not None]

    def activate(self, worker: int) -> None:
        """Give the model and the optimizer the values of a worker."""
        if worker != self._active:
            self.park()
            held = self._workers[worker]
            self._use(held.parameters, held.buffers)
            self.optimizer.state = held.slots
            self._active = worker

    def park(self) -> None:
        """Give the model the shared parameters, and the optimizer no state."""
        if self._active is not None:
            self._workers[self._active].buffers = self._buffers_now()  # a forward pass may replace them
            self._use(self._shared, self._shared_buffers)
            self.optimizer.state = defaultdict(dict)
            self._active = None

    def _use(self, parameters: list[Tensor], buffers: list[Tensor]) -> None:
        for (_, parameter), value in zip(self._named, parameters, strict=True):
            parameter.data = value
        for (module, name), buffer in zip(self._buffer_places, buffers, strict=True):
            module._buffers[name] = buffer

    def steps_apart(self, left: int) -> int:
        """Return the number of steps, `left` at most, until all ranks meet again."""
        interval = self.plan.interval
        within = self.steps % interval
        part = -(-interval // -(-interval // _STEPS_APART))
        return min(min((within // part + 1) * part, interval) - within, left)

    def end_step(self) -> None:
        """Count a step of all workers, and apply an outer step that is due. Collective: yes, if one is."""
        self.steps += 1
        if self.steps in self._due.values():
            self._apply_due()

    def end_window(self, step: int, tokens: Sequence[float], *, last: bool) -> None:
        """Begin the outer step that is due after step `step`, and apply it unless it is delayed. Collective: yes.

        `tokens` of each worker since the last call; `last`: exchange and apply all that is left.

        Errors: TaskError: other parameters require gradients than when workers began.
        """
        assert self._outer is not None
        self.park()
        now = {name for name, p in named_parameters(self.optimizer, self._model) if p.requires_grad}
        if changed := {name for name, _ in self._named} ^ now:
            raise TaskError(
                f"the program has frozen or unfrozen parameters: {', '.join(sorted(changed)[:3])}",
                expected="the same parameters in all steps, because workers exchange the changes of these",
                next_step="--parallel.sync every_step",
            )
        self._tokens = [a + b for a, b in zip(self._tokens, tokens, strict=True)]
        number, rest = divmod(self.steps, self.plan.interval)
        if rest and not last:
            return
        self._merged = (self._merged[1], step)
        if last:
            self._apply_due(all_of_them=True)
        total = sum(self._tokens)
        weights = [count / total if total else 1 / len(self._tokens) for count in self._tokens]
        self._tokens = [0.0] * len(weights)
        for fragment in range(self.plan.fragments) if last else [(number - 1) % self.plan.fragments]:
            self._outer.start(step, fragment, self._parameters(), weights)
            self._due[fragment] = self.steps + (0 if last else self.plan.delay)
        self._share_buffers(weights)
        if last or not self.plan.delay:
            self._apply_due()

    def _apply_due(self, *, all_of_them: bool = False) -> None:
        assert self._outer is not None
        self._outer.receive()
        for fragment in [f for f, due in self._due.items() if all_of_them or due <= self.steps]:
            self._outer.apply(fragment, self._parameters())
            del self._due[fragment]

    def _parameters(self) -> dict[int, list[Tensor]]:
        return {worker: held.parameters for worker, held in self._workers.items()}

    def pop_facts(self) -> list[OuterFacts]:
        """Return the figures of outer steps that were received since the last call."""
        if self._outer is None:
            return []
        found, self._outer.facts = self._outer.facts, []
        return found

    def _share_buffers(self, weights: list[float]) -> None:
        """Average persistent buffers over workers; those that are not floating-point come from worker 0."""
        if not self._shared_buffers:
            return
        links = self.links
        for index, shared in enumerate(self._shared_buffers):
            total = torch.zeros(shared.shape, dtype=torch.float64, device=shared.device)
            for worker in links.served if links.leaders is not None else ():
                part = weights[worker] if shared.is_floating_point() else float(worker == 0)
                total.add_(self._workers[worker].buffers[index], alpha=part)
            links.everyone.allreduce(total, name=f"outer/buffer/{index}").wait()
            shared.copy_(total)
            for held in self._workers.values():
                held.buffers[index].copy_(shared)

    @property
    def replayable(self) -> bool:
        """Whether a rank can repeat its passes of the last step alone: not those of workers."""
        return not self.begun

    def covered(self, step: int) -> range:
        """Return the steps that the shared parameters have gained with step `step`."""
        if not self.begun:
            return range(step, step + 1)
        before, at = self._merged
        return range(before + 1, at + 1) if step == at else range(0)

    # State

    def complete(self) -> None:  # noqa: D102
        self.inner.complete()
        if self._outer is not None:
            self._outer.receive()

    def synchronized_state(self) -> dict[str, Tensor]:  # noqa: D102
        return self._tensors(self.inner.synchronized_state())

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the tensors of this rank's workers, and of the outer step."""
        tensors, values = self._loaded or self.inner.state_dict()
        values = {**values, KEY: self.links.workers.count, "begun": self.begun}
        if self.begun:
            values |= {
                "steps": self.steps,
                "merged": list(self._merged),
                "tokens": self._tokens,
                "due": {str(fragment): due for fragment, due in self._due.items()},
                "group_sizes": [len(self.links.workers.ranks_of(w)) for w in range(self.links.workers.count)],
            }
        return self._tensors(tensors), values

    def _tensors(self, inner: dict[str, Tensor]) -> dict[str, Tensor]:
        if not self.begun:
            return inner
        assert self._outer is not None
        names = {parameter: name for name, parameter in self._named}
        found: dict[str, Tensor] = {f"outer/momentum/{n}": t for n, t in enumerate(self._outer.momentum)}
        found |= {f"outer/pending/{fragment}": tensor for fragment, tensor in self._outer.pending.items()}
        self._places = {}
        for worker, held in self._workers.items():
            own = {f"parameters/{name}": value for name, value in zip(names.values(), held.parameters, strict=True)}
            own |= {f"buffers/{number}": value for number, value in enumerate(held.buffers)}
            for parameter, slots in held.slots.items():
                for slot, value in slots.items():
                    own |= _stored(f"{names[parameter]}/{slot}", value)
            own |= {f"residual/{f}": value for (w, f), value in self._outer.residuals.items() if w == worker}
            own |= {f"exchange/{key}": value for key, value in inner.items()}
            for key, value in own.items():
                found[f"{_PREFIX}/{worker}/{key}"] = value
                ranks = tuple(self.links.workers.ranks_of(worker))
                leader_only = key.startswith("residual/")
                place = Place(tuple(value.shape), (0,) * value.dim(), ranks[:1] if leader_only else ranks)
                self._places[f"{_PREFIX}/{worker}/{key}"] = place
        return found

    def state_place(self, key: str) -> Place | None:
        """Return the place of a tensor of a worker, which only the ranks have that serve it."""
        return self._places.get(key)

    def residual_ranks(self, key: str) -> Sequence[int]:
        """Return no ranks: residuals are saved with their worker."""
        return ()

    @property
    def in_pieces(self) -> bool:
        """Whether ranks have different parts of the state: each has that of its workers."""
        return True

    def keeps(self, key: str) -> bool:  # noqa: D102
        prefix, _, rest = key.partition("/")
        return prefix != _PREFIX or int(rest.partition("/")[0]) in self.links.served

    def load_state_dict(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Load what concerns this rank's workers, which are as many; the model has the shared parameters already."""
        if not values.get("begun"):
            if not self.begun:
                self.inner.load_state_dict(tensors, values)
            return
        if not self.begun:
            self._make_workers()
        assert self._outer is not None
        self.park()
        self.steps, self._merged = int(values["steps"]), (values["merged"][0], values["merged"][1])
        self._tokens = list(values["tokens"])
        self._due = {int(fragment): due for fragment, due in values["due"].items()}
        with torch.no_grad():
            for number, velocity in enumerate(self._outer.momentum):
                velocity.copy_(tensors[f"outer/momentum/{number}"])
            self._outer.pending = {
                fragment: tensors[f"outer/pending/{fragment}"].to(self._shared[0].device, copy=True)
                for fragment in self._due
            }
            for worker in self.links.served:
                self._load_worker(worker, dict(_of_worker(tensors, worker)), values)

    def _load_worker(self, worker: int, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        assert self._outer is not None
        held, parameters = self._workers[worker], dict(self._named)
        slots: dict[str, dict[str, Any]] = {}
        exchange: dict[str, Tensor] = {}
        for key, value in tensors.items():
            kind, _, name = key.partition("/")
            if kind == "parameters":
                held.parameters[[*parameters].index(name)].copy_(value)
            elif kind == "buffers":
                held.buffers[int(name)].copy_(value)
            elif kind == "residual":
                if (residual := self._outer.residuals.get((worker, int(name)))) is not None:
                    residual.copy_(value)
            elif kind == "exchange":
                exchange[name] = value
            else:
                of, _, slot = name.rpartition("/")
                loaded = (slot, value.item()) if kind == "number" else as_slot(parameters[of], slot, value)
                slots.setdefault(of, {}).update([loaded])
        held.slots = self._slots(slots)
        self._loaded = exchange, {**values, "ranks": values["group_sizes"][worker]}
        if self._joined and self.links.group.size > 1:
            self.inner.load_state_dict(*self._loaded)

    def _slots(self, named: Mapping[str, dict[str, Any]]) -> Any:
        """Return state of the optimizer by parameter; torch casts and moves it as the optimizer needs."""
        parameters, groups = dict(self._named), self.optimizer.state_dict()["param_groups"]
        members = [p for group in self.optimizer.param_groups for p in group["params"]]
        numbers = {parameter: number for number, parameter in enumerate(members)}
        entries = {numbers[parameters[name]]: slots for name, slots in named.items()}
        self.optimizer.load_state_dict({"state": entries, "param_groups": groups})
        found, self.optimizer.state = self.optimizer.state, defaultdict(dict)
        return found


def _stored(key: str, value: Any) -> dict[str, Tensor]:
    """Return a value of the optimizer's state as a tensor. Errors: TaskError if it is none, and no number."""
    if isinstance(value, Tensor):
        return dict([as_saved(f"optimizer/{key}", value)])
    if isinstance(value, (int, float)):
        return {f"number/{key}": torch.tensor(value, dtype=_NUMBER_TYPES.get(type(value), torch.float64))}
    raise TaskError(
        f"the optimizer has state that cannot be saved: {key}",
        expected="tensors and numbers",
        found=type(value).__name__,
        next_step="use an optimizer with flat state",
    )


def _of_worker(tensors: Mapping[str, Tensor], worker: int) -> Iterator[tuple[str, Tensor]]:
    prefix = f"{_PREFIX}/{worker}/"
    for key in tensors:
        if key.startswith(prefix):
            yield key.removeprefix(prefix), tensors[key]


def without_workers(state: StateDict) -> StateDict:
    """Return a whole state with one optimizer. Its tensors are the mean over the workers.

    What workers have learned since the last outer step is left out, and so is the outer optimizer.
    """
    exchange, count = state.tensors["exchange"], state.values["exchange"][KEY]
    merged: dict[str, Tensor] = {}
    plain: dict[str, Any] = {}
    for key, value in _of_worker(exchange, 0):
        kind, _, name = key.partition("/")
        if kind == "optimizer":
            total = value.double()
            for worker in range(1, count):
                total += exchange[f"{_PREFIX}/{worker}/{key}"]
            merged[name] = (total / count).to(value.dtype)
        elif kind == "number":
            plain[name] = value.item()
    tensors = {group: found for group, found in state.tensors.items() if group != "exchange"}
    values = {**state.values, "optimizer": plain, "exchange": None}
    return StateDict({**tensors, "optimizer": merged}, values, state.places)


def make_periodic(
    model: nn.Module,
    plan: OuterPlan,
    comm: Comm,
    make: Callable[[Comm, str], Engine],
    compression: str,
    *,
    elastic: bool,
) -> PeriodicEngine:
    """Make the engine; in an `elastic` job, ranks may leave. Collective: yes. Other arguments: see `PeriodicEngine`.

    Errors: ConfigError: several ranks would serve a worker in an elastic job of Horovod, or a parameter is complex.
    """
    if found := [name for name, parameter in model.named_parameters() if parameter.is_complex()]:
        raise ConfigError(
            f"{found[0]} is complex, and workers that train apart exchange changes of real parameters",
            next_step="--parallel.sync every_step",
        )
    workers = Workers(plan.workers, comm.size, plan.shares)
    own, leaders = list(workers.ranks_of(workers.served_by(comm.rank)[0])), workers.leaders()
    links = Links(comm, SoloComm(), comm, workers)
    if len(leaders) < comm.size:
        if elastic and isinstance(comm, GroupingComm):
            raise ConfigError(
                f"{comm.size} ranks serve {plan.workers} workers in an elastic job, so some serve one together",
                expected=f"at most {plan.workers} ranks: if one of a group is lost, Horovod ends the other ranks",
                next_step=f"--elastic 1:{plan.workers}, more --parallel.workers, or a job without --elastic",
                everywhere=True,
            )
        hosts = allgather_json(comm, socket.gethostname(), name="workers/hosts")
        group = subset(comm, own, hosts) if len(own) > 1 else SoloComm()
        links = Links(comm, group, subset(comm, leaders, hosts) if comm.rank in leaders else None, workers)
    return PeriodicEngine(model, plan, links, make, compression, parse_outer(plan.coding).load())
