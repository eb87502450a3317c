# SPDX-License-Identifier: Apache-2.0
"""Check the bytes of an ONNX model for external files and custom ops, without the package onnx.

    check_model(data, {"const_0"}, "ONNX Runtime")      # BackendError unless it is self-contained

A library resolves the path of external data against the working directory. The only external tensors allowed
are the weights that blade passes in memory, each once, as an initializer of the main graph. The check walks
everything that a model may nest: graphs in attributes, functions, sparse tensors, training information.
"""

from collections.abc import Collection, Iterator
from typing import NamedTuple

from blade.errors import BackendError

DOMAINS = frozenset({"", "ai.onnx"})
"""Domains of standard ops. ``com.microsoft`` has ops that name files (EPContext)."""
_MAX_DEPTH = 64
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

# Field numbers of onnx.proto, which are part of the file format: message -> field -> message inside.
_INSIDE: dict[str, dict[int, str]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "function": {7: "node", 11: "attribute"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
}
_NODE_DOMAIN, _FUNCTION_DOMAIN = 7, 10
_TENSOR_NAME, _EXTERNAL_DATA, _DATA_LOCATION = 8, 13, 14
_INITIALIZER = ("model", "graph", "tensor")


class _Field(NamedTuple):
    number: int
    kind: int
    number_value: int
    data: memoryview


class _Malformed(ValueError):
    pass


def check_model(
    data: bytes, given: Collection[str], who: str, domains: Collection[str] = DOMAINS
) -> None:
    """Raise ``BackendError`` if ``data`` is no ONNX model, or one that reads files or has custom ops.

    ``given``: names of the initializers whose contents ``who`` receives in memory. ``domains``: of its ops.
    """
    seen: set[str] = set()
    try:
        for path, fields in _messages(memoryview(data)):
            if path[-1] == "tensor":
                _check_tensor(path, fields, given, seen)
            elif path[-1] in ("node", "function"):
                number = _NODE_DOMAIN if path[-1] == "node" else _FUNCTION_DOMAIN
                for domain in _texts(fields, number):
                    if domain not in domains:
                        raise _Malformed(f"it has ops of the domain {domain!r}")
    except _Malformed as error:
        raise BackendError(f"the model for {who} is not used: {error}.") from error


def _check_tensor(
    path: tuple[str, ...], fields: list[_Field], given: Collection[str], seen: set[str]
) -> None:
    location = any(
        f.number == _DATA_LOCATION and (f.kind != _VARINT or f.number_value) for f in fields
    )
    if not location and not any(f.number == _EXTERNAL_DATA for f in fields):
        return
    names = _texts(fields, _TENSOR_NAME)
    name = names[-1] if names else ""
    if path != _INITIALIZER or len(names) != 1 or name not in given:
        raise _Malformed(f"its tensor {name!r} is in another file")
    if name in seen:
        raise _Malformed(f"it has two tensors {name!r}")
    seen.add(name)


def _messages(data: memoryview) -> Iterator[tuple[tuple[str, ...], list[_Field]]]:
    """Every message of the model, with the kinds of its enclosing messages. A repeated value of a singular
    field is read as all of its values, because libraries merge them."""
    waiting: list[tuple[tuple[str, ...], memoryview]] = [(("model",), data)]
    while waiting:
        path, message = waiting.pop()
        if len(path) > _MAX_DEPTH:
            raise _Malformed(f"it is nested more than {_MAX_DEPTH} levels deep")
        fields = list(_fields(message))
        inside = _INSIDE.get(path[-1], {})
        for field in fields:
            if field.number in inside:
                if field.kind != _BYTES:
                    raise _Malformed(f"field {field.number} of a {path[-1]} is no message")
                waiting.append(((*path, inside[field.number]), field.data))
        if path == ("model",) and not any(field.number == 7 for field in fields):
            raise _Malformed("it is no ONNX model: it has no graph")
        yield path, fields


def _fields(message: memoryview) -> Iterator[_Field]:
    position = 0
    while position < len(message):
        tag, position = _varint(message, position)
        number, kind = tag >> 3, tag & 7
        value, start = 0, position
        if kind == _VARINT:
            value, position = _varint(message, position)
        elif kind == _BYTES:
            size, start = _varint(message, position)
            position = start + size
        elif kind in (_FIXED64, _FIXED32):
            position += 8 if kind == _FIXED64 else 4
        else:
            raise _Malformed("it is no ONNX model: its bytes are no protocol buffer")
        if position > len(message) or not 0 < number < 1 << 29:
            raise _Malformed("it is no ONNX model, or one that was cut off")
        yield _Field(number, kind, value, message[start:position])


def _varint(message: memoryview, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(message):
            break
        byte = message[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
    raise _Malformed("it is no ONNX model, or one that was cut off")


def _texts(fields: list[_Field], number: int) -> list[str]:
    found = [f for f in fields if f.number == number]
    if any(f.kind != _BYTES for f in found):
        raise _Malformed(f"field {number} is no text")
    return [bytes(f.data).decode("utf-8", "replace") for f in found]
