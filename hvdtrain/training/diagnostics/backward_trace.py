"""Watches a backward pass: which node of the autograd graph made a gradient not finite of finite ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from hvdtrain.training.diagnostics.origin import Origin, not_finite, place


class BackwardTrace:
    """A context manager around a backward pass. It has hooks on the graph behind the loss.

    The nodes of the graph, not the modules: full backward hooks of modules wrap outputs in views, which breaks
    functions that work in place.

    Args:
        loss: before backward.
        module_of: the module that made a node, None for the loss function.
    """

    def __init__(self, loss: Tensor, module_of: Mapping[Node, str | None]) -> None:
        self._loss = loss
        self._module_of = module_of
        self._came_out: dict[Node, list[Node]] = {}
        """By node that gave on gradients that are not finite, in order of time: the nodes that it gave them to."""
        self._went_in: set[Node] = set()
        """Nodes that were given gradients that are not finite."""
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> BackwardTrace:
        """Put hooks on every node."""
        self._hooks += [node.register_hook(self._hook(node)) for node in _graph(self._loss)]
        return self

    def __exit__(self, *exception: object) -> None:
        """Take them off: through them a node would hold itself, which no garbage collector sees."""
        for hook in self._hooks:
            hook.remove()

    def origin(self, model: nn.Module, bad: Sequence[nn.Parameter]) -> Origin:
        """Where the gradients of `bad` parameters, which are not finite, came from."""
        owners = {p: (name.rpartition(".")[0], name) for name, p in model.named_parameters()}
        types = {name: type(module).__name__ for name, module in model.named_modules()}
        node = self._first(bad)
        if node is None:
            module, name = owners[bad[0]]
            return Origin("backward", module, types[module], tensor=name)
        seen = {node}
        while node in self._went_in:
            before = next((n for n, to in self._came_out.items() if node in to and n not in seen), None)
            if before is None:
                break  # a sum of gradients, or a hook of somebody else, made it
            node = before
            seen.add(node)
        at = self._module_of.get(node)
        kind = types[at] if at is not None else None
        stack = dict(node.metadata).get("traceback_", [])  # type: ignore[call-overload]
        return Origin("backward", at, kind, node.name(), place(stack))

    def _first(self, bad: Sequence[nn.Parameter]) -> Node | None:
        """The first node that gave one of `bad` a gradient that is not finite."""
        for node, to in self._came_out.items():
            if any(getattr(target, "variable", None) is p for target in to for p in bad):
                return node
        return None

    def _hook(self, node: Node) -> Callable[[Any, Any], None]:
        def on_gradients(given: Sequence[Tensor | None], taken: Sequence[Tensor | None]) -> None:
            """`given` on to the nodes behind, `taken` from those before."""
            if any(g is not None and not_finite(g) for g in taken):
                self._went_in.add(node)
            targets = [
                target
                for (target, _), gradient in zip(node.next_functions, given, strict=False)
                if target is not None and gradient is not None and not_finite(gradient)
            ]
            if targets:
                self._came_out[node] = targets

        return on_gradients


def _graph(loss: Tensor) -> list[Node]:
    """All nodes but the leaves."""
    assert loss.grad_fn is not None
    found = {loss.grad_fn: None}
    todo = [loss.grad_fn]
    while todo:
        for node, _ in todo.pop().next_functions:
            if node is not None and node not in found and not hasattr(node, "variable"):
                found[node] = None
                todo.append(node)
    return list(found)
