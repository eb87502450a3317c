# SPDX-License-Identifier: Apache-2.0
"""AOTInductor, PyTorch's own ahead-of-time compiler, as a backend."""
