# SPDX-License-Identifier: Apache-2.0
"""Attention on CPU."""
