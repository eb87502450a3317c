# SPDX-License-Identifier: Apache-2.0
"""Graph edits for quantization."""
