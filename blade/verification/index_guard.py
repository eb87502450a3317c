# SPDX-License-Identifier: Apache-2.0
"""Check indices in derived inputs before they reach a GPU, whose CUDA context a bad index ends.

blade runs the user's model at sizes and contents of its own, to see what it accepts and whether a graph or an
engine answers alike. On a CPU an index out of bounds raises an exception. On a GPU it is a device-side
assertion, after which no call of the process succeeds. Within

    with in_bounds(*inputs) as seen:
        answer = model(*inputs)          # IndexError, where a kernel would assert
    seen.why                             # "", or what was out of bounds

every op that uses its inputs' contents as indices is checked first (``index_rules.RULES``), eager or in
TorchScript. On a CPU nothing is checked. On a GPU an op takes some 20 us longer (10 ms for BERT-base), and a
check waits for the device. Kernels of other libraries have their own checks. Ops called by C++ threads of
their own or captured in CUDA graphs are not seen: do not run engines inside.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from blade.core.torch_modes import has_kernel, is_composite, takes_numbers
from blade.verification.index_rules import RULES

_NUMBERS = (bool, int, float, complex)


class IndexBoundsMode(TorchDispatchMode):
    """Raises ``IndexError`` before an op that would stop a GPU; ``why`` names the op and its fault."""

    supports_higher_order_operators = True  # they run unchanged

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.why = ""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):
            return func(*args, **kwargs)
        op = _bounds_of(func)
        for k in op.tensors:
            if k < len(args) and _has_number(args[k]):
                args = _with_tensors(op, args)
                break
        if op.rule is not None and (why := op.rule(_given(func, args, kwargs))):
            self.why = f"{func}: {why}"
            raise IndexError(self.why)
        if op.is_composite:  # composite ops are seen whole only in inference mode
            with self:
                return func.decompose(*args, **kwargs)
        return func(*args, **kwargs)


@dataclass(frozen=True)
class _OpBounds:
    """Rule of an op, whether it has no kernel of its own, and which arguments have to be tensors."""

    rule: Callable[[dict[str, Any]], str] | None
    is_composite: bool
    tensors: frozenset[int]


@cache
def _bounds_of(func: OpOverload) -> _OpBounds:
    return _OpBounds(RULES.get(_name(func)), _is_composite(func), _tensor_places(func))


@contextmanager
def in_bounds(*values: Any) -> Iterator[IndexBoundsMode]:
    """Check the ops inside if a tensor anywhere in ``values``, or a device among them, is on a GPU."""
    seen = IndexBoundsMode()
    if any(_is_there(leaf) for leaf in pytree.tree_leaves(values)):
        with seen:
            yield seen
    else:
        yield seen


def asserts(device: torch.device) -> bool:
    """Whether an index out of bounds on ``device`` is an assertion instead of an exception."""
    return device.type not in ("cpu", "meta")


def _is_there(leaf: Any) -> bool:
    device = leaf.device if isinstance(leaf, torch.Tensor) else leaf
    return isinstance(device, torch.device) and asserts(device)


def _name(func: OpOverload) -> str:
    """Return ``index_put`` for ``aten::index_put_.default``; empty for other libraries."""
    library, _, name = func._schema.name.partition("::")
    if library != "aten":
        return ""
    return name.removesuffix("_") if func._schema.is_mutable else name


def _is_composite(func: OpOverload) -> bool:
    """Whether the op decomposes into other ops, and no device has a kernel for the whole."""
    if func.namespace == "prim":  # ``prim`` ops, which the dispatcher does not know
        return False
    keys = torch._C.DispatchKey
    has_own = any(has_kernel(func.name(), key) for key in (keys.CPU, keys.CUDA))
    return not has_own and is_composite(func.name())


def _with_tensors(op: _OpBounds, args: Sequence[Any]) -> Sequence[Any]:
    """Turn numbers back into 0-d tensors where the op needs tensors.

    TorchScript has many 0-d tensors that stand for a number; they arrive here as the number.
    """
    return [pytree.tree_map(_tensor, a) if k in op.tensors else a for k, a in enumerate(args)]


def _has_number(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(isinstance(one, _NUMBERS) for one in value)
    return isinstance(value, _NUMBERS)


def _tensor(value: Any) -> Any:
    return torch.tensor(value) if isinstance(value, _NUMBERS) else value


def _tensor_places(func: OpOverload) -> frozenset[int]:
    """Return the positions of arguments that have to be tensors."""
    kinds = ["Optional[Tensor]", "List[Tensor]", "List[Optional[Tensor]]"]
    kinds += [] if takes_numbers(_name(func)) else ["Tensor"]
    schema = enumerate(func._schema.arguments)
    return frozenset(k for k, a in schema if str(a.type) in kinds)


def _given(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    schema = func._schema.arguments
    given = {a.name: a.default_value for a in schema if a.has_default_value()}
    positional = [a.name for a in schema if not a.kwarg_only]
    return given | dict(zip(positional, args, strict=False)) | kwargs
