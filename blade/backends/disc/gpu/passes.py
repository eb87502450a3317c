# SPDX-License-Identifier: Apache-2.0
"""The order of the passes between lowering and fusion on GPU: the CPU's, less what packs its weights.

Products read weights where they lie or from a copy that is made once (constants.py). Convolutions run on
channels-last data, as on CPU, which is also how tensor cores want halves.
"""

from collections.abc import Sequence
from functools import partial

import torch

from blade.backends.disc import legalize
from blade.backends.disc.attention_pattern import find_attention
from blade.backends.disc.columns import compute_in_rows
from blade.backends.disc.forms import Forms
from blade.backends.disc.gpu.attention import LARGEST_HEAD
from blade.backends.disc.gpu.channel_values import compute_where_read
from blade.backends.disc.gpu.constants import is_known, precompute
from blade.backends.disc.gpu.convolutions import (
    bias_after,
    patches_to_rows,
    weights_channels_last,
)
from blade.backends.disc.gpu.gathers import assert_in_kernels
from blade.backends.disc.gpu.half import use_half
from blade.backends.disc.gpu.row_values import keep_row_values
from blade.backends.disc.gpu.scaled import ScaledLowerer
from blade.backends.disc.horizontal import merge_linears
from blade.backends.disc.int8 import lower_int8
from blade.backends.disc.ir import Value
from blade.backends.disc.layouts import propagate
from blade.backends.disc.outputs import outputs
from blade.backends.disc.passes import Pass
from blade.backends.disc.shapes import normalize
from blade.backends.disc.split_sums import split_sums
from blade.backends.disc.spread import spread

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
FORMS = Forms(FLOATS, FLOATS, widest_head=LARGEST_HEAD, moments=FLOATS)


def passes(half: torch.dtype | None) -> Sequence[tuple[str, Pass]]:
    """``half``: what products of float32 are computed in instead."""
    narrow = () if half is None else (("half", partial(use_half, dtype=half)),)
    return (
        ("normalize", normalize),
        ("assert_in_kernels", assert_in_kernels),
        ("int8", partial(lower_int8, lowerer_of=ScaledLowerer)),
        ("find_attention", partial(find_attention, forms=FORMS)),
        *narrow,
        ("layouts", propagate),
        ("bias_after", bias_after),
        ("patches_to_rows", patches_to_rows),
        ("spread", spread),
        ("split_sums", split_sums),
        ("compute_in_rows", compute_in_rows),
        ("rows", legalize.rows),
        ("keep_row_values", keep_row_values),
        ("bias_to_consumers", partial(legalize.bias_to_consumers, packed=_nothing)),
        ("merge_linears", partial(merge_linears, known=has_known_weights, far=True)),
        ("weights_channels_last", weights_channels_last),
        ("compute_where_read", compute_where_read),
        ("addressable", partial(legalize.addressable, packed=_nothing)),
        ("precompute", precompute),
        ("outputs", outputs),
    )


def has_known_weights(v: Value) -> bool:
    """Whether ``v`` is a product with constants, which can lie side by side with others."""
    if v.op == "scaled_linear":
        return all(a.op == "fill" or is_known(a) for a in v.args[1:4])
    return v.op == "linear" and all(map(is_known, v.args[1:]))


def _nothing(_: Value) -> range:
    """The operands of a product that are laid out for it."""
    return range(0)
