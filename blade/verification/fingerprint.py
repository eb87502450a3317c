# SPDX-License-Identifier: Apache-2.0
"""Tell whether a large tensor was written to, without a copy of it.

    before = [fingerprint(t) for t in tensors]
    ...
    changed = [i for i, t in enumerate(tensors) if not has(t, before[i])]

A fingerprint holds sums of the elements' bits, as integers: of each line, and across the lines. A write changes one of
them, unless it leaves every one of these sums as it was.
"""

from collections.abc import Sequence
from math import isqrt

import torch

from blade.graph.shapes.memory_format import dense_order

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers as wide as an element, in bytes."""
_WORD = 8  # bytes; sums of narrower integers would take a widened copy
_PIECE = 1 << 22  # elements that are summed at a time: a sum may take copies of them

Fingerprint = Sequence[torch.Tensor]


def fingerprint(tensor: torch.Tensor) -> Fingerprint:
    """Return the sums, for a strided tensor of any dtype; where it is large, in a hundredth of its memory or so."""
    bits = _bits(tensor)
    if not bits.numel():
        return ()
    size = bits.element_size()
    is_aligned = bits.storage_offset() * size % _WORD == 0
    if is_aligned and dense_order(bits) is not None:
        flat = bits.as_strided((bits.numel(),), (1,))
        whole = flat.numel() * size // _WORD * _WORD // size
        words = flat[:whole].view(torch.int64).split(_PIECE)
        return *(s for piece in words for s in _sums_of_line(piece)), flat[whole:].clone()
    return _sums_of_pieces(bits)


def has(tensor: torch.Tensor, before: Fingerprint) -> bool:
    """Whether ``tensor`` has the fingerprint ``before``."""
    return all(map(torch.equal, fingerprint(tensor), before))


def _sums_of_line(words: torch.Tensor) -> Fingerprint:
    """As if its elements were rows and columns; and those that are left."""
    if not words.numel():
        return ()
    length = isqrt(words.numel())
    rows = words.unfold(0, length, length)
    return rows.sum(0), rows.sum(1), words[rows.numel() :].clone()


def _sums_of_pieces(bits: torch.Tensor) -> Fingerprint:
    """Along the longest axis, and along the others."""
    if not bits.dim():
        return (bits.clone(),)
    longest = max(range(bits.dim()), key=lambda axis: bits.shape[axis])
    count = max(1, _PIECE * bits.shape[longest] // bits.numel())
    first, *others = bits.unsqueeze(-1).split(count, longest)
    along, across = _sums_of_rows(first, longest)
    all_across = [across]
    for piece in others:
        total, across = _sums_of_rows(piece, longest)
        along += total
        all_across.append(across)
    return along, torch.cat(all_across)


def _sums_of_rows(bits: torch.Tensor, axis: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the rows, and of each: a row is all that one index of ``axis`` has."""
    rows = bits.movedim(axis, 0).flatten(1).to(torch.int64)
    return rows.sum(0), rows.sum(1)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as integers, where they lie; those of a lazily conjugated or negated tensor are computed."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.dtype == torch.complex128:
        tensor = torch.view_as_real(tensor)
    return tensor.view(_BITS[tensor.element_size()])
