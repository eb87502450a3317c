# SPDX-License-Identifier: Apache-2.0
"""Launches of prepared kernels beside generated ones."""
