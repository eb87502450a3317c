# SPDX-License-Identifier: Apache-2.0
"""Engine plans: choose one engine, or several by size, per cluster, and assemble the choices."""
