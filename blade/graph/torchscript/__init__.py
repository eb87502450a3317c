# SPDX-License-Identifier: Apache-2.0
"""Reads and edits ``torch._C.Graph``."""
