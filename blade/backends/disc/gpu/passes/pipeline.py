# SPDX-License-Identifier: Apache-2.0
"""The passes between lowering and fusion on GPU: those of the CPU without the packing of weights.

Products read weights in place or from a copy made once (precompute_constants.py). Convolutions run on
channels-last data, as on CPU, which tensor cores also need for halves.
"""

from collections.abc import Sequence
from functools import partial

import torch

from blade.backends.disc.gpu.attention.calls import LARGEST_HEAD
from blade.backends.disc.gpu.passes.assert_indices import assert_indices
from blade.backends.disc.gpu.passes.generate_scatters import generate_scatters
from blade.backends.disc.gpu.passes.keep_row_values import keep_row_values
from blade.backends.disc.gpu.passes.lower_scaled import ScaledLowerer
from blade.backends.disc.gpu.passes.mixed_precision import use_mixed_precision
from blade.backends.disc.gpu.passes.precompute_constants import is_known, precompute_constants
from blade.backends.disc.gpu.passes.prepare_convolutions import (
    bias_after,
    patches_to_rows,
    rows_to_patches,
    weights_channels_last,
)
from blade.backends.disc.gpu.passes.recompute_channel_values import recompute_channel_values
from blade.backends.disc.gpu.passes.widen_where_read import widen_where_read
from blade.backends.disc.gpu.passes.write_reordered import write_reordered
from blade.backends.disc.ir.graph import Value
from blade.backends.disc.passes import legalize
from blade.backends.disc.passes.copy_complex import copy_complex
from blade.backends.disc.passes.fuse_attention import find_attention
from blade.backends.disc.passes.hoist_products import hoist_products
from blade.backends.disc.passes.lower_quantized import lower_int8
from blade.backends.disc.passes.materialize_outputs import materialize_outputs
from blade.backends.disc.passes.merge_linears import merge_linears
from blade.backends.disc.passes.normalize_sizes import normalize_sizes
from blade.backends.disc.passes.pipeline import GraphPass
from blade.backends.disc.passes.propagate_layouts import propagate
from blade.backends.disc.passes.push_through_concat import push_through_concat
from blade.backends.disc.passes.reduce_last_axis import reduce_last_axis
from blade.backends.disc.passes.split_reductions import split_reductions
from blade.backends.disc.passes.update_in_place import update_in_place
from blade.backends.disc.target.capabilities import TargetCapabilities
from blade.core.dtypes import HALVES

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
FORMS = TargetCapabilities(
    FLOATS,
    FLOATS,
    widest_head=LARGEST_HEAD,
    moments=FLOATS,
    bilinear=FLOATS,
    image_gradients=HALVES,
)


def passes(half: torch.dtype | None) -> Sequence[tuple[str, GraphPass]]:
    """The passes, by name; ``half``: the dtype that replaces float32 in products."""
    narrow = () if half is None else (("half", partial(use_mixed_precision, dtype=half)),)
    return (
        ("update_in_place", update_in_place),
        ("normalize", normalize_sizes),
        ("hoist", hoist_products),
        ("assert_in_kernels", assert_indices),
        ("scatters", generate_scatters),
        ("int8", partial(lower_int8, lowerer_of=ScaledLowerer)),
        ("find_attention", partial(find_attention, forms=FORMS)),
        *narrow,
        ("layouts", partial(propagate, transposed=True)),
        ("rows_to_patches", rows_to_patches),
        ("bias_after", bias_after),
        ("patches_to_rows", patches_to_rows),
        ("write_reordered", write_reordered),
        ("spread", partial(push_through_concat, interleaved=True)),
        ("split_sums", partial(split_reductions, pieces=True)),
        ("compute_in_rows", partial(reduce_last_axis, pieces=True)),
        ("rows", legalize.rows),
        ("keep_row_values", keep_row_values),
        ("bias_to_consumers", partial(legalize.bias_to_consumers, packed=_nothing)),
        ("merge_linears", partial(merge_linears, known=has_known_weights, far=True)),
        ("weights_channels_last", weights_channels_last),
        ("compute_where_read", recompute_channel_values),
        ("addressable", partial(legalize.addressable, packed=_nothing, transposed=True)),
        ("precompute", precompute_constants),
        ("outputs", materialize_outputs),
        ("complex", copy_complex),
        ("widen_where_read", widen_where_read),
    )


def has_known_weights(v: Value) -> bool:
    """Is ``v`` a product with constant weights, which can be concatenated with others?"""
    if v.op == "scaled_linear":
        return all(a.op == "fill" or is_known(a) for a in v.args[1:4])
    return v.op == "linear" and all(map(is_known, v.args[1:]))


def _nothing(_: Value) -> range:
    """The operands that are packed for a product: none on GPU."""
    return range(0)
