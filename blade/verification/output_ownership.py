# SPDX-License-Identifier: Apache-2.0
"""Check that the outputs of an engine own their memory, which no later call writes to.

    check_fresh(engine, case, updates)      # raises Refused where outputs share memory

Only engines of libraries are checked: a library that returns its own buffer, or a few in turns, overwrites
outputs that the caller still holds. A DISC program allocates its outputs in every call.
"""

from collections.abc import Sequence
from typing import Any

import torch

from blade.core.reason import Code
from blade.errors import Refused
from blade.verification.cases import Case

CALLS = 16  # outputs held at a time: more than a library has buffers in turns
MOST_BYTES = 1 << 28  # bytes of held outputs; two calls are held in any case


def check_fresh(engine: Any, case: Case, updates: Sequence[int]) -> None:
    """Call ``engine`` at ``case`` while all earlier outputs are held. Inputs that it updates are copied."""
    if engine.backend() == "disc":
        return
    held: list[list[torch.Tensor]] = []
    seen: dict[tuple[torch.device, int], int] = {}
    taken = 0
    while len(held) < 2 or (len(held) < CALLS and taken < MOST_BYTES):
        given = [t.clone() if i in updates else t for i, t in enumerate(case.inputs)]
        got = engine.try_execute(given)
        if got is None:
            return
        own = {_place(t): i for i, t in enumerate(got) if t.numel()}
        if shared := own.keys() & seen.keys():
            i = own[next(iter(shared))]
            raise Refused(
                Code.WRONG_VALUES,
                f"its output {i} lies where an earlier answer does, which a call thus overwrites: return a copy.",
            )
        seen |= own
        held.append(got)
        taken += sum(t.untyped_storage().nbytes() for t in got)


def _place(tensor: torch.Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.data_ptr()
