# SPDX-License-Identifier: Apache-2.0
"""Lowering from FX to DISC's IR."""
