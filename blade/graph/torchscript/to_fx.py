# SPDX-License-Identifier: Apache-2.0
"""Converts a group to an FX graph of ATen ops with symbolic shapes.

Straight-line TorchScript needs one FX call per line and no tracing: each call runs once on fake tensors,
only to learn the shapes and the guards that they rely on. Nothing is decomposed (``aten.linear`` stays
``aten.linear``): lowering is the backend's decision.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from blade.core.reason import Code
from blade.core.torch_modes import takes_numbers
from blade.errors import Refused
from blade.graph.fx.writer import (
    CANNOT,
    FxWriter,
    value_of,
    writing,
)
from blade.graph.shapes.observed_layout import example_tensor, order_in
from blade.graph.shapes.symbolic import is_symbolic
from blade.graph.torchscript.bind_overloads import (
    resolve,
    split_arguments,
    to_python,
    trim_defaults,
)
from blade.graph.torchscript.boundary import Boundary
from blade.graph.torchscript.boundary_scalars import tensor_form
from blade.graph.torchscript.describe import source
from blade.graph.torchscript.loops_to_fx import write_loop
from blade.graph.torchscript.program import Line
from blade.graph.torchscript.scalar_lines import (
    CHAIN,
    COMPARISONS,
    EXACT,
    FROM_CHAIN,
    READS,
    ROOTS,
    ROUNDING,
)
from blade.graph.torchscript.scalars_to_fx import FOLDS, FUNCTIONS, LISTS, PASS_THROUGH
from blade.graph.torchscript.view import GraphView

_DISGUISED_DTYPE = torch.int64
"""Dtype of ``prim::NumToTensor`` of an int, and of integer arithmetic on it."""
_OF_NUMBERS = CHAIN | FROM_CHAIN | COMPARISONS | {"aten::where"}
"""Kinds that take a number where a constant 0-d tensor stands."""
_SOMETHING = 8
"""A size for axes that are empty in all samples; numbers of heads and groups mostly divide it."""


def to_fx(
    view: GraphView,
    boundary: Boundary,
    examples: Sequence[tuple[torch.Tensor, ...]],
    fixed: Callable[[str, int], bool] | None = None,
    varied: bool | None = None,
    samples: Sequence[tuple[torch.Tensor, ...]] = (),
) -> tuple[torch.fx.GraphModule, ShapeEnv]:
    """FX module of ``boundary``'s lines and the environment its symbols live in.

    ``examples`` are real inputs, best first: a size symbol takes its hint from the first one whose size is
    neither 0 nor 1. ``varied``: they come from more than one run of the model (default: if there are
    several), so every size that can vary did. ``samples``: the examples that are the user's own. Raises ``Refused``
    naming the line that cannot be expressed.
    """
    assert examples, boundary
    varied = len(examples) > 1 if varied is None else varied
    with writing():
        try:
            return _build(view, boundary, examples, fixed, varied, samples)
        except Refused:
            if all(t.numel() for example in examples for t in example):
                raise
        # Shape functions ask whether one size divides another, which fails for 0.
        filled = [tuple(map(_filled, example)) for example in examples]
        return _build(view, boundary, filled, fixed, varied, ())


def _build(
    view: GraphView,
    boundary: Boundary,
    examples: Sequence[tuple[torch.Tensor, ...]],
    fixed: Callable[[str, int], bool] | None,
    varied: bool,
    samples: Sequence[tuple[torch.Tensor, ...]],
) -> tuple[torch.fx.GraphModule, ShapeEnv]:
    """The conversion; again with sizes of 1 that stay so where shape functions took them for larger ones.

    To a shape function no symbol is 1, so that it does not broadcast it but makes it equal to the other size, and
    the user's own sample would not be served.
    """
    builder = _FxGraphBuilder(view, boundary)
    made = builder.build(examples, fixed, varied)
    broadcast = frozenset(place for sample in samples for place in builder.contradicted(sample))
    if not broadcast:
        return made
    return _FxGraphBuilder(view, boundary, broadcast=broadcast).build(examples, fixed, varied)


def _filled(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, or a non-empty one of its form if it is empty."""
    if tensor.numel():
        return tensor
    sizes = [n or _SOMETHING for n in tensor.shape]
    return torch.empty(sizes, dtype=tensor.dtype, device=tensor.device)


