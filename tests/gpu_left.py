# SPDX-License-Identifier: Apache-2.0
"""Samples of the op table that DISC leaves to the original on CUDA, and words of the reason it gives."""

LEFT: dict[str, str] = {}
