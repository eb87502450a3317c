# SPDX-License-Identifier: Apache-2.0
"""A cluster as an ONNX model without its weights, for all backends that read ONNX.

    model = to_onnx(cluster, config)
    model.data                      # a valid ModelProto whose weights are inputs: {"const_0": ...}
    external_weights(model)         # ... are initializers without contents

Weights are the engine's constants, so that a saved file has them once. Small constants (a shape, a scalar, an
epsilon) are in ``data``, where they can be folded. Exports are cached, so that several backends, and the next
process, share one.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from operator import attrgetter
from typing import Any

import torch

from blade.backends.shared.onnx.exporter import OPSET, reduce, translate
from blade.config import Config
from blade.core.cluster import Cluster
from blade.core.disk_cache import code_version, digest, open_cache
from blade.graph.fx.check_indices import OutOfRangePolicy
from blade.graph.fx.exported_program import output_orders, to_exported
from blade.program.guard_program import guard_program

KIND = "onnx"
INLINE_BYTES = 1024  # constants up to this size are part of the model
Order = tuple[int, ...] | None


@dataclass(frozen=True)
class OnnxModel:
    """``data`` is the model. Its inputs are ``inputs``, in the cluster's order, then the ``weights``.

    ``outputs``: the cluster's, then the flag of its indices if they are flagged. ``weights``: name in the
    model -> name of the cluster's constant. ``orders[k]``, if set: output k is returned permuted, and
    ``output_buffers.restore`` undoes that. ``program`` has all guards, including the exporter's.
    """

    data: bytes
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    weights: Mapping[str, str]
    orders: tuple[Order, ...]
    program: str


def to_onnx(cluster: Cluster, config: Config, *, indices: OutOfRangePolicy = "raised") -> OnnxModel:
    """``cluster`` in ONNX, from the cache if it was exported before.

    ``indices`` says what happens to indices out of range, for which torch raises on a CPU. "raised": the
    library raises; negative indices, which ONNX allows, are made out of range. "flagged": an additional last
    output is true if all are in range (only if the cluster looks up anything). "trusted": they are assumed
    not to occur.

    Raises ``Refused`` if ONNX or a program cannot express the cluster, and what the exporter raises.
    """
    cache = open_cache(config.cache)
    key = digest([_key(cluster), indices]) if cache is not None else ""
    if cache is not None and (data := cache.get(KIND, key)) is not None:
        return _from_bytes(data)
    model = _export(cluster, indices)
    if cache is not None:
        cache.put(KIND, key, _to_bytes(model))
    return model


def why_no_onnx() -> str | None:
    """``None`` if clusters can be exported, else a sentence with the fix."""
    from importlib.util import find_spec

    missing = [name for name in ("onnx", "onnxscript") if find_spec(name) is None]
    if not missing:
        return None
    names = " and ".join(missing)
    return f"ONNX models are made with {names}, not installed here: pip install {' '.join(missing)}"


def exporter_version() -> str:
    """The versions that an export depends on besides the cluster."""
    parts = [f"{name} {version(name)}" for name in ("onnx", "onnxscript")]
    return ", ".join([f"torch {torch.__version__}", *parts, f"opset {OPSET}"])


def export_seconds(cluster: Cluster) -> float:
    """Estimated seconds for exporting and loading without a cache: 2 s to start, 8 ms per op."""
    return 2.0 + 0.008 * len(cluster.ops)


def external_weights(model: OnnxModel) -> bytes:
    """The model with its weights as external initializers, whose contents the caller passes in memory."""
    import onnx

    proto = onnx.load_from_string(model.data)
    for value in _take_weights(proto.graph, model):
        tensor = proto.graph.initializer.add()
        _declare(tensor, value)
        tensor.data_location = onnx.TensorProto.EXTERNAL
        entry = tensor.external_data.add()
        entry.key, entry.value = "location", value.name
    data: bytes = proto.SerializeToString()
    return data


def _take_weights(graph: Any, model: OnnxModel) -> list[Any]:
    """Remove the weights' entries from the inputs and return them."""
    found = [value for value in graph.input if value.name in model.weights]
    for value in found:
        graph.input.remove(value)
    return found


def _declare(tensor: Any, value: Any) -> None:
    kind = value.type.tensor_type
    tensor.name, tensor.data_type = value.name, kind.elem_type
    tensor.dims.extend(dim.dim_value for dim in kind.shape.dim)


