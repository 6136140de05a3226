"""Wait in the forward pass for parameters that other ranks have updated."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from hvdtrain.engine.blocks import before_forward, blocks
from hvdtrain.exchange.shard_bucket import ShardBucket
from hvdtrain.spans import GATHER, Spans


class Gathers:
    """Waits for gathered parameters in forward passes: at each block, and at each module outside of blocks.

    A parameter that is used before its module runs, or without it, is waited for at the start of a step. The first
    step with a forward pass finds these. Up to it, all parameters are waited for at the start.
    """

    def __init__(
        self, model: nn.Module, bucket_of: Mapping[nn.Parameter, ShardBucket], spans: Spans, limit_bytes: int
    ) -> None:
        self._spans, self._limit_bytes = spans, limit_bytes
        self._waiting: deque[ShardBucket] = deque()
        self._running: list[ShardBucket] = []
        self._of_unit: dict[nn.Module, list[ShardBucket]] = {}
        self._units: dict[nn.Parameter, set[nn.Module]] = {}
        self._early: dict[ShardBucket, None] = {}
        self._ran: set[nn.Module] = set()
        self._is_first, self._is_watching = bool(bucket_of), False
        self._undo: list[Callable[[], object]] = []
        repeated = blocks(model)
        inside = {module for block in repeated for module in block.modules()}
        for unit in [*repeated, *(module for module in model.modules() if module not in inside)]:
            own = unit.parameters(recurse=unit in inside)
            parameters = [p for p in own if p in bucket_of]
            if parameters:
                self._of_unit[unit] = list(dict.fromkeys(bucket_of[p] for p in parameters))
                for parameter in parameters:
                    self._units.setdefault(parameter, set()).add(unit)
                self._undo.append(before_forward(unit, partial(self._enter, unit)))
        self._is_compiled = any(unit._compiled_call_impl is not None for unit in self._of_unit)

    def _enter(self, unit: nn.Module) -> None:
        self._ran.add(unit)
        self._wait(self._of_unit[unit])

    def start(self, buckets: Iterable[ShardBucket]) -> None:
        """Gather these buckets in this order, equal on all ranks. Collective: yes."""
        self._waiting += buckets
        self._start_some()

    def _start_some(self) -> None:
        """Start gathers up to the limit."""
        while self._waiting:
            length = sum(bucket.exchange_bytes for bucket in [*self._running, self._waiting[0]])
            if self._running and length > self._limit_bytes:
                return
            self._running.append(bucket := self._waiting.popleft())
            bucket.start_gather()

    def finish(self, buckets: Iterable[ShardBucket] | None = None) -> None:
        """Wait for these buckets (default: all)."""
        for bucket in [*self._running, *self._waiting] if buckets is None else buckets:
            while bucket in self._running or bucket in self._waiting:
                first = bucket if bucket in self._running else self._running[0]
                first.finish_gather()
                self._running.remove(first)
                self._start_some()

    def _wait(self, buckets: Iterable[ShardBucket]) -> None:
        pending = [bucket for bucket in buckets if bucket in self._running or bucket in self._waiting]
        if pending:
            with self._spans(GATHER):
                self.finish(pending)

    def begin(self) -> None:
        """Start a step: wait for the parameters that may be used before their module runs."""
        if not self._of_unit:
            return
        if self._is_watching:
            self._is_first = self._is_watching = False
            for unit in self._of_unit.keys() - self._ran:
                self._early |= dict.fromkeys(self._of_unit[unit])
        every = (bucket for of_unit in self._of_unit.values() for bucket in of_unit)
        with self._spans("forward"):
            self._wait(dict.fromkeys(every) if self._is_first else self._early)

    def watch(self) -> AbstractContextManager[object]:
        """Return a context that finds parameters that are used before a module of theirs has run."""
        if not self._is_first:
            return nullcontext()
        if not self._is_watching:
            self._is_watching = True
            self._ran.clear()  # by an evaluation
        return nullcontext() if self._is_compiled else _Uses(self._used)

    def _used(self, parameter: nn.Parameter) -> None:
        units = self._units.get(parameter)
        if units and not units & self._ran:
            self._early |= {bucket: None for unit in units for bucket in self._of_unit[unit]}

    def close(self) -> None:
        """Remove the hooks."""
        for undo in self._undo:
            undo()


class _Uses(TorchFunctionMode):
    """Calls a function with each parameter that an operation of torch is called with."""

    def __init__(self, on_use: Callable[[nn.Parameter], None]) -> None:
        super().__init__()
        self._on_use = on_use

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") != "__get__":  # shapes and dtypes are no values
            for value in tree_leaves((args, kwargs)):
                if isinstance(value, nn.Parameter):
                    self._on_use(value)
        return func(*args, **(kwargs or {}))
