# SPDX-License-Identifier: Apache-2.0
"""What the table is written with: values, types, lines of TorchScript."""
