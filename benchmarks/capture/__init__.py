# SPDX-License-Identifier: Apache-2.0
"""Models whose Python decides on sizes and values; each function returns one, its sample and ten other calls."""
