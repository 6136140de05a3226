"""Parameters without memory, for a model that gets its values from another rank."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from hvdtrain.runtime.tuning import return_freed_memory

_NEW = "empty_like full_like ones_like rand_like randint_like randn_like zeros_like"
_NEW += " new_empty new_empty_strided new_full new_ones new_zeros"
_MAKE_ANOTHER = {getattr(torch.ops.aten, name) for name in _NEW.split()}
"""Operations that need no values: their results are as always."""
_DRAWN = "bernoulli_ cauchy_ exponential_ geometric_ log_normal_ normal_ random_ uniform_"
_FILL = {getattr(torch.ops.aten, name) for name in _DRAWN.split()}
"""Operations that draw random numbers in place: how many depends only on shape, strides and dtype."""
_TRUNCATED = "_no_grad_trunc_normal_"  # what `nn.init.trunc_normal_` calls, under any of its names
_LARGE_BYTES = 1 << 20
_HUGE_BYTES = 1 << 30
"""The kernel may refuse such memory, though nothing is written to it: of the experts of a layer, for example."""
_draws = ContextVar("draws", default=True)
_later = ContextVar[list[Any] | None]("later", default=None)
_CPU, _META = torch.device("cpu"), torch.device("meta")


class Placeholder(Tensor):
    """A tensor on the CPU that has no memory and no values. What is computed from it has none, either.

    It takes part in what initialises a model: it draws as many random numbers as a tensor with values, and drops them.

    Tensors on torch's "meta" device would do for some models only, as code asks whether a tensor is on it: torch's
    `trunc_normal_` and transformers' initial values then draw nothing.

    Errors: RuntimeError, NotImplementedError: an operation needs values.

    `read`: reads the values, if this process can do so later; None if another rank has them.
    """

    read: Callable[[], Tensor] | None = None
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, like: Tensor, requires_grad: bool = False) -> Placeholder:
        """Make one of shape, strides and dtype of another tensor."""
        made: Placeholder = Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=_CPU, requires_grad=requires_grad
        )
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Placeholder(shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Placeholder:
        made = memo[id(self)] = Placeholder(self, self.requires_grad)
        vars(made).update(copy.deepcopy(vars(self), memo))
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be saved."""
        raise NotImplementedError("saving needs values of parameters")

    def data_ptr(self) -> int:
        """Refuse: it is not the address of any memory."""
        raise NotImplementedError("data_ptr needs values of parameters")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func.namespace != "aten" or _writes_values(func, args, named):
            raise NotImplementedError(f"{func} needs values of parameters")
        if func.overloadpacket in _MAKE_ANOTHER:
            named["device"] = named.get("device") or _CPU
            return func(*tree_map(_on_meta, args), **named)
        if torch.Tag.nondeterministic_seeded in func.tags:
            if func.overloadpacket not in _FILL:
                raise NotImplementedError(f"{func} draws random numbers from values of parameters")
            _fill_another(func, *args, **named)
        if named.get("device") == _CPU:
            named["device"] = _META
        given: dict[int, tuple[Tensor, Placeholder]] = {}

        def lend(value: Any) -> Any:
            lent = _on_meta(value)
            if isinstance(value, Placeholder):
                given[id(lent)] = lent, value
            return lent

        def take(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            lent, own = given.get(id(value), (None, None))
            return Placeholder(value) if lent is None else own

        positional, named = tree_map(lend, (args, named))
        result = func(*positional, **named)
        for lent, own in given.values():
            if (lent.shape, lent.stride(), lent.dtype) != (own.shape, own.stride(), own.dtype):
                raise NotImplementedError(f"{func} changes a parameter's shape or dtype")
        return tree_map(take, result)


def _on_meta(value: Any) -> Any:
    if isinstance(value, Placeholder):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_META)
    return value.to(_META) if isinstance(value, Tensor) else value


