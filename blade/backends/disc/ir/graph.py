# SPDX-License-Identifier: Apache-2.0
"""DISC IR: a small functional graph with symbolic shapes. The whole grammar:

    input i | const i                     tensors from outside
    fill value | size expr | iota         scalars and 0..n-1 along `axis`, at any shape
    <pointwise> a b c                     names in kernel.POINTWISE; operands have the result's shape
    broadcast a {axes}                    axis k of `a` becomes axis axes[k]; every other axis is new
    permute a {perm} | reshape a          reshape keeps the row-major order of elements
    slice a {starts, steps}               element start + step * i along each axis
    window a {starts, walks}              result axis k moves `step` along axis `a` for each (a, step) of walks[k]
    concat a b ... {axis}
    written x {input, starts}             the new contents of an input, in its memory: x from `starts` on, the rest as
    written i x {input, axis, target}     it was; or x at the index i along `axis`, put by `target` on a CPU
                                          (update_in_place.py)
    gather a i t? {axis, axes, asserts?}  index i along `axis` of `a`; its other axes k are the result's axes[k];
                                          i has the result's shape and is in bounds once the check t has run,
                                          or, with `asserts`, is checked by the kernel
    scatter i x {axis, axes, kind}        GPU: every point of x goes to index i along `axis` of the result, whose other
                                          axes k are x's axes[k], and is combined there: `kind` is sum or max; i has
                                          x's shape and is checked by the kernel
    reduce a {kind, axes}                 keeps reduced axes with size 1
    linear x w bias?                      x @ w.T + bias over the last axis of x
    dequantize x scale? zero? {kind}      (x - zero) * scale; kind: `tensor` (both are numbers), one of each per
                                          `row`, along `axis` (`column`), or per `group` of a row
    int8_linear x w ws bias s? z? {scale, zero}
                                          (x - zero - z) @ w.T * (ws * scale * s) + bias; x uint8, w int8; ws and
                                          bias per column, s and z per row; further attributes requantize:
                                          clamp(round(y * inverse) + point, low, high)
    int8_conv x w ws bias {scale, zero, stride, padding, dilation}
                                          the same for a `conv` of one group; padding has the value `zero`
    weight_only_linear x w ws bias {bits, zeros?}
                                          x @ ((w - z) * ws).T + bias; ws per group of a row of w; with `zeros`, the
                                          last half of ws is z, else z is 0
    scaled_linear x w ws bias s? {scale}  x @ w.T * (ws * scale * s) + bias; x and w both int8 or both fp8; ws and
                                          bias per column, s per row
    matmul a b bias?                      batched over equal leading axes; bias per column
    conv x w bias? residual? {stride, padding, dilation, groups, activation, transposed, trailing?}
                                          channels last: x [N, *spatial, C], w [O, C/groups, *kernel]
    conv_weight_gradient grad x w {stride, padding, dilation, groups, transposed, output_padding}
                                          the gradient of a conv's weight, channels last (convolution.py)
    attention q k v bias? sink? {scale, cap, causal, undefined, fill, sink, hides, heads}
                                          softmax(scale * q @ k.T + bias) @ v over equal leading axes; the last
                                          `heads` of them follow the query axis in the result
    group_moments x {groups, eps}         mean and 1/deviation of x [N, C, *pixels] over each group of channels,
                                          f32 [2, N, C] (group_moments.py)
    flash_attention q k v bias? {scale, causal}
    flash_attention_gradient g q k v logs delta bias? {scale, causal}
                                          attention and its gradient for training (flash_attention.py)
    packed a b ... {pack}                 copies of constants, concatenated along axis 0, in the value's dtype,
                                          made once per loaded engine
    spatial x {target, template}          an ATen op on images, with channels-last data like a conv's
    call ... {target, args, draw?}        any other ATen op, through the dispatcher; `draw` numbers the calls that
                                          draw random numbers (random_calls.py)
    item a {index}                        one result of a call with several, or of all iterations of a loop
    read a {symbol}                       the element of a 0-d int64, which becomes the size `symbol`; also calls
                                          make sizes that depend on elements (late_sizes.py)
    loop a b ... {body, count}            `count` iterations of a nested graph (loop.py); the state at the start,
                                          then what every iteration reads
    carried a {index}                     a state of a loop after its last iteration

Shapes are tuples of ints and sympy expressions over size symbols. Relations between sizes (``Graph.facts``)
are part of the graph and printed with it. Equal expressions are one value.

    %3 f32[s0, s1, 384] = add %1 %2
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch

from blade.backends.disc.ir.kernel import POINTWISE, Dim
from blade.backends.disc.ir.late_sizes import late_operands, makers
from blade.program.dtypes import DTYPES

Shape = tuple[Dim, ...]
LAYOUT = ("broadcast", "permute", "reshape", "slice", "window")
LEAVES = ("fill", "size", "iota")


@dataclass(frozen=True, eq=False)
class Value:
    """One node of the graph and its (only) result; compared by identity.

    ``strides`` is set where the memory layout is part of the meaning: results of ``call``s.
    """

    id: int
    op: str
    args: tuple["Value", ...]
    attrs: Mapping[str, Any]
    shape: Shape
    dtype: torch.dtype
    strides: Shape | None = None

    def __str__(self) -> str:
        words = [f"%{a.id}" for a in self.args]
        words += [f"{k}={_text(v)}" for k, v in self.attrs.items()]
        kind = f"{_dtype(self.dtype)}[{', '.join(map(str, self.shape))}]"
        return f"%{self.id} {kind} = {self.op} {' '.join(words)}".rstrip()

    @property
    def is_pointwise(self) -> bool:
        return self.op in POINTWISE

    @property
    def is_layout(self) -> bool:
        return self.op in LAYOUT

    @property
    def is_fusible(self) -> bool:
        """Whether a kernel of several values may compute it."""
        return self.is_pointwise or self.op in ("reduce", "gather", "scatter")


@dataclass(frozen=True)
class SizeRelation:
    """A relation between sizes that the program relies on; guarded at run time."""

    relation: sympy.Basic
    source: str = ""


@dataclass
class Graph:
    """Values in topological order, the outputs, and the relations between sizes that hold.

    ``storages[i]`` numbers the tensor whose memory output i may share: an input, or, counted on from the
    number of inputs, an output. Empty: unconstrained.
    ``origins``: size symbol -> its (input, axis); empty: derived from the inputs' shapes.
    ``updates``: the last outputs are not returned; they are the new contents of the inputs with these
    indices.
    """

    values: list[Value] = field(default_factory=list)
    outputs: tuple[Value, ...] = ()
    output_strides: tuple[Shape, ...] = ()
    inputs: tuple[Value, ...] = ()
    constants: tuple[torch.Tensor, ...] = ()
    facts: tuple[SizeRelation, ...] = ()
    storages: tuple[int, ...] = ()
    origins: Mapping[sympy.Symbol, tuple[int, int]] = field(default_factory=dict)
    updates: tuple[int, ...] = ()

    @property
    def returned(self) -> tuple[Value, ...]:
        return self.outputs[: len(self.outputs) - len(self.updates)]

    @property
    def updated(self) -> tuple[tuple[Value, Value], ...]:
        """(new contents, input) for each input that is written."""
        new = self.outputs[len(self.outputs) - len(self.updates) :]
        return tuple((v, self.inputs[i]) for v, i in zip(new, self.updates, strict=True))

    def __str__(self) -> str:
        lines = [f"fact {fact.relation}" for fact in self.facts]
        lines += [str(v) for v in self.values]
        lines.append("return " + " ".join(f"%{v.id}" for v in self.returned))
        lines += [f"update %{into.id} %{v.id}" for v, into in self.updated]
        return "\n".join(lines)

    def users(self) -> dict[int, list[Value]]:
        """Value id -> its readers, one entry per use."""
        users: dict[int, list[Value]] = {v.id: [] for v in self.values}
        for value in self.values:
            for arg in value.args:
                users[arg.id].append(value)
        return users


class IrBuilder:
    """Creates values and shares equal ones. ``rules`` may replace a new value with a simpler one."""

    def __init__(self, rules: Mapping[str, Sequence["Rule"]] | None = None) -> None:
        self.values: list[Value] = []
        self.facts: dict[sympy.Basic, SizeRelation] = {}
        self._rules = rules or {}
        self._shared: dict[Any, Value] = {}

    def make(
        self,
        op: str,
        args: Sequence[Value],
        shape: Sequence[Dim],
        dtype: torch.dtype,
        strides: Shape | None = None,
        **attrs: Any,
    ) -> Value:
        """A value with this content: simplified by the rules, and shared if it already exists."""
        value = Value(-1, op, tuple(args), attrs, tuple(map(plain, shape)), dtype, strides)
        for rule in self._rules.get(op, ()):
            simpler = rule(self, value)
            if simpler is not None:
                assert simpler.shape == value.shape and simpler.dtype == value.dtype, (
                    f"{value}\n{simpler}"
                )
                return simpler
        key = (op, tuple(a.id for a in args), _key(attrs), value.shape, dtype, strides)
        if key not in self._shared:
            numbered = Value(len(self.values), op, value.args, attrs, value.shape, dtype, strides)
            self.values.append(numbered)
            self._shared[key] = numbered
        return self._shared[key]

    def nested(self) -> "IrBuilder":
        """An empty builder with the same rules, for the body of a loop."""
        return IrBuilder(self._rules)

    def pointwise(self, op: str, *args: Value, dtype: torch.dtype | None = None) -> Value:
        """A pointwise op over operands of one shape."""
        shape = args[0].shape
        assert all(a.shape == shape for a in args), (op, [a.shape for a in args])
        return self.make(op, args, shape, dtype or args[-1].dtype)

    def fill(self, value: Any, shape: Sequence[Dim], dtype: torch.dtype) -> Value:
        """A scalar (Python number or size expression) at every point of ``shape``."""
        value = plain(value) if isinstance(value, sympy.Expr) else value
        if isinstance(value, sympy.Expr):
            return self.make("size", (), shape, dtype, value=value)
        kind: Any = bool if dtype == torch.bool else float if dtype.is_floating_point else int
        kind = complex if dtype.is_complex else kind
        return self.make("fill", (), shape, dtype, value=kind(value))

    def cast(self, value: Value, dtype: torch.dtype) -> Value:
        """Convert elements to ``dtype``; ``value`` itself if it has that dtype."""
        if value.dtype == dtype:
            return value
        return self.pointwise("cast", value, dtype=dtype)

    def broadcast(self, value: Value, shape: Sequence[Dim]) -> Value:
        """Expand to ``shape`` by numpy's rule: axes are aligned at the end, and axes of size 1 repeat."""
        shape = tuple(map(plain, shape))
        if value.shape == shape:
            return value
        shift = len(shape) - len(value.shape)
        keep = [k for k, d in enumerate(value.shape) if not (d == 1 and shape[k + shift] != 1)]
        kept = tuple(value.shape[k] for k in keep)
        core = value if kept == value.shape else self.reshape(value, kept)
        return self.make(
            "broadcast", (core,), shape, value.dtype, axes=tuple(k + shift for k in keep)
        )

    def reshape(self, value: Value, shape: Sequence[Dim]) -> Value:
        shape = tuple(map(plain, shape))
        return value if value.shape == shape else self.make("reshape", (value,), shape, value.dtype)

    def permute(self, value: Value, perm: Sequence[int]) -> Value:
        perm = tuple(perm)
        if perm == tuple(range(len(perm))):
            return value
        shape = tuple(value.shape[p] for p in perm)
        return self.make("permute", (value,), shape, value.dtype, perm=perm)

    def slice(self, value: Value, axis: int, start: Dim, step: int, size: Dim) -> Value:
        """``size`` elements along ``axis`` from ``start`` in steps of ``step``."""
        rank = len(value.shape)
        shape = tuple(plain(size) if k == axis else d for k, d in enumerate(value.shape))
        if shape == value.shape and start == 0 and step == 1:
            return value
        starts = tuple(plain(start) if k == axis else 0 for k in range(rank))
        steps = tuple(step if k == axis else 1 for k in range(rank))
        return self.make("slice", (value,), shape, value.dtype, starts=starts, steps=steps)

    def reduce(self, kind: str, value: Value, axes: Iterable[int]) -> Value:
        """Reduce over ``axes``, which keep size 1."""
        axes = tuple(sorted(axes))
        shape = tuple(1 if k in axes else d for k, d in enumerate(value.shape))
        return self.make("reduce", (value,), shape, value.dtype, kind=kind, axes=axes)

    def require(self, relation: Any, source: str = "") -> None:
        """Rely on ``relation`` between sizes, which holds for the samples and is guarded at run time."""
        if relation is not sympy.true and relation is not True:
            self.facts.setdefault(relation, SizeRelation(relation, source))


