# SPDX-License-Identifier: Apache-2.0
"""A model as ``blade.optimize`` takes it: tensors in, tensors out, everything else in the kind of the call.

flat = flat_call(model, kind)
flat(*call.tensors)            # the tensors of the output, then those of the caches after the call
flat.seen                      # the structures of all outputs so far
"""

import copy
import inspect
from typing import Any

import torch
from torch import nn

from blade.core.reason import Code
from blade.dropin.caches import changes
from blade.dropin.call_kind import CallKind, arguments_of
from blade.dropin.nested import Parts, Structure
from blade.errors import Refused

# The structure of an output, and the facts of each cache among the arguments after the call.
Outcome = tuple[Structure, tuple[Structure, ...]]


class Seen:
    """The outcomes of a ``FlatCall`` and of all its copies."""

    def __init__(self) -> None:
        self.outcomes: set[Outcome] = set()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Seen":
        return self


class FlatCall(nn.Module):
    """Calls ``model`` as calls of ``kind`` do."""

    def __init__(self, model: nn.Module, kind: CallKind) -> None:
        super().__init__()
        self.model = model
        self.kind = kind
        self.seen = Seen()
        self.training = False

    def __deepcopy__(self, memo: dict[int, Any]) -> "FlatCall":
        """A copy whose parameters share the memory of the model's: the graphs of all kinds hold the weights once.

        Whoever writes to the weights makes the drop-in forget these graphs (watched.py).
        """
        for parameter in self.model.parameters():
            if type(parameter) is nn.Parameter:
                own = nn.Parameter(parameter.detach(), parameter.requires_grad)
                memo.setdefault(id(parameter), own)
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        vars(made).update(copy.deepcopy(vars(self), memo))
        return made

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (args, kwargs), caches = arguments_of(self.kind, tensors)
        output = self.model.forward(*args, **kwargs)
        parts = Parts(caches)
        structure = parts.add(output)
        after = []
        for cache in caches:
            facts, held = changes(cache)
            after.append(facts)
            parts.tensors += held
        if not parts.tensors:
            raise Refused(Code.UNKNOWN_TYPE, "The output has no tensors.")
        self.seen.outcomes.add((structure, tuple(after)))
        return tuple(parts.tensors)


def flat_call(model: nn.Module, kind: CallKind) -> FlatCall:
    """A ``FlatCall`` of a class with the name of the model's, whose ``forward`` names its arguments."""
    labels = ["self", *kind.labels()]
    place = inspect.Parameter.POSITIONAL_ONLY

    def forward(self: FlatCall, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return FlatCall.forward(self, *tensors)

    forward.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(label, place) for label in labels]
    )
    made = type(type(model).__name__, (FlatCall,), {"forward": forward, "__module__": __name__})
    flat: FlatCall = made(model, kind)
    return flat
