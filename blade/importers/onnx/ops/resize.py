# SPDX-License-Identifier: Apache-2.0
"""Resize and GridSample, and other sampling of images."""

from __future__ import annotations

from blade.importers.onnx.emit.emitter import Emitter, number_text
from blade.importers.onnx.emit.errors import NotImported
from blade.importers.onnx.emit.table import NodeView, row
from blade.importers.onnx.emit.values import HostNumber, Number, TensorValue, Value
from blade.importers.onnx.ops.layout import numbers


@row("Resize")
def resize(
    e: Emitter,
    node: NodeView,
    x: Value,
    roi: Value | None = None,
    scales: Value | None = None,
    sizes: Value | None = None,
) -> TensorValue:
    rank, dtype = e.rank(x), e.dtype(x)
    axes = [axis % rank for axis in node.ints("axes") or range(rank)]
    if sizes is not None and e.dims(sizes) == (0,):
        sizes = None
    if sizes is None and scales is None:
        raise NotImported("It has neither scales nor sizes.")
    fast = _as_upsample(e, node, x, scales, sizes, axes)
    if fast is not None:
        return fast
    text = e.tensor(x) if dtype.is_floating_point else f"{e.tensor(x)}.to(torch.float32)"
    made = _by_axes(e, node, text, axes, roi, scales, sizes)
    if not dtype.is_floating_point:
        made = (
            f"torch.round({made}).to({dtype})"
            if node.text("mode", "") != "nearest"
            else f"{made}.to({dtype})"
        )
    return TensorValue(made, dtype, (None,) * rank)


def _by_axes(
    e: Emitter,
    node: NodeView,
    text: str,
    axes: list[int],
    roi: Value | None,
    scales: Value | None,
    sizes: Value | None,
) -> str:
    """A call of the function that resizes one axis after the other."""
    none = "torch.jit.annotate(List[float], [])"
    wanted = e.no_ints() if sizes is None else e.ints(sizes)
    factors = none if sizes is not None or scales is None else e.floats(scales)
    crop_mode = node.text("coordinate_transformation_mode", "half_pixel")
    crop = none if roi is None or crop_mode != "tf_crop_and_resize" else e.floats(roi)
    options = ", ".join(
        [
            f'"{node.text("mode", "nearest")}"',
            f'"{crop_mode}"',
            f'"{node.text("nearest_mode", "round_prefer_floor")}"',
            f'"{node.text("keep_aspect_ratio_policy", "stretch")}"',
            number_text(node.float("cubic_coeff_a", -0.75)),
            number_text(node.float("extrapolation_value", 0.0)),
            str(bool(node.int("exclude_outside", 0))),
            str(bool(node.int("antialias", 0))),
        ]
    )
    return f"run.resize({text}, {axes}, {wanted}, {factors}, {crop}, {options})"


def _as_upsample(
    e: Emitter,
    node: NodeView,
    x: Value,
    scales: Value | None,
    sizes: Value | None,
    axes: list[int],
) -> TensorValue | None:
    """torch's own op for images [N, C, H, W], where it computes the same."""
    mode = node.text("mode", "nearest")
    coordinates = node.text("coordinate_transformation_mode", "half_pixel")
    plain = node.text("keep_aspect_ratio_policy", "stretch") == "stretch"
    is_float = e.dtype(x).is_floating_point
    if e.rank(x) != 4 or not plain or node.int("antialias", 0) or not is_float:
        return None
    found = _spatial(e, x, scales, sizes, axes)
    if found is None:
        return None
    wanted, factors = found
    given = ", ".join("None" if one is None else number_text(one) for one in factors)
    text, shape = e.tensor(x), e.ints(wanted)
    if mode == "nearest" and coordinates == "asymmetric":
        if node.text("nearest_mode", "round_prefer_floor") != "floor":
            return None
        made = f"torch.ops.aten.upsample_nearest2d({text}, {shape}, {given})"
    elif mode == "linear" and coordinates in ("half_pixel", "pytorch_half_pixel", "align_corners"):
        corners = coordinates == "align_corners"
        if coordinates != "half_pixel" and any(one == 1 for one in wanted):
            return None
        made = f"torch.ops.aten.upsample_bilinear2d({text}, {shape}, {corners}, {given})"
    else:
        return None
    known = tuple(one if isinstance(one, int) else None for one in wanted)
    return TensorValue(made, e.dtype(x), (*(e.sizes(x) or ())[:2], *known))


def _spatial(
    e: Emitter, x: Value, scales: Value | None, sizes: Value | None, axes: list[int]
) -> tuple[list[HostNumber], list[float | None]] | None:
    """Height and width of the result, and the factors where these are given."""
    if sizes is not None:
        given = numbers(e, sizes)
        if given is None:
            return None
        by_axis = dict(zip(axes, given))
        for axis in (0, 1):
            size = by_axis.get(axis)
            if size is not None and size != e.size(x, axis):
                return None
        return [by_axis.get(axis, e.size(x, axis)) for axis in (2, 3)], [None, None]
    known = e.known(scales)
    if known is None:
        return None
    factor = dict(zip(axes, (float(one) for one in known.flat)))
    if any(factor.get(axis, 1.0) != 1.0 for axis in (0, 1)):
        return None
    wanted: list[HostNumber] = []
    for axis in (2, 3):
        size, scale = e.size(x, axis), factor.get(axis, 1.0)
        if not isinstance(size, Number):
            wanted.append(int(size * scale + 1e-6))
        elif scale == int(scale):
            wanted.append(size if scale == 1 else e.number(f"{size} * {int(scale)}", is_size=True))
        else:
            wanted.append(e.number(f"int({size} * {scale} + 1e-6)", is_size=True))
    return wanted, [factor.get(2, 1.0), factor.get(3, 1.0)]


@row("GridSample")
def grid_sample(e: Emitter, node: NodeView, x: Value, grid: Value) -> TensorValue:
    modes = {"bilinear": 0, "linear": 0, "nearest": 1, "bicubic": 2, "cubic": 2}
    mode = modes[node.text("mode", "linear")]
    padding = ["zeros", "border", "reflection"].index(node.text("padding_mode", "zeros"))
    corners = bool(node.int("align_corners", 0))
    if e.rank(x) == 5 and mode == 2:
        raise NotImported("torch has no cubic sampling of volumes.")
    given = f"{e.tensor(x)}, {e.tensor(grid)}, {mode}, {padding}, {corners}"
    return TensorValue(f"torch.grid_sampler({given})", e.dtype(x), (None,) * e.rank(x))


@row("AffineGrid")
def affine_grid(e: Emitter, node: NodeView, theta: Value, size: Value) -> TensorValue:
    corners = bool(node.int("align_corners", 0))
    rank = (e.dims(size) or (None,))[0]
    made = f"torch.affine_grid_generator({e.tensor(theta)}, {e.ints(size)}, {corners})"
    return TensorValue(made, e.dtype(theta), None if rank is None else (None,) * rank)
