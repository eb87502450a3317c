# SPDX-License-Identifier: Apache-2.0
"""Sizes, strides and fake tensors."""
