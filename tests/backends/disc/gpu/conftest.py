# SPDX-License-Identifier: Apache-2.0
"""Triton decides as it is imported whether functions are interpreted; tests of this folder need that."""

import os

os.environ["TRITON_INTERPRET"] = "1"
