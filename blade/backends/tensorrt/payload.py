# SPDX-License-Identifier: Apache-2.0
"""The payload of a TensorRT engine in a saved file: head, plan, and the graph to refit it from.

    data = TensorRTPayload(head, plan, graph).to_bytes()
    payload = from_bytes(data, 2)     # of an engine with 2 constants

The plan is stripped of its weights: they are the engine's constants, which the file contains once. Loading
refits them, at the positions that ``graph`` (the ONNX graph without weights) defines.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from blade.backends.shared.library_payload import why_no_orders
from blade.backends.tensorrt.dtypes import TORCH
from blade.backends.tensorrt.profiles import Profile, Shape
from blade.errors import BackendError

FORMAT = 1


@dataclass(frozen=True)
class TensorSpec:
    """An input or output of the engine, in the order of the cluster's. ``dtype`` is TensorRT's name.

    ``order``: the permutation that gives an output the original's memory order.
    """

    name: str
    dtype: str
    rank: int
    order: tuple[int, ...] | None = None


@dataclass(frozen=True)
class TensorRTHeader:
    """``library``: the stamp of the TensorRT that built the plan, the only one that may run it.

    ``weights``: initializer of the graph -> index of the engine's constant. ``key``: the plan's cache key;
    empty if nothing is to be cached.
    """

    library: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    profiles: tuple[Profile, ...]
    weights: Mapping[str, int]
    key: str


@dataclass(frozen=True)
class TensorRTPayload:
    """``plan`` is what TensorRT built, ``graph`` the ONNX model it was built from, without weights."""

    head: TensorRTHeader
    plan: bytes
    graph: bytes

    def to_bytes(self) -> bytes:
        head = {"format": FORMAT, "sizes": [len(self.plan), len(self.graph)], **asdict(self.head)}
        text = json.dumps(head).encode()
        return b"".join([len(text).to_bytes(8, "little"), text, self.plan, self.graph])


def from_bytes(data: bytes | memoryview, constants: int) -> TensorRTPayload:
    """``constants``: how many the engine has.

    Raises ``BackendError`` for a payload of another version of blade, and for any other data.
    """
    view = memoryview(data)
    size = int.from_bytes(view[:8], "little")
    try:
        if size > len(view) - 8:
            raise ValueError("its head is cut off")
        head = json.loads(bytes(view[8 : 8 + size]))
        if head["format"] != FORMAT:
            raise BackendError(
                f"The engine was saved in format {head['format']}; this blade reads format {FORMAT}."
            )
        return _payload(head, view[8 + size :], constants)
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise BackendError(f"what TensorRT compiled is damaged ({error}).") from error


def _payload(head: dict[str, Any], files: memoryview, constants: int) -> TensorRTPayload:
    plan, graph = head["sizes"]
    if not _are_counts([plan, graph]) or plan + graph != len(files):
        raise ValueError("its parts have other sizes")
    weights, key = head["weights"], head["key"]
    if not _are_counts(weights.values()) or any(k >= constants for k in weights.values()):
        raise ValueError("its weights are not those of the engine")
    if not isinstance(key, str):
        raise ValueError("its key is no text")
    return TensorRTPayload(
        TensorRTHeader(
            library=head["library"],
            inputs=tuple(_tensor(one) for one in head["inputs"]),
            outputs=tuple(_tensor(one) for one in head["outputs"]),
            profiles=tuple(
                Profile(_shapes(one["min"]), _shapes(one["opt"]), _shapes(one["max"]))
                for one in head["profiles"]
            ),
            weights=weights,
            key=key,
        ),
        bytes(files[:plan]),
        bytes(files[plan:]),
    )


def _tensor(head: dict[str, Any]) -> TensorSpec:
    name, dtype, rank, order = (head[part] for part in ("name", "dtype", "rank", "order"))
    if not isinstance(name, str) or dtype not in TORCH or not _are_counts([rank]):
        raise ValueError(f"{name!r} of {dtype!r} is no tensor of an engine")
    if (why := why_no_orders([order])) is not None:
        raise ValueError(why)
    return TensorSpec(name, dtype, rank, None if order is None else tuple(order))


def _are_counts(values: Iterable[Any]) -> bool:
    return all(type(value) is int and value >= 0 for value in values)


def _shapes(shapes: list[list[int]]) -> tuple[Shape, ...]:
    if not all(_are_counts(shape) for shape in shapes):
        raise ValueError("a profile is no list of sizes")
    return tuple(map(tuple, shapes))
