# SPDX-License-Identifier: Apache-2.0
"""Resize, along one axis after the other, by a matrix of weights."""

import torch
from torch import Tensor


def _coordinates(
    size: int, wanted: int, scale: float, how: str, start: float, end: float, device: torch.device
) -> Tensor:
    """Where in the input the elements of the result are."""
    at = torch.arange(wanted, dtype=torch.float64, device=device)
    length = scale * size
    if how == "asymmetric":
        return at / scale
    if how == "align_corners":
        return at * (size - 1) / (length - 1) if length != 1 else torch.zeros_like(at)
    if how == "pytorch_half_pixel":
        return (at + 0.5) / scale - 0.5 if length > 1 else torch.zeros_like(at)
    if how == "half_pixel_symmetric":
        adjusted = wanted / length
        center = size / 2
        return center * (1 - adjusted) + (at + 0.5) / scale - 0.5
    if how == "tf_crop_and_resize":
        if wanted > 1:
            return start * (size - 1) + at * (end - start) * (size - 1) / (wanted - 1)
        return torch.full_like(at, 0.5 * (start + end) * (size - 1))
    return (at + 0.5) / scale - 0.5


def _nearest(at: Tensor, how: str) -> Tensor:
    if how == "round_prefer_floor":
        return torch.ceil(at - 0.5)
    if how == "round_prefer_ceil":
        return torch.floor(at + 0.5)
    return torch.floor(at) if how == "floor" else torch.ceil(at)


def _weights(distance: Tensor, mode: str, a: float) -> Tensor:
    """The weight of an element at ``distance``."""
    d = torch.abs(distance)
    if mode == "linear":
        return torch.clamp(1 - d, min=0.0)
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return torch.where(d <= 1, near, torch.where(d < 2, far, torch.zeros_like(d)))


def _resize_axis(
    x: Tensor,
    axis: int,
    wanted: int,
    scale: float,
    start: float,
    end: float,
    mode: str,
    coordinates: str,
    nearest_mode: str,
    a: float,
    outside: float,
    exclude: bool,
    antialias: bool,
) -> Tensor:
    size = x.size(axis)
    at = _coordinates(size, wanted, scale, coordinates, start, end, x.device)
    if mode == "nearest":
        places = torch.clamp(_nearest(at, nearest_mode), min=0, max=size - 1).to(torch.int64)
        made = x.index_select(axis, places)
    else:
        stretch = max(1.0, 1.0 / scale) if antialias else 1.0
        reach = int(2.0 * stretch if mode == "cubic" else stretch) + 2
        first = torch.floor(at)
        taps = torch.arange(-reach, reach + 1, dtype=torch.float64, device=x.device)
        places = first.unsqueeze(1) + taps.unsqueeze(0)
        weights = _weights((places - at.unsqueeze(1)) / stretch, mode, a)
        if exclude:
            inside = torch.logical_and(places >= 0, places <= size - 1)
            weights = torch.where(inside, weights, torch.zeros_like(weights))
        if exclude or antialias:
            weights = weights / weights.sum(1, keepdim=True)
        places = torch.clamp(places, min=0, max=size - 1).to(torch.int64)
        matrix = torch.zeros([wanted, size], dtype=torch.float64, device=x.device)
        matrix = matrix.scatter_add(1, places, weights)
        made = torch.matmul(x.transpose(axis, -1), matrix.t().to(x.dtype)).transpose(axis, -1)
    if coordinates == "tf_crop_and_resize":
        shape = [1] * x.dim()
        shape[axis] = wanted
        inside = torch.logical_and(at >= 0, at <= size - 1).reshape(shape)
        made = torch.where(inside, made, torch.full_like(made, outside))
    return made


def resize(
    x: Tensor,
    axes: list[int],
    sizes: list[int],
    scales: list[float],
    roi: list[float],
    mode: str,
    coordinates: str,
    nearest_mode: str,
    policy: str,
    a: float,
    outside: float,
    exclude: bool,
    antialias: bool,
) -> Tensor:
    """``sizes`` or ``scales`` per axis of ``axes``; ``roi``: starts, then ends."""
    factors: list[float] = []
    wanted: list[int] = []
    for k, axis in enumerate(axes):
        if len(sizes) > 0:
            factors.append(sizes[k] / x.size(axis))
            wanted.append(sizes[k])
        else:
            factors.append(scales[k])
            wanted.append(int(x.size(axis) * scales[k] + 1e-6))
    if len(sizes) > 0 and policy != "stretch":
        factor = min(factors) if policy == "not_larger" else max(factors)
        for k, axis in enumerate(axes):
            factors[k] = factor
            wanted[k] = int(factor * x.size(axis) + 0.5)
    for k, axis in enumerate(axes):
        if factors[k] != 1.0 or coordinates == "tf_crop_and_resize":
            start = roi[k] if len(roi) > 0 else 0.0
            end = roi[k + len(axes)] if len(roi) > 0 else 1.0
            x = _resize_axis(
                x,
                axis,
                wanted[k],
                factors[k],
                start,
                end,
                mode,
                coordinates,
                nearest_mode,
                a,
                outside,
                exclude,
                antialias,
            )
    return x
