# SPDX-License-Identifier: Apache-2.0
"""Writes docs/disc.md: one expression after every stage of DISC, in the compiler's own dumps.

    python docs/make_disc.py            # rewrites the page beside this file
    python docs/make_disc.py PATH       # writes it to PATH

The targets are fixed, so that the page is the same on every machine; no GPU is needed or used.
"""

import os
import re
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # with a GPU the compiler would measure, and decide by that

import torch

import blade
from blade.backends import registry
from blade.backends.disc.backend import DiscBackend
from blade.backends.disc.compiler import compile_graph
from blade.backends.disc.frontend.lower import lower
from blade.backends.disc.fusion.build_kernels import build_kernel
from blade.backends.disc.fusion.fuse import FusionGroup, fuse
from blade.backends.disc.ir.kernel import (
    Access,
    Compute,
    Const,
    Kernel,
    Load,
    Reduce,
    Store,
)
from blade.backends.disc.passes.pipeline import PASSES
from blade.backends.disc.target.cpu import CpuTarget
from blade.backends.disc.target.gpu import GpuTarget
from blade.core.cluster import Cluster
from blade.core.reason import Code
from blade.errors import Refused
from blade.program.dtypes import DTYPES

CPU = CpuTarget(("avx2", "fma", "f16c"), 8)
GPU = GpuTarget(arch=90)
DEPTH, COLUMNS, ROWS = 64, 8, 5  # eight columns: a row is one vector


class Weights(torch.nn.Module):
    """The expression, with ``w`` and ``b`` as parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.randn(DEPTH, COLUMNS))
        self.b = torch.nn.Parameter(torch.randn(COLUMNS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x @ self.w + self.b, dim=-1)


class Arguments(torch.nn.Module):
    """The expression, with ``w`` and ``b`` as inputs of every call."""

    def forward(self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x @ w + b, dim=-1)


class Transposed(Weights):
    """The expression, with the rows of ``x`` along its last axis."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x.transpose(0, 1) @ self.w + self.b, dim=-1)


