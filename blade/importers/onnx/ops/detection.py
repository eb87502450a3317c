# SPDX-License-Identifier: Apache-2.0
"""Detection."""

from __future__ import annotations

import torch

from blade.importers.onnx.emit.emitter import Emitter, number_text
from blade.importers.onnx.emit.table import NodeView, row
from blade.importers.onnx.emit.values import TensorValue, Value


@row("NonMaxSuppression")
def non_max_suppression(
    e: Emitter,
    node: NodeView,
    boxes: Value,
    scores: Value,
    most: Value | None = None,
    overlap: Value | None = None,
    least: Value | None = None,
) -> TensorValue:
    count = "0" if most is None else e.int(most)
    limit = "0.0" if overlap is None else e.float(overlap)
    threshold = '-float("inf")' if least is None else e.float(least)
    center = bool(node.int("center_point_box", 0))
    given = f"{e.tensor(boxes)}, {e.tensor(scores)}, {count}, {limit}, {threshold}, {center}"
    return TensorValue(f"run.non_max_suppression({given})", torch.int64, (None, 3))


@row("RoiAlign")
def roi_align(e: Emitter, node: NodeView, x: Value, rois: Value, batches: Value) -> TensorValue:
    height, width = node.int("output_height", 1), node.int("output_width", 1)
    how = "half_pixel" if node.version >= 16 else "output_half_pixel"
    offset = 0.5 if node.text("coordinate_transformation_mode", how) == "half_pixel" else 0.0
    average = node.text("mode", "avg") == "avg"
    ratio, scale = node.int("sampling_ratio", 0), number_text(node.float("spatial_scale", 1.0))
    given = f"{e.tensor(x)}, {e.tensor(rois)}, {e.tensor(batches)}"
    made = f"run.roi_align({given}, {height}, {width}, {ratio}, {scale}, {offset}, {average})"
    sizes = e.sizes(x)
    channels = None if sizes is None else sizes[1]
    return TensorValue(made, e.dtype(x), (None, channels, height, width))
