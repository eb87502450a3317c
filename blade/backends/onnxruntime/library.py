# SPDX-License-Identifier: Apache-2.0
"""ONNX Runtime as installed; imported by ``LIBRARY.load()`` alone, which switches its telemetry off."""

from blade.backends.shared.library_sessions import OptionalLibrary

# From 1.32 on its import would write an id of the machine into the home folder, and sessions would send events.
LIBRARY = OptionalLibrary(
    "onnxruntime",
    "InferenceSession",
    ("onnxruntime", "onnxruntime-gpu"),
    environment=(("ORT_DISABLE_TELEMETRY", "1"),),
)
