# SPDX-License-Identifier: Apache-2.0
"""An optimized module as one op: ``blade::run_model``, which owns engines, guards, originals and weights.

    whole = whole_model(optimized, samples)
    torch.export.export(whole, whole.sample, dynamic_shapes=whole.dynamic_shapes, strict=False)

The op is functional. Writes to arguments, and results that are arguments or views of them, are ops around it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from blade.core import torchscript
from blade.errors import InputError
from blade.graph.shapes.memory_format import order_of
from blade.runtime.model import NAMES, PYTREES, Model, make_model, script_in
from blade.runtime.result_form import UNKNOWN, ResultForm, evaluate
from blade.saving.derive_results import (
    Alias,
    Derived,
    Result,
    Sample,
    View,
    ViewSize,
    derive_results,
)
from blade.saving.script_source import method_source


class Wrapper(nn.Module):
    """Gives the TorchScript class its name."""


class WholeModel(nn.Module):
    """Takes the optimized module's arguments and returns its results, by one op.

    ``sample``: arguments of sizes that suit ``torch.export``. ``fixed``: by tensor and axis, the sizes that have to be.
    """

    def __init__(
        self,
        model: Model,
        names: Sequence[str],
        results: Sequence[Result],
        written: Sequence[int],
        returned: Any,
        sample: Sample,
        fixed: Mapping[tuple[int, int], int],
    ) -> None:
        super().__init__()
        self.model = model
        self.results, self.written, self.returned = results, written, returned
        self.sample = sample
        self.fixed = fixed
        self.training = False
        self.names = tuple(names)

    def forward(self, *args: Any) -> Any:
        tensors = [x for x in pytree.tree_leaves(args) if isinstance(x, torch.Tensor)]
        made = torch.ops.blade.run_model(self.model, "forward", tensors)
        found = with_writes_and_aliases(made, self.results, self.written, tensors)
        return pytree.tree_unflatten(found, self.returned)


def with_writes_and_aliases(
    made: Sequence[torch.Tensor],
    results: Sequence[Result],
    written: Sequence[int],
    given: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """The ``results`` of an op that has ``made`` these tensors of those ``given``, which get what was ``written``."""
    count = len(results)
    for index, new in zip(written, made[count:], strict=True):
        given[index].copy_(new)
    found: list[torch.Tensor] = []
    for result, own in zip(results, made[:count], strict=True):
        found.append(own if result.alias is None else _alias(result.alias, given, found))
    return found


def _alias(
    alias: Alias, tensors: Sequence[torch.Tensor], found: Sequence[torch.Tensor]
) -> torch.Tensor:
    now = tensors[alias.index] if alias.of == "input" else found[alias.index]
    for view in alias.views:
        now = _viewed(now, view, tensors)
    return now


def _viewed(base: torch.Tensor, view: View, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    def number(leaf: Any) -> Any:
        return evaluate(leaf.text, tensors) if isinstance(leaf, ViewSize) else leaf

    args, kwargs = pytree.tree_map(number, (view.args, dict(view.kwargs)))
    made = view.overload(base, *args, **kwargs)
    found: torch.Tensor = made if view.part is None else made[view.part]
    return found


def whole_model(
    module: torch.jit.ScriptModule,
    samples: Sequence[Sample],
    notes: Mapping[str, list[str]] | None = None,
) -> WholeModel:
    """``module``, which ``samples`` are arguments of, for ``torch.export``. It is copied. ``notes``: further attributes
    of the script in its model.

    Raises ``InputError`` if it returns anything but tensors, or what it returns cannot be found out.
    """
    names = argument_names(module)
    returned = module._c._get_method("forward").schema.returns[0].type
    derived = derived_or_all_written(module, samples)
    script = _script(
        module, samples[0], derived, returned, {NAMES: names, PYTREES: [], **(notes or {})}
    )
    probe = Probe(script_in(make_model(script)), samples)
    results, form = forms_of(derived, probe)
    written = sorted(derived.written)
    script._c.setattr("forms", {"forward": form})
    if notes is None and not written and all(result.alias is None for result in results):
        script._c.setattr(PYTREES, _pytrees(samples[0], returned))
    fixed = {
        place: size for place, size in derived.fixed.items() if not probe.accepts_others(*place)
    }
    whole: WholeModel = named_class(WholeModel, module)(
        make_model(script),
        names,
        results,
        written,
        _structure(returned),
        tuple(for_export(samples[0], fixed)),
        fixed,
    )
    return whole


def argument_names(module: torch.jit.ScriptModule) -> list[str]:
    """The names of ``module``'s arguments."""
    schema = module._c._get_method("forward").schema
    return [_identifier(argument.name) for argument in schema.arguments[1:]]


