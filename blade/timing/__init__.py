# SPDX-License-Identifier: Apache-2.0
"""Timing: functions in interleaved rounds, GPU kernels as CUDA graphs, budgets and estimates."""
