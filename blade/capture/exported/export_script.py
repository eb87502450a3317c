# SPDX-License-Identifier: Apache-2.0
"""From an ``nn.Module`` to a ScriptModule by way of torch.export, with sizes kept symbolic.

    interface = Interface(call.names, sample, call.bind, tensors_of)
    module = export_script(model, interface)        # or a Reason

A trace makes every decision on a size constant. torch.export keeps the sizes as symbols, and where the
model decides on them, the condition becomes a guard of the module: ``x.size(1) % 7 == 0``.
"""

import io
import logging
import re
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram, ShapesCollection
from torch.fx.experimental import symbolic_shapes
from torch.utils import _pytree as pytree

from blade.capture.exported.interface import Interface
from blade.capture.exported.to_script import to_script
from blade.core.attempt import attempt
from blade.core.reason import Code, Reason, Stage
from blade.core.torch_modes import oblivious_to_sizes
from blade.errors import Refused

Axis = tuple[int, int]  # tensor among the leaves of a sample, axis


def export_script(
    model: nn.Module, interface: Interface, fixed: Collection[Axis] = ()
) -> torch.jit.ScriptModule | Reason:
    """Return a ScriptModule of ``model``, made by torch.export, or a Reason why there is none.

    Every axis of every tensor of ``interface.sample`` but the ``fixed`` ones is dynamic; export makes those
    constant, or equal, that the model's code needs so. The module raises RuntimeError at other sizes, dtypes
    and ranks than it is right for, and names the condition; nothing is decided on values, so that it is right
    at all contents. It shares the model's parameters and buffers, takes the entries of a sample by name, and
    returns what ``interface.flatten`` makes of the output.

    ``model`` is in eval mode. Its code runs, on tensors without data, once or twice, and may leave other
    attributes behind: restore them (``ReferenceModel.reset``). The first sizes tried are those of the sample
    as they are, with 0 and 1 like any other size; where the code needs to know whether a size is 1, it is
    run again with sizes taken to be at least 2, which is a guard then.
    """
    name = type(model).__name__
    reasons = []
    for any_size in (True, False):
        made = attempt(
            Stage.CAPTURE,
            None,
            name,
            partial(_export_script, model, interface, fixed, any_size),
            code=Code.EXPORT_FAILED,
        )
        if not isinstance(made, Reason):
            return made
        reasons.append(made)
        if made.error is None:  # refused: sizes are not what is in the way
            break
    return reasons[0]


def _export_script(
    model: nn.Module, interface: Interface, fixed: Collection[Axis], any_size: bool
) -> torch.jit.ScriptModule:
    program = export(model, interface, fixed, any_size)
    return to_script(program, interface, all_ranges=True, as_checks=True)


def export(
    model: nn.Module, interface: Interface, fixed: Collection[Axis] = (), any_size: bool = True
) -> ExportedProgram:
    """Return the program of ``model`` at ``interface.sample``; raises what torch.export raises, and ``Refused`` for a
    decision on a value.

    ``any_size``: sizes of 0 and 1 are no special case of the sizes.
    """
    leaves = pytree.tree_leaves(interface.sample)
    axes = [
        (k, d) for k, x in enumerate(leaves) if isinstance(x, torch.Tensor) for d in range(x.dim())
    ]
    dims = {axis: Dim.STATIC if axis in fixed else Dim.AUTO for axis in axes}
    args, kwargs, shapes = arguments(interface, dims)
    with quiet(), torch.no_grad(), oblivious_to_sizes(any_size):
        try:
            return torch.export.export(model, args, kwargs, dynamic_shapes=shapes, strict=False)
        except symbolic_shapes.GuardOnDataDependentSymNode as error:
            raise Refused(Code.EXPORT_FAILED, _decision(str(error))) from error


def arguments(
    interface: Interface, dims: Mapping[Axis, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Return arguments of the model made from copies of ``interface.sample``, and their dynamic shapes: ``dims`` has
    a ``Dim`` for every axis."""
    leaves, spec = pytree.tree_flatten(interface.sample)
    shapes: Any = ShapesCollection()  # takes the place of nested dicts, which its type does not say
    copies = []
    for index, leaf in enumerate(leaves):
        copies.append(leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf)
        if isinstance(leaf, torch.Tensor):  # found again by identity, so each has a copy of its own
            shapes[copies[-1]] = {d: dims[index, d] for d in range(leaf.dim())}
    args, kwargs = interface.bind(pytree.tree_unflatten(copies, spec))
    return args, kwargs, shapes


def _decision(text: str) -> str:
    """What export says of a decision on a value, with the line of the model's code."""
    places = re.findall(r'File "([^"]*)", line (\d+), in .*\n\s*(.*)', text)
    if not places:
        return text.splitlines()[0]
    file, line, code = places[-1]
    return f"{Path(file).name}:{line} decides on a value that only a call knows: {code.strip()}"


@contextmanager
def quiet() -> Iterator[None]:
    """A context in which torch.export writes nothing: what it says of a failure is in its exception."""
    from torch.export import _draft_export  # takes long to import, and few models are exported

    loggers = [symbolic_shapes.log, _draft_export.log]
    before = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
