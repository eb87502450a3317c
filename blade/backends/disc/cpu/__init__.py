# SPDX-License-Identifier: Apache-2.0
"""Kernels as native CPU code: kernel IR -> MLIR text -> relocatable object.

emitted = emit(kernel, "k0", host())                                # emit/kernel.py
objects = compile_kernels([("k0", emitted.text)], host())           # compile/parallel.py
"""
