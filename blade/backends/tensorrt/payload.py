# SPDX-License-Identifier: Apache-2.0
"""What of a TensorRT engine travels in a saved file: head, plan, and the graph to refit it from.

    data = Payload(head, plan, graph).to_bytes()
    payload = from_bytes(data)

The plan is stripped of its weights: they are the engine's constants, which the file holds once, and are
put back when the engine is loaded (``graph`` is the ONNX graph without them, which says where).
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from blade.backends.tensorrt.profiles import Profile, Shape
from blade.errors import BackendError

FORMAT = 1


@dataclass(frozen=True)
class Tensor:
    """An input or output of the engine, in the order of the cluster's. ``dtype`` is TensorRT's name.

    ``order``: the permutation that gives an output the memory order the original's has.
    """

    name: str
    dtype: str
    rank: int
    order: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Head:
    """``library``: the stamp of the TensorRT that built the plan, the only one that may run it.

    ``weights``: initializer of the graph -> position among the engine's constants. ``key`` names the
    plan in the cache; empty where nothing is to be kept.
    """

    library: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    profiles: tuple[Profile, ...]
    weights: Mapping[str, int]
    key: str


@dataclass(frozen=True)
class Payload:
    """``plan`` is what TensorRT built, ``graph`` the ONNX model it was built from, without weights."""

    head: Head
    plan: bytes
    graph: bytes

    def to_bytes(self) -> bytes:
        head = {"format": FORMAT, "sizes": [len(self.plan), len(self.graph)], **asdict(self.head)}
        text = json.dumps(head).encode()
        return b"".join([len(text).to_bytes(8, "little"), text, self.plan, self.graph])


def from_bytes(data: bytes | memoryview) -> Payload:
    """Raises ``BackendError`` for what another version of blade wrote."""
    view = memoryview(data)
    size = int.from_bytes(view[:8], "little")
    head = json.loads(bytes(view[8 : 8 + size]))
    if head["format"] != FORMAT:
        raise BackendError(
            f"The engine was saved in format {head['format']}; this blade reads format {FORMAT}."
        )
    plan, graph = head["sizes"]
    start = 8 + size
    return Payload(
        Head(
            library=head["library"],
            inputs=tuple(_tensor(one) for one in head["inputs"]),
            outputs=tuple(_tensor(one) for one in head["outputs"]),
            profiles=tuple(
                Profile(_shapes(one["min"]), _shapes(one["opt"]), _shapes(one["max"]))
                for one in head["profiles"]
            ),
            weights=head["weights"],
            key=head["key"],
        ),
        bytes(view[start : start + plan]),
        bytes(view[start + plan : start + plan + graph]),
    )


def _tensor(head: dict[str, object]) -> Tensor:
    order = head["order"]
    return Tensor(**{**head, "order": tuple(order) if isinstance(order, list) else None})  # type: ignore[arg-type]


def _shapes(shapes: list[list[int]]) -> tuple[Shape, ...]:
    return tuple(map(tuple, shapes))
