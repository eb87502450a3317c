# SPDX-License-Identifier: Apache-2.0
"""Ops that DISC supports: those with a row in the table, and every functional op that it can `call`."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from blade.backends.disc.frontend import lower
from blade.backends.disc.frontend.ops.random_calls import may_draw
from blade.backends.disc.frontend.ops.table import rule_for
from blade.core.cluster import OpNode, ValueInfo, makes_sizes, reads_sizes, values_in
from blade.core.reason import Code, Reason, Stage
from blade.graph.fx.random_ops import draws_nothing, given
from blade.program.dtypes import DTYPES

NAME = "disc"
# Argument types that a program's `call` can carry; others (generators, layouts ...) are refused.
CALLABLE = "Tensor int SymInt float bool str number Scalar Device ScalarType".split()
RETURNED = ("Tensor", "List[Tensor]")
_CPU = torch.device("cpu")
NUMBERS = ("int", "SymInt")
NARROW = (torch.float8_e4m3fn,)
"""Dtypes that only DISC's own products read, from values that blade's quantization makes."""
BY_MEMORY = {
    # offsets count from the beginning of the storage
    torch.ops.aten.as_strided_scatter.default,
    # return factors of the matrix, or of its transpose if that is contiguous, for their gradients
    torch.ops.aten._linalg_det.default,
    torch.ops.aten._linalg_slogdet.default,
    torch.ops.aten._linalg_solve_ex.default,
}
"""Ops whose result depends on their input's memory layout, which engines may change."""


MAKE_SIZES = frozenset(
    [
        *(f"aten::{name}" for name in "index masked_select nonzero nonzero_numpy where".split()),
        *(
            f"aten::{name}"
            for name in "repeat_interleave _unique2 unique_consecutive unique_dim".split()
        ),
        "torchvision::nms",
    ]
)
"""Ops that are called although sizes of their results depend on elements; torch has shape functions for them."""


WhyNotDevice = Callable[[torch.device], str | None]


def why_not_op(node: OpNode, why_not_device: WhyNotDevice) -> Reason | None:
    """``None`` if DISC supports ``node``; ``why_not_device`` says whether it can compile for a device."""
    return _why_not_values(node, why_not_device) or _why_not_target(node)


def _why_not_values(node: OpNode, why_not_device: WhyNotDevice) -> Reason | None:
    operands = [v for v in values_in((*node.args, *node.kwargs.values())) if v.kind == "tensor"]
    results = [v for v in node.outputs if v.kind == "tensor"]
    for value in (*operands, *results):
        if value.dtype is None or value.rank is None or value.device is None:
            return _reason(Code.UNKNOWN_TYPE, node, "a tensor of it has no known dtype or rank")
        if value.dtype not in DTYPES or value.dtype in NARROW:
            return _reason(Code.UNSUPPORTED_DTYPE, node, f"{value.dtype} has no form in DISC")
    read = [v for v in operands if not (v.is_size or _is_number(v))]
    devices = dict.fromkeys(v.device for v in (*read, *results) if v.device is not None)
    if len(devices) > 1 and not any(v.device == _CPU for v in results):
        devices = dict.fromkeys(d for d in devices if d != _CPU or not _are_numbers(read))
    if len(devices) > 1:
        places = " and ".join(map(str, devices))
        return _reason(Code.UNSUPPORTED_DEVICE, node, f"its tensors are on {places}")
    for device in devices:
        if (why := why_not_device(device)) is not None:
            return _reason(Code.UNSUPPORTED_DEVICE, node, why.rstrip("."))
    return None


def _are_numbers(values: Sequence[ValueInfo]) -> bool:
    """Whether those of the CPU have no dimensions: torch takes them beside tensors of a GPU, and so do programs."""
    return not any(v.rank for v in values if v.device == _CPU)


def _is_number(value: ValueInfo) -> bool:
    """Whether ``value`` is a 0-d constant, which becomes part of the code, whatever its device."""
    return value.constant and value.rank == 0 and value.dtype in lower.SCALARS


def _why_not_target(node: OpNode) -> Reason | None:
    schema, tags = node.target._schema, node.target.tags
    if _is_update(node):
        return None
    if schema.is_mutable:
        return _reason(Code.MUTATES, node, "it writes to one of its inputs")
    if torch.Tag.nondeterministic_seeded in tags and not (draws_nothing(node) or may_draw(node)):
        return _reason(Code.RANDOM, node, "it draws random numbers")
    dynamic = makes_sizes(node) or torch.Tag.data_dependent_output in tags
    follows = reads_sizes(node) or (node.late_sizes and torch.Tag.dynamic_output_shape not in tags)
    if dynamic and not (follows or schema.name in MAKE_SIZES):
        return _reason(Code.DATA_DEPENDENT, node, "its result's shape depends on values")
    if node.target in BY_MEMORY:
        return _reason(
            Code.UNSUPPORTED_OP, node, "its result depends on how its input lies in memory"
        )
    if any(isinstance(given(node, argument), complex) for argument in schema.arguments):
        return _reason(Code.UNSUPPORTED_DTYPE, node, "it takes a complex number")
    if rule_for(node.target) is not None:
        return None
    if any(r.alias_info is not None for r in schema.returns):
        return _reason(Code.ALIASES, node, "its result is a view, for which DISC has no rule")
    for argument in schema.arguments:
        if not _callable(str(argument.type)) and not _is_absent(node, argument):
            kind = f"an argument of type {argument.type}, {argument.name}"
            return _reason(Code.UNSUPPORTED_OP, node, f"it takes {kind}")
    if not schema.returns or not _returns_tensors(node):
        return _reason(Code.UNSUPPORTED_OP, node, "it returns something other than tensors")
    return None


def _returns_tensors(node: OpNode) -> bool:
    """Whether all results that are used are tensors; unused numbers do no harm."""
    kinds = {str(r.type) for r in node.target._schema.returns}
    if kinds.isdisjoint(NUMBERS):
        return kinds.issubset(RETURNED)
    return kinds.issubset((*RETURNED, *NUMBERS)) and all(v.kind == "tensor" for v in node.outputs)


def _is_update(node: OpNode) -> bool:
    """Whether ``node`` overwrites a tensor with one of equal dtype and shape (``Cluster.updates``)."""
    if node.target is not torch.ops.aten.copy_.default:
        return False
    into, new = values_in(node.args[:2])
    return (into.dtype, into.shape) == (new.dtype, new.shape)


def _callable(kind: str) -> bool:
    for wrapper in ("Optional[", "List["):
        kind = kind.replace(wrapper, "")
    return kind.rstrip("]") in CALLABLE


def _is_absent(node: OpNode, argument: Any) -> bool:
    return given(node, argument) is None


def _reason(code: Code, node: OpNode, why: str) -> Reason:
    return Reason(Stage.SUPPORT, code, NAME, node.name, f"{node.target} stays TorchScript: {why}.")


assert lower.FAMILIES, "the table is filled by importing the families"
