# SPDX-License-Identifier: Apache-2.0
"""Models to measure, one file per family; each function builds one. ``models.MODELS`` lists them."""
