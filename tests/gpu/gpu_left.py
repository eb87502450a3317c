# SPDX-License-Identifier: Apache-2.0
"""Samples of the op table that DISC leaves to the original on CUDA, and why."""

LEFT: dict[str, str] = {}