class Selected(torch.nn.Module):
    """A size that depends on elements."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.exp(x[x > 0]) + 1


class Recorder(DiscBackend):
    """DISC as ``blade.optimize`` sees it, except that it keeps the first cluster and builds no engine."""

    name = "recorder"

    def __init__(self) -> None:
        self.cluster: Cluster | None = None

    def convert(self, cluster: Cluster, config: blade.Config) -> torch.ScriptObject:
        self.cluster = self.cluster or cluster
        raise Refused(Code.NOT_TRIED, "Only the cluster is of interest.")


@dataclass(frozen=True)
class Stages:
    """``dumps``: (name, text) in the order in which the compiler wrote them."""

    fx: str
    dumps: tuple[tuple[str, str], ...]

    def __getitem__(self, name: str) -> str:
        return dict(self.dumps)[name]

    def passes(self) -> list[str]:
        names = [name for name, _ in self.dumps]
        return names[1 : names.index("fuse")]

    def changes(self) -> Iterator[tuple[str, str]]:
        """(pass, difference) for each pass that changed more than the numbers of values."""
        for (_, before), (name, after) in zip(self.dumps, self.dumps[1:], strict=False):
            if name in self.passes() and (found := difference(before, after)):
                yield name, found


def capture(model: torch.nn.Module, *inputs: torch.Tensor) -> Cluster:
    """The cluster that ``blade.optimize`` hands to DISC for ``model``."""
    recorder = Recorder()
    registry.register(recorder)
    try:
        config = blade.Config(
            optimization_pipeline=recorder.name, min_cluster_size=1, cache=False, timing=False
        )
        blade.optimize(model.eval(), inputs, config)
    finally:
        registry.unregister(recorder.name)
    assert recorder.cluster is not None
    return recorder.cluster


def compile_in_stages(
    cluster: Cluster, target: CpuTarget | GpuTarget, half: torch.dtype | None = None
) -> Stages:
    """What the compiler dumps for ``cluster``; size symbols are s0, s1, .. as they appear."""
    with tempfile.TemporaryDirectory() as folder:
        compile_graph(cluster.gm, cluster.shape_env, target, Path(folder), half=half)
        dumps = [
            (p.stem[3:], p.read_text(encoding="utf-8")) for p in sorted(Path(folder).iterdir())
        ]
    numbered = renumber(fx_text(cluster.gm))
    code = ("mlir", "triton", "program")
    dumps = [(name, text if name in code else numbered(text)) for name, text in dumps]
    return Stages(numbered(fx_text(cluster.gm)), tuple((name, t.rstrip("\n")) for name, t in dumps))


def renumber(text: str) -> Callable[[str], str]:
    """A function that gives the size symbols of ``text`` the names s0, s1, .. in any other text."""
    found = dict.fromkeys(re.findall(r"\bs\d+\b", text))
    names = {name: f"s{k}" for k, name in enumerate(found)}
    return lambda other: re.sub(r"\bs\d+\b", lambda m: names.get(m[0], m[0]), other)


def fx_text(gm: torch.fx.GraphModule) -> str:
    """A line per node: its type, its name, what computes it."""
    lines = []
    for node in gm.graph.nodes:
        if node.op == "output":
            lines.append(f"return {', '.join(map(str, node.args[0]))}")
            continue
        value = node.meta["val"]
        shape = ", ".join(map(str, value.shape))
        arguments = ", ".join(map(str, node.args))
        made = {"placeholder": "input", "get_attr": "constant"}.get(node.op)
        lines.append(
            f"{node.name}: {DTYPES[value.dtype]}[{shape}] = {made or f'{node.target}({arguments})'}"
        )
    return "\n".join(lines)


def difference(before: str, after: str) -> str:
    """Lines that went and came; values that only have another number are no difference."""
    old, new = before.splitlines(), after.splitlines()
    plain = [[re.sub(r"%\d+", "%", line) for line in lines] for lines in (old, new)]
    lines: list[str] = []
    for kind, i, j, k, m in SequenceMatcher(None, *plain, autojunk=False).get_opcodes():
        if kind != "equal":
            lines += [f"- {line}" for line in old[i:j]] + [f"+ {line}" for line in new[k:m]]
    return "\n".join(re.sub(r"pack=Packed\(.*\)", "pack=...", line) for line in lines)


def kernel_of(cluster: Cluster) -> Kernel:
    """The kernel of the first fusion group on CPU."""
    graph = lower(cluster.gm, cluster.shape_env)
    for _, run_pass in PASSES:
        graph = run_pass(graph)
    fused = fuse(graph)
    groups = [unit for unit in fused.units if isinstance(unit, FusionGroup)]
    return build_kernel(groups[0], fused).kernel


def kernel_text(kernel: Kernel) -> str:
    """The form that ``Kernel``'s module describes."""

    def element(access: Access) -> str:
        terms = [f"{s}*d{k}".replace("1*d", "d") for k, s in enumerate(access.strides) if s != 0]
        return f"p{access.arg}[{' + '.join(terms)}]"

    def statement(k: int, s: Any) -> str:
        match s:
            case Load():
                return f"%{k} = load {element(s.access)} : {DTYPES[s.dtype]}"
            case Const():
                return f"%{k} = const {s.value} : {DTYPES[s.dtype]}"
            case Compute():
                return f"%{k} = {s.op} {' '.join(f'%{a}' for a in s.args)} : {DTYPES[s.dtype]}"
            case Reduce():
                return f"%{k} = reduce {s.kind} %{s.arg} : {DTYPES[s.dtype]}"
            case Store():
                return f"store {element(s.access)} %{s.value}"
        raise AssertionError(s)

    head = f"outer [{', '.join(map(str, kernel.outer))}]  inner {kernel.inner}"
    return "\n".join([head, *(statement(k, s) for k, s in enumerate(kernel.body))])


def first_function(mlir: str) -> str:
    """Of all functions of a program the first, which is the fusion group's."""
    return mlir.partition("\n}\n")[0] + "\n}"


