# SPDX-License-Identifier: Apache-2.0
"""Numbers read from tensors that stay in the graph: 0-d tensors that compute as Python's numbers do.

    n = as_number(x.abs().max())         # what x.abs().max().item() is while a model is traced
    y = x / (n + 1e-5)                   # float32 like x: a Python number does not promote

A float is a float64 tensor and an int an int64 tensor, so that arithmetic among numbers is as exact as Python's.
With another tensor a number takes the dtype that torch would compute in with a Python number. To use one in
any other way (in a branch, as an index, as a key) asks for its value, which the recorder sees.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

_FLOAT, _INT = torch.float64, torch.int64
_Base: Any = torch._C.TensorBase
_tracer: Any = torch._C  # the stubs leave the tracer out

_IN_FLOATS = frozenset(
    "truediv __truediv__ __rtruediv__ __itruediv__ true_divide div divide __div__ __rdiv__ "
    "sqrt exp log log2 log10 sin cos tanh sigmoid reciprocal mean".split()
)
"""Functions of ints that Python computes in floats."""

_ARITHMETIC = frozenset(
    "add sub mul div true_divide floor_divide remainder fmod pow rsub maximum minimum max min clamp "
    "clamp_min clamp_max where eq ne lt le gt ge atan2 lerp masked_fill fill_ float_power subtract "
    "multiply divide clip addcmul addcdiv xlogy hypot copysign bitwise_and bitwise_or __and__ __or__".split()
)
"""Functions in which a Python number does not decide on the dtype of the result."""


def dtype_of(tensor: torch.Tensor) -> torch.dtype:
    """The dtype, unseen by the recorder, as of the functions below."""
    found: torch.dtype = _Base.dtype.__get__(tensor)
    return found


def rank_of(tensor: torch.Tensor) -> int:
    return int(_Base.dim(tensor))


def is_float(tensor: torch.Tensor) -> bool:
    return bool(_Base.is_floating_point(tensor))


def is_traced(tensor: Any) -> bool:
    """Whether ``tensor`` depends on the inputs or weights of the trace being made."""
    if not isinstance(tensor, torch.Tensor):
        return False
    return _kind_of_maker(tensor) != "prim::Constant"


def is_made(tensor: torch.Tensor) -> bool:
    """Whether the trace being made computes ``tensor``: a module's own tensor stays what it is."""
    return _kind_of_maker(tensor) not in ("prim::Constant", "prim::GetAttr", "prim::Param")


def _kind_of_maker(tensor: torch.Tensor) -> str:
    return str(_tracer._get_value_trace(tensor).node().kind())


