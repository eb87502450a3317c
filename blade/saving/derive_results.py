# SPDX-License-Identifier: Apache-2.0
"""What a module returns, at every size: by interpretation of its original graphs over fake tensors.

    derived = derive_results(optimized, samples)
    derived.results[0].sizes                # ("x0.0", "x0.1", "384"): the sizes of tensor 0 of the arguments
    derived.written                         # tensors of the arguments that a call writes to

Every path through the graph is followed; where two return other sizes, or the graph has no form in Python, a size is
unknown before the call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext
from torch.utils import _pytree as pytree

from blade.core.torch_modes import dispatched_in_python, oblivious_to_sizes
from blade.graph.fx.writer import CANNOT
from blade.graph.shapes.shape_functions import result_of
from blade.graph.shapes.symbolic import UnspecializedFakeMode, UnspecializedShapeEnv
from blade.graph.torchscript.interpret import Ended, NotInterpreted, ScriptInterpreter
from blade.runtime.result_form import UNKNOWN
from blade.saving.postfix import postfix

MOST_PATHS = 64
Sample = tuple[Any, ...]


@dataclass(frozen=True)
class ViewSize:
    """A number in the arguments of a view, as text."""

    text: str


@dataclass(frozen=True)
class View:
    """An op that returns a view: its first argument is the tensor before it. ``part``: of several results."""

    overload: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    part: int | None


@dataclass(frozen=True)
class Alias:
    """A result that is an argument, or a view of it (``of == "input"``), or of an earlier result ("result")."""

    of: str
    index: int
    views: tuple[View, ...] = ()


@dataclass(frozen=True)
class Result:
    """One tensor that a module returns. ``order``: its axes from the outermost in memory, if it is dense."""

    dtype: torch.dtype
    device: torch.device
    order: tuple[int, ...]
    sizes: tuple[str, ...]
    alias: Alias | None = None

    def joined(self, other: Result) -> Result | None:
        """What holds for both; ``None`` if they have nothing in common."""
        if (self.dtype, self.device, len(self.sizes)) != (
            other.dtype,
            other.device,
            len(other.sizes),
        ):
            return None
        sizes = tuple(a if a == b else UNKNOWN for a, b in zip(self.sizes, other.sizes))
        alias = self.alias if repr(self.alias) == repr(other.alias) else None
        order = self.order if self.order == other.order else tuple(range(len(sizes)))
        return replace(self, sizes=sizes, alias=alias, order=order)


@dataclass(frozen=True)
class Derived:
    """``results`` is ``None`` where the graph could not be followed. ``fixed``: sizes (tensor, axis) of the arguments
    that every path takes for a number."""

    results: tuple[Result, ...] | None
    written: frozenset[int]
    fixed: Mapping[tuple[int, int], int]


UNDERIVED = Derived(None, frozenset(), {})


@contextmanager
def symbolic() -> Iterator[None]:
    """The context in which a ``Walk`` follows its path."""
    oblivious = oblivious_to_sizes()
    with oblivious, torch.no_grad():
        yield


def derive_results(module: torch.jit.ScriptModule, samples: Sequence[Sample]) -> Derived:
    """Follow every path of ``module``, which takes the arguments that ``samples`` are of."""
    found: Derived | None = None
    with symbolic():
        for one in _paths(module._c, samples):
            found = one if found is None else _joined(found, one)
            if found.results is None:
                return UNDERIVED
    return found or UNDERIVED


def _joined(one: Derived, other: Derived) -> Derived:
    if one.results is None or other.results is None or len(one.results) != len(other.results):
        return UNDERIVED
    results = [a.joined(b) for a, b in zip(one.results, other.results)]
    fixed = {key: size for key, size in one.fixed.items() if other.fixed.get(key) == size}
    if any(result is None for result in results):
        return UNDERIVED
    return Derived(tuple(r for r in results if r), one.written | other.written, fixed)


def _paths(module: Any, samples: Sequence[Sample]) -> Iterator[Derived]:
    """What each path returns; ``UNDERIVED`` for one that cannot be followed."""
    waiting: list[tuple[bool, ...]] = [()]
    for _ in range(MOST_PATHS):
        if not waiting:
            return
        taken = waiting.pop()
        for sample in samples:
            walk = Walk(taken, sample)
            try:
                derived: Derived | None = walk.follow(module)
            except Ended:
                derived = None
            except (*CANNOT, NotInterpreted):
                continue
            waiting += walk.turns()
            if derived is not None:
                yield derived
            break
        else:
            yield UNDERIVED
            return
    yield UNDERIVED


class Walk(ScriptInterpreter):
    """Follows one path: ``taken`` are its first decisions on sizes, and the later ones are yes."""

    def __init__(self, taken: tuple[bool, ...], sample: Sample) -> None:
        super().__init__()
        self._given, self._decided = taken, list[bool]()
        self.env = UnspecializedShapeEnv()
        self._mode = UnspecializedFakeMode(self.env)
        self.names: dict[sympy.Symbol, str] = {}  # sizes of the arguments' tensors
        self._places: dict[tuple[int, int], Any] = {}
        self._written: set[int] = set()
        self._views: dict[int, tuple[Any, View]] = {}
        self._alive: list[Any] = []  # ids stay unique
        leaves, self._spec = pytree.tree_flatten(sample)
        tensors = iter(range(len(leaves)))
        self._entries = [
            self._placed(next(tensors), leaf) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in leaves
        ]
        self._inputs = [leaf for leaf in self._entries if isinstance(leaf, torch.Tensor)]

    def follow(self, module: Any) -> Derived:
        with self._mode, dispatched_in_python():
            entries = pytree.tree_unflatten(self._entries, self._spec)
            outputs = self.call_module(module, "forward", entries, "")
        leaves = pytree.tree_leaves(outputs)
        if not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
            raise NotInterpreted("a result that is no tensor")
        results = tuple(self._result(leaf, leaves[:k]) for k, leaf in enumerate(leaves))
        fixed = {place: self._fixed(size) for place, size in self._places.items()}
        return Derived(
            results,
            frozenset(self._written),
            {place: size for place, size in fixed.items() if size is not None},
        )

    def turns(self) -> Iterator[tuple[bool, ...]]:
        """The paths that part from this one behind its first decisions."""
        for count in range(len(self._given), len(self._decided)):
            yield (*self._decided[:count], not self._decided[count])

    def decide(self, condition: Any) -> bool:
        if not isinstance(condition, (torch.SymBool, torch.SymInt)):
            return super().decide(condition)
        known = self.env._maybe_evaluate_static(condition.node.expr)
        if known is not None:
            return bool(known)
        place = len(self._decided)
        self._decided.append(self._given[place] if place < len(self._given) else True)
        return self._decided[place]

    def call(self, overload: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self._note_writes(overload, args, kwargs)
        result = result_of(overload, args, kwargs)
        if not overload._schema.is_mutable and args and isinstance(args[0], torch.Tensor):
            parts = result if isinstance(result, (list, tuple)) else (result,)
            for k, part in enumerate(parts):
                if isinstance(part, torch.Tensor) and part is not args[0]:
                    place = k if isinstance(result, (list, tuple)) else None
                    self._note_view(part, overload, args, kwargs, place)
        return list(result) if isinstance(result, tuple) and len(result) > 1 else result

    def call_module(self, module: Any, method: str, inputs: Sequence[Any], name: str) -> Any:
        """Of a cluster, its original: an engine answers alike."""
        if method == "forward" and module.hasattr("fallback"):
            return self.call_module(module.getattr("fallback"), method, inputs, "fallback")
        return super().call_module(module, method, inputs, name)

    def constant(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )

    def _placed(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        fake = self._mode.from_tensor(
            tensor,
            source=ConstantSource(f"x{index}"),
            symbolic_context=StatelessSymbolicContext(
                dynamic_sizes=[DimDynamic.DYNAMIC] * tensor.dim()
            ),
        )
        for axis, size in enumerate(fake.shape):
            self._places[index, axis] = size
            if isinstance(size, torch.SymInt):
                self.names.setdefault(size.node.expr, f"x{index}.{axis}")
        return fake

    def _note_writes(self, overload: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        schema = overload._schema
        if not schema.is_mutable:
            return
        positional = [a for a in schema.arguments if not a.kwarg_only]
        pairs = [*zip(positional, args), *((a, kwargs.get(a.name)) for a in schema.arguments)]
        for argument, value in pairs:
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for tensor in pytree.tree_leaves(value):
                self._written |= {k for k, x in enumerate(self._inputs) if _share(x, tensor)}

    def _note_view(
        self,
        result: torch.Tensor,
        overload: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        part: int | None,
    ) -> None:
        if _share(result, args[0]):
            view = View(overload, self._texts(tuple(args[1:])), self._texts(dict(kwargs)), part)
            self._views[id(result)] = args[0], view
            self._alive += (result, args[0])

    def _texts(self, value: Any) -> Any:
        return pytree.tree_map(
            lambda leaf: (
                ViewSize(postfix(leaf.node.expr, self.names))
                if isinstance(leaf, torch.SymInt)
                else leaf
            ),
            value,
        )

    def _result(self, fake: torch.Tensor, earlier: Sequence[torch.Tensor]) -> Result:
        sizes = tuple(self._text(size) for size in fake.shape)
        return Result(
            fake.dtype, fake.device, tuple(range(fake.dim())), sizes, self._alias(fake, earlier)
        )

    def _text(self, size: Any) -> str:
        if not isinstance(size, torch.SymInt):
            return postfix(size, {})
        return postfix(self.env.simplify(size.node.expr), self.names)

    def _alias(self, fake: torch.Tensor, earlier: Sequence[torch.Tensor]) -> Alias | None:
        views: list[View] = []
        now = fake
        while True:
            for kind, known in (("input", self._inputs), ("result", earlier)):
                found = next((k for k, one in enumerate(known) if one is now), None)
                if found is not None:
                    return Alias(kind, found, tuple(reversed(views)))
            if id(now) not in self._views:
                return None
            now, view = self._views[id(now)]
            if UNKNOWN in repr((view.args, view.kwargs)) or "Tensor(" in repr(view.args):
                return None
            views.append(view)

    def _fixed(self, size: Any) -> int | None:
        if not isinstance(size, torch.SymInt):
            return int(size)
        known = self.env.simplify(size.node.expr)
        return int(known) if isinstance(known, sympy.Integer) else None


def _share(one: Any, other: Any) -> bool:
    return (
        isinstance(one, torch.Tensor)
        and isinstance(other, torch.Tensor)
        and one.untyped_storage()._cdata == other.untyped_storage()._cdata
    )
