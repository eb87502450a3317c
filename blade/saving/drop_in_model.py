# SPDX-License-Identifier: Apache-2.0
"""The calls of a drop-in that are made most, for ``torch.export``: the model's arguments and outputs, by pytrees."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from blade.dropin.call_kind import arguments_of
from blade.dropin.drop_in import DropIn, plain, state_of
from blade.dropin.nested import Structure, made
from blade.errors import InputError
from blade.saving.whole_model import WholeModel, whole_model

_LEAVES = (torch.Tensor, type(None), bool, int, float, str)


class DropInModel(nn.Module):
    """Takes the arguments of ``sample``, those of the model's forward, and returns its output."""

    def __init__(self, whole: WholeModel, sample: Any, output: Structure) -> None:
        super().__init__()
        self.whole, self.sample, self.output = whole, sample, output
        self.training = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        answer = self.whole(*(leaf for leaf in leaves if isinstance(leaf, torch.Tensor)))
        tensors = (answer,) if isinstance(answer, torch.Tensor) else answer
        return made(self.output, iter(tensors), ())


def drop_in_model(module: DropIn, samples: Sequence[tuple[Any, ...]]) -> DropInModel:
    """``module``'s optimized module for the calls that are made most, with the model's arguments and output.

    Raises ``InputError`` for calls with caches or numbers of any value, and for outputs whose classes torch's pytrees
    do not know.
    """
    [prepared, *_] = state_of(module).most_called()
    kind, (output, after) = prepared.kind, prepared.outcome
    if after or kind.numbers():
        what = "caches, which the call changes" if after else "numbers that are sizes"
        raise InputError(
            f"module: its calls take {what}: a program of torch.export has no such arguments. Save the module that "
            "takes and returns tensors (module.optimized), or the drop-in itself (format='blade')."
        )
    parameters = inspect.signature(plain(module).forward).parameters
    by_name = [name for name in kind.names if name != "*"]
    whole = whole_model(prepared.module, samples, {"places": list(parameters), "named": by_name})
    sample, _ = arguments_of(kind, whole.sample)
    _check_output(made(output, iter(torch.zeros(1).expand(10_000)), ()))
    name = type(plain(module)).__name__
    kept: DropInModel = type(name, (DropInModel,), {"forward": _forward_of(plain(module))})(
        whole, sample, output
    )
    return kept


def _forward_of(model: nn.Module) -> Any:
    def forward(self: DropInModel, *args: Any, **kwargs: Any) -> Any:
        return DropInModel.forward(self, *args, **kwargs)

    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    given = inspect.signature(model.forward).parameters.values()
    forward.__signature__ = inspect.Signature([own, *given], __validate_parameters__=False)  # type: ignore[attr-defined]
    return forward


def _check_output(output: Any) -> None:
    for leaf in pytree.tree_leaves(output):
        if not isinstance(leaf, _LEAVES):
            raise InputError(
                f"module: its output holds a {type(leaf).__qualname__}, which torch's pytrees do not know: call "
                "torch.export.register_dataclass with its class here and where the file is loaded, or save "
                "module.optimized."
            )
