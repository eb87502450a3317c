# SPDX-License-Identifier: Apache-2.0
"""Values that all stages use; nothing here imports the rest of blade."""
