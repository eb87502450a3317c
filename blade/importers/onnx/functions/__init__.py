# SPDX-License-Identifier: Apache-2.0
"""Functions that TorchScript compiles, for ops whose sizes or axes are known at run time only."""