class _FxGraphBuilder:
    """State of a conversion: FX node (or plain number) and fake value of each TorchScript value."""

    def __init__(
        self,
        view: GraphView,
        boundary: Boundary,
        around: FxWriter | None = None,
        broadcast: frozenset[tuple[int, int]] = frozenset(),
    ) -> None:
        self.view = view
        self.boundary = boundary
        self.broadcast = broadcast  # (input, axis) of sizes that are 1
        self.placed: dict[tuple[int, int], Any] = {}  # the symbols of sizes, by (input, axis)
        self.writer = FxWriter(around)
        self.in_loop = around is not None
        self.nodes: dict[int, Any] = {}
        self.slots: dict[int, torch.fx.Node] = {}
        self.tensors: dict[tuple[int, torch.device | None], torch.fx.Node] = {}
        self.device: torch.device | None = None  # device of the current op

    def build(
        self,
        examples: Sequence[tuple[torch.Tensor, ...]],
        fixed: Callable[[str, int], bool] | None,
        varied: bool,
    ) -> tuple[torch.fx.GraphModule, ShapeEnv]:
        self._place_inputs(examples, fixed, varied)
        self.convert(self.boundary.lines)
        gm = self.writer.finish([self.nodes[v] for v in self.boundary.outputs])
        return gm, self.writer.shape_env

    def convert(self, lines: Sequence[int]) -> None:
        program = self.view.program
        by_head = {self.view.units[n].lines[0]: n for n in self.boundary.nodes}
        for index in lines:
            if index not in by_head:
                continue  # unpacks a list: converted with the line that makes the list
            line = program.lines[index]
            try:
                if line.blocks:
                    self._loop(line)
                else:
                    self._call(line, self.view.units[by_head[index]].picks, by_head[index])
            except CANNOT as error:
                name = self.view.nodes[by_head[index]].name
                first = str(error).strip().split("\n")[0]
                detail = f"{name} cannot be expressed with symbolic shapes: {first}"
                raise Refused(Code.CONVERSION_FAILED, detail) from error

    def _place_inputs(
        self,
        examples: Sequence[tuple[torch.Tensor, ...]],
        fixed: Callable[[str, int], bool] | None,
        varied: bool,
    ) -> None:
        for i, value in enumerate(self.boundary.inputs):
            seen = [example[i] for example in examples]
            name = self.view.program.values[value].debugName()
            from_caller = value in self.view.program.inputs
            dynamic = [
                DimDynamic.STATIC
                if _is_settled([t.shape[d] for t in seen], varied and not from_caller)
                or (fixed is not None and fixed(name, d))
                or (i, d) in self.broadcast
                else DimDynamic.DYNAMIC
                for d in range(seen[0].dim())
            ]
            like = example_tensor(seen, order_in(self.view.facts[0], value))
            for d in range(like.dim()):
                like = like.narrow(d, 0, 1) if (i, d) in self.broadcast else like
            self.nodes[value] = self.writer.place(f"x{i}", like, dynamic, f"%{name}")
            for d, size in enumerate(value_of(self.nodes[value]).shape):
                if isinstance(size, torch.SymInt):
                    self.placed[i, d] = size.node.expr

    def contradicted(self, sample: Sequence[torch.Tensor]) -> Iterator[tuple[int, int]]:
        """Sizes of inputs that are 1 in ``sample``, and something else by what shape functions concluded."""
        sizes = {symbol: sample[i].shape[d] for (i, d), symbol in self.placed.items()}
        for i, d in self.placed:
            size = value_of(self.nodes[self.boundary.inputs[i]]).shape[d]
            if sample[i].shape[d] == 1 and size.node.expr.xreplace(sizes) != 1:
                yield i, d

    def _call(self, line: Line, picks: tuple[int, ...], unit: int) -> None:
        overload = resolve(line.node)
        if overload is None:
            raise TypeError(f"{line.kind} is not an ATen operator")
        self.device = next((v.device for v in self.view.nodes[unit].outputs), None)
        values = {
            argument.name: to_python(argument, self._operand(overload, argument, value, line))
            for argument, value in zip(overload._schema.arguments, line.inputs, strict=True)
        }
        if line.index in self.view.scalars and not self.in_loop:
            overload = tensor_form(overload)
        args, kwargs = trim_defaults(overload, *split_arguments(overload, values))
        node = self.emit(overload, args, kwargs, line)
        results = self.view.units[unit].results
        if not picks and len(results) == 1:
            self.writer.lay_out(node, order_in(self.view.facts[0], results[0]))
            self.nodes[results[0]] = node
            return
        for value, position in zip(results, picks or range(len(results)), strict=True):
            self.nodes[value] = self.emit(operator.getitem, (node, position), {}, line)

    def _loop(self, line: Line) -> None:
        body = _FxGraphBuilder(self.view, self.boundary, self.writer)
        self.nodes.update(write_loop(self, body, line))

    def emit(
        self, target: Callable[..., Any], args: Any, kwargs: dict[str, Any], line: Line
    ) -> torch.fx.Node:
        return self.writer.emit(target, args, kwargs, source(line))

    def _operand(
        self, overload: torch._ops.OpOverload, argument: torch._C.Argument, value: int, line: Line
    ) -> Any:
        """``argument``; a number that was traced into a tensor becomes one again if the op takes
        no numbers.
        """
        found = self.argument(value)
        if type(found) not in (bool, int, float) or argument.type.kind() != "TensorType":
            return found
        name = overload._schema.name.partition("::")[2]
        if takes_numbers(name):
            return found
        form = {"dtype": self.view.program.tensor_dtype(value), "device": self.device}
        return self.emit(torch.ops.aten.scalar_tensor.default, (found,), form, line)

    def argument(self, value: int) -> Any:
        """The FX argument for ``value``: a node, a plain Python value, or a list of them.

        A 0-d integer tensor that stands for a size becomes a tensor again as an argument of a real op. It
        is made on the device of that op's result: torch accepts a CPU scalar everywhere, an engine does
        not.
        """
        found = self.evaluate(value)
        line = self.view.program.maker(value)
        if isinstance(found, list) or line is None or line.kind == "prim::Constant":
            return found
        disguised = line.index in self.view.scalar_lines and self.view.program.is_tensor(value)
        return self._as_tensor(value, found, line) if disguised else found

    def _as_tensor(self, value: int, number: Any, line: Line) -> torch.fx.Node:
        key = value, self.device
        if key not in self.tensors:
            target = torch.ops.aten.scalar_tensor.default
            form = {"dtype": _DISGUISED_DTYPE, "device": self.device}
            self.tensors[key] = self.emit(target, (number,), form, line)
        return self.tensors[key]

    def evaluate(self, value: int) -> Any:
        """FX node or Python value of ``value``; converts its scalar producers first."""
        if value in self.nodes:
            return self.nodes[value]
        line = self.view.program.maker(value)
        assert line is not None and line.index in self.view.scalar_lines, value
        self.nodes[value] = made = self._cheap(line, value)
        return made

    def _cheap(self, line: Line, value: int) -> Any:
        if line.kind == "prim::Constant":
            return self._constant(value)
        if line.kind == "prim::TupleConstruct":
            return tuple(self.evaluate(v) for v in line.inputs)
        if line.kind == "prim::ListConstruct":
            tensors = self.view.program.values[value].type().getElementType().kind()
            numbers = tensors in ("IntType", "FloatType", "BoolType", "NumberType")
            read = self.evaluate if numbers else self.argument
            return [read(v) for v in line.inputs]
        if line.kind == "aten::where":  # the comparison itself is not needed
            return self._greater_or_smaller(line, *(self._number(line, v) for v in line.inputs[1:]))
        inputs = [self._number(line, v) for v in line.inputs]
        if line.kind in READS and isinstance(value_of(inputs[0]), torch.Tensor):
            return self._read(line, inputs[0])
        if line.kind in PASS_THROUGH:
            return inputs[0]
        if line.kind == "aten::size":
            return self._sizes(line, *inputs)
        if line.kind == "aten::len" and isinstance(inputs[0], torch.fx.Node):
            return self._size(line, inputs[0], 0)
        if line.kind == "aten::numel":
            return self._numel(line, inputs[0])
        if inputs and isinstance(inputs[0], (list, tuple)):
            return self._of_list(line, inputs, line.outputs.index(value))
        if line.kind == "aten::divmod":
            both = ("aten::floordiv", "aten::remainder")
            return self._apply(FUNCTIONS[both[line.outputs.index(value)]], inputs, line)
        if line.kind in _OF_TENSOR:
            return _OF_TENSOR[line.kind](value_of(inputs[0]))
        return self._arithmetic(line, inputs)

    def _of_list(self, line: Line, inputs: list[Any], output: int) -> Any:
        """The result of an op on a list of numbers: a number, or a list of them."""
        if line.kind in ("prim::ListUnpack", "prim::TupleUnpack"):
            return inputs[0][output]
        if line.kind in FOLDS and len(inputs) == 1:
            function = FUNCTIONS[FOLDS[line.kind]]
            return reduce(lambda a, b: self._apply(function, [a, b], line), inputs[0] or [0])
        if line.kind not in LISTS:
            raise NotImplementedError(f"{line.kind} of a list of sizes has no FX form")
        return LISTS[line.kind](*inputs)

    def _number(self, line: Line, value: int) -> Any:
        """``value`` as ``line`` wants it: in arithmetic on sizes a constant 0-d tensor is its number."""
        held = self.view.program.tensor_constant(value)
        if held is not None and held.dim() == 0 and line.kind in _OF_NUMBERS:
            return held.item()
        return self.evaluate(value)

    def _constant(self, value: int) -> Any:
        if self.view.program.tensor_constant(value) is None:
            return self.view.program.held(value)
        slot = self.boundary.slots[self.boundary.constants.index(value)]
        if slot not in self.slots:
            name = self.view.program.values[value].debugName()
            self.slots[slot] = self.writer.hold(slot, self.boundary.tensors[slot], f"%{name}")
        return self.slots[slot]

    def _sizes(self, line: Line, tensor: torch.fx.Node, axis: int | None = None) -> Any:
        rank = tensor.meta["val"].dim()
        if axis is not None:
            return self._size(line, tensor, axis % rank)
        return [self._size(line, tensor, d) for d in range(rank)]

    def _size(self, line: Line, tensor: torch.fx.Node, axis: int) -> Any:
        return self.writer.size(tensor, axis, source(line))

    def _numel(self, line: Line, tensor: torch.fx.Node) -> Any:
        count = tensor.meta["val"].numel()
        if not is_symbolic(count):
            return count
        return self.emit(torch.ops.aten.sym_numel.default, (tensor,), {}, line)

    def _read(self, line: Line, tensor: torch.fx.Node) -> torch.fx.Node:
        """The int in ``tensor``, a size. A negative one is declined when the engine runs."""
        aten = torch.ops.aten
        if value_of(tensor).dtype is not torch.int64:
            tensor = self.emit(aten.to.dtype, (tensor, torch.int64), {}, line)
        number = self.emit(aten._local_scalar_dense.default, (tensor,), {}, line)
        torch._check(number.meta["val"] >= 0)
        return number

    def _arithmetic(self, line: Line, inputs: list[Any]) -> Any:
        if line.kind == "aten::rsub":
            own, other, *alpha = inputs
            inputs = [other, self._scaled(line, own, alpha[0] if alpha else 1)]
            return self._apply(FUNCTIONS["aten::sub"], inputs, line)
        if line.kind in ROOTS and self.view.program.is_tensor(line.outputs[0]):
            return self._root(line, inputs[0])
        if line.kind in ("aten::to", "aten::Bool"):  # no effect on a size, or what compares sizes
            return inputs[0]
        if line.kind == "aten::div" and len(inputs) == 3:
            if inputs[2] is None:
                return self._apply(FUNCTIONS["aten::div"], inputs[:2], line)
            return self._quotient(line, *inputs)
        if line.kind in ROUNDING and (parts := _quotient_of(inputs[0])) is not None:
            return self._rounded(line, *parts)
        if line.kind == "aten::clamp":
            return self._bounded(line, *inputs)
        if line.kind in ("prim::abs", "aten::abs"):
            negative = self._apply(FUNCTIONS["aten::neg"], inputs, line)
            return self._apply(FUNCTIONS["prim::max"], [inputs[0], negative], line)
        if line.kind in ("aten::__lshift__", "aten::__rshift__"):
            by = self._apply(FUNCTIONS["aten::pow"], [2, inputs[1]], line)
            kind = "aten::mul" if line.kind == "aten::__lshift__" else "aten::floordiv"
            return self._apply(FUNCTIONS[kind], [inputs[0], by], line)
        if line.kind in ("aten::add", "aten::sub") and (parts := _quotient_of(inputs[0])):
            number, by = (
                parts  # an integer more or less is one of the numerator, times the denominator
            )
            more = self._scaled(line, by, inputs[1])
            sum_ = self._apply(FUNCTIONS[line.kind], [number, more], line)
            return self._apply(FUNCTIONS["aten::div"], [sum_, by], line)
        function = FUNCTIONS.get(line.kind)
        if function is None:
            raise NotImplementedError(f"{line.kind} of a size has no FX form")
        if (
            line.kind in ("aten::add", "aten::sub") and len(inputs) == 3
        ):  # on 0-d tensors there is an alpha
            inputs = [inputs[0], self._scaled(line, inputs[1], inputs[2])]
        return self._apply(function, inputs, line)

    def _bounded(self, line: Line, number: Any, low: Any = None, high: Any = None) -> Any:
        if low is not None:
            number = self._apply(FUNCTIONS["prim::max"], [number, low], line)
        if high is not None:
            number = self._apply(FUNCTIONS["prim::min"], [number, high], line)
        return number

    def _greater_or_smaller(self, line: Line, a: Any, b: Any) -> Any:
        """``where(a > b, a, b)`` or the like."""
        order = self.view.program.maker(line.inputs[0])
        assert order is not None
        kind = "prim::max" if order.kind in ("aten::gt", "aten::ge") else "prim::min"
        return self._apply(FUNCTIONS[kind], [a, b], line)

    def _root(self, line: Line, number: Any) -> Any:
        """The integer part of a square root; of a tensor it is exact where ``number`` is below ``EXACT``, a guard."""
        torch._check(value_of(number) < EXACT)
        root = self._apply(FUNCTIONS["aten::sqrt"], [number], line)
        return self._apply(FUNCTIONS["aten::Int"], [root], line)

    def _rounded(self, line: Line, number: Any, by: Any) -> Any:
        """A quotient rounded up or down, in integers; of a tensor it is exact where ``number`` is below ``EXACT``,
        which becomes a guard.
        """
        if self.view.program.is_tensor(line.outputs[0]):
            torch._check(value_of(number) < EXACT)
        floor, minus = FUNCTIONS["aten::floordiv"], FUNCTIONS["aten::neg"]
        if line.kind == "aten::floor":
            return self._apply(floor, [number, by], line)
        negative = self._apply(minus, [number], line)
        return self._apply(minus, [self._apply(floor, [negative, by], line)], line)

    def _quotient(self, line: Line, number: Any, by: Any, mode: str) -> Any:
        """A quotient rounded down or towards zero; whether these differ becomes a guard unless it
        is known.
        """
        floor, minus = FUNCTIONS["aten::floordiv"], FUNCTIONS["aten::neg"]
        is_positive = bool(value_of(number) >= 0) == bool(value_of(by) > 0)
        if mode == "floor" or is_positive:
            return self._apply(floor, [number, by], line)
        up = self._apply(floor, [self._apply(minus, [number], line), by], line)
        return self._apply(minus, [up], line)

    def _scaled(self, line: Line, number: Any, alpha: Any) -> Any:
        if not isinstance(alpha, torch.fx.Node) and alpha == 1:
            return number
        return self._apply(FUNCTIONS["aten::mul"], [number, alpha], line)

    def _apply(self, function: Callable[..., Any], inputs: list[Any], line: Line) -> Any:
        return self.writer.number(function, inputs, source(line))