Rule = Callable[[IrBuilder, Value], Value | None]


def rewrite(graph: Graph, rules: Mapping[str, Sequence[Rule]]) -> Graph:
    """Rebuild ``graph`` through ``rules``, without values that no output needs."""
    builder = IrBuilder(rules)
    for fact in graph.facts:
        builder.facts.setdefault(fact.relation, fact)
    new: dict[int, Value] = {}
    for value in live(graph):
        args = [new[a.id] for a in value.args]
        new[value.id] = builder.make(
            value.op, args, value.shape, value.dtype, value.strides, **value.attrs
        )
    outputs = tuple(new[v.id] for v in graph.outputs)
    inputs = tuple(new[v.id] for v in graph.inputs)
    rebuilt = Graph(
        builder.values,
        outputs,
        graph.output_strides,
        inputs,
        graph.constants,
        tuple(builder.facts.values()),
        graph.storages,
        graph.origins,
        graph.updates,
    )
    rebuilt.values = live(rebuilt)
    return rebuilt


def live(graph: Graph) -> list[Value]:
    """Values that an output depends on, all inputs and all random draws, in topological order."""
    needed = {v.id for v in (*graph.outputs, *graph.inputs)}
    needed.update(v.id for v in graph.values if "draw" in v.attrs)
    late = late_operands(graph.values)
    by_facts = {s for f in graph.facts for s in f.relation.free_symbols} if late else set()
    needed.update(v.id for s, v in makers(graph.values).items() if s in by_facts)
    for value in reversed(graph.values):
        if value.id in needed:
            needed.update(a.id for a in (*value.args, *late.get(value.id, ())))
    return [v for v in graph.values if v.id in needed]


def plain(dim: Any) -> Dim:
    """A size as an int if it is known, else as a sympy expression."""
    if isinstance(dim, torch.SymInt):
        dim = dim.node.expr
    if isinstance(dim, sympy.Expr):
        return int(dim) if dim.is_number else dim
    return int(dim)


def numel(shape: Sequence[Dim]) -> Dim:
    """Number of elements, as an expression."""
    total: Any = 1
    for dim in shape:
        total = total * dim
    return plain(total)


def contiguous_strides(shape: Sequence[Dim]) -> Shape:
    """Row-major strides, in elements."""
    strides: list[Dim] = []
    step: Any = 1
    for dim in reversed(shape):
        strides.insert(0, plain(step))
        step = step * dim
    return tuple(strides)


def _key(attrs: Mapping[str, Any]) -> tuple[Any, ...]:
    # repr distinguishes 0.0 from -0.0 and 1 from True, and makes nan equal to itself.
    return tuple((k, repr(v)) for k, v in attrs.items())


def _text(value: Any) -> str:
    return str(value).replace(" ", "")


def _dtype(dtype: torch.dtype) -> str:
    return DTYPES[dtype]
