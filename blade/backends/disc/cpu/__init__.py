# SPDX-License-Identifier: Apache-2.0
"""Kernels as native CPU code: kernel IR -> MLIR text -> relocatable object.

emitted = emit(kernel, "k0", host())
objects = compile_kernels([("k0", emitted.text)], host())
"""

from blade.backends.disc.cpu.compile import compile_kernels
from blade.backends.disc.cpu.emit import Emitted, emit
from blade.backends.disc.cpu.pointwise import supports
from blade.backends.disc.cpu.target import Target, host

__all__ = ["Emitted", "Target", "compile_kernels", "emit", "host", "supports"]
