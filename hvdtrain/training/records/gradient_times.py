"""When backward has each gradient ready, in some early steps, for `hvdtrain timeline whatif`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import orjson
import torch
from torch import Tensor, nn

from hvdtrain.comm.base import Comm, TimelineComm
from hvdtrain.engine.base import Engine
from hvdtrain.engine.divisible import updates_by_element
from hvdtrain.exchange.backward_passes import accumulation
from hvdtrain.exchange.rows import count_rows
from hvdtrain.files import write_text
from hvdtrain.runtime.host import HostFacts
from hvdtrain.runtime.threads import read_busy_ns
from hvdtrain.spans import Listener, Spans
from hvdtrain.state.divided import local
from hvdtrain.training.records.listeners import timing_event

VERSION = 1
_COUNT_ROWS, _FIRST, _LAST = 3, 4, 7
"""Steps of a start: the first counts rows of embeddings, the others are timed. Step 1 learns the buckets, step 2 is the
first to use them; at the end of step 7, automatic compression may change the exchange."""
_COPIED = 1 << 22
"""Elements that are copied once to see how long packing would take."""


class GradientMarks:
    """Marks the time at which backward reaches the hook of each gradient.

    Hooks of a parameter run in the order of their registration, then those of the node that accumulates its gradient.
    An engine packs in hooks of either kind. Marks made before the engine say when a gradient is ready. Marks in `last`
    hooks, made after it, say when it is packed. Where the engine places parts of the model, all are made after it.

    Attributes:
        named: the trained parameters that this rank has, or a part of them, by name.
        marks: one a parameter, of the last backward pass; None for a gradient that was not computed.
        counts_rows: whether to count the touched rows of embeddings.
        rows: the last count, by name.
        on_cuda: mark by timing events of the CUDA device, not by the host's clock.
    """

    def __init__(self, model: nn.Module, spans: Spans, *, on_cuda: bool = False, last: bool = False) -> None:
        self.model = model
        self.named = [(n, p) for n, p in model.named_parameters() if p.requires_grad and local(p).numel()]
        self.on_cuda = on_cuda
        self.counts_rows = False
        self.rows: dict[str, int] = {}
        self._spans = spans
        parameters = [p for _, p in self.named]
        # The methods of nodes are kept: parameters do not own nodes.
        self._ways = [
            accumulation(p).register_hook if last else p.register_post_accumulate_grad_hook for p in parameters
        ]
        self._hooks = [way(partial(self._on_gradient, index)) for index, way in enumerate(self._ways)]
        self.clear()

    def clear(self) -> None:
        """Forget the marks of the last pass."""
        self.marks: list[Any] = [None] * len(self.named)

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def mark(self) -> Any:
        """Return a mark of the current time."""
        if not self.on_cuda:
            return self._spans.now()
        event = timing_event()
        event.record()
        return event

    def _on_gradient(self, index: int, *_: Any) -> None:
        self.marks[index] = self.mark()
        if self.counts_rows and self.named[index][1].grad is not None:
            self.rows.update(count_rows([self.named[index]]))


@dataclass
class GradientTimes(Listener):
    """A watcher of steps and a listener to spans. It removes all hooks after step `_LAST` and writes a file."""

    ready: GradientMarks  # made before the engine
    engine: Engine
    comm: Comm
    spans: Spans
    path: Path  # of the file; a later start of the run replaces it
    warn: Callable[[str], None]  # called if the file cannot be written
    host: HostFacts  # cores of this host
    _first_step: int = -1
    _timed: list[dict[str, Any]] = field(default_factory=list)
    _pass_marks: dict[str, Any] = field(default_factory=dict)
    _passes: int = 0
    _cpu_ns: list[int | None] = field(default_factory=list)
    _packed: GradientMarks | None = None
    _is_closed: bool = False

    def __post_init__(self) -> None:
        self.spans.listeners.append(self)

    def begin_step(self, step: int) -> None:
        """Keep the times of the previous step, if it was timed; begin or end timing."""
        self._first_step = step if self._first_step < 0 else self._first_step
        number = step - self._first_step + 1
        if number > _FIRST and not self._is_closed:
            self._keep(step - 1)
        # Where ranks divide the model, gradients are not sent as rows, and to count them would be collective.
        self.ready.counts_rows = number == _COUNT_ROWS and not self.engine.sums.copies()
        if number == _FIRST:
            self._packed = GradientMarks(self.ready.model, self.spans, on_cuda=self.ready.on_cuda, last=True)
        if _FIRST <= number <= _LAST + 1:
            self._cpu_ns.append(self._exchange_cpu_ns())
        if number > _LAST:
            self.close()
        self._passes = 0

    def close(self) -> None:
        """Remove the hooks, and write the times."""
        if self._is_closed:
            return
        self._is_closed = True
        for marks in self._all_marks():
            marks.close()
        self.spans.listeners.remove(self)
        if not self._timed:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self.path, orjson.dumps(self._content()).decode() + "\n")
        except Exception as error:  # any: if the run has failed, this must not hide the run's own error
            self.warn(f"cannot write {self.path}: {error}; training continues")

    def enter(self, name: str) -> None:
        """Note the begin of a backward pass."""
        if name == "backward":
            self._passes += 1
            self._pass_marks["begin"] = self.ready.mark()
            for marks in self._all_marks():
                marks.clear()

    def exit(self, name: str) -> None:
        """Note the end of a backward pass."""
        if name == "backward":
            self._pass_marks["end"] = self.ready.mark()

    def _all_marks(self) -> list[GradientMarks]:
        return [self.ready, self._packed] if self._packed is not None else [self.ready]

    def _us(self, mark: Any, since: Any = None) -> float | None:
        """Return the microseconds since another mark, or the begin of the last backward pass."""
        begin = self._pass_marks["begin"] if since is None else since
        if mark is None:
            return None
        if not self.ready.on_cuda:
            return float(mark - begin) / 1e3
        mark.synchronize()
        return float(begin.elapsed_time(mark)) * 1e3

    def _copy_us(self) -> list[float | None]:
        """Return the bytes of the largest parameter, or of a part of it, and the microseconds to copy them."""
        largest: Tensor = max((local(p) for _, p in self.ready.named), key=Tensor.numel, default=torch.zeros(0))
        tensor = largest.detach().reshape(-1)[:_COPIED]
        copy, us = torch.empty_like(tensor), None
        for _ in range(2):  # the first copy touches new memory
            began = self.ready.mark()
            copy.copy_(tensor)
            us = self._us(self.ready.mark(), began)
        return [tensor.nbytes, us]

    def _keep(self, step: int) -> None:
        if "end" in self._pass_marks and self._packed is not None:
            self._timed.append(
                {
                    "step": step,
                    "passes": self._passes,
                    "backward_us": self._us(self._pass_marks["end"]),
                    "ready_us": [self._us(mark) for mark in self.ready.marks],
                    "packed_us": [self._us(mark) for mark in self._packed.marks],
                }
            )

    def _state_bytes(self, name: str, parameter: nn.Parameter) -> list[float] | None:
        """Return the bytes of the optimizer's state for each element of a parameter, and of what is not by element.

        None if this rank does not update the parameter.
        """
        owned = self.engine.owned()
        own = parameter if owned is None or name not in owned else owned[name].parameter
        if own is None:
            return None
        slots = [slot for slot in self.engine.optimizer.state.get(own, {}).values() if isinstance(slot, Tensor)]
        by_element = [slot.dtype.itemsize for slot in slots if slot.shape == own.shape]
        return [sum(by_element), sum(slot.nbytes for slot in slots if slot.shape != own.shape)]

    def _exchange_cpu_us(self) -> float | None:
        """Return the CPU time a step of the threads that Horovod has started; None if unknown."""
        if len(self._cpu_ns) < 2 or None in (self._cpu_ns[0], self._cpu_ns[-1]):
            return None
        first, *_, last = cast("list[int]", self._cpu_ns)
        return (last - first) / (len(self._cpu_ns) - 1) / 1e3

    def _exchange_cpu_ns(self) -> int | None:
        if not isinstance(self.comm, TimelineComm) or not self.comm.started_threads:
            return None
        busy_ns = 0
        try:
            for thread in self.comm.started_threads:
                with suppress(FileNotFoundError):  # a thread that has ended
                    busy_ns += read_busy_ns(thread)
        except (OSError, ValueError):  # a kernel without these figures
            return None
        return busy_ns

    def _content(self) -> dict[str, Any]:
        copies = self.engine.sums.copies()
        return {
            "version": VERSION,
            "size": self.comm.size,
            "local_size": self.comm.local_size,
            "cores": self.host.cores,
            "own_cores": self.host.own_cores,
            "threads": torch.get_num_threads(),
            "device": "cuda" if self.ready.on_cuda else "cpu",
            "compression": self.engine.compression,
            "plan": self.engine.state_dict()[1].get("plan"),
            "exchange_cpu_us": self._exchange_cpu_us(),
            "copied": self._copy_us(),
            "by_element": updates_by_element(self.engine.optimizer),
            "frozen_bytes": sum(local(p).nbytes for p in self.ready.model.parameters() if not p.requires_grad),
            "parameters": [
                {
                    "name": name,
                    "shape": list(local(p).shape),
                    "copies": copies.get(name, self.comm.size),
                    "dtype": str(p.dtype).removeprefix("torch."),
                    "rows": self.ready.rows.get(name),
                    "state_bytes": self._state_bytes(name, p),
                }
                for name, p in self.ready.named
            ],
            "steps": self._timed,
        }
