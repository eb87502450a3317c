# SPDX-License-Identifier: Apache-2.0
"""Trace directly to a frozen graph: weights are inputs of one graph, and become its constants.

    frozen = flat_trace(model, ["input_ids"], [ids])
    frozen(ids)

``torch.jit.trace`` makes a TorchScript class for every submodule, and freezing inlines them all again.
Freezing also compares every two constants of one size, several times: on a GPU these are tens of thousands of
kernels, each with a synchronization. If no weight is written to, neither is needed: inputs are not compared,
and equal weights are merged here.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.jit import _trace as tracer

from blade.capture.clean import optimized
from blade.capture.inputs import ArgumentSlot
from blade.core import torchscript
from blade.graph.torchscript.alias import find_aliases
from blade.graph.torchscript.check_arguments import add_arguments
from blade.graph.torchscript.fold_ranks import fold_ranks
from blade.graph.torchscript.inline_autograd_functions import inline_functions
from blade.graph.torchscript.program import read
from blade.graph.torchscript.show_identities import show_identities
from blade.graph.torchscript.to_script_module import script_of, simplified

_LOOKED_AT = 16
"""Leading elements that are compared before whole tensors are."""


def _may_be_written(graph: torch._C.Graph, inputs: Sequence[torch._C.Value]) -> bool:
    """Whether ``graph`` may write to one of its ``inputs``.

    torch's analysis is quick, and takes an element of a list for any input: a write to it is one to all weights.
    """
    torchs: Any = graph.alias_db()
    if not any(torchs.has_writers(value) for value in inputs):
        return False
    program = read(graph)
    aliases, names = find_aliases(program), {value.unique() for value in inputs}
    return any(aliases.may_be_written(v) for v in program.inputs if v in names)


def flat_trace(
    model: nn.Module,
    names: Sequence[str],
    entries: Sequence[Any],
    ended: Callable[[Any], Any] = lambda output: output,
    guards: Sequence[ArgumentSlot] = (),
    consult_ranks: Callable[[], object] = lambda: None,
) -> torch.jit.ScriptModule | None:
    """Trace ``model`` at ``entries``, named ``names``, and freeze it; ``None`` if it may write to a weight.

    ``ended`` gets the model's output while it is still traced; ``consult_ranks`` is called if the graph holds for
    inputs of these ranks only. The last arguments of the module are those of
    ``guards``; the graph reads only those of them that are in ``names``. Raises what tracing raises; a
    ScriptModule or a C++ object inside ``model`` can only be traced as part of a module.
    """
    weights = dict((*model.named_parameters(), *model.named_buffers()))
    inputs = [*names, *(f"weight_{k}" for k in range(len(weights)))]
    with _scopes(model):
        graph: Any = torch._C._create_graph_by_tracing(
            lambda *given: ended(model(*given[: len(names)])),
            (*entries, *weights.values()),
            tracer._create_interpreter_name_lookup_fn(),
            False,  # not strict: a dict may be returned
            False,  # in-place ops stay as they are
            None,
            inputs,
        )[0]
    inline_functions(graph)
    show_identities(graph)
    if fold_ranks(graph):
        consult_ranks()
    # the tracer notes the sample's sizes on every value; no pass may rely on them
    torchscript.forget_shapes(graph)
    _merge(list(graph.inputs())[len(names) :], [*weights.values()])
    free = simplified(graph, inputs)
    arguments = add_arguments(free, names, {slot.name: slot.guard for slot in guards})
    values = list(free.inputs())[len(arguments) :]
    if _may_be_written(free, values):
        return None
    constants = {
        name: tensor.detach() if value.uses() else None
        for value, (name, tensor) in zip(values, weights.items(), strict=True)
    }

    def frozen() -> torch.jit.ScriptModule:
        defaults = {slot.name: slot.value for slot in guards}
        made = script_of(free, type(model).__name__, arguments, constants, defaults)
        torchscript.propagate_constants(made.graph)
        torchscript.remove_dead_code(made.graph)
        return made

    return optimized(frozen, model)


@contextmanager
def _scopes(model: nn.Module) -> Iterator[None]:
    """Record the submodule that calls each op, as ``torch.jit.trace`` does."""
    names = {part: f"__module.{name}" for name, part in model.named_modules() if name}
    tracer._trace_module_map = names
    try:
        yield
    finally:
        tracer._trace_module_map = None


def _merge(values: Sequence[Any], tensors: Sequence[torch.Tensor]) -> None:
    """Replace each of ``values`` whose tensor equals an earlier one by that one."""
    alike: dict[Any, list[int]] = {}
    for k, tensor in enumerate(tensors):
        if type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided:
            form = tensor.dtype, tensor.device, tensor.shape, tensor.stride()
            alike.setdefault(form, []).append(k)
    several = [k for group in alike.values() if len(group) > 1 for k in group]
    begins = dict(zip(several, _beginnings([tensors[k] for k in several]), strict=True))
    for group in alike.values():
        first: dict[bytes, list[int]] = {}
        for k in group if len(group) > 1 else ():
            known = first.setdefault(begins[k], [])
            equal = next((j for j in known if torch.equal(tensors[j], tensors[k])), None)
            if equal is None:
                known.append(k)
            else:
                values[k].replaceAllUsesWith(values[equal])


def _beginnings(tensors: Sequence[torch.Tensor]) -> list[bytes]:
    """Return the leading elements of each of ``tensors``, of one device; all are fetched at once."""
    rows = [_beginning(tensor.detach()) for tensor in tensors]
    data = torch.cat(rows).cpu().numpy().tobytes() if rows else b""
    ends = list(accumulate(row.numel() for row in rows))
    return [data[end - row.numel() : end] for row, end in zip(rows, ends, strict=True)]


def _beginning(tensor: torch.Tensor) -> torch.Tensor:
    while tensor.dim() > 1 and tensor.shape[0]:
        tensor = tensor[0]
    return tensor.reshape(-1)[:_LOOKED_AT].contiguous().view(torch.uint8)
