# SPDX-License-Identifier: Apache-2.0
"""The decisions that a model's Python code takes on tensors while it is traced.

``recorder`` sees each conversion of a tensor into Python and notes it as a check in the trace; ``traced_number``
keeps numbers that are only computed with as tensors of the graph; ``shadows`` makes ``float(t)`` and its kin
return such numbers. ``markers`` finds the checks again in the finished graph.
"""
