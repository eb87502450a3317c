# SPDX-License-Identifier: Apache-2.0
"""Pickles tensors of any dtype, to be read with ``pickle.loads``.

    data = dump(value)

torch pickles a tensor of float8 or of unsigned 16, 32 or 64 bits, and raises ``AttributeError`` when it is loaded: it
has no class of storage for these. They are pickled as ints of their size.
"""

import io
import pickle
from typing import Any

import torch

from blade.core.dtypes import COMPUTED

_BYTES_AS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def dump(value: object) -> bytes:
    """The pickle of ``value``; raises what ``pickle.dumps`` raises."""
    data = io.BytesIO()
    _Pickler(data).dump(value)
    return data.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not torch.Tensor or obj.dtype in COMPUTED or obj.is_quantized:
            return NotImplemented
        if obj.layout is not torch.strided or obj.element_size() not in _BYTES_AS:
            return NotImplemented
        return _restored, (obj.detach().view(_BYTES_AS[obj.element_size()]), obj.dtype)


def _restored(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.view(dtype)
