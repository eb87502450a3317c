# SPDX-License-Identifier: Apache-2.0
"""Fourier transforms of tensors whose last axis is the real and the imaginary part."""

import math

import torch
from torch import Tensor


def dft(x: Tensor, length: int | None, axis: int, inverse: bool, half: bool) -> Tensor:
    place = axis + x.dim() if axis < 0 else axis
    wide = x.to(torch.float64)
    if wide.size(-1) == 1:
        wide = torch.cat([wide, torch.zeros_like(wide)], -1)
    given = torch.view_as_complex(wide.contiguous())
    size = given.size(place) if length is None else length
    if inverse and half:
        count = 2 * (given.size(place) - 1) if length is None else length
        real: Tensor = torch.fft.irfft(given, count, place)
        return real.unsqueeze(-1).to(x.dtype)
    if inverse:
        made = torch.fft.ifft(given, size, place)
    else:
        made = torch.fft.fft(given, size, place)
    if half:
        made = made.narrow(place, 0, size // 2 + 1)
    return torch.view_as_real(made).to(x.dtype)


def stft(x: Tensor, step: int, window: Tensor | None, length: int | None, half: bool) -> Tensor:
    """[batch, frames, bins, 2]"""
    if length is not None:
        size = length
    elif window is not None:
        size = window.size(0)
    else:
        size = x.size(1)
    frames = x.unfold(1, size, step)  # [batch, frames, 1 or 2, size]
    if x.dim() == 2:
        frames = frames.unsqueeze(2)
    frames = frames.transpose(2, 3)
    if window is not None:
        frames = frames * window.unsqueeze(1)
    return dft(frames, size, 2, False, half)


def window(size: int, a: float, b: float, c: float, periodic: bool, device: torch.device) -> Tensor:
    """A sum of cosines."""
    steps = size if periodic else size - 1
    at = torch.arange(size, dtype=torch.float64, device=device) * (2 * math.pi / steps)
    return a - b * torch.cos(at) + c * torch.cos(2 * at)


def mel_weights(bins: int, length: int, rate: int, low: float, high: float) -> Tensor:
    """[length // 2 + 1, bins]: triangles on the mel scale."""
    spectrum = length // 2 + 1
    first = 2595 * math.log10(1 + low / 700)
    last = 2595 * math.log10(1 + high / 700)
    mels = torch.arange(bins + 2, dtype=torch.float64) * ((last - first) / (bins + 2)) + first
    hertz = 700 * (torch.pow(torch.full_like(mels, 10.0), mels / 2595) - 1)
    places = torch.floor((length + 1) * hertz / rate)
    at = torch.arange(spectrum, dtype=torch.float64).unsqueeze(1)
    left, center, right = places[:-2], places[1:-1], places[2:]
    rising = (at - left) / (center - left)
    falling = (right - at) / (right - center)
    up = torch.logical_and(at >= left, at <= center)
    down = torch.logical_and(at > center, at < right)
    none = torch.zeros_like(rising)
    made = torch.where(up, rising, torch.where(down, falling, none))
    flat = (center == left).unsqueeze(0).expand_as(made)
    peak = torch.where(at == center, torch.ones_like(made), none)
    return torch.where(torch.logical_and(flat, up), peak, made)
