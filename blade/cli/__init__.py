# SPDX-License-Identifier: Apache-2.0
"""``python -m blade``: one module per command, each a function from arguments to a ``CommandResult``."""
