"""When backward has each gradient ready, in a few early steps: what `hvdtrain timeline whatif` replays."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import orjson
import torch
from torch import nn

from hvdtrain.comm.base import Comm, TimelineComm
from hvdtrain.config.schema import ObserveConfig
from hvdtrain.durable import write_text
from hvdtrain.engine.base import Engine
from hvdtrain.exchange.rows import count_rows
from hvdtrain.observe.recorder import Recorder
from hvdtrain.run_layout import RunLayout
from hvdtrain.runtime.host import HostFacts
from hvdtrain.runtime.threads import read_use
from hvdtrain.spans import Spans
from hvdtrain.training.records.device_spans import timing_event

VERSION = 1
_LOOK, _FIRST, _LAST = 3, 4, 7
"""Steps of a start: in the first its rows are counted, the others are timed. Step 1 learns the buckets, 2 is the first
to use them; at the end of 7, a choice of compression may change how they travel."""


def add_gradient_times(
    recorder: Recorder,
    observe: ObserveConfig,
    model: nn.Module,
    spans: Spans,
    directory: Path,
    comm: Comm,
    device: torch.device,
    host: HostFacts,
) -> GradientTimes | None:
    """On rank 0, time the gradients of some early steps; to be called before the engine is made."""
    if comm.rank != 0 or observe.timeline == "off":
        return None
    event = timing_event if device.type == "cuda" else None
    times = GradientTimes(model, comm, spans, RunLayout(directory).timeline.gradients, recorder.warn, host, event)
    recorder.add_watcher(times)
    return times


class GradientTimes:
    """A watcher of steps and a listener to spans, which takes its hooks off when it has seen enough.

    Made before the engine: its first hooks run before those that pack, its second ones, made later, after them.

    Args:
        model: on its device.
        comm: the ranks.
        spans: says when backward begins and ends.
        path: of the file; in a later start of a run it is written anew.
        warn: told when it cannot be written.
        host: what this host offers.
        event: makes a timing event of the device; None where the host's clock tells.

    Attributes:
        engine: exchanges the gradients; set before the first step.
    """

    engine: Engine

    def __init__(
        self,
        model: nn.Module,
        comm: Comm,
        spans: Spans,
        path: Path,
        warn: Callable[[str], None],
        host: HostFacts,
        event: Callable[[], Any] | None = None,
    ) -> None:
        self._named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._comm = comm
        self._spans = spans
        self._path = path
        self._warn = warn
        self._host = host
        self._event = event
        self._began = -1
        self._timed: list[dict[str, Any]] = []
        self._rows: dict[str, int] = {}
        self._marks: dict[str, Any] = {}
        self._ready: list[Any] = [None] * len(self._named)
        self._packed: list[Any] = [None] * len(self._named)
        self._passes = 0
        self._cpu_ns: list[int | None] = []
        self._hooks = self._hook(self._on_ready)
        spans.listeners.append(self)

    def begin_step(self, step: int) -> None:
        """Begin or end looking, keep what the step before was."""
        self._began = step if self._began < 0 else self._began
        number = step - self._began + 1
        if number > _FIRST and self._hooks:
            self._keep(step - 1)
        if number == _FIRST:
            self._hooks += self._hook(self._on_packed)
        if _FIRST <= number <= _LAST + 1:
            self._cpu_ns.append(self._cpu())
        if number > _LAST and self._hooks:
            self.close()
        self._passes = 0

    def close(self) -> None:
        """Take the hooks off, and write what was seen."""
        if not self._hooks:
            return
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._spans.listeners.remove(self)
        if not self._timed:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self._path, orjson.dumps(self._content()).decode() + "\n")
        except Exception as error:  # of a run that fails, anything: it must not stand in the place of what failed
            self._warn(f"{self._path} is not written: {error}; training goes on")

    def enter(self, name: str) -> None:
        """Backward begins."""
        if name == "backward":
            self._passes += 1
            self._marks["begin"] = self._mark()
            self._ready = [None] * len(self._named)
            self._packed = [None] * len(self._named)

    def exit(self, name: str) -> None:
        """Backward ends."""
        if name == "backward":
            self._marks["end"] = self._mark()

    def take(self) -> dict[str, float]:
        """Change no sums."""
        return {}

    def _hook(self, on: Callable[[int, nn.Parameter], None]) -> list[Any]:
        def made(index: int) -> Callable[[nn.Parameter], None]:
            return lambda parameter: on(index, parameter)

        return [
            p.register_post_accumulate_grad_hook(made(index))  # type: ignore[no-untyped-call]
            for index, (_, p) in enumerate(self._named)
        ]

    def _on_ready(self, index: int, parameter: nn.Parameter) -> None:
        self._ready[index] = self._mark()
        if self._spans.step - self._began + 1 == _LOOK and parameter.grad is not None:
            self._rows.update(count_rows([(self._named[index][0], parameter)]))

    def _on_packed(self, index: int, parameter: nn.Parameter) -> None:
        self._packed[index] = self._mark()

    def _mark(self) -> Any:
        if self._event is None:
            return self._spans.now()
        event = self._event()
        event.record()
        return event

    def _us(self, mark: Any) -> float | None:
        """Microseconds from the beginning of the last backward pass."""
        if mark is None:
            return None
        if self._event is None:
            return float(mark - self._marks["begin"]) / 1e3
        mark.synchronize()
        return float(self._marks["begin"].elapsed_time(mark)) * 1e3

    def _keep(self, step: int) -> None:
        if "end" in self._marks:
            self._timed.append(
                {
                    "step": step,
                    "passes": self._passes,
                    "backward_us": self._us(self._marks["end"]),
                    "ready_us": [self._us(mark) for mark in self._ready],
                    "packed_us": [self._us(mark) for mark in self._packed],
                }
            )

    def _exchange_cpu_us(self) -> float | None:
        """Of a step, processor time of the threads that Horovod has started; None where nothing tells."""
        if len(self._cpu_ns) < 2 or None in (self._cpu_ns[0], self._cpu_ns[-1]):
            return None
        first, *_, last = cast("list[int]", self._cpu_ns)
        return (last - first) / (len(self._cpu_ns) - 1) / 1e3

    def _cpu(self) -> int | None:
        if not isinstance(self._comm, TimelineComm) or not self._comm.started_threads:
            return None
        busy_ns = 0
        try:
            for thread in self._comm.started_threads:
                with suppress(FileNotFoundError):  # one that has ended
                    busy_ns += read_use(thread).busy_ns
        except (OSError, ValueError):  # a kernel that does not tell
            return None
        return busy_ns

    def _content(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "size": self._comm.size,
            "local_size": self._comm.local_size,
            "cores": self._host.cores,
            "own_cores": self._host.own_cores,
            "threads": torch.get_num_threads(),
            "device": "cpu" if self._event is None else "cuda",
            "compression": self.engine.compression,
            "plan": self.engine.state_dict()[1].get("plan"),
            "exchange_cpu_us": self._exchange_cpu_us(),
            "parameters": [
                {
                    "name": name,
                    "shape": list(p.shape),
                    "dtype": str(p.dtype).removeprefix("torch."),
                    "rows": self._rows.get(name),
                }
                for name, p in self._named
            ],
            "steps": self._timed,
        }
