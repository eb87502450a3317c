# SPDX-License-Identifier: Apache-2.0
"""The choice of layers to quantize, and of their schemes."""
