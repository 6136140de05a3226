"""FLOPs of a sample, the peak FLOP/s of the devices, and how often torch.compile compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from hvdtrain.config.schema import Config
from hvdtrain.observe.flops import FlopCount, peak_tflops
from hvdtrain.training.loop.step_part import StepPart
from hvdtrain.training.start.device import allows_tf32

_BACKWARD = 2  # backward costs twice as much as forward: it computes gradients of inputs and of weights

COMPILED = "compiled"
"""Event at the end: `frames` compiled, `graph_breaks`, and `late` frames, after the first step. The first ones of
`break_reasons`, `break_places` (where a compiled function resumes after a break) and `late_reasons`."""
_RESUMED = "torch_dynamo_resume_in_"
"""Start of the names that torch gives to the rest of a function after a graph break."""
_MOST = 3  # reasons of each kind that are recorded


@dataclass
class FirstPass(StepPart):
    """Counts the FLOPs of the first forward pass in training, without an extra pass.

    `event`: records the event ``flops``, once: ``per_sample``, FLOPs of training on a sample; ``device``;
    ``peak_per_s`` of all ranks together and ``peak_source``, None if unknown. It is not called if nothing could be
    counted.
    """

    config: Config  # precision, samples of a pass, and the peak if the user gives it
    device: torch.device  # of this rank
    size: int  # number of ranks
    event: Callable[[dict[str, Any]], None]
    same_samples: int  # number of ranks that have the same samples
    _is_counted: bool = field(default=False, init=False)

    def around_forward(self, batch: Any) -> AbstractContextManager[object] | None:
        """Return the context of a forward pass."""
        return None if self._is_counted else self._counted()

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self._is_counted = True
        with FlopCount() as count:
            yield
        if count.flops:
            self.event(self._facts(count.flops))

    def _facts(self, flops: int) -> dict[str, Any]:
        device, config = self.device, self.config
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        own = config.observe.peak_tflops
        precision = config.precision.removesuffix("-weights")
        peak = (own, "--observe.peak_tflops") if own else peak_tflops(name, precision, tf32=allows_tf32())
        return {
            "event": "flops",
            "per_sample": (1 + _BACKWARD) * flops * self.same_samples / config.train.micro_batch,
            "device": name,
            "peak_per_s": peak[0] * 1e12 * self.size if peak else None,
            "peak_source": peak[1] if peak else None,
        }


class CompileCounts:
    """Counts of this process from now on, by torch's own counters. `event`: records the event `COMPILED`."""

    def __init__(self, event: Callable[[dict[str, Any]], None], say: Callable[[str], None]) -> None:
        import torch._dynamo.utils as counted  # takes seconds

        self._counted, self._event, self._say = counted, event, say
        self._breaks_before = dict(counted.counters["graph_break"])
        self._frames_before = self._late_after = self._frames()

    def end_first_step(self) -> None:
        """Count what is compiled from now on as late: each batch should find its code."""
        self._late_after = self._frames()

    def end(self) -> None:
        """Record the counts, and show them."""
        before = self._breaks_before
        breaks = {text: n - before.get(text, 0) for text, n in self._counted.counters["graph_break"].items()}
        breaks = {text: number for text, number in breaks.items() if number > 0}
        late = self._frames() - self._late_after
        newest = self._newest(self._frames() - self._frames_before)
        reasons = [(each, getattr(each, "recompile_reason", None)) for each in self._newest(late)]
        facts: dict[str, Any] = {
            "event": COMPILED,
            "frames": self._frames() - self._frames_before,
            "graph_breaks": sum(breaks.values()),
            "late": late,
            "break_reasons": [_first_line(text) for text in breaks][:_MOST],
            "break_places": _different(map(_place, (each for each in newest if each.co_name.startswith(_RESUMED)))),
            # Why what was there did not fit, and where.
            "late_reasons": _different(f"{_place(each)}: {_first_line(reason)}" for each, reason in reasons if reason),
        }
        self._event(facts)
        parts = [f"torch.compile: {facts['graph_breaks']} graph break(s), {late} compilation(s) after step 1"]
        for kind in ("break_reasons", "break_places", "late_reasons"):
            parts += facts[kind][:1]
        self._say("; ".join(parts))

    def _frames(self) -> int:
        return int(self._counted.counters["frames"]["total"])

    def _newest(self, count: int) -> list[Any]:
        """Return torch's records of the newest `count` compilations, or as many as it keeps."""
        frames = [each for each in self._counted.get_compilation_metrics() if each.co_name]  # others are of backward
        return frames[-count:] if count else []


def _different(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))[:_MOST]


def _place(metrics: Any) -> str:
    return f"{str(metrics.co_name).removeprefix(_RESUMED)} ({metrics.co_filename}:{metrics.co_firstlineno})"


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0].strip()