_OF_TENSOR: dict[str, Callable[[Any], Any]] = {
    "aten::dim": lambda t: t.dim(),
    "aten::is_floating_point": lambda t: t.is_floating_point(),
    "prim::dtype": lambda t: t.dtype,
    "prim::device": lambda t: t.device,
    "prim::layout": lambda t: t.layout,
    "prim::is_cuda": lambda t: t.device.type == "cuda",
    "prim::is_cpu": lambda t: t.device.type == "cpu",
    "prim::type": lambda device: device.type,
}
"""Properties that do not depend on the shape: folded, because guards check dtype and device."""


def _quotient_of(number: Any) -> tuple[Any, Any] | None:
    """The integers whose quotient ``number`` is, if it is one."""
    if not isinstance(number, torch.fx.Node) or number.target is not FUNCTIONS["aten::div"]:
        return None
    a, b = number.args
    is_int = all(isinstance(value_of(one), (int, torch.SymInt)) for one in (a, b))
    return (a, b) if is_int else None


def _is_settled(sizes: Sequence[int], varied: bool) -> bool:
    """Whether an axis with these sizes in all runs is a number rather than a symbol.

    A size of 1 everywhere is a broadcast axis: as a symbol it could not be broadcast. Between clusters, a
    size that no run changes comes from a weight, because runs vary every size that can vary. Sizes that a
    caller passes stay symbolic; if the ops force one to a number, a guard says so.
    """
    same = all(size == sizes[0] for size in sizes)
    return same and (sizes[0] == 1 or varied)
