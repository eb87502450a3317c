# SPDX-License-Identifier: Apache-2.0
"""The table of ONNX ops: a file per kind of op."""
