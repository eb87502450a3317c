# SPDX-License-Identifier: Apache-2.0
"""From clusters to one engine plan: build candidates, time them, choose."""
