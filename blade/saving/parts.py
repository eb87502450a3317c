# SPDX-License-Identifier: Apache-2.0
"""An optimized module taken apart for AOTInductor: the ops between its clusters as ATen ops, each cluster as one op.

    parts = parts_model(optimized, samples)
    torch.export.export(parts, parts.sample, dynamic_shapes=.., strict=False)

A cluster's op owns engine and original, like that of a whole module. The compiled ops rely on relations between sizes
that held at the sample, so that the program checks these first, and raises where they do not hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import nn
from torch.utils import _pytree as pytree

from blade.core import torchscript
from blade.errors import InputError
from blade.graph.fx.writer import CANNOT
from blade.graph.shapes.fake_tensors import hint
from blade.graph.torchscript.interpret import Ended, NotInterpreted, ScriptInterpreter
from blade.report import ATTRIBUTE
from blade.runtime.model import NAMES, SIZES, Model, make_model, script_in
from blade.runtime.result_form import UNKNOWN
from blade.saving.derive_results import Derived, Result, Sample, Walk, symbolic
from blade.saving.postfix import postfix
from blade.saving.script_source import method_source
from blade.saving.whole_model import (
    Probe,
    Wrapper,
    argument_names,
    derived_or_all_written,
    for_export,
    forms_of,
    named_class,
    with_writes_and_aliases,
)

Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class Piece:
    """What a cluster returns, and which of its arguments it writes to."""

    results: Sequence[Result]
    written: Sequence[int]


class PartsModel(nn.Module):
    """Takes the optimized module's arguments and returns its results, op by op."""

    def __init__(self, module: Any, model: Model, sample: Sample, pieces: Mapping[str, Piece]):
        super().__init__()
        self.model = model
        self.sample = sample
        self.fixed: Mapping[tuple[int, int], int] = {}
        self.training = False
        self._module, self._pieces = (module,), pieces  # in a tuple: no submodule of this one
        self._places: dict[int, str] = {}

    def hold(self, constants: Mapping[int, torch.Tensor]) -> None:
        """Register the tensors of the ops between the clusters."""
        for number, (key, tensor) in enumerate(constants.items()):
            self.register_buffer(f"constant_{number}", tensor)
            self._places[key] = f"constant_{number}"

    def constant(self, key: int) -> torch.Tensor:
        found: torch.Tensor = getattr(self, self._places[key])
        return found

    def forward(self, *args: Any) -> Any:
        tensors = [x for x in pytree.tree_leaves(args) if isinstance(x, torch.Tensor)]
        torch.ops.blade.run_model(self.model, SIZES, tensors)
        results = _Glue(self, self._pieces).run(self._module[0], args)
        return results[0] if len(results) == 1 else tuple(results)


