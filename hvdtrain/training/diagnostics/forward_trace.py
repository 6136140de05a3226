"""Trace a forward pass: find the function, and its module, that made a non-finite number from finite ones."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode, resolve_name

from hvdtrain.training.diagnostics.origin import Origin, leaves, not_finite, source_line, tensors


@dataclass(frozen=True, eq=False)
class _Record:
    """The origin of one non-finite tensor.

    Attributes:
        number: in order of time.
        origin: its `kind` may also be buffer; or constant, an infinity in the source, as in masks.
        has_nan: it contains nan, not only infinities.
        parents: of its inputs that were already non-finite.
    """

    number: int
    origin: Origin
    has_nan: bool
    parents: list[_Record]


class ForwardTrace(TorchFunctionMode):
    """A context manager around a forward pass, which checks the result of each call of a torch function.

    A non-finite tensor is not an error in itself: masks contain infinities, and `where` may discard them. Only those
    that the loss was computed from count. Each is traced back to the first of them.

    Args:
        model: hooks on its modules show which module runs.
        batch: on the device.

    Attributes:
        module_of: for each node of the autograd graph, the module that made it; None for the loss function.
    """

    def __init__(self, model: nn.Module, batch: Any) -> None:
        super().__init__()
        self.module_of: dict[Node, str | None] = {}
        self._names = {module: name for name, module in model.named_modules()}
        self._sources = {id(tensor): ("input", "") for tensor in tensors(batch)}
        self._sources |= {id(b): ("buffer", name) for name, b in model.named_buffers()}
        self._sources |= {id(p): ("parameter", name) for name, p in model.named_parameters()}
        self._running: list[str] = []
        self._records: dict[int, tuple[Tensor, _Record]] = {}  # the tensor is kept, so that its id stays its own
        self._numbers = count(1)
        self._is_checking = False
        self._hooks: list[Any] = []

    def __enter__(self) -> ForwardTrace:
        """Add hooks to every module."""
        for module in self._names:
            if not isinstance(module, torch.jit.ScriptModule):
                self._hooks.append(module.register_forward_pre_hook(self._begin))
                self._hooks.append(module.register_forward_hook(self._end, with_kwargs=True, always_call=True))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        """Remove the hooks."""
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a torch function, and check its inputs and outputs."""
        if self._is_checking:
            return func(*args, **(kwargs or {}))
        bad = [t for t in tensors((args, kwargs)) if not_finite(t)]  # before: some functions write to their inputs
        out = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        results = tensors(out)
        if args and (name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))):
            results += tensors(args[0])
        self._claim(results)
        if "empty" not in name:  # uninitialised memory
            infinite = any(isinstance(n, float) and math.isinf(n) for n in leaves((args, kwargs)))
            for result in results:
                if not any(result is t for t in bad) and not_finite(result):
                    self._add(result, "constant" if infinite and not bad else "forward", _name(func), bad)
        return out

    def origin(self, loss: Tensor) -> Origin:
        """Return the origin of a non-finite `loss`."""
        every = _ancestors(self._record(loss))
        # Not buffers: the step itself, which ran before, has spoiled running statistics.
        sources = [r for r in every if not r.parents and r.origin.kind not in ("constant", "buffer")]
        # From constant infinities only: the function that turned them into nan, such as softmax of a fully masked row.
        made_nan = [r for r in every if r.has_nan and not any(parent.has_nan for parent in r.parents)]
        first = min(sources or made_nan or every, key=lambda r: r.number).origin
        return replace(first, kind={"constant": "forward", "buffer": "parameter"}.get(first.kind, first.kind))

    def _begin(self, module: nn.Module, args: Any) -> None:
        self._running.append(self._names[module])

    def _end(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._is_checking = True
        results = tensors(output)
        self._claim(results)
        for result in results:  # of functions outside torch, such as an autograd.Function
            if id(result) not in self._records and id(result) not in self._sources and not_finite(result):
                bad = [t for t in tensors((args, kwargs)) if t is not result and not_finite(t)]
                self._add(result, "forward", _gradient_name(result), bad)
        self._running.pop()
        self._is_checking = False

    def _claim(self, results: list[Tensor]) -> None:
        """Assign the new graph nodes of `results` to the running module."""
        todo = [r.grad_fn for r in results if r.grad_fn is not None]
        while todo:
            node = todo.pop()
            if node not in self.module_of:
                self.module_of[node] = self._module()
                todo += [following for following, _ in node.next_functions if following is not None]

    def _module(self) -> str | None:
        return self._running[-1] if self._running else None

    def _add(self, tensor: Tensor, kind: str, function: str | None, bad: list[Tensor], name: str = "") -> _Record:
        parents = [self._record(parent) for parent in bad]
        module = name.rpartition(".")[0] if name else self._module()
        at = source_line(traceback.format_stack())
        origin = Origin(kind, module, None, function, at, name or None)
        record = _Record(next(self._numbers), origin, _has_nan(tensor), parents)
        self._records[id(tensor)] = tensor, record
        return record

    def _record(self, tensor: Tensor) -> _Record:
        """Return the record of a non-finite tensor; make one for an input, parameter, buffer or unknown origin."""
        if id(tensor) in self._records:
            return self._records[id(tensor)][1]
        if id(tensor) not in self._sources:
            return self._add(tensor, "forward", _gradient_name(tensor), [])
        kind, name = self._sources[id(tensor)]
        if kind == "buffer" and not _has_nan(tensor):
            kind = "constant"
        return self._add(tensor, kind, None, [], name)


def _ancestors(record: _Record) -> list[_Record]:
    found, todo = {record}, [record]
    while todo:
        new = set(todo.pop().parents) - found
        found |= new
        todo += new
    return list(found)


def _has_nan(tensor: Tensor) -> bool:
    return bool(tensor.detach().isnan().any())


def _name(function: Callable[..., Any]) -> str:
    return str(resolve_name(function) or getattr(function, "__name__", type(function).__name__))


def _gradient_name(tensor: Tensor) -> str | None:
    return tensor.grad_fn.name() if tensor.grad_fn is not None else None
