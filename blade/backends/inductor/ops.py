# SPDX-License-Identifier: Apache-2.0
"""Which nodes AOTInductor takes: what Inductor itself says it has code, or a call, for."""

from collections.abc import Iterator

import torch

from blade.backends.known_ops import KnownOps, lookups

NAME = "inductor"
# What Inductor's C++ holds in memory; complex numbers it leaves to calls, one op at a time.
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


# Its C++ throws inside a parallel region, where nothing can catch it.
NOT_CAUGHT = "its code ends the process where an index is out of range, and eager raises"
OPS = KnownOps(NAME, "Inductor", DTYPES, lambda: torch.__version__, ask, lookups(NOT_CAUGHT))
