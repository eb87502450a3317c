# SPDX-License-Identifier: Apache-2.0
"""The reference semantics of DISC IR: each op as a torch expression.

    interpret(graph, [x, y]) -> list of output tensors

Slow and simple on purpose; tests compare compiled programs with it, and constant folding uses its ops.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch

from blade.backends.disc.frontend.ops import group_moments as moments
from blade.backends.disc.frontend.ops.table import OperandSlot
from blade.backends.disc.ir import attention, convolution, flash_attention
from blade.backends.disc.ir.graph import Graph, Value, contiguous_strides
from blade.backends.disc.ir.kernel import ACCUMULATIONS, evaluate
from blade.backends.disc.ir.loop import body_of
from blade.backends.disc.ir.pointwise import POINTWISE_REFERENCE, cast
from blade.backends.disc.reference import quantized as int8_reference
from blade.graph.shapes.symbolic import is_late

REDUCTION_REFERENCE: dict[str, Callable[[torch.Tensor, tuple[int, ...]], torch.Tensor]] = {
    "sum": lambda x, axes: x.sum(dim=axes, keepdim=True, dtype=x.dtype),
    "max": lambda x, axes: _extremum(x, axes, torch.amax, lowest),
    "min": lambda x, axes: _extremum(x, axes, torch.amin, highest),
    "any": lambda x, axes: torch.any(x, dim=axes, keepdim=True),
    "all": lambda x, axes: torch.all(x, dim=axes, keepdim=True),
}


def lowest(dtype: torch.dtype) -> float:
    """The identity of a maximum."""
    if dtype == torch.bool:
        return False
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def highest(dtype: torch.dtype) -> float:
    """The identity of a minimum."""
    if dtype == torch.bool:
        return True
    return math.inf if dtype.is_floating_point else torch.iinfo(dtype).max


def _extremum(
    x: torch.Tensor,
    axes: tuple[int, ...],
    function: Callable[..., torch.Tensor],
    identity: Callable[[torch.dtype], float],
) -> torch.Tensor:
    if any(x.shape[a] == 0 for a in axes):
        shape = [1 if k in axes else d for k, d in enumerate(x.shape)]
        return x.new_full(shape, identity(x.dtype))
    return function(x, dim=axes, keepdim=True)


def interpret(graph: Graph, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Run ``graph`` on real tensors; sizes are taken from ``inputs``."""
    return _run(graph, inputs, _sizes(graph, inputs))


def _run(
    graph: Graph, inputs: Sequence[torch.Tensor], sizes: dict[sympy.Basic, int]
) -> list[torch.Tensor]:
    env: dict[int, Any] = {}
    for value in graph.values:
        args = [env[a.id] for a in value.args]
        of_loop = value.op == "item" and value.args[0].op == "loop"
        if value.op in ("call", "item", "read") and not of_loop:
            env[value.id] = _called(value, args, sizes)
        shape = [evaluate(d, sizes) for d in value.shape]
        if value.id not in env:
            env[value.id] = _step(value, args, shape, sizes, graph, inputs)
        if isinstance(env[value.id], torch.Tensor):
            assert list(env[value.id].shape) == shape, (str(value), env[value.id].shape, shape)
    return [env[v.id] for v in graph.outputs]


def _sizes(graph: Graph, inputs: Sequence[torch.Tensor]) -> dict[sympy.Basic, int]:
    sizes: dict[sympy.Basic, int] = {}
    for value, tensor in zip(graph.inputs, inputs, strict=True):
        for dim, size in zip(value.shape, tensor.shape, strict=True):
            if isinstance(dim, sympy.Symbol):
                sizes[dim] = size
    for symbol, (index, axis) in graph.origins.items():
        sizes[symbol] = inputs[index].shape[axis]
    return sizes


def _called(v: Value, args: list[Any], sizes: dict[sympy.Basic, int]) -> Any:
    """The result of a call, or one of several, or a number; ``sizes`` learns those that depend on elements."""
    if v.op == "read":
        sizes[v.attrs["symbol"]] = int(args[0])
        return args[0]
    if v.op == "item":
        made = args[0][v.attrs["index"]]
    else:
        made = _call(v.attrs["target"], [_argument(t, args, sizes) for t in v.attrs["template"]])
    first = made if isinstance(made, torch.Tensor) else next(x for x in made if x is not None)
    for dim, size in zip(v.shape, first.shape, strict=True):
        if is_late(dim):
            sizes.setdefault(dim, size)
    return made


