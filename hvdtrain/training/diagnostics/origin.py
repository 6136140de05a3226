"""The origin of a non-finite number: traces of a forward and of a backward pass find what made it of finite ones."""

from __future__ import annotations

import dataclasses
import math
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

_FRAME = re.compile(r'File "(.+?)", line (\d+)')
_NOT_THE_CAUSE = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
"""Folders of torch and of this package: their lines are not the cause."""


@dataclass(frozen=True)
class Origin:
    """The origin of a non-finite number.

    `kind`: forward or backward, which made it from finite numbers; parameter or input, which was non-finite from the
    start; overflow, for a gradient that is too large for its format.
    """

    kind: str
    module: str | None = None  # name in the model; "" for the model itself; None for the loss function
    module_type: str | None = None  # its class
    function: str | None = None  # that made it: a torch function, or its gradient
    place: str | None = None  # file:line of the call, outside torch
    tensor: str | None = None  # name of the parameter, if it is one

    def __str__(self) -> str:
        where = f"{self.module or 'the model'} ({self.module_type})" if self.module is not None else "the loss function"
        if self.kind == "parameter":
            return f"{self.tensor} of {where} is itself not finite"
        by = f" by {self.function}" if self.function else ""
        at = f", {self.place}" if self.place else ""
        if self.kind == "input":
            return f"the batch itself is not finite; first used in {where}{by}{at}"
        made = {"forward": "made in the forward pass of", "backward": "made in the backward pass of"}
        return f"{made.get(self.kind, 'a gradient too large for its format, in')} {where}{by}{at}"


def not_finite(value: Tensor) -> bool:
    """Return whether any element is inf or nan. Waits for the device."""
    if not (value.is_floating_point() or value.is_complex()):
        return False
    try:
        return not bool(value.detach().isfinite().all())  # detached: activation checkpointing counts saved tensors
    except (RuntimeError, NotImplementedError):  # no values (vmap, meta), or a dtype without the test
        return False


def leaves(value: Any) -> Iterator[Any]:
    """Yield the leaves of nested tuples, lists, dicts and dataclasses."""
    for leaf in tree_leaves(value):
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from leaves(vars(leaf))
        else:
            yield leaf


def tensors(value: Any) -> list[Tensor]:
    """Return the tensors in a nested value."""
    return [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)]


def source_line(stack: Iterable[str]) -> str | None:
    """Return ``file:line`` of the innermost call in a formatted stack that is outside torch and this package."""
    frames = _FRAME.findall("".join(stack))
    for file, line in reversed(frames):
        if not file.startswith((*_NOT_THE_CAUSE, "<")):
            return f"{file}:{line}"
    return None


@dataclass(frozen=True, eq=False)
class _Record:
    """The origin of one non-finite tensor."""

    number: int  # in order of time
    origin: Origin  # its `kind` may also be buffer; or constant, an infinity in the source, as in masks
    has_nan: bool  # it contains nan, not only infinities
    parents: list[_Record]  # of its inputs that were already non-finite


class ForwardTrace(TorchFunctionMode):
    """A context manager around a forward pass, which checks the result of each call of a torch function.

    A non-finite tensor is not an error in itself: masks contain infinities, and `where` may discard them. Only those
    that the loss was computed from count. Each is traced back to the first of them.

    `model`: hooks on its modules show which module runs.

    `module_of`: for each node of the autograd graph, the module that made it; None for the loss function.
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
        for module in self._names:
            if not isinstance(module, torch.jit.ScriptModule):
                self._hooks.append(module.register_forward_pre_hook(self._begin))
                self._hooks.append(module.register_forward_hook(self._end, with_kwargs=True, always_call=True))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
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
                    called = str(resolve_name(func) or name or type(func).__name__)
                    self._add(result, "constant" if infinite and not bad else "forward", called, bad)
        return out

    def origin(self, loss: Tensor) -> Origin:
        """Return the origin of a non-finite `loss`."""
        todo = [self._record(loss)]
        every = {*todo}
        while todo:
            new = set(todo.pop().parents) - every
            every |= new
            todo += new
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


def _has_nan(tensor: Tensor) -> bool:
    return bool(tensor.detach().isnan().any())


def _gradient_name(tensor: Tensor) -> str | None:
    return tensor.grad_fn.name() if tensor.grad_fn is not None else None


class BackwardTrace:
    """A context manager around a backward pass, with hooks on the nodes of the loss's graph.

    It does not use full backward hooks of modules: they wrap outputs in views, which breaks in-place functions.

    `module_of`: the module that made each node; None for the loss function.
    """

    def __init__(self, loss: Tensor, module_of: Mapping[Node, str | None]) -> None:
        self._loss = loss
        self._module_of = module_of
        self._outputs: dict[Node, list[Node]] = {}
        """Nodes that passed on non-finite gradients, in order of time, with the nodes that received them."""
        self._received: set[Node] = set()
        """Nodes that received non-finite gradients."""
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> BackwardTrace:
        self._hooks += [node.register_hook(partial(self._on_gradients, node)) for node in _graph(self._loss)]
        return self

    def __exit__(self, *exception: object) -> None:
        """Remove the hooks: they make reference cycles that the garbage collector cannot find."""
        for hook in self._hooks:
            hook.remove()

    def origin(self, bad: Mapping[str, nn.Parameter]) -> Origin:
        """Return the origin of the non-finite gradients of the parameters `bad`, by name."""
        ids = {id(parameter) for parameter in bad.values()}
        gave = (node for node, to in self._outputs.items() if any(id(getattr(n, "variable", None)) in ids for n in to))
        node = next(gave, None)
        if node is None:
            name = next(iter(bad))
            return Origin("backward", name.rpartition(".")[0], tensor=name)
        seen = {node}
        while node in self._received:
            before = next((n for n, to in self._outputs.items() if node in to and n not in seen), None)
            if before is None:
                break  # made by a sum of gradients, or by a hook of the user
            node = before
            seen.add(node)
        stack = dict(node.metadata).get("traceback_", [])  # type: ignore[call-overload]
        return Origin("backward", self._module_of.get(node), None, node.name(), source_line(stack))

    def _on_gradients(self, node: Node, given: Sequence[Tensor | None], taken: Sequence[Tensor | None]) -> None:
        """Note non-finite gradients: `given` to the next nodes, `taken` from the previous ones."""
        if any(g is not None and not_finite(g) for g in taken):
            self._received.add(node)
        targets = [
            target
            for (target, _), gradient in zip(node.next_functions, given, strict=False)
            if target is not None and gradient is not None and not_finite(gradient)
        ]
        if targets:
            self._outputs[node] = targets


def _graph(loss: Tensor) -> list[Node]:
    """Return all nodes except the leaves."""
    assert loss.grad_fn is not None
    nodes = {loss.grad_fn: None}
    todo = [loss.grad_fn]
    while todo:
        for node, _ in todo.pop().next_functions:
            if node is not None and node not in nodes and not hasattr(node, "variable"):
                nodes[node] = None
                todo.append(node)
    return list(nodes)
