# SPDX-License-Identifier: Apache-2.0
"""Programs of well-known libraries, in two sizes: what ``bench_drop_in.py`` times and ``tests/dropin`` compares."""
