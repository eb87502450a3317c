# SPDX-License-Identifier: Apache-2.0
"""Layout copies in the GPU programs of training steps, read without a GPU: what moves values between orders of axes.

    python benchmarks/gpu_layouts.py darknet_detector edsr       # a line per model of the suite
    python benchmarks/gpu_layouts.py --batch 8 --each conformer  # and one per copy

Forward and backward are fused as for a GPU, from the graphs of a step under autocast to bfloat16 on the CPU. Of four
kinds of copies it tells the bytes, and their share of all bytes that kernels and library calls move:

    copy     a kernel does nothing else
    convert  a kernel only converts the dtype, into another order
    strided  a kernel reads a tensor against the order in which it writes
    call     ATen's convolution copies an operand that lies in another order than the one it computes in
"""

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.fx import GraphModule

import blade
from blade.backends.disc.compiler import copies_of
from blade.backends.disc.frontend.lower import lower
from blade.backends.disc.fusion.build_kernels import GroupKernel, build_kernel
from blade.backends.disc.fusion.fuse import Fused, FusionGroup, fuse
from blade.backends.disc.fusion.shorten_lives import shorten_lives
from blade.backends.disc.gpu.passes.pipeline import FORMS, passes
from blade.backends.disc.ir.graph import Graph, Value, contiguous_strides
from blade.backends.disc.ir.kernel import Access, Compute, Gather, Load, Reduce, Store
from blade.backends.disc.ir.views import view_of
from blade.clustering.cluster import cluster
from blade.config import Config
from blade.dynamo import forward_backward, narrow_places, saved_layouts
from blade.dynamo.rewrites import apply_rewrites
from blade.graph.fx.extract import extract_fx
from blade.graph.fx.view import view_fx
from blade.partition.support import resolve, support

aten = torch.ops.aten
BATCH = 8
KINDS = ("copy", "convert", "strided", "call")


@dataclass(frozen=True)
class LayoutCopy:
    """``of``: the value that is copied, as text."""

    kind: str
    of: str
    shape: tuple[int, ...]
    moved: int  # bytes


@dataclass(frozen=True)
class Layouts:
    """What is copied in a program; ``moved``: the bytes that all of it moves."""

    copies: tuple[LayoutCopy, ...]
    moved: int
    fused: Fused

    @property
    def copied(self) -> int:
        return sum(copy.moved for copy in self.copies)


