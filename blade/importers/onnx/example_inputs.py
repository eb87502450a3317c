# SPDX-License-Identifier: Apache-2.0
"""Random inputs of the sizes that a model declares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx
import torch

from blade.errors import InputError
from blade.importers.onnx.emit.dtypes import torch_dtype
from blade.importers.onnx.emit.errors import NotImported
from blade.importers.onnx.import_model import ImportedModel


def example_inputs(model: ImportedModel, sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """A sample by name; ``sizes`` are those of the dimensions that have a name instead of a size.

    Floats are normal; integers are 0 or 1, since they may be indices, and so are masks. Raises ``InputError`` for
    a size that is not known, and for inputs that are no tensors.
    """
    generator = torch.Generator().manual_seed(0)
    unused = set(sizes) - {one.dim_param for info in model.declared for one in _dims(info)}
    if unused:
        raise InputError(
            f"inputs: no input has a dimension {sorted(unused)[0]!r}; there are {_shown(_free(model))}."
        )
    return {info.name: _example(info, sizes, generator, model) for info in model.declared}


def _dims(info: onnx.ValueInfoProto) -> Any:
    return info.type.tensor_type.shape.dim


def _free(model: ImportedModel) -> list[str]:
    return sorted(
        {d.dim_param or "?" for one in model.declared for d in _dims(one) if not d.dim_value}
    )


def _shown(names: list[str]) -> str:
    return ", ".join(map(repr, names)) or "none without a size"


def _example(
    info: onnx.ValueInfoProto,
    sizes: Mapping[str, int],
    generator: torch.Generator,
    model: ImportedModel,
) -> torch.Tensor:
    if info.type.WhichOneof("value") != "tensor_type":
        raise InputError(f"inputs: {info.name!r} is no tensor; give samples.")
    shape = []
    for dim in _dims(info):
        size = dim.dim_value if dim.HasField("dim_value") else sizes.get(dim.dim_param)
        if size is None:
            raise InputError(
                f"inputs: the sizes {_shown(_free(model))} of the model are not fixed; give samples, or these sizes."
            )
        shape.append(int(size))
    try:
        dtype = torch_dtype(info.type.tensor_type.elem_type)
    except NotImported as why:
        raise InputError(f"inputs: {info.name!r}: {why}") from why
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)