def follows_sizes(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is an int that the trace being made computes from sizes and constants alone."""
    if rank_of(tensor) or dtype_of(tensor) is not _INT:
        return False
    values, seen = [_tracer._get_value_trace(tensor)], set()
    while values:
        value = values.pop()
        if value.unique() in seen:
            continue
        seen.add(value.unique())
        node = value.node()
        if node.kind() == "prim::Param":
            return False
        if node.kind() != "aten::size":
            values += node.inputs()
    return True


@contextmanager
def untraced() -> Iterator[None]:
    """The tracer does not see what happens inside the block."""
    state = torch._C._get_tracing_state()
    _tracer._set_tracing_state(None)
    try:
        yield
    finally:
        _tracer._set_tracing_state(state)


def as_number(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> Any:
    """The only element of ``tensor`` as a number of the graph; ``dtype`` is that of a Python number."""
    with torch._C.DisableTorchFunctionSubclass():
        if dtype is None:
            own = dtype_of(tensor)
            dtype = _FLOAT if is_float(tensor) else own if own is torch.bool else _INT
        number = tensor.reshape(()) if rank_of(tensor) else tensor
        number = number if dtype_of(number) is dtype else number.to(dtype)
        if number is tensor and type(number) is torch.Tensor:
            number = torch.ops.aten.alias(number)
        return as_own_number(number)


def as_own_number(tensor: torch.Tensor) -> Any:
    """``tensor`` itself as a ``TracedNumber``; a view would be another value of the trace."""
    if type(tensor) is torch.Tensor and rank_of(tensor) == 0:
        tensor.__class__ = TracedNumber
    return tensor


class TracedNumber(torch.Tensor):
    """A number of the graph; made by ``as_number``."""

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        leaves = pytree.tree_leaves((args, kwargs or {}))
        numbers = [x for x in leaves if isinstance(x, TracedNumber)]
        others = [x for x in leaves if isinstance(x, torch.Tensor) and not _is_number(x)]
        name = getattr(func, "__name__", "")
        with torch._C.DisableTorchFunctionSubclass():
            if not numbers or name == "__get__":
                return func(*args, **(kwargs or {}))
            if others:
                if (
                    name.strip("_").removeprefix("r").removeprefix("i") in _PLAIN
                    or name in _ARITHMETIC
                ):
                    args, kwargs = pytree.tree_map(
                        lambda x: _beside(x, others), (tuple(args), dict(kwargs or {}))
                    )
                return func(*args, **(kwargs or {}))
            floats = _computes_in_floats(name, leaves)
            if name not in _OF_TRUTHS:
                args, kwargs = pytree.tree_map(
                    lambda x: _among(x, floats), (tuple(args), dict(kwargs or {}))
                )
            if name in _DIVISIONS:
                divisor = args[0] if name.startswith("__r") else args[1]
                for watch in _watchers:
                    watch(divisor)
            result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and dtype_of(result) in (_FLOAT, _INT, torch.bool):
            return as_own_number(result)
        return result

    def plain(self) -> torch.Tensor:
        """The value as an ordinary tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return torch.ops.aten.alias(self)  # type: ignore[no-any-return]

    def __hash__(self) -> int:
        """The hash of the value, as a key or in a set."""
        if dtype_of(self) is torch.bool:
            return hash(self.__bool__())
        return hash(self.__float__() if is_float(self) else self.__int__())

    def is_integer(self) -> bool:
        """Whether this float is a whole number, like ``float.is_integer``."""
        return bool(self == torch.trunc(self))


_OF_TRUTHS = frozenset(("_is_all_true", "_is_any_true"))
"""Functions that take nothing but a bool."""

_DIVISIONS = frozenset(
    "div __truediv__ __rtruediv__ __floordiv__ __rfloordiv__ __mod__ __rmod__ true_divide "
    "floor_divide remainder divide __div__ __rdiv__".split()
)
"""Functions of two numbers that raise in Python if the second one is 0."""


def watch_divisors(function: Callable[[Any], None]) -> None:
    """Let ``function`` see the divisor of each division among numbers before it is computed."""
    _watchers[:] = [function]


_watchers: list[Callable[[Any], None]] = []


_PLAIN = _ARITHMETIC | {"truediv", "floordiv", "mod", "sub", "and", "or"}


def _is_number(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is a number of the graph or a size, which is a 0-d tensor while torch traces."""
    if isinstance(tensor, TracedNumber):
        return True
    return rank_of(tensor) == 0 and dtype_of(tensor) is _INT and bool(_Base.is_cpu.__get__(tensor))


def _computes_in_floats(name: str, leaves: Sequence[Any]) -> bool:
    if name in _IN_FLOATS:
        return True
    if name in ("pow", "__pow__", "__rpow__", "__ipow__"):
        return not all(
            isinstance(x, int) and x >= 0 for x in leaves if not isinstance(x, torch.Tensor)
        )
    return any(
        isinstance(x, float) or (isinstance(x, torch.Tensor) and is_float(x)) for x in leaves
    )


def _among(leaf: Any, floats: bool) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return int(leaf) if isinstance(leaf, bool) else leaf
    own = dtype_of(leaf)
    if floats and own is not _FLOAT:
        return leaf.to(_FLOAT)
    return leaf.to(_INT) if own is torch.bool else leaf


def _beside(leaf: Any, others: Sequence[torch.Tensor]) -> Any:
    """``leaf``, a number, in the dtype and on the device in which torch computes it with ``others``."""
    if not isinstance(leaf, TracedNumber):
        return leaf
    own = dtype_of(leaf)
    example: Any = 1.0 if own is _FLOAT else True if own is torch.bool else 1
    tensor = max(others, key=rank_of)
    device = _Base.device.__get__(tensor)
    if _Base.device.__get__(leaf) != device:
        leaf = leaf.to(device)
    # torch reads a 0-d float64 operand of halves exactly; rounded first, it would be another number
    if own is _FLOAT and rank_of(tensor) > 0 and is_float(tensor):
        return leaf
    dtype = torch.result_type(tensor, example)
    return leaf if dtype is own else leaf.to(dtype)
