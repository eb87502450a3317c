# SPDX-License-Identifier: Apache-2.0
"""A machine with AVX2 in place of the one that this is, for the libraries that let themselves be told.

    avx2.ask()        # before the processes of the peers begin: eager mode, Inductor, oneDNN and MKL
    avx2.narrow()     # in each of them: DISC generates for AVX2 and FMA alone

ONNX Runtime asks the processor itself, and so may OpenVINO: they keep what this machine has.
"""

import os

_ASKED = {
    "BENCH_ISA": "avx2",
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}


def ask() -> None:
    os.environ.update(_ASKED)


def narrow() -> None:
    """Take from DISC what it knows of this machine beyond AVX2, if that was asked for."""
    if os.environ.get("BENCH_ISA") != "avx2":
        return
    from blade.backends.disc.target import cpu

    kept = frozenset(f for f in cpu.isa_features() if not f.startswith(("avx512", "avx_", "amx")))
    cpu.isa_features = lambda: kept
    cpu.host.cache_clear()
    assert cpu.host().lanes == 8, cpu.host()
