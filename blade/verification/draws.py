# SPDX-License-Identifier: Apache-2.0
"""Whether code draws random numbers: of torch, by any generator, of Python or of NumPy.

with Draws() as draws:
    model(x)
draws.seen
"""

import random
import sys
from collections.abc import Sequence
from typing import Any

from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from blade.core.cluster import draws_numbers


class Draws(TorchDispatchMode):
    """``seen``: whether an op that draws ran inside the block, or a generator of Python or NumPy moved."""

    supports_higher_order_operators = True  # they run unchanged

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = False
        self._before = ""

    def __enter__(self) -> "Draws":
        self._before = _states()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.seen |= _states() != self._before

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if isinstance(func, OpOverload):
            self.seen |= draws_numbers(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _states() -> str:
    numpy = sys.modules.get("numpy")
    others = () if numpy is None else tuple(map(repr, numpy.random.get_state()))
    return f"{random.getstate()}{others}"
