# SPDX-License-Identifier: Apache-2.0
"""The op table: one row per ATen overload, in one file per family."""
