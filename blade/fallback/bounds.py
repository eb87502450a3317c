# SPDX-License-Identifier: Apache-2.0
"""Inputs that nobody gave are looked at before a GPU is: what raises on a CPU ends the CUDA context there.

blade runs the user's model at sizes and contents of its own, to see what it takes and whether a graph or an engine
answers alike. On a CPU an index out of bounds is an exception, which says "not these". On a GPU it is a device-side
assertion, after which no call of the process succeeds. So there

    with in_bounds(*inputs) as seen:
        answer = model(*inputs)          # IndexError, where a kernel would assert
    seen.why                             # "", or what was out of bounds

every op that reads its inputs' contents as places is asked first (``assertions.RULES``), eager or in TorchScript.
On a CPU nothing is done. On a GPU an op takes some 20 us longer (10 ms for BERT-base), and waits for the device
where it is asked. Kernels of other libraries check what they check. Ops called by C++ threads of their own
or captured in CUDA graphs are not seen: engines are not to be run in here.
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

from blade.fallback.assertions import RULES

_NUMBERS = (bool, int, float, complex)


class Bounds(TorchDispatchMode):
    """Raises ``IndexError`` before an op that would stop a GPU; ``why`` says what the op was given."""

    supports_higher_order_operators = True  # which run as they are

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
        op = _known_of(func)
        for k in op.tensors:
            if k < len(args) and _has_number(args[k]):
                args = _with_tensors(op, args)
                break
        if op.rule is not None and (why := op.rule(_given(func, args, kwargs))):
            self.why = f"{func}: {why}"
            raise IndexError(self.why)
        if op.is_composite:  # such are whole only in inference mode
            with self:
                return func.decompose(*args, **kwargs)
        return func(*args, **kwargs)


@dataclass(frozen=True)
class _Known:
    """Of an op: its rule, whether it has no kernel of its own, and which arguments have to be tensors."""

    rule: Callable[[dict[str, Any]], str] | None
    is_composite: bool
    tensors: frozenset[int]


@cache
def _known_of(func: OpOverload) -> _Known:
    return _Known(RULES.get(_name(func)), _is_composite(func), _tensor_places(func))


@contextmanager
def in_bounds(*values: Any) -> Iterator[Bounds]:
    """Checks what runs inside if a tensor anywhere in ``values``, or one of these, is a device that asserts."""
    seen = Bounds()
    if any(_is_there(leaf) for leaf in pytree.tree_leaves(values)):
        with seen:
            yield seen
    else:
        yield seen


def asserts(device: torch.device) -> bool:
    """Whether an index out of bounds is no exception on ``device``."""
    return device.type not in ("cpu", "meta")


def _is_there(leaf: Any) -> bool:
    device = leaf.device if isinstance(leaf, torch.Tensor) else leaf
    return isinstance(device, torch.device) and asserts(device)


def _name(func: OpOverload) -> str:
    """``aten::index_put_.default`` -> ``index_put``; empty for other libraries."""
    library, _, name = func._schema.name.partition("::")
    if library != "aten":
        return ""
    return name.removesuffix("_") if func._schema.is_mutable else name


def _is_composite(func: OpOverload) -> bool:
    """Whether it is made of other ops, and no device has a kernel for the whole."""
    if func.namespace == "prim":  # questions to a stand-in, which the dispatcher does not know
        return False
    keys = torch._C.DispatchKey
    has_kernel: Callable[..., bool] = torch._C._dispatch_has_kernel_for_dispatch_key
    has_own = any(has_kernel(func.name(), key) for key in (keys.CPU, keys.CUDA))
    return not has_own and has_kernel(func.name(), keys.CompositeImplicitAutograd)


def _with_tensors(op: _Known, args: Sequence[Any]) -> Sequence[Any]:
    """A 0-d tensor that stands for a number, of which TorchScript has many, arrives as the number.

    Not every op takes that where it wants a tensor.
    """
    return [pytree.tree_map(_tensor, a) if k in op.tensors else a for k, a in enumerate(args)]


def _has_number(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(isinstance(one, _NUMBERS) for one in value)
    return isinstance(value, _NUMBERS)


def _tensor(value: Any) -> Any:
    return torch.tensor(value) if isinstance(value, _NUMBERS) else value


def _tensor_places(func: OpOverload) -> frozenset[int]:
    """Positions of arguments that have to be tensors."""
    kinds = ["Optional[Tensor]", "List[Tensor]", "List[Optional[Tensor]]"]
    takes_numbers: bool = torch._C._should_allow_numbers_as_tensors(_name(func))
    kinds += [] if takes_numbers else ["Tensor"]
    schema = enumerate(func._schema.arguments)
    return frozenset(k for k, a in schema if str(a.type) in kinds)


def _given(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    schema = func._schema.arguments
    given = {a.name: a.default_value for a in schema if a.has_default_value()}
    positional = [a.name for a in schema if not a.kwarg_only]
    return given | dict(zip(positional, args, strict=False)) | kwargs
