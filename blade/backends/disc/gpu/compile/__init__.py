# SPDX-License-Identifier: Apache-2.0
"""Compile Triton to cubins."""
