# SPDX-License-Identifier: Apache-2.0
"""SmoothQuant: scales are moved from activations into weights, so that outlier channels cost less precision.

    gm, moved = smoothquant(gm, layers, seen, per_token=True)

Source: Xiao et al., ICML 2023. The layer that computes a product's input features divides them by ``s``,
and the columns of the product's weight are multiplied by ``s``. This is exact if an affine norm or another
product computes the features and only products read them. It is applied if it also reduces the products'
own error on the samples' rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from blade.backends.quant.analysis.affine import affine_of, quantize_weight, token_round_trip
from blade.backends.quant.analysis.calibrate import CalibrationStats
from blade.backends.quant.analysis.layers import Layer, find_layers, tensor_of
from blade.backends.quant.transforms.insert_qdq import QdqWriter, finish, private

aten = torch.ops.aten
STRENGTHS = (0.5, 0.75, 0.25)  # share of an outlier that moves to the weight, in the order of trial
GAIN = 0.9  # the error must shrink at least by this factor
_NORM, _SCALE = aten.layer_norm.default, aten.mul.Tensor
_KEEP_SCALES = (aten.relu.default, aten.leaky_relu.default)  # f(s x) = s f(x) for s > 0


@dataclass(frozen=True)
class Migration:
    """``maker`` computes the features, up to a scale-preserving function; only ``readers`` read them."""

    maker: Node
    readers: tuple[Layer, ...]

    @property
    def features(self) -> str:
        return self.readers[0].x.name


def smoothquant(
    gm: GraphModule, layers: Sequence[Layer], seen: CalibrationStats, per_token: bool
) -> tuple[GraphModule, list[str]]:
    """``gm`` with scales moved where that helps, and the activations' names; ``gm`` itself without any.

    ``per_token``: activations will be quantized per token, not per tensor.
    """
    chosen = []
    for migration in find_migrations(gm, layers):
        scales = _best_scales(migration, seen, per_token)
        if scales is not None:
            chosen.append((migration, scales))
    if not chosen:
        return gm, []
    copy = private(gm)
    for migration, scales in chosen:
        apply(copy, migration, scales)
    return finish(copy), [m.features for m, _ in chosen]


def find_migrations(gm: GraphModule, layers: Sequence[Layer]) -> list[Migration]:
    """All migrations that are exact."""
    readers: dict[Node, list[Layer]] = {}
    for layer in layers:
        if layer.kind == "linear":
            readers.setdefault(layer.x, []).append(layer)
    products = {layer.node: layer for layer in layers if layer.kind == "linear"}
    found = []
    for x, every in readers.items():
        if len(x.users) != len({r.node for r in every}):
            continue  # another op reads the unscaled features
        maker = _maker(gm, x, products)
        if maker is not None:
            found.append(Migration(maker, tuple(every)))
    return found


def apply(gm: GraphModule, migration: Migration, scales: torch.Tensor) -> None:
    """Divide the features by ``scales`` in their maker and multiply in their readers, in place."""
    writer = QdqWriter(gm)
    nodes = {node.name: node for node in gm.graph.nodes}
    layers = {layer.name: layer for layer in find_layers(gm)}
    maker = nodes[migration.maker.name]
    if maker.name in layers:
        layer = layers[maker.name]
        bias = None if layer.bias is None else tensor_of(gm, layer.bias)
        divided = None if bias is None else bias / scales
        writer.reweight(layer, layer.weight / scales.unsqueeze(1), divided, nodes)
    else:
        _divide_norm(writer, gm, maker, scales)
    for reader in migration.readers:
        layer = layers[reader.name]
        bias = None if layer.bias is None else tensor_of(gm, layer.bias)
        writer.reweight(layer, layer.weight * scales, bias, nodes)


def scales_of(
    peaks: torch.Tensor, weights: Sequence[torch.Tensor], strength: float
) -> torch.Tensor:
    """``s = peak(x) ** strength / peak(w) ** (1 - strength)`` per feature; 1 if either peak is 0."""
    columns = torch.stack([w.abs().amax(0) for w in weights]).amax(0)
    scales = peaks.pow(strength) / columns.pow(1 - strength)
    usable = (peaks > 0) & (columns > 0) & torch.isfinite(scales) & (scales > 0)
    return scales.where(usable, 1.0)


def _maker(gm: GraphModule, x: Node, products: dict[Node, Layer]) -> Node | None:
    while x.target in _KEEP_SCALES and len(x.users) >= 1:
        source = x.args[0]
        if not isinstance(source, Node) or len(source.users) != 1:
            return None
        x = source
    if x in products:
        return x
    if x.target is _NORM and len(x.args) > 3 and len(x.args[1]) == 1:  # type: ignore[arg-type]
        held = [tensor_of(gm, a) for a in x.args[2:4]]
        return x if all(h is not None for h in held) else None
    if x.target is _SCALE:  # an RMS norm's last op
        held = [tensor_of(gm, a) for a in x.args]
        one = [h for h in held if h is not None and h.dim() == 1 and h.dtype == torch.float32]
        return x if len(one) == 1 and len(one[0]) == x.meta["val"].shape[-1] else None
    return None


def _divide_norm(writer: QdqWriter, gm: GraphModule, norm: Node, scales: torch.Tensor) -> None:
    args = list(norm.args)
    positions = (2, 3) if norm.target is _NORM else (0, 1)
    with gm.graph.inserting_before(norm):
        for i in positions:
            held = tensor_of(gm, args[i])
            if held is not None:
                args[i] = writer.constant(held / scales)
    norm.args = tuple(args)


def _best_scales(
    migration: Migration, seen: CalibrationStats, per_token: bool
) -> torch.Tensor | None:
    rows, peaks = (of.get(migration.features) for of in (seen.rows, seen.peaks))
    if rows is None or peaks is None or not len(rows):
        return None
    weights = [r.weight for r in migration.readers]
    best, least = None, GAIN * _error(rows, weights, torch.ones_like(peaks), per_token)
    for strength in STRENGTHS:
        scales = scales_of(peaks, weights, strength)
        error = _error(rows, weights, scales, per_token)
        if error < least:
            best, least = scales, error
    return best


def _error(
    rows: torch.Tensor, weights: Sequence[torch.Tensor], scales: torch.Tensor, per_token: bool
) -> float:
    """Squared error of the products of ``rows`` with features divided by ``scales`` and quantized."""
    smoothed = rows / scales
    if per_token:
        seen = token_round_trip(smoothed, symmetric=True)
    else:
        low, high = (float(v) for v in torch.aminmax(smoothed))
        seen = affine_of(low, high, symmetric=False).round_trip(smoothed)
    total = 0.0
    for weight in weights:
        got = seen @ quantize_weight(weight * scales).dequantize().t()
        total += float((got - rows @ weight.t()).square().sum())
    return total
