# SPDX-License-Identifier: Apache-2.0
"""What an engine of a library carries in a file: a head in JSON, then the library's own bytes.

data = pack(Head("onnxruntime", "1.31.1", weights=("w0",)), model)
head, model = unpack(payload_tensor, "onnxruntime", "1.31.1")      # BackendError: another version
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from blade.errors import BackendError

FORMAT = 1


@dataclass(frozen=True)
class Head:
    """``weights``: the library's names of the engine's constants, in their order. ``orders``: per result
    the order of its axes in memory (``results.restore``), or ``None``."""

    library: str
    version: str
    weights: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    orders: Sequence[Sequence[int] | None] = ()


def pack(head: Head, data: bytes) -> bytes:
    """Both as bytes."""
    text = json.dumps({"format": FORMAT, **asdict(head)}).encode()
    return b"".join([len(text).to_bytes(8, "little"), text, data])


def unpack(payload: torch.Tensor, library: str, version: str) -> tuple[Head, bytes]:
    """Head and data of an engine made with this ``version`` of ``library``.

    Raises ``BackendError`` for another one: what it would compute was not verified.
    """
    raw = payload.numpy()
    size = int.from_bytes(raw[:8].tobytes(), "little")
    fields = json.loads(raw[8 : 8 + size].tobytes())
    if fields.pop("format") != FORMAT:
        raise BackendError(f"the engine's {library} payload is of another version of blade.")
    head = Head(**{name: _tuples(value) for name, value in fields.items()})
    if (head.library, head.version) != (library, version):
        raise BackendError(
            f"the engine was made and verified with {head.library} {head.version}, this process has "
            f"{library} {version}: optimize again, or install {head.library}=={head.version}."
        )
    return head, raw[8 + size :].tobytes()


def _tuples(value: Any) -> Any:
    """Lists, as JSON has them, as tuples."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
