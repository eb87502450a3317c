# SPDX-License-Identifier: Apache-2.0
"""Nodes that AOTInductor supports: those for which Inductor lists a lowering or a decomposition."""

from collections.abc import Iterator

import torch

from blade.backends.shared.op_survey import OpSurvey, lookups

NAME = "inductor"
# Dtypes of Inductor's C++ code; for complex numbers it calls torch, one op at a time.
DTYPES = frozenset(
    {
        *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    }
)


def ask() -> Iterator[str]:
    from torch._inductor.decomposition import decompositions
    from torch._inductor.lowering import lowerings

    for op in (*lowerings, *decompositions):
        if isinstance(op, torch._ops.OpOverload):
            yield str(op)


# Inductor's C++ throws inside a parallel region, where nothing can catch it.
NOT_CAUGHT = "its code ends the process where an index is out of range, and eager raises"
OPS = OpSurvey(NAME, "Inductor", DTYPES, lambda: torch.__version__, ask, lookups(NOT_CAUGHT))
