# SPDX-License-Identifier: Apache-2.0
"""IR passes for GPU."""
