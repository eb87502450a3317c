# SPDX-License-Identifier: Apache-2.0
"""The order of products in ``torch.einsum`` of three and more tensors decides on speed alone.

Where the package opt_einsum is installed, torch asks it for that order, and it reads every size. The order that
it finds for a sample is right at all sizes, so these reads are no decisions, and need no checks.
"""

import sys
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from blade.capture.decisions.traced_number import untraced

_OWNERS = ("opt_einsum", "opt_einsum.contract")


def with_unchecked_order(is_active: Callable[[], bool]) -> Iterator[tuple[Any, str, Any]]:
    """Yield (owner, name, function) of functions whose reads of sizes stay unseen while ``is_active()``."""
    for name in _OWNERS:
        original = getattr(sys.modules.get(name), "contract_path", None)
        if original is not None:
            yield sys.modules[name], "contract_path", _unseen(original, is_active)


def _unseen(original: Any, is_active: Callable[[], bool]) -> Any:
    @wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        if not is_active():
            return original(*args, **kwargs)
        with untraced():
            return original(*args, **kwargs)

    return function
