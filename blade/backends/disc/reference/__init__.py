# SPDX-License-Identifier: Apache-2.0
"""The reference semantics of the IR and the kernel IR, by interpretation."""
