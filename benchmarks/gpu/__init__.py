# SPDX-License-Identifier: Apache-2.0
"""What bench_gpu.py is made of: peers, the processes they live in, what is measured there, and the tables."""
