# SPDX-License-Identifier: Apache-2.0
"""The order of the passes between lowering and fusion on CPU; each takes a graph and returns a new one."""

from collections.abc import Callable
from functools import partial

import torch

from blade.backends.disc.ir.graph import Graph
from blade.backends.disc.passes import legalize
from blade.backends.disc.passes.bf16_convs import pair_channels
from blade.backends.disc.passes.bf16_products import narrow_results, use_bf16_products, widen_biases
from blade.backends.disc.passes.copy_complex import copy_complex
from blade.backends.disc.passes.find_quantized_weights import find_quantized_weights
from blade.backends.disc.passes.fuse_attention import find_attention
from blade.backends.disc.passes.fuse_conv_epilogue import fuse_conv_epilogue
from blade.backends.disc.passes.fuse_requantize import fuse_requantize
from blade.backends.disc.passes.hoist_products import hoist_products
from blade.backends.disc.passes.linear_to_matmul import linear_to_matmul
from blade.backends.disc.passes.lower_quantized import lower_int8
from blade.backends.disc.passes.materialize_outputs import materialize_outputs
from blade.backends.disc.passes.merge_linears import merge_linears
from blade.backends.disc.passes.normalize_sizes import normalize_sizes
from blade.backends.disc.passes.propagate_layouts import propagate
from blade.backends.disc.passes.push_through_concat import push_through_concat
from blade.backends.disc.passes.reduce_last_axis import reduce_last_axis
from blade.backends.disc.passes.split_reductions import split_reductions
from blade.backends.disc.passes.update_in_place import update_in_place

GraphPass = Callable[[Graph], Graph]

PASSES: tuple[tuple[str, GraphPass], ...] = (
    ("update_in_place", update_in_place),
    ("normalize", normalize_sizes),
    ("find_quantized", find_quantized_weights),
    ("hoist", hoist_products),
    ("int8", lower_int8),
    ("find_attention", find_attention),
    ("widen_biases", widen_biases),
    ("layouts", propagate),
    ("pairs", pair_channels),
    ("conv_epilogue", fuse_conv_epilogue),
    ("requantize", fuse_requantize),
    ("spread", push_through_concat),
    ("split_sums", split_reductions),
    ("compute_in_rows", partial(reduce_last_axis, gathers=True)),
    ("rows", legalize.rows),
    ("bias_to_consumers", legalize.bias_to_consumers),
    ("merge_linears", merge_linears),
    ("multiply_computed", linear_to_matmul),
    ("addressable", legalize.addressable),
    ("outputs", materialize_outputs),
    ("complex", copy_complex),
)


def passes(half: torch.dtype | None, sixteenths: int = 16) -> tuple[tuple[str, GraphPass], ...]:
    """The passes, by name; ``half``: bfloat16 if it may replace float32, in so many of every 16 products."""
    narrow: dict[str, tuple[str, GraphPass]] = {
        "find_attention": ("bf16", partial(use_bf16_products, sixteenths=sixteenths)),
        "conv_epilogue": ("bf16_results", narrow_results),
    }
    if half is None:
        return PASSES
    return tuple(one for step in PASSES for one in (step, narrow.get(step[0])) if one is not None)
