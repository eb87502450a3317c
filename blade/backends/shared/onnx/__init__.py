# SPDX-License-Identifier: Apache-2.0
"""ONNX models from FX graphs."""
