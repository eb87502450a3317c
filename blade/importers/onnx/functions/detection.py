# SPDX-License-Identifier: Apache-2.0
"""Detection: suppression of boxes that overlap, and pooling of regions."""

import torch
from torch import Tensor


def _corners(boxes: Tensor, center: bool) -> Tensor:
    """[N, 4]: y1, x1, y2, x2, the smaller corner first."""
    if center:
        x, y, w, h = boxes.unbind(-1)
        return torch.stack([y - h / 2, x - w / 2, y + h / 2, x + w / 2], -1)
    a, b, c, d = boxes.unbind(-1)
    low = torch.stack([torch.minimum(a, c), torch.minimum(b, d)], -1)
    high = torch.stack([torch.maximum(a, c), torch.maximum(b, d)], -1)
    return torch.cat([low, high], -1)


def non_max_suppression(
    boxes: Tensor, scores: Tensor, most: int, overlap: float, least: float, center: bool
) -> Tensor:
    """[M, 3]: batch, class and box of those that are left."""
    found: list[Tensor] = []
    for batch in range(scores.size(0)):
        corners = _corners(boxes[batch], center)
        area = (corners[:, 2] - corners[:, 0]) * (corners[:, 3] - corners[:, 1])
        low = torch.maximum(corners[:, :2].unsqueeze(1), corners[:, :2].unsqueeze(0))
        high = torch.minimum(corners[:, 2:].unsqueeze(1), corners[:, 2:].unsqueeze(0))
        shared = torch.clamp(high - low, min=0).prod(-1)
        both = area.unsqueeze(1) + area.unsqueeze(0) - shared
        covers = torch.logical_and(shared > overlap * both, both > 0)
        for kind in range(scores.size(1)):
            values = scores[batch][kind]
            order = torch.argsort(values, stable=True, dim=0, descending=True)
            order = order[values[order] > least]
            covered = torch.zeros_like(values, dtype=torch.bool)
            count = 0
            for k in range(order.size(0)):
                at = int(order[k].item())
                if count < most and not bool(covered[at].item()):
                    covered = torch.logical_or(covered, covers[at])
                    found.append(torch.tensor([batch, kind, at], device=boxes.device))
                    count += 1
    if len(found) == 0:
        return torch.zeros([0, 3], dtype=torch.int64, device=boxes.device)
    return torch.stack(found)


def _bilinear(image: Tensor, y: Tensor, x: Tensor, average: bool) -> Tensor:
    """[C, H, W] at points: [C, points...], the sum of four neighbours or the largest; zero outside by more than one."""
    height, width = image.size(1), image.size(2)
    outside = torch.logical_or(
        torch.logical_or(y < -1, y > height), torch.logical_or(x < -1, x > width)
    )
    y = torch.clamp(y, min=0, max=height - 1)
    x = torch.clamp(x, min=0, max=width - 1)
    top, left = torch.floor(y).to(torch.int64), torch.floor(x).to(torch.int64)
    bottom = torch.clamp(top + 1, max=height - 1)
    right = torch.clamp(left + 1, max=width - 1)
    dy, dx = y - top, x - left
    first = image[:, top, left] * (1 - dy) * (1 - dx)
    second = image[:, top, right] * (1 - dy) * dx
    third = image[:, bottom, left] * dy * (1 - dx)
    fourth = image[:, bottom, right] * dy * dx
    parts = torch.stack([first, second, third, fourth])
    value = parts.sum(0) if average else parts.amax(0)
    return torch.where(outside, torch.zeros_like(value), value)


def roi_align(
    x: Tensor,
    rois: Tensor,
    batches: Tensor,
    height: int,
    width: int,
    ratio: int,
    scale: float,
    offset: float,
    average: bool,
) -> Tensor:
    """[regions, C, height, width]"""
    found: list[Tensor] = []
    for k in range(rois.size(0)):
        x1 = float(rois[k][0].item()) * scale - offset
        y1 = float(rois[k][1].item()) * scale - offset
        x2 = float(rois[k][2].item()) * scale - offset
        y2 = float(rois[k][3].item()) * scale - offset
        tall, wide = y2 - y1, x2 - x1
        if offset == 0.0:
            tall, wide = max(tall, 1.0), max(wide, 1.0)
        rows, columns = ratio, ratio
        if ratio <= 0:
            rows = int(torch.ceil(torch.tensor(tall / height)).item())
            columns = int(torch.ceil(torch.tensor(wide / width)).item())
        ys = torch.arange(height * rows, device=x.device).to(x.dtype) + 0.5
        xs = torch.arange(width * columns, device=x.device).to(x.dtype) + 0.5
        ys = y1 + ys * (tall / height / rows)
        xs = x1 + xs * (wide / width / columns)
        grid_y = ys.unsqueeze(1).expand([ys.size(0), xs.size(0)])
        grid_x = xs.unsqueeze(0).expand([ys.size(0), xs.size(0)])
        sampled = _bilinear(x[int(batches[k].item())], grid_y, grid_x, average)
        sampled = sampled.reshape([x.size(1), height, rows, width, columns])
        found.append(sampled.mean([2, 4]) if average else sampled.amax([2, 4]))
    if len(found) == 0:
        return torch.zeros([0, x.size(1), height, width], dtype=x.dtype, device=x.device)
    return torch.stack(found)