def _step(
    v: Value,
    args: list[Any],
    shape: list[int],
    sizes: Mapping[sympy.Basic, int],
    graph: Graph,
    inputs: Sequence[torch.Tensor],
) -> Any:
    a = v.attrs
    if v.op == "input":
        return inputs[a["index"]]
    if v.op == "const":
        return graph.constants[a["index"]]
    if v.op == "written":
        made = inputs[a["input"]].clone()
        if "axis" in a:
            return _call(a["target"], [_argument(t, [made, *args], sizes) for t in a["template"]])
        starts = [evaluate(d, sizes) for d in a["starts"]]
        places = zip(starts, args[0].shape, strict=True)
        made[tuple(slice(start, start + size) for start, size in places)] = args[0]
        return made
    if v.op in ("fill", "size"):
        number = evaluate(a["value"], sizes) if v.op == "size" else a["value"]
        return torch.full(shape, number, dtype=v.dtype)
    if v.op == "iota":
        view = [-1 if k == a["axis"] else 1 for k in range(len(shape))]
        return torch.arange(shape[a["axis"]], dtype=v.dtype).reshape(view).expand(shape)
    if v.op == "cast":
        return cast(args[0], v.dtype)
    if v.is_pointwise:
        return POINTWISE_REFERENCE[v.op](*args)
    if v.op == "reduce":
        return _reduce(v, args[0])
    if v.op == "loop":
        return _loop(v, args, graph, sizes)
    if v.op == "carried":
        return args[0][0][a["index"]]
    if v.op == "item" and v.args[0].op == "loop":
        results = args[0][1]
        return (
            torch.stack([one[a["index"]] for one in results])
            if results
            else torch.empty(shape, dtype=v.dtype)
        )
    return _structural(v, args, shape, sizes)


def _loop(
    v: Value, args: list[Any], graph: Graph, sizes: Mapping[sympy.Basic, int]
) -> tuple[list[Any], list[list[Any]]]:
    """The state after the last iteration, and the results of each."""
    body = body_of(v)
    inner = replace(body.graph, constants=graph.constants)
    state, given = args[: body.carried], args[body.carried :]
    results: list[list[Any]] = []
    for index in range(evaluate(v.attrs["count"], sizes)):
        outputs = _run(inner, [*state, *given], {**sizes, body.index: index})
        state = outputs[: body.carried]
        results.append(outputs[body.carried :])
    return state, results[::-1] if body.backwards else results


def _call(target: Any, args: list[Any]) -> Any:
    arguments = target._schema.arguments
    named = {a.name: x for a, x in zip(arguments, args, strict=True) if a.kwarg_only}
    return target(*args[: len(args) - len(named)], **named)


def _reduce(v: Value, x: torch.Tensor) -> torch.Tensor:
    kind, axes = v.attrs["kind"], v.attrs["axes"]
    if kind == "prod":
        for axis in axes:
            x = x.prod(dim=axis, keepdim=True, dtype=x.dtype)
        return x
    return REDUCTION_REFERENCE[kind](x, axes)


def _structural(
    v: Value, args: list[Any], shape: list[int], sizes: Mapping[sympy.Basic, int]
) -> Any:
    a = v.attrs
    if v.op == "broadcast":
        view = [1] * len(shape)
        for axis, place in enumerate(a["axes"]):
            view[place] = args[0].shape[axis]
        return args[0].reshape(view).expand(shape)
    if v.op == "permute":
        return args[0].permute(a["perm"])
    if v.op == "reshape":
        return args[0].reshape(shape)
    if v.op == "slice":
        x = args[0]
        for axis, (start, step) in enumerate(zip(a["starts"], a["steps"], strict=True)):
            first = evaluate(start, sizes)
            x = x.index_select(axis, first + torch.arange(shape[axis]) * step)
        return x
    if v.op == "window":
        return _window(args[0], a, shape, sizes)
    if v.op == "gather":
        return _gather(args[0], args[1], a["axis"], a["axes"])
    if v.op == "scatter":
        return _scatter(v, args[0], args[1], shape)
    if v.op == "concat":
        return torch.cat(args, a["axis"])
    if v.op == "packed":
        return torch.cat(args).to(v.dtype)
    if v.op == "linear":
        return torch.nn.functional.linear(*args)
    if v.op in ("int8_linear", "int8_conv"):
        return int8_reference.product(v, args)
    if v.op == "scaled_linear":
        return int8_reference.scaled(v, args)
    if v.op == "weight_only_linear":
        x, w, scales, bias = args
        scales, points = scales.chunk(2, 1) if v.attrs.get("zeros") else (scales, None)
        size = w.shape[1] // scales.shape[1]
        wide = w if points is None else w - points.repeat_interleave(size, 1)
        return torch.nn.functional.linear(x, wide * scales.repeat_interleave(size, 1), bias)
    if v.op == "dequantize":
        return _dequantize(v, *args)
    if v.op == "matmul":
        product = torch.matmul(*args[:2])
        return product + args[2] if len(args) == 3 else product
    if v.op == "conv":
        return convolution.reference(v, args, shape)
    if v.op == "conv_weight_gradient":
        return convolution.weight_gradient(v, *args)
    if v.op == "spatial":
        return _spatial(v, args, sizes)
    if v.op == "attention":
        return attention.reference(v, *args)
    if v.op == "group_moments":
        return moments.reference(v, *args)
    if v.op in ("flash_attention", "flash_attention_gradient"):
        return flash_attention.reference(v, *args)
    raise AssertionError(str(v))


