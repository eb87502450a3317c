# SPDX-License-Identifier: Apache-2.0
"""From kernels to program text."""
