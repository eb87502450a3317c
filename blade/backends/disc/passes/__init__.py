# SPDX-License-Identifier: Apache-2.0
"""Passes from IR to IR; each file is named after its function."""
