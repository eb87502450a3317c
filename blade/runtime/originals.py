# SPDX-License-Identifier: Apache-2.0
"""Original models that answer where no captured path does: the last tier of fallback, of this process only.

    register(number, owner, lambda inputs: [...])
    torch.ops.blade.answer_by_original((x, 2), number, 1, "text")     # [...]; elsewhere RuntimeError("text")

The number is in the saved module. A process that did not optimize the model does not know it.
"""

import secrets
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from blade.runtime.engine import library
from blade.runtime.interrupts import interrupts_noted

Original = Callable[[tuple[Any, ...]], Sequence[torch.Tensor]]


_known: dict[int, Original] = {}
_lock = threading.RLock()  # an original that is dropped may drop a module that forgets its own


def new_number() -> int:
    """A number that no other process draws."""
    return secrets.randbits(62) + 1


def register(number: int, owner: Any, call: Original) -> None:
    """Let ``call`` answer for ``number`` as long as ``owner`` lives."""
    with _lock:
        _known[number] = call
    torch.ops.blade.announce_original(number, True)
    weakref.finalize(owner, _forget, number)


def answering(number: int) -> Original | None:
    """What answers for ``number``, if something does."""
    with _lock:
        return _known.get(number)


def answer_with(number: int, call: Original) -> None:
    """Let ``call`` answer for ``number`` from now on, if somebody still does."""
    with _lock:
        before = _known.get(number)
        if before is not None:
            _known[number] = call
    del before  # without the lock, like all that it holds


def give_up_paths(number: int) -> None:
    """Let the original answer all further calls: the paths no longer compute the same."""
    torch.ops.blade.note_changed_original(number)


def number_of(graph: Any) -> int:
    """The number under which the original answers in ``graph``, or 0."""
    nodes: list[Any] = graph.findAllNodes("blade::answer_by_original", True)
    return next((int(node.inputsAt(1).toIValue()) for node in nodes), 0)


def _forget(number: int) -> None:
    torch.ops.blade.announce_original(number, False)
    with _lock:
        dropped = _known.pop(number, None)
    del dropped  # without the lock, like all that it holds


def _call_original(
    number: int, outputs: int, text: str, inputs: tuple[Any, ...]
) -> list[torch.Tensor]:
    with _lock:
        call = _known[number]
    with interrupts_noted():
        made = list(call(inputs))
    if len(made) != outputs:
        raise RuntimeError(
            f"The original model returns {len(made)} tensors for these inputs, and {outputs} for the samples that it "
            f"was captured with; a TorchScript module returns always as many. {text}"
        )
    return made


library.impl("call_original", _call_original, "CompositeImplicitAutograd")