def training_layouts(module: nn.Module, inputs: Sequence[torch.Tensor]) -> dict[str, list[Layouts]]:
    """The programs for forward and for backward of ``module``, one for each graph and cluster."""
    found: dict[str, list[Layouts]] = {"forward": [], "backward": []}
    cut = forward_backward.partition

    def spy(*args: Any, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        both = cut(*args, **kwargs)
        for name, gm in zip(found, both, strict=True):
            found[name] += map(layouts_of, _fused(gm))
        return both

    with (
        mock.patch("blade.dynamo.backends.partition", spy),
        mock.patch("blade.dynamo.backends.compile_fx", lambda gm, *_: _zeros_of(gm)),
        mock.patch.object(saved_layouts, "_is_on_cpu", lambda value: False),
        mock.patch.object(narrow_places, "_is_on_cpu", lambda image: False),
        torch.autocast("cpu", dtype=torch.bfloat16),
    ):
        torch._dynamo.reset()
        torch.compile(module, backend=blade.dynamo.aot_disc, dynamic=False)(*inputs)
    return found


def _zeros_of(gm: GraphModule) -> Any:
    """A stand-in for ``gm``, which computes nothing."""
    [returned] = gm.graph.output_node().args
    assert isinstance(returned, (list, tuple))
    values = [getattr(node, "meta", {}).get("val", node) for node in returned]
    return lambda *_: [
        torch.zeros_like(v, device="cpu") if isinstance(v, torch.Tensor) else v for v in values
    ]


def _fused(gm: GraphModule) -> Iterator[Fused]:
    """The clusters of ``gm`` after the GPU's passes."""
    config = Config(optimization_pipeline="DISC")
    apply_rewrites(gm.graph)
    view = view_fx(gm.graph)
    backends, _ = resolve(config)
    labels = support(view.nodes, view.excluded, backends, config).labels
    for group in cluster(view.problem(labels, config.min_cluster_size)).groups:
        made = extract_fx("cluster", view, group.nodes, {}).cluster
        graph = lower(made.gm, made.shape_env, False, made.updates, FORMS)
        yield fused_for_gpu(graph)


def fused_for_gpu(graph: Graph) -> Fused:
    for _, run in passes(None):
        graph = run(graph)
    return shorten_lives(fuse(graph, repeats=True))


def layouts_of(fused: Fused) -> Layouts:
    """The layout copies of a program with known sizes."""
    copies: list[LayoutCopy] = []
    moved = 0
    for unit in fused.units:
        if isinstance(unit, FusionGroup):
            kernels = [build_kernel(unit, fused)]
        elif unit.op == "concat":
            kernels = [*copies_of(unit, fused)]
        else:
            kernels = []
            copies += _of_call(unit)
            if unit.op not in ("item", "carried"):
                moved += sum(map(_bytes, (*unit.args, unit)))
        for built in kernels:
            copies += _of_kernel(built)
            moved += _moved(built)
    return Layouts(tuple(copies), moved, fused)


def _of_kernel(built: GroupKernel) -> Iterator[LayoutCopy]:
    kernel = built.kernel
    dims = (*kernel.outer, kernel.inner)
    stores = [s.access for s in kernel.body if isinstance(s, Store)]
    loads = [s.access for s in kernel.body if isinstance(s, Load)]
    computes = any(
        isinstance(s, (Reduce, Gather)) or (isinstance(s, Compute) and s.op != "cast")
        for s in kernel.body
    )
    whole = [a for a in stores if _is_whole(a, dims)]
    if not computes:
        for access in loads[: len(loads) if whole else 0]:
            converts = kernel.args[access.arg].dtype != kernel.args[whole[0].arg].dtype
            if not converts or _last(access, dims) != _last(whole[0], dims):
                one = _access_bytes(access, dims, built) + _access_bytes(whole[0], dims, built)
                yield LayoutCopy(
                    "convert" if converts else "copy",
                    _text(built.buffers[access.arg]),
                    _ints(dims),
                    one,
                )
        return
    full = [a for a in loads if _is_whole(a, dims)]
    orders = [_last(a, dims) for a in (whole or full)]
    for access in full:
        if orders and _last(access, dims) != max(orders, key=orders.count):
            yield LayoutCopy(
                "strided",
                _text(built.buffers[access.arg]),
                _ints(dims),
                _access_bytes(access, dims, built),
            )


def _of_call(v: Value) -> Iterator[LayoutCopy]:
    """Operands that ATen's convolutions make contiguous; they compute in 16 bits with channels last."""
    if v.op == "conv":
        operands: Sequence[Value] = v.args[1:2]
    elif v.op == "call" and v.attrs["target"] is aten.convolution_backward.default:
        operands = v.args[:2]
    else:
        return
    for a in operands:
        # lines [N, C, L] are made row-major before anything else
        if not _is_dense(a, last=v.op == "conv" or len(a.shape) > 3):
            yield LayoutCopy("call", _text(a), _ints(a.shape), 2 * _bytes(a))


def _is_dense(v: Value, last: bool) -> bool:
    """Whether ``v`` [N, C, *spatial] is contiguous, row-major or with channels ``last``."""
    view = view_of(v)
    assert view is not None, v
    axes = [0, *range(2, len(v.shape)), 1] if last else [*range(len(v.shape))]
    dense = contiguous_strides([v.shape[k] for k in axes])
    return all(
        v.shape[k] == 1 or view.strides[k] == step for k, step in zip(axes, dense, strict=True)
    )


def _is_whole(access: Access, dims: Sequence[Any]) -> bool:
    return all(step != 0 for d, step in zip(dims, access.strides, strict=True) if d != 1)


def _last(access: Access, dims: Sequence[Any]) -> int:
    """The axis along which the elements lie closest."""
    steps = [
        (abs(int(s)), k)
        for k, (d, s) in enumerate(zip(dims, access.strides, strict=True))
        if d != 1 and s != 0
    ]
    return min(steps, default=(0, len(dims) - 1))[1]


def _moved(built: GroupKernel) -> int:
    dims = (*built.kernel.outer, built.kernel.inner)
    accesses = {s.access for s in built.kernel.body if isinstance(s, (Load, Store, Gather))}
    return sum(_access_bytes(a, dims, built) for a in accesses)


def _access_bytes(access: Access, dims: Sequence[Any], built: GroupKernel) -> int:
    count = math.prod(int(d) for d, s in zip(dims, access.strides, strict=True) if s != 0)
    return count * built.kernel.args[access.arg].dtype.itemsize


def _bytes(v: Value) -> int:
    return math.prod(_ints(v.shape)) * v.dtype.itemsize


def _ints(shape: Sequence[Any]) -> tuple[int, ...]:
    return tuple(map(int, shape))


def _text(v: Value) -> str:
    target = v.attrs.get("target")
    inner = (
        f" of {v.args[0].attrs['target']}" if v.op == "item" and "target" in v.args[0].attrs else ""
    )
    return f"%{v.id} {v.op}{'' if target is None else f' {target}'}{inner}"


def main() -> None:
    from suite.registry import ENTRIES

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", choices=list(ENTRIES), metavar="MODEL")
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--each", action="store_true", help="a line per copy, too")
    parser.add_argument("--dump", help="a folder for the programs after fusion")
    given = parser.parse_args()
    for name in given.models:
        torch.manual_seed(0)
        model = ENTRIES[name].build("small")
        inputs = model.inputs((given.batch, *model.fixed[0][1:]), 0)
        found = training_layouts(model.module.train(), inputs)
        words = []
        for side, programs in found.items():
            for k, one in enumerate(programs if given.dump else ()):
                path = Path(given.dump) / f"{name}_{side}_{k}.txt"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(f"{one.fused.graph}\n\n{one.fused}\n", encoding="utf-8")
            copies = [c for one in programs for c in one.copies]
            moved = sum(one.moved for one in programs)
            copied = sum(one.copied for one in programs)
            kinds = {k: [c.moved for c in copies if c.kind == k] for k in KINDS}
            parts = ", ".join(f"{len(v)} {k} {sum(v) / 1e6:.1f} MB" for k, v in kinds.items() if v)
            words.append(f"{side} {copied / max(moved, 1):.1%} of {moved / 1e6:.0f} MB ({parts})")
            if given.each:
                for c in sorted(copies, key=lambda c: -c.moved):
                    print(f"    {side} {c.kind} {c.moved / 1e6:.2f} MB {list(c.shape)} {c.of}")
        print(f"{name} | " + " | ".join(words), flush=True)


if __name__ == "__main__":
    sys.exit(main())
