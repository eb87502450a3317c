# SPDX-License-Identifier: Apache-2.0
"""DISC's IR, the kernel IR, and analyses of both."""
