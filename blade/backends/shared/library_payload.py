# SPDX-License-Identifier: Apache-2.0
"""The payload of a library's engine: the model in the library's format, and the meaning of its names.

data = pack(LibraryHeader(weights=("w0",)), {"openvino": "2026.4.1"}, model)
head, model = unpack(payload_tensor, {"openvino": "2026.4.1"}, "OpenVINO", 1)     # BackendError: another version
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from blade.backends.shared.archive import EngineArchive, read
from blade.errors import BackendError

MODEL = "model.onnx"
DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class LibraryHeader:
    """``weights``: the library's names of the engine's constants, in order. ``outputs``: the names of the
    outputs, then of the flag that all indices are in range, if there is one. ``orders``: per output the order
    of its axes in memory (``output_buffers.restore``), or ``None``. ``device``: the device type of all inputs
    and outputs."""

    weights: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    orders: Sequence[Sequence[int] | None] = ()
    device: str = "cpu"

    @property
    def is_flagged(self) -> bool:
        """Whether the last output is a boolean that says if all indices are in range."""
        return len(self.outputs) > len(self.orders)


def pack(head: LibraryHeader, stamp: Mapping[str, str], model: bytes) -> bytes:
    """The payload as bytes; ``stamp``: the versions it was made and verified with."""
    return EngineArchive(stamp, asdict(head), {MODEL: model}).to_bytes()


def unpack(
    payload: torch.Tensor, here: Mapping[str, str], who: str, constants: int
) -> tuple[LibraryHeader, bytes]:
    """The head and the model. ``constants``: how many the engine has.

    Raises ``BackendError`` if the payload is damaged, was made with other versions than ``here``, or its head
    is not one that ``pack`` writes.
    """
    archive = read(payload.numpy().tobytes(), here, who, {MODEL})
    facts = {name: _tuples(value) for name, value in archive.facts.items()}
    if set(facts) != {one.name for one in fields(LibraryHeader)} or MODEL not in archive.files:
        raise BackendError(f"what {who} compiled is damaged (its head is in another form).")
    head = LibraryHeader(**facts)
    if (why := _why_not(head, constants)) is not None:
        raise BackendError(f"what {who} compiled is damaged ({why}).")
    return head, archive.files[MODEL]


def why_no_orders(orders: Any) -> str | None:
    """``None`` if ``orders`` are orders of axes for ``output_buffers.restore``, in tuples or lists."""
    if not isinstance(orders, (list, tuple)):
        return "it has no orders of axes"
    for order in orders:
        plain = isinstance(order, (list, tuple)) and all(type(axis) is int for axis in order)
        if order is not None and (not plain or sorted(order) != list(range(len(order)))):
            return f"{order!r} is no order of axes"
    return None


def _why_not(head: LibraryHeader, constants: int) -> str | None:
    for names in (head.weights, head.inputs, head.outputs):
        if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
            return "its names are no texts"
        if len(set(names)) != len(names):
            return "it has a name twice"
    if head.device not in DEVICES:
        return f"there is no device {head.device!r}"
    if len(head.weights) != constants:
        return f"it has {len(head.weights)} weights, and the engine {constants}"
    if (why := why_no_orders(head.orders)) is not None:
        return why
    few = len(head.outputs) - len(head.orders)
    return None if few in (0, 1) else "its outputs do not fit their orders"


def _tuples(value: Any) -> Any:
    """Convert JSON's lists to tuples."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
