# SPDX-License-Identifier: Apache-2.0
"""CPUs and GPUs that code is generated for, and their capabilities."""
