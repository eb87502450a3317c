# SPDX-License-Identifier: Apache-2.0
"""Kernels as GPU code: kernel IR -> Triton text -> cubin, ahead of time."""
