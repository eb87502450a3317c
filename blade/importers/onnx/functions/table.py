# SPDX-License-Identifier: Apache-2.0
"""The functions that rows call, as ``run.<name>``."""

import warnings
from functools import cache
from typing import Any

import torch

from blade.importers.onnx.functions.detection import *  # noqa: F403
from blade.importers.onnx.functions.index import *  # noqa: F403
from blade.importers.onnx.functions.layout import *  # noqa: F403
from blade.importers.onnx.functions.pooling import *  # noqa: F403
from blade.importers.onnx.functions.recurrent import *  # noqa: F403
from blade.importers.onnx.functions.resize import *  # noqa: F403
from blade.importers.onnx.functions.signal import *  # noqa: F403


def __getattr__(name: str) -> Any:
    """``run.as_int32``: the elements' bits as another type. Source text has no way to call ``aten::view.dtype``."""
    dtype = getattr(torch, name.removeprefix("as_"), None)
    if not name.startswith("as_") or not isinstance(dtype, torch.dtype):
        raise AttributeError(name)
    return _bit_cast(dtype)


@cache
def _bit_cast(dtype: torch.dtype) -> Any:
    like = torch.zeros([], dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(lambda x: x.view(dtype), (like,), check_trace=False)
