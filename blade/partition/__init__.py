# SPDX-License-Identifier: Apache-2.0
"""Partition: the backends that support each node, and the groups that each backend tries."""