def block(text: str, language: str = "") -> str:
    return f"```{language}\n{text.strip()}\n```"


def changes(text: str, stages: Stages) -> str:
    parts = [text]
    for name, text in stages.changes():
        parts += [f"`{name}`:", block(text, "diff")]
    return "\n\n".join(parts)


def names(head: str, passes: Sequence[str]) -> str:
    """A paragraph: ``head``, and the passes in their order."""
    text = f"{head} {', '.join(f'`{name}`' for name in passes)}."
    return textwrap.fill(text, 110, break_on_hyphens=False)


PAGE = """\
# DISC, stage by stage

This page follows one expression, `softmax(x @ w + b)`, through the compiler. `x` has any number of rows and
{depth} columns. `w` ({depth} x {columns}) and `b` ({columns}) are parameters. `docs/make_disc.py` generates
the page from the compiler's own dumps, and a test keeps it up to date. `Config(dump_dir="...")` writes the
same stages for any model.

The targets are fixed: a CPU with AVX2 (vectors of 8 floats) and a GPU of architecture sm_90.

## FX: the cluster

Capture, support and clustering hand a backend an FX graph of ATen ops. Sizes that may vary are symbols:
`s0` is the number of rows. Parameters are constants, the same tensors that the fallback uses.

{fx}

## IR: lowering

Lowering writes every ATen op in a small set of ops (the grammar is the docstring of the IR's module). A
product is `linear`, which takes its weight as `[out, in]`; hence the `permute`, which is a view. `softmax`
becomes its definition: subtract the maximum of a row, `exp`, divide by the sum. Broadcasts are explicit:
operands of a pointwise op have the shape of its result. What is looked up in or resampled from constants at
sizes that are numbers becomes a constant here (`static_parts.py`).

{lowered}

## IR: the passes

A pass takes a graph and returns a graph.

{cpu_passes}

{gpu_passes}

With `enable_fp16` or `enable_bf16` the GPU has one more: `{half_pass}`. With `enable_bf16` a CPU that multiplies
bfloat16 has two more: {narrow_passes}.

Each pass looks for one pattern. The expression above has none of them, so all passes leave it as it is.
These variants show a pass at work; `-` and `+` mark values that went and came.

{variants}

## Fusion groups

Fusion puts pointwise ops and reductions that walk one shape into one kernel. A group without a reduction is
a `loop`, with one a `row`, with several that depend on each other a `stitch`. Values that something outside
the group reads are `stored`. Library ops, here `linear`, stay between the groups; views cost nothing and
are not listed. A sum has at most four terms in one group: all that a kernel reads is in memory when it begins.

{fused}

## Kernel

A group becomes a kernel: an iteration space, and statements for one point of it. `outer` dimensions times
one `inner` dimension are the space, `d0, d1, ..` are its indices, `p0, p1, ..` the buffers. A `reduce` runs
over `inner` and has the same value at every point of a row. The kernel does not say in how many loops a row
is computed. That is the emitter's decision.

{kernel}

## CPU: MLIR

The CPU emitter walks a row three times: the maximum; `exp` and the sum; the division. Results of `exp` wait
in scratch memory, whose pointer follows those of the buffers (`%9`). The function takes the pointers, the
integers (sizes and strides) and the range of rows to compute: the executor splits the rows over threads.
`exp` is a polynomial on vectors. LLVM compiles the function to an object. The product is a GEMM of DISC's
own, whose text is too long for this page.

{mlir}

## CPU: program

The program is what the C++ runtime reads (FORMAT.md has the grammar). Registers hold sizes and what is
computed from them, once per set of input sizes. The guard sends a call with another number of columns to
the original. The `packs` run at the engine's first call: one lays the weight out for the GEMM, one makes a
bias of zeros. The `arena` slot is memory of the engine that other slots may share. A `kernel` names its
code, then three registers (extent, cost, bytes of scratch memory), then slots and integers.

{program}

## GPU: Triton

The same kernel in Triton. One program of the grid computes several rows at once, so that a row stays in
registers and is read once. `gdc_wait` and `gdc_launch_dependents` overlap the start of a launch with the
end of the one before it (programmatic dependent launch). `n0` is the number of rows; {columns}, the length
of a row, is a literal.

{triton}

## GPU: program

Kernels are `launch`es over a grid of registers. The product is a call of ATen (cuBLAS) here: on a machine
with a GPU DISC measures it against kernels of its own, and writes both with a condition (`when`) where each
is best at some sizes.

{gpu_program}

## Sizes that depend on elements

How many elements `exp(x[x > 0]) + 1` has is known when the mask is. Torch names such a size `u0`. The call
that makes it cuts no cluster: values that need `u0` wait for the call, in fusion too.

{late_fused}

In the program `u0` is a `late` register. It gets its value from the result of the call, and the runtime
prepares what follows from it, here an output and a kernel's extent, behind that call. Had `u0` to be equal to
another size, a guard would say so, and would be checked there.

{late_program}
"""

