# SPDX-License-Identifier: Apache-2.0
"""TorchScript source of a method that takes and returns a list of tensors, around a module with other arguments.

method_source("forward", "self.model", (TENSOR, (TENSOR, 5)), ["Tensor", "Tensor"], written={0})

    def forward(self, xs: List[Tensor]) -> List[Tensor]:
        x0 = xs[0].clone()
        x1 = xs[1]
        y = self.model(x0, (x1, 5))
        return [y[0], y[1], x0]
"""

from collections.abc import Collection, Iterator
from typing import Any

import torch

from blade.errors import InputError


def method_source(
    name: str, called: str, sample: tuple[Any, ...], returned: Any, written: Collection[int]
) -> str:
    """``sample``: the arguments; ``returned``: the TorchScript type of the result. What the call writes to is a copy,
    and comes back after the results."""
    count = _count_tensors(sample)
    lines = [f"def {name}(self, xs: List[Tensor]) -> List[Tensor]:"]
    for k in range(count):
        lines.append(f"    x{k} = xs[{k}]" + (".clone()" if k in written else ""))
    tensors = iter(range(count))
    given = ", ".join(_argument(entry, tensors) for entry in sample)
    back = [*_results(returned, "y"), *(f"x{k}" for k in sorted(written))]
    lines += [f"    y = {called}({given})", f"    return [{', '.join(back)}]"]
    return "\n".join(lines) + "\n"


def _count_tensors(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return 1
    inside = value.values() if isinstance(value, dict) else value
    return sum(map(_count_tensors, inside)) if isinstance(value, (tuple, list, dict)) else 0


def _argument(value: Any, tensors: Iterator[int]) -> str:
    """The expression of an argument; the tensors in it are x0, x1, .. in order."""
    if isinstance(value, torch.Tensor):
        return f"x{next(tensors)}"
    if isinstance(value, dict):
        # in the order in which torch's pytrees have the items
        return "{" + ", ".join(f"{k!r}: {_argument(v, tensors)}" for k, v in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        parts = [_argument(part, tensors) for part in value]
        if isinstance(value, list):
            return f"[{', '.join(parts)}]"
        return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"
    return repr(value)


def _results(kind: Any, expression: str) -> list[str]:
    """An expression for each tensor in ``expression``, which has the TorchScript type ``kind``."""
    if kind.kind() == "TensorType":
        return [expression]
    if kind.kind() == "TupleType":
        return [
            found
            for k, part in enumerate(kind.elements())
            for found in _results(part, f"{expression}[{k}]")
        ]
    raise InputError(
        f"module: its result is of the type {kind.annotation_str}; a program of torch.export returns tensors and "
        "tuples of them. Save it as TorchScript (format='torchscript')."
    )
