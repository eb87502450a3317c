# SPDX-License-Identifier: Apache-2.0
"""Compile MLIR to machine code."""