ARGUMENTS = """\
**`w` and `b` are inputs of every call (CPU).** To pack a weight pays only if it stays the same. The
`linear` becomes a `matmul`, which reads its operand where it lies."""

TRANSPOSED = """\
**`x` comes transposed (CPU).** The GEMM reads rows. A `cast` to the dtype that a value already has is a
copy in row-major order."""

HALF = """\
**`enable_fp16` (GPU).** The product is computed in float16, everything else in float32. The cast of the
weight becomes `packed`: it runs once per loaded engine."""


NARROW = """\
**`enable_bf16` (CPU).** The product reads bfloat16 and sums in float32, and the weight is packed as bfloat16 when
the engine loads. Only the operands are rounded. Where the CPU has AMX, matrix tiles sum 32 rows by 32 columns
over whole steps of 32 elements (64 of int8), and the vector kernels add the rest and finish."""


def page() -> str:
    torch.manual_seed(0)
    rows = torch.randn(ROWS, DEPTH)
    cluster = capture(Weights(), rows)
    arguments = capture(Arguments(), rows, torch.randn(DEPTH, COLUMNS), torch.randn(COLUMNS))
    transposed = capture(Transposed(), rows.t().contiguous())
    cpu, gpu = compile_in_stages(cluster, CPU), compile_in_stages(cluster, GPU)
    half = compile_in_stages(cluster, GPU, torch.float16)
    late = compile_in_stages(capture(Selected(), rows), CPU)
    narrow = compile_in_stages(cluster, CPU, torch.bfloat16)
    more = [f"`{one}`" for one in narrow.passes() if one not in cpu.passes()]
    [half_pass] = set(half.passes()) - set(gpu.passes())
    assert not [*cpu.changes(), *gpu.changes()], "the page says that no pass changes the graph"
    variants = [
        changes(ARGUMENTS, compile_in_stages(arguments, CPU)),
        changes(TRANSPOSED, compile_in_stages(transposed, CPU)),
        changes(HALF, half),
        changes(NARROW, narrow),
    ]
    return PAGE.format(
        depth=DEPTH,
        columns=COLUMNS,
        fx=block(cpu.fx),
        lowered=block(cpu["lower"]),
        cpu_passes=names("On CPU, in this order:", cpu.passes()),
        gpu_passes=names("On GPU:", gpu.passes()),
        half_pass=half_pass,
        narrow_passes=" and ".join(more),
        variants="\n\n".join(variants),
        fused=block(cpu["fuse"]),
        kernel=block(renumber(str(kernel_of(cluster)))(kernel_text(kernel_of(cluster)))),
        mlir=block(first_function(cpu["mlir"]), "mlir"),
        program=block(cpu["program"]),
        triton=block(gpu["triton"], "python"),
        gpu_program=block(gpu["program"]),
        late_fused=block(late["fuse"]),
        late_program=block(late["program"]),
    )


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("disc.md")
    target.write_text(page(), encoding="utf-8")