def derived_or_all_written(module: torch.jit.ScriptModule, samples: Sequence[Sample]) -> Derived:
    """``derive_results``; where the graph cannot be followed, and has writes, they are to all arguments."""
    derived = derive_results(module, samples)
    if derived.results is None and _may_write(module):
        return Derived(None, frozenset(range(_count(samples[0]))), {})
    return derived


def forms_of(derived: Derived, probe: Probe) -> tuple[list[Result], str]:
    """The results, and the text of their forms and of those of the arguments that are written to."""
    results = _checked(derived, probe)
    forms = [ResultForm(r.dtype, r.device, r.order, r.sizes).text for r in results]
    written = sorted(derived.written)
    forms += [_form_of_input(tensor, index) for index, tensor in probe.tensors_at(written)]
    return results, "\n".join(forms)


class Probe:
    """Runs a copy of the module, whose counters and state are its own. No path is counted, and where none fits
    nothing answers, as in another process."""

    def __init__(
        self, script: torch.jit.ScriptModule, samples: Sequence[Sample], method: str = "forward"
    ) -> None:
        self._call = getattr(script, method)
        if method == "forward":
            _leave_alone(script.model.graph)
        self._tensors = [x for x in pytree.tree_leaves(samples[0]) if isinstance(x, torch.Tensor)]
        self.seen = self._run(self._tensors)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return self._tensors

    def tensors_at(self, indices: Sequence[int]) -> list[tuple[int, torch.Tensor]]:
        return [(index, self._tensors[index]) for index in indices]

    def accepts_others(self, index: int, axis: int) -> bool:
        """Whether the module takes another size there than the sample's, or that is unknown."""
        if self.seen is None:
            return True
        size = self._tensors[index].shape[axis]
        return any(self._run(self._with_size(index, axis, n)) for n in {1, size + 1} - {size})

    def _with_size(self, index: int, axis: int, size: int) -> list[torch.Tensor]:
        changed = self._tensors[index].narrow(axis, 0, 1)
        sizes = [size if k == axis else n for k, n in enumerate(self._tensors[index].shape)]
        given = list(self._tensors)
        given[index] = changed.expand(sizes).clone()
        return given

    def _run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        try:
            with torch.no_grad():
                found: list[torch.Tensor] = self._call([x.clone() for x in tensors])
        except (RuntimeError, IndexError, ValueError):
            return None
        return found


def _leave_alone(graph: Any) -> None:
    """Let ``graph`` neither count calls by path nor ask the original model of this process."""
    for node in graph.findAllNodes("blade::count_path", True):
        node.destroy()
    for op, place in (("answer_by_original", 1), ("has_original_changed", 0)):
        for node in graph.findAllNodes(f"blade::{op}", True):
            with graph.insert_point_guard(node):
                node.replaceInput(place, graph.insertConstant(0))


def _checked(derived: Derived, probe: Probe) -> list[Result]:
    """The results as derived and as seen in a call at the sample: where these differ, a size is unknown."""
    seen = probe.seen
    if derived.results is None and seen is None:
        raise InputError(
            "module: what it returns cannot be found out: its graph has ops without shapes, and a call at its sample's "
            "sizes fails. Save it as TorchScript (format='torchscript')."
        )
    if seen is None:
        assert derived.results is not None
        return list(derived.results)
    count = len(seen) - len(derived.written)
    if derived.results is None:
        return [_as_seen(one) for one in seen[:count]]
    return [_compared(result, one, probe.tensors) for result, one in zip(derived.results, seen)]


