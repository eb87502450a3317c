# SPDX-License-Identifier: Apache-2.0
"""ONNX models as TorchScript, an op at a time.

``ops/`` is the table: a row per ONNX op writes TorchScript. ``functions/`` are functions in TorchScript that rows
call where what a node does depends on values that are known at run time only.
"""