def _fill_another(fill: Callable[..., object], placeholder: Tensor, *args: Any, **kwargs: Any) -> None:
    """Fill a tensor like a placeholder, and free it; do nothing if numbers are not drawn."""
    if not _draws.get():
        return
    fill(torch.empty_strided(placeholder.shape, placeholder.stride(), dtype=placeholder.dtype), *args, **kwargs)
    if placeholder.nbytes >= _LARGE_BYTES:
        return_freed_memory()


def _writes_values(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operation would write into a tensor that has values."""
    written = [
        args[index] if index < len(args) else kwargs.get(argument.name)
        for index, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return any(isinstance(leaf, Tensor) and not isinstance(leaf, Placeholder) for leaf in tree_leaves(written))


class _HugeTensors(TorchFunctionMode):
    """Makes huge new tensors without values placeholders from the start."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func is torch.empty and named.get("device") in (None, "cpu", _CPU) and "out" not in named:
            made = torch.empty(*args, **{**named, "device": _META, "pin_memory": False})
            if made.nbytes >= _HUGE_BYTES:
                return Placeholder(made, made.requires_grad)
        return func(*args, **named)


@contextmanager
def values_read_later() -> Iterator[list[Any]]:
    """Let what makes a model leave its parameters to be read when an engine places them, where it can.

    Yields a list, to which such models are added.
    """
    found: list[Any] = []
    before = _later.set(found)
    try:
        yield found
    finally:
        _later.reset(before)


def models_read_later() -> list[Any] | None:
    """Return the list of `values_read_later`; None if the values are needed now."""
    return _later.get()


def refuse_other_placeholders(model: nn.Module) -> None:
    """Check that no placeholder is left but the model's parameters.

    Errors: RuntimeError: there is one, such as a buffer, or a copy of a parameter.
    """
    parameters = set(map(id, model.parameters()))

    def others() -> list[Any]:
        # Not isinstance: of a proxy, that may import a library.
        return [each for each in gc.get_objects() if type(each) is Placeholder and id(each) not in parameters]

    if others():
        gc.collect()
    if found := others():
        raise RuntimeError(f"a tensor of shape {tuple(found[0].shape)} is computed from parameters, and kept")


@contextmanager
def parameters_without_memory(*, draw: bool = True) -> Iterator[list[str]]:
    """Make each parameter on the CPU a `Placeholder` as soon as a module of this thread registers it.

    Yields a list, to which the names of these parameters in their modules are added.

    All other tensors are as always: data, which `with torch.device("meta")` would empty, too, and buffers, which every
    rank has whole anyway. A tied parameter stays one. accelerate's `init_empty_weights` is not used because its
    parameters draw no random numbers, so that data that is drawn after the model would be other data. Without `draw`,
    ours draw none, either, which saves minutes of a large model.
    """
    thread = threading.get_ident()
    truncated = getattr(nn.init, _TRUNCATED, None)
    made: list[str] = []

    def empty(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        if threading.get_ident() != thread or type(parameter) is not nn.Parameter or parameter.device != _CPU:
            return
        placeholder = Placeholder(parameter, parameter.requires_grad)
        vars(placeholder).update(vars(parameter), _is_param=True)  # `isinstance(..., nn.Parameter)` looks at this
        with suppress(RuntimeError):  # it has weak references: it keeps its values
            torch.utils.swap_tensors(parameter, placeholder)  # type: ignore[no-untyped-call]
            made.append(name)
            if parameter.nbytes >= _LARGE_BYTES:
                del placeholder  # it has the memory now
                return_freed_memory()

    def fill_truncated(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Fill a tensor with values: numbers are drawn again until all are within the limits."""
        assert truncated is not None
        if isinstance(tensor, Placeholder):
            _fill_another(truncated, tensor, *args, **kwargs)
        else:
            truncated(tensor, *args, **kwargs)
        return tensor

    hook, before = register_module_parameter_registration_hook(empty), _draws.set(draw)
    if truncated is not None:
        setattr(nn.init, _TRUNCATED, fill_truncated)
    try:
        with _HugeTensors():
            yield made
    finally:
        if truncated is not None:
            setattr(nn.init, _TRUNCATED, truncated)
        hook.remove()
        _draws.reset(before)