def _as_seen(tensor: torch.Tensor) -> Result:
    return Result(tensor.dtype, tensor.device, _order(tensor), (UNKNOWN,) * tensor.dim())


def _compared(result: Result, seen: torch.Tensor, inputs: Sequence[torch.Tensor]) -> Result:
    if len(result.sizes) != seen.dim() or result.dtype != seen.dtype:
        return _as_seen(seen)
    sizes = [
        size if size == UNKNOWN or evaluate(size, inputs) == n else UNKNOWN
        for size, n in zip(result.sizes, seen.shape)
    ]
    return Result(result.dtype, seen.device, _order(seen), tuple(sizes), result.alias)


def _order(tensor: torch.Tensor) -> tuple[int, ...]:
    return order_of(tensor) or tuple(range(tensor.dim()))


def _form_of_input(tensor: torch.Tensor, index: int) -> str:
    sizes = tuple(f"x{index}.{axis}" for axis in range(tensor.dim()))
    return ResultForm(tensor.dtype, tensor.device, tuple(range(tensor.dim())), sizes).text


def _script(
    module: torch.jit.ScriptModule,
    sample: Sample,
    derived: Derived,
    returned: Any,
    notes: Mapping[str, list[str]],
) -> torch.jit.ScriptModule:
    holder = Wrapper().eval()
    types = {"forms": dict[str, str], **dict.fromkeys(notes, list[str])}
    holder.model = module
    vars(holder).update({"forms": {"forward": ""}, **notes})
    script = torchscript.without_methods(holder, types)
    script.define(method_source("forward", "self.model", sample, returned, derived.written))
    return script


def _may_write(module: torch.jit.ScriptModule) -> bool:
    """Whether any graph inside has an op that writes to a tensor."""
    for one in module.modules():
        if isinstance(one, torch.jit.ScriptModule) and one._c._has_method("forward"):
            graph: Any = one._c._get_method("forward").graph
            if "_(" in str(graph):
                return True
    return False


def _pytrees(sample: Sample, returned: Any) -> list[str]:
    """Of arguments and results; nothing if an argument is a constant, which the program compares."""
    leaves, given = pytree.tree_flatten(sample)
    if not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
        return []
    return [pytree.treespec_dumps(given), pytree.treespec_dumps(_structure(returned))]


def _structure(kind: Any) -> Any:
    """The pytree of a result of the TorchScript type ``kind``."""

    def like(part: Any) -> Any:
        return tuple(map(like, part.elements())) if part.kind() == "TupleType" else 0

    return pytree.tree_structure(like(kind))


def for_export(value: Any, fixed: Mapping[tuple[int, int], int]) -> Any:
    """``value`` with tensors whose dynamic axes are neither 0 nor 1 long, which ``torch.export`` takes for numbers."""
    leaves, spec = pytree.tree_flatten(value)
    index = 0
    for k, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            sizes = [
                n if n > 1 or (index, axis) in fixed else _SOME for axis, n in enumerate(leaf.shape)
            ]
            leaves[k] = torch.zeros(sizes, dtype=leaf.dtype, device=leaf.device)
            index += 1
    return pytree.tree_unflatten(leaves, spec)


def named_class(base: Any, module: torch.jit.ScriptModule) -> Any:
    """A class like ``base`` with the name of ``module``'s, whose ``forward`` names its arguments."""

    def forward(self: Any, *args: Any) -> Any:
        return base.forward(self, *args)

    place = inspect.Parameter.POSITIONAL_OR_KEYWORD
    forward.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, place) for name in ("self", *argument_names(module))]
    )
    return type(_identifier(str(module.original_name)), (base,), {"forward": forward})


def _count(sample: Sample) -> int:
    return sum(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(sample))


def _identifier(name: str) -> str:
    return "".join(c if c.isalnum() or c == "_" else "_" for c in name)


_SOME = 7
"""A size that is no 0 or 1."""
