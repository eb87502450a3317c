# SPDX-License-Identifier: Apache-2.0
"""Small kernels compiled by Triton while the test runs, in the container the executor reads."""

from functools import cache

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def neg(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, -tl.load(x + i, mask=i < n), mask=i < n)


@triton.jit
def add(x, y, z, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(z + i, tl.load(x + i, mask=i < n) + tl.load(y + i, mask=i < n), mask=i < n)


@triton.jit
def neg_early(x, y, n, BLOCK: tl.constexpr):
    """Starts while what was launched before it ends, and lets the next one do so."""
    gdc_wait()
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n)
    gdc_launch_dependents()
    tl.store(y + i, -value, mask=i < n)


@triton.jit
def double_row(x, y, BLOCK: tl.constexpr):
    """A pack's fill: row i of 4 elements, doubled."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, 2 * tl.load(x + i))


FUNCTIONS = {"neg": neg, "add": add, "double_row": double_row}
if torch.cuda.get_device_capability() >= (9, 0):
    FUNCTIONS["neg_early"] = neg_early
POINTERS = {name: ("x", "y", "z")[: 3 if name == "add" else 2] for name in FUNCTIONS}
BLOCKS = {name: 4 if name == "double_row" else 128 for name in FUNCTIONS}


@cache
def cubin(name: str, capability: int) -> tuple[bytes, int, int]:
    """The binary, its threads per block and its bytes of shared memory."""
    function = FUNCTIONS[name]
    signature = dict.fromkeys(POINTERS[name], "*fp32")
    if name != "double_row":
        signature["n"] = "i64"
    signature["BLOCK"] = "constexpr"
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(POINTERS[name]))}
    source = ASTSource(function, signature, constexprs={"BLOCK": BLOCKS[name]}, attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    return compiled.asm["cubin"], 32 * compiled.metadata.num_warps, compiled.metadata.shared


def capability() -> int:
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def architecture() -> str:
    return f"sm_{capability()}"


def container(says: str | None = None) -> bytes:
    """All kernels; ``says`` is the architecture the index names instead of this device's."""
    found = {name: cubin(name, capability()) for name in POINTERS}
    lines = ["blade.cubins 1", str(len(found))]
    for name, (code, threads, shared) in found.items():
        words = f"{says or architecture()} {name} {threads} {shared} {len(code)}"
        lines.append(words + " early" * name.endswith("_early"))
    return "\n".join(lines).encode() + b"\n" + b"".join(code for code, _, _ in found.values())
