# SPDX-License-Identifier: Apache-2.0
"""Restrict engines to the CPU that they were compiled for (``-march=native``).

    program = for_this_cpu(guard_program(cluster))

The C++ engine compares the program's ``isa`` line with the CPU it is loaded on; if a feature is missing
there, the original runs.
"""

from blade.runtime.engine import isa_features

# The names in /proc/cpuinfo of instructions that a compiler may choose by itself. The others (of kernels, virtual
# machines, power) differ between machines that run the same code.
_X86 = (
    *("sse", "ssse3", "avx", "fma", "f16c", "bmi", "abm", "popcnt", "movbe", "adx", "amx", "gfni"),
    *("aes", "vaes", "pclmulqdq", "vpclmulqdq", "sha", "rdrand", "rdseed", "clwb", "movdir"),
)
_X86_EXACTLY = ("fma4", "lahf_lm", "cx16", "xop", "tbm")


def for_this_cpu(program: str) -> str:
    """``program``, which now requires all instructions of this CPU."""
    lines = program.splitlines(keepends=True)
    (place,) = (i for i, line in enumerate(lines) if line.split() == ["isa"])
    lines[place] = " ".join(["isa", *instructions()]) + "\n"
    return "".join(lines)


def instructions() -> tuple[str, ...]:
    """The instruction sets of this CPU, sorted."""
    features = isa_features()
    if "asimd" in features:
        return tuple(sorted(features))
    return tuple(sorted(f for f in features if f.startswith(_X86) or f in _X86_EXACTLY))
