# SPDX-License-Identifier: Apache-2.0
"""Freezing, inlining, and clean-up passes that preserve the semantics of the graph."""

import logging
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

import torch

from blade.capture.attributes import attributes_of
from blade.capture.reference_model import copy_of
from blade.core import torchscript
from blade.core.dtypes import HALVES
from blade.errors import InputError
from blade.graph.torchscript.detach_constants import detached_constants
from blade.graph.torchscript.fold_constants import fold
from blade.graph.torchscript.forget_calls import forget_calls
from blade.graph.torchscript.keep_type_promotion import keep_type_promotion
from blade.graph.torchscript.name_views import name_views
from blade.graph.torchscript.unpack_constant_lists import unpack_constant_lists

_log = logging.getLogger(__name__)


def freeze(
    module: torch.jit.ScriptModule, preserved: Sequence[str], constants: bool
) -> torch.jit.ScriptModule:
    """Return a copy of ``module`` with its calls inlined; with ``constants``, parameters are constants.

    Attributes that forward or a preserved method writes stay attributes, with storage of their own.
    Raises ``InputError`` if ``preserved`` names an attribute that does not exist.
    """
    for name in preserved:
        if not hasattr(module, name.split(".")[0]):
            raise InputError(
                f"preserved_attributes: {name!r} is no attribute or method of the captured model. "
                "(A method is kept only if the model is scripted and the method is exported.)"
            )
    # torch.jit.freeze rejects a module that is frozen already.

    def frozen() -> torch.jit.ScriptModule:
        native = torchscript.frozen(module._c, preserved, parameters=not constants)
        made = torchscript.wrapped(native)
        if module not in _inlined and native._has_method("forward"):
            forget_calls(made.graph)
        return made

    if not constants:
        return frozen()
    methods = [name for name in preserved if module._c._has_method(name)]
    result = optimized(frozen, module, methods)
    _own_attributes(result)
    return result


def inline_own(module: torch.jit.ScriptModule) -> None:
    """Inline forward of a ``module`` that the user does not have, before it is frozen.

    Its ops keep their places in the source: the methods that they refer to live as long as the process.
    """
    torchscript.inline(module.graph)
    _inlined.add(module)


_inlined: WeakSet[torch.jit.ScriptModule] = WeakSet()


def optimized(
    frozen: Callable[[], torch.jit.ScriptModule],
    source: torch.nn.Module,
    methods: Sequence[str] = (),
) -> torch.jit.ScriptModule:
    """Return ``frozen()`` of ``source``, with batch norms and factors folded into weights if possible.

    Folding CPU scalars into convolutions on a GPU fails ("INTERNAL ASSERT FAILED", torch 2.11).
    """
    # folding a batch norm into 16-bit weights would round them again, which shows in deep models
    if any(p.dtype in HALVES for p in source.parameters()):
        return frozen()
    module = frozen()
    graphs = [module.graph] if module._c._has_method("forward") else []
    try:
        for graph in (*graphs, *(getattr(module, name).graph for name in methods)):
            fold(graph)
    except RuntimeError as error:
        _log.info("torch does not fold what is constant: %s", error)
        return frozen()
    return module


def forward_of(frozen: torch.jit.ScriptModule) -> Callable[..., Any]:
    """Return the forward as a function with its own graph and executor: the module's stay unused."""
    function = torchscript.function_of("forward", frozen.graph.copy())
    return lambda *sample: function(frozen._c, *sample)


def clean(module: torch.jit.ScriptModule, passes: Sequence[Callable[[torch.Graph], None]]) -> None:
    """Inline ``module``'s forward, run the user's ``passes`` on it, then clean it, all in place."""
    graph = module.graph
    torchscript.inline(graph)
    for user_pass in passes:
        user_pass(graph)
        torch._C._jit_pass_lint(graph)
    keep_type_promotion(graph)
    # The tracer notes the sample's sizes on every value; no later pass may rely on them.
    torchscript.forget_shapes(graph)
    torch._C._jit_pass_remove_dropout(module._c)
    torchscript.propagate_constants(graph)
    torch._C._jit_pass_peephole(graph, True)
    with detached_constants(graph):
        torch._C._jit_pass_cse(graph)
    torchscript.remove_dead_code(graph)
    unpack_constant_lists(graph)
    name_views(graph)
    torch._C._jit_pass_lint(graph)


def _own_attributes(frozen: torch.jit.ScriptModule) -> None:
    """Copy the attributes that ``frozen`` writes, as it shares their storage with the source."""
    for attribute in attributes_of(frozen):
        attribute.set(copy_of(attribute.get()))
