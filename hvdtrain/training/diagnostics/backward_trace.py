"""Trace a backward pass: find the node of the autograd graph that made a non-finite gradient from finite ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from hvdtrain.training.diagnostics.origin import Origin, not_finite, source_line


class BackwardTrace:
    """A context manager around a backward pass, with hooks on the nodes of the loss's graph.

    It does not use full backward hooks of modules: they wrap outputs in views, which breaks in-place functions.

    Args:
        module_of: the module that made each node; None for the loss function.
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
        """Add a hook to every node."""
        self._hooks += [node.register_hook(self._hook(node)) for node in _graph(self._loss)]
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

    def _hook(self, node: Node) -> Callable[[Any, Any], None]:
        def on_gradients(given: Sequence[Tensor | None], taken: Sequence[Tensor | None]) -> None:
            """`given` to the next nodes, `taken` from the previous ones."""
            if any(g is not None and not_finite(g) for g in taken):
                self._received.add(node)
            targets = [
                target
                for (target, _), gradient in zip(node.next_functions, given, strict=False)
                if target is not None and gradient is not None and not_finite(gradient)
            ]
            if targets:
                self._outputs[node] = targets

        return on_gradients


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
