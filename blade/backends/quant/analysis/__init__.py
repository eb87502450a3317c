# SPDX-License-Identifier: Apache-2.0
"""Ranges and errors of layers."""
