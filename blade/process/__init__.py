# SPDX-License-Identifier: Apache-2.0
"""State of the whole process: locks, garbage collection, overlap, messages to other processes."""