def _dequantize(v: Value, x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
    kind = v.attrs["kind"]
    if kind == "tensor":
        y: torch.Tensor = (x.to(v.dtype) - v.attrs["zero"]) * v.attrs["scale"]
        return y
    if kind == "column":
        shape = [-1 if k == v.attrs["axis"] else 1 for k in range(x.dim())]
        parameters = tuple(p.reshape(shape) for p in parameters)
    if kind == "group":
        size = x.shape[1] // parameters[0].shape[1]
        parameters = tuple(p.repeat_interleave(size, 1) for p in parameters)
    scale, *zero = parameters
    x = x.float() if x.is_floating_point() else x
    return ((x - zero[0] if zero else x) * scale).to(v.dtype)


def _spatial(v: Value, args: list[Any], sizes: Mapping[sympy.Basic, int]) -> torch.Tensor:
    rank = len(v.shape)
    images = [x.permute(convolution.to_channels_first(rank)) for x in args]
    y: torch.Tensor = _call(
        v.attrs["target"], [_argument(t, images, sizes) for t in v.attrs["template"]]
    )
    return y.permute(convolution.to_channels_last(rank))


def _window(
    x: torch.Tensor,
    attrs: Mapping[str, Any],
    shape: list[int],
    sizes: Mapping[sympy.Basic, int],
) -> torch.Tensor:
    index = [torch.tensor(evaluate(start, sizes)) for start in attrs["starts"]]
    for k, walk in enumerate(attrs["walks"]):
        along = torch.arange(shape[k]).reshape([-1 if i == k else 1 for i in range(len(shape))])
        for axis, step in walk:
            index[axis] = index[axis] + along * evaluate(step, sizes)
    return x[tuple(index)].expand(shape) if index else x.expand(shape)


def _gather(
    x: torch.Tensor, index: torch.Tensor, axis: int, axes: Sequence[int | None]
) -> torch.Tensor:
    return x[_places(index, axes)]


def _places(index: torch.Tensor, axes: Sequence[int | None]) -> tuple[torch.Tensor, ...]:
    """Per axis the positions that ``index`` and the own places of its elements name."""
    places = []
    for place in axes:
        view = [-1 if k == place else 1 for k in range(index.dim())]
        own = None if place is None else torch.arange(index.shape[place]).view(view)
        places.append(index.long() if own is None else own.expand(index.shape))
    return tuple(places)


def _scatter(
    v: Value, index: torch.Tensor, source: torch.Tensor, shape: Sequence[int]
) -> torch.Tensor:
    """The values that go to one element are combined in float64."""
    result = torch.full(shape, ACCUMULATIONS[v.attrs["kind"]], dtype=torch.float64)
    strides = contiguous_strides(tuple(shape))
    place = sum(p * s for p, s in zip(_places(index, v.attrs["axes"]), strides, strict=True))
    assert isinstance(place, torch.Tensor), v
    kind = {"sum": "sum", "max": "amax"}[v.attrs["kind"]]
    flat = result.flatten().scatter_reduce(0, place.flatten(), source.double().flatten(), kind)
    return flat.view(shape).to(v.dtype)


def _argument(template: Any, args: list[Any], sizes: Mapping[sympy.Basic, int]) -> Any:
    if isinstance(template, OperandSlot):
        return args[template]
    if isinstance(template, tuple):
        return [_argument(t, args, sizes) for t in template]
    return evaluate(template, sizes) if isinstance(template, sympy.Expr) else template
