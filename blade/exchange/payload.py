# SPDX-License-Identifier: Apache-2.0
"""What an engine of a library carries in a file: the model as the library reads it, and what its names mean.

data = pack(Head(weights=("w0",)), {"openvino": "2026.4.1"}, {"model.onnx": model})
head, files = unpack(payload_tensor, {"openvino": "2026.4.1"}, "OpenVINO")     # BackendError: another version
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from blade.backends.archive import Archive, read


@dataclass(frozen=True)
class Head:
    """``weights``: the library's names of the engine's constants, in their order. ``outputs``: of the results,
    then of the flag that all indices are in range, if there is one. ``orders``: per result
    the order of its axes in memory (``results.restore``), or ``None``. ``device``: the type of the one that all
    inputs and results are on."""

    weights: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    orders: Sequence[Sequence[int] | None] = ()
    device: str = "cpu"

    @property
    def is_flagged(self) -> bool:
        """Whether the last output is a boolean that says if all indices are in range."""
        return len(self.outputs) > len(self.orders)


def pack(head: Head, stamp: Mapping[str, str], files: Mapping[str, bytes]) -> bytes:
    """All of it as bytes; ``stamp`` are the versions it was made and verified with."""
    return Archive(stamp, asdict(head), files).to_bytes()


def unpack(
    payload: torch.Tensor, here: Mapping[str, str], who: str
) -> tuple[Head, Mapping[str, bytes]]:
    """Raises ``BackendError`` where it is damaged or was made with other versions than are ``here``."""
    archive = read(payload.numpy().tobytes(), here, who)
    return Head(**{name: _tuples(value) for name, value in archive.facts.items()}), archive.files


def _tuples(value: Any) -> Any:
    """Lists, as JSON has them, as tuples."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
