# SPDX-License-Identifier: Apache-2.0
"""Verification: compare an engine with the original and with an fp64 reference."""
