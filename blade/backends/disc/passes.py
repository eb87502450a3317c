# SPDX-License-Identifier: Apache-2.0
"""The order of the passes between lowering and fusion on CPU; each takes a graph and returns a new one."""

from collections.abc import Callable

from blade.backends.disc import legalize
from blade.backends.disc.attention_pattern import find_attention
from blade.backends.disc.columns import compute_in_rows
from blade.backends.disc.conv_epilogue import absorb
from blade.backends.disc.horizontal import merge_linears
from blade.backends.disc.int8 import lower_int8
from blade.backends.disc.ir import Graph
from blade.backends.disc.layouts import propagate
from blade.backends.disc.outputs import outputs
from blade.backends.disc.products import multiply_computed
from blade.backends.disc.requantize import requantize
from blade.backends.disc.shapes import normalize
from blade.backends.disc.split_sums import split_sums
from blade.backends.disc.spread import spread

Pass = Callable[[Graph], Graph]

PASSES: tuple[tuple[str, Pass], ...] = (
    ("normalize", normalize),
    ("int8", lower_int8),
    ("find_attention", find_attention),
    ("layouts", propagate),
    ("conv_epilogue", absorb),
    ("requantize", requantize),
    ("spread", spread),
    ("split_sums", split_sums),
    ("compute_in_rows", compute_in_rows),
    ("rows", legalize.rows),
    ("bias_to_consumers", legalize.bias_to_consumers),
    ("merge_linears", merge_linears),
    ("multiply_computed", multiply_computed),
    ("addressable", legalize.addressable),
    ("outputs", outputs),
)
