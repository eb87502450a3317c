# SPDX-License-Identifier: Apache-2.0
"""From IR to fusion groups and kernels."""
