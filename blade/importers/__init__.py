# SPDX-License-Identifier: Apache-2.0
"""Models of other frameworks as TorchScript: ONNX, and TensorFlow by way of ONNX."""
