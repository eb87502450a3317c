# SPDX-License-Identifier: Apache-2.0
"""Apache TVM (Relax) as a backend."""
