# SPDX-License-Identifier: Apache-2.0
"""Reads and edits FX graphs of ATen ops."""