class _Glue(ScriptInterpreter):
    """Calls the ops between the clusters as they are, and the clusters through their model."""

    def __init__(self, owner: PartsModel, pieces: Mapping[str, Piece]) -> None:
        super().__init__()
        self._owner, self._pieces = owner, pieces

    def constant(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._owner.constant(tensor._cdata)

    def call_module(self, module: Any, method: str, inputs: Sequence[Any], name: str) -> Any:
        piece = self._pieces.get(name)
        if piece is None:
            return super().call_module(module, method, inputs, name)
        given = [self.as_tensor(value, None) for value in inputs]
        made = torch.ops.blade.run_model(self._owner.model, name, given)
        found = with_writes_and_aliases(made, piece.results, piece.written, given)
        return found[0] if len(found) == 1 else tuple(found)


class _Boundaries(Walk):
    """Notes what the clusters are called with, and the tensors of the ops between them."""

    def __init__(self, sample: Sample) -> None:
        super().__init__((), sample)
        self.calls: dict[str, tuple[Any, Tensors]] = {}
        self.constants: dict[int, torch.Tensor] = {}
        self._depth = 0

    def call_module(self, module: Any, method: str, inputs: Sequence[Any], name: str) -> Any:
        is_cluster = module.hasattr("fallback") and not self._depth
        if is_cluster:
            if name in self.calls:
                raise NotInterpreted(f"{name} is called twice")
            self.calls[name] = module, [self.as_tensor(value, None) for value in inputs]
        self._depth += is_cluster
        try:
            return super().call_module(module, method, inputs, name)
        finally:
            self._depth -= is_cluster

    def constant(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self._depth:
            self.constants[tensor._cdata] = tensor
        return super().constant(tensor)


def parts_model(module: torch.jit.ScriptModule, samples: Sequence[Sample]) -> PartsModel:
    """Take ``module`` apart. Raises ``InputError`` if that cannot be done."""
    walk = _Boundaries(samples[0])
    try:
        with symbolic():
            walk.follow(module._c)
            clusters = {name: _at_hints(inputs) for name, (_, inputs) in walk.calls.items()}
    except Ended as error:
        raise _refused("it has several paths") from error
    except (*CANNOT, NotInterpreted) as error:
        raise _refused(str(error).strip().partition("\n")[0]) from error
    if next(iter(walk.turns()), None) is not None:
        raise _refused("it has several paths")
    if not clusters:
        raise _refused("it has no clusters")
    script = _script(module, clusters)
    found = {name: _define(script, module, name, sample) for name, sample in clusters.items()}
    copy = script_in(make_model(script))
    forms, pieces = {SIZES: "\n".join(_relations(walk, argument_names(module)))}, {}
    for name, derived in found.items():
        results, forms[name] = forms_of(derived, Probe(copy, [clusters[name]], name))
        if any(UNKNOWN in result.sizes for result in results):
            raise _refused(f"{name} returns sizes that are unknown before the call")
        pieces[name] = Piece(results, sorted(derived.written))
    script._c.setattr("forms", forms)
    sample = tuple(for_export(samples[0], {}))
    parts: PartsModel = named_class(PartsModel, module)(
        module._c, make_model(script), sample, pieces
    )
    parts.hold(walk.constants)
    return parts


def _refused(why: str) -> InputError:
    return InputError(
        f"compile_glue: the ops between the clusters cannot be compiled: {why}. Save the module without compile_glue: "
        "one op answers as a whole, with every path."
    )


def _at_hints(fakes: Sequence[torch.Tensor]) -> Sample:
    """Real tensors of the sizes that ``fakes`` have at the sample."""
    return tuple(
        torch.zeros([hint(size) for size in fake.shape], dtype=fake.dtype, device=fake.device)
        for fake in fakes
    )


def _script(
    module: torch.jit.ScriptModule, clusters: Mapping[str, Sample]
) -> torch.jit.ScriptModule:
    """The clusters alone, under the optimized module's report."""
    inside = Wrapper().eval()
    for name in clusters:
        setattr(inside, name, getattr(module, name))
    held = torchscript.without_methods(inside)
    text = torch._C.StringType.get()
    held._c._register_attribute(ATTRIBUTE, text, getattr(module, ATTRIBUTE))
    held.define("def forward(self) -> int:\n    return 0\n")
    holder = Wrapper().eval()
    types = {"forms": dict[str, str], NAMES: list[str]}
    holder.model = held
    names = argument_names(module)
    vars(holder).update({"forms": {}, NAMES: names})
    return torchscript.without_methods(holder, types)


def _define(
    script: torch.jit.ScriptModule, module: torch.jit.ScriptModule, name: str, sample: Sample
) -> Derived:
    """Define the method of the cluster ``name`` in ``script``; what it returns."""
    cluster: Any = getattr(module, name)
    derived = derived_or_all_written(cluster, [sample])
    returned = cluster._c._get_method("forward").schema.returns[0].type
    script.define(method_source(name, f"self.model.{name}", sample, returned, derived.written))
    return derived


def _relations(walk: Walk, names: Sequence[str]) -> Iterator[str]:
    """What the shapes of the whole graph rely on, as lines that C++ checks."""
    for guard in walk.env.guards:
        relation = guard.expr
        if not relation.free_symbols or not relation.free_symbols <= set(walk.names):
            continue
        for number in _not_negative(relation):
            text = postfix(number, walk.names)
            if text == UNKNOWN:
                raise _refused(f"it relies on {relation}")
            yield f"{_shown(relation, walk, names)} | {text}"


def _not_negative(relation: Any) -> list[Any]:
    """Numbers that are not negative if, and only if, ``relation`` holds."""
    kind = type(relation)
    if kind not in (sympy.Eq, *_ORDERS):
        raise _refused(f"it relies on {relation}")
    a, b = relation.args
    if kind is sympy.Eq:
        return [a - b, b - a]
    difference = a - b if kind in (sympy.Ge, sympy.Gt) else b - a
    return [difference - 1 if kind in (sympy.Gt, sympy.Lt) else difference]


_ORDERS = (sympy.Ge, sympy.Gt, sympy.Le, sympy.Lt)


def _shown(relation: Any, walk: Walk, names: Sequence[str]) -> str:
    """``relation`` in terms of the arguments."""
    shown = f" {relation.rel_op} ".join(map(str, relation.args))
    for symbol, place in walk.names.items():
        index, axis = place[1:].split(".")
        name = names[int(index)] if int(index) < len(names) else f"tensor {index}"
        shown = shown.replace(str(symbol), f"{name}.shape[{axis}]")
    return shown