def _export(cluster: Cluster, indices: OutOfRangePolicy) -> OnnxModel:
    import onnx_ir

    graph = _translate(cluster, indices)
    weights = _free_weights(graph, cluster)
    _simplify(graph)
    _drop_notes(graph)
    used = [value for value in graph.graph.inputs if value.name in weights and value.uses()]
    inputs = [value for value in graph.graph.inputs if value.name not in weights]
    graph.graph.inputs[:] = [*inputs, *used]
    return OnnxModel(
        data=onnx_ir.serde.serialize_model(graph).SerializeToString(),
        inputs=tuple(str(value.name) for value in inputs),
        outputs=tuple(str(value.name) for value in graph.graph.outputs),
        weights={str(value.name): str(value.name) for value in used},
        orders=tuple(output_orders(cluster)),
        program=guard_program(cluster),  # last: the exporter adds guards
    )


def _translate(cluster: Cluster, indices: OutOfRangePolicy) -> Any:
    """The exporter's model, not yet simplified."""
    reduced = partial(reduce, indices=indices)
    model = translate(to_exported(cluster, row_major=True, reduce=reduced))
    for k, value in enumerate(model.graph.outputs):
        value.name = f"y{k}"
    return model


def _free_weights(model: Any, cluster: Cluster) -> set[str]:
    """Turn large constants into inputs, so that they are neither folded nor copied."""
    free = set()
    for name, value in list(model.graph.initializers.items()):
        tensor = _constant(cluster, name)
        if tensor is None or tensor.numel() * tensor.element_size() <= INLINE_BYTES:
            continue
        del model.graph.initializers[name]
        value.const_value = None
        model.graph.inputs.append(value)
        free.add(name)
    return free


def _simplify(model: Any) -> None:
    """Apply the cheap simplifications. Rewriting (``optimizer.optimize``) takes as long as the export, and
    the libraries do it themselves."""
    from onnx_ir.passes import common
    from onnxscript import optimizer

    optimizer.inline(model)
    optimizer.fold_constants(model, output_size_limit=INLINE_BYTES)
    optimizer.remove_unused_nodes(model)
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    common.DeduplicateInitializersPass()(model)
    common.CommonSubexpressionEliminationPass()(model)
    common.OutputFixPass()(model)


def _constant(cluster: Cluster, name: str) -> torch.Tensor | None:
    known = {str(n.target) for n in cluster.gm.graph.nodes if n.op == "get_attr"}
    return attrgetter(name)(cluster.gm) if name in known else None


def _drop_notes(model: Any) -> None:
    """Remove the origins of nodes: they name files of this machine and are half of the model's size."""
    model.graph.metadata_props.clear()
    for node in model.graph.all_nodes():
        node.metadata_props.clear()
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()
    for value in [*model.graph.inputs, *model.graph.initializers.values()]:
        value.metadata_props.clear()


def _key(cluster: Cluster) -> str:
    """The cache key of everything that the export depends on, but not the contents of large constants."""
    nodes = list(cluster.gm.graph.nodes)
    given = [_form(n.meta["val"]) for n in nodes if n.op == "placeholder"]
    held = {
        str(n.target): attrgetter(str(n.target))(cluster.gm) for n in nodes if n.op == "get_attr"
    }
    return digest(
        [
            code_version(),
            exporter_version(),
            "\n".join(str(n.format_node()) for n in nodes),
            *given,
            *(part for name, tensor in held.items() for part in (name, *_contents(tensor))),
            *(str(guard.expr) for guard in cluster.shape_env.guards),
        ]
    )


def _form(fake: torch.Tensor) -> str:
    hints = [
        n if isinstance(n, int) else f"{n}={n.node.hint}" for n in (*fake.shape, *fake.stride())
    ]
    return f"{fake.dtype} {fake.device} {hints}"


def _contents(tensor: torch.Tensor) -> Sequence[str | bytes]:
    form = f"{tensor.dtype} {list(tensor.shape)}"
    if tensor.numel() * tensor.element_size() > INLINE_BYTES:
        return (form,)
    return form, tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _to_bytes(model: OnnxModel) -> bytes:
    head = asdict(model)
    del head["data"]
    text = json.dumps(head).encode()
    return b"".join([len(text).to_bytes(8, "little"), text, model.data])


def _from_bytes(data: bytes) -> OnnxModel:
    size = int.from_bytes(data[:8], "little")
    head = json.loads(data[8 : 8 + size])
    return OnnxModel(
        data=data[8 + size :],
        inputs=tuple(head["inputs"]),
        outputs=tuple(head["outputs"]),
        weights=head["weights"],
        orders=tuple(None if one is None else tuple(one) for one in head["orders"]),
        program=head["program"],
    )
