# SPDX-License-Identifier: Apache-2.0
"""Writes the TorchScript of one model, and turns values into what a row of the table needs.

e = Emitter()
e.tensor(x)          # the text of a tensor; constants become buffers, host values torch.tensor([...])
e.ints(axes)         # the text of a List[int]
e.known_ints(axes)   # list[int], if they are known now
e.size(x, 1)         # 768, or Number("n3")
e.let("torch.relu(x)", torch.float32, dims)     # a line; returns the TensorValue of its left side
"""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from blade.importers.onnx.emit.dtypes import FLOATS, to_tensor
from blade.importers.onnx.emit.errors import NotImported
from blade.importers.onnx.emit.values import (
    AnyTensor,
    Array,
    ConstantValue,
    Dims,
    HostNumber,
    HostValue,
    Number,
    OptionalValue,
    SequenceValue,
    Sizes,
    TensorValue,
    Value,
)

HOST_ELEMENTS = 64
"""The largest constant whose elements may become numbers of the host."""

_RESERVED = {*keyword.kwlist, "self", "torch", "math", "run", "float", "int", "bool", "len"}
_RESERVED |= {"inf", "nan", "range", "min", "max", "Tensor", "List", "Optional", "forward", "print"}


class Emitter:
    """The lines of ``forward``, and the tensors that they read as attributes."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.buffers: dict[str, torch.Tensor] = {}
        self.engines: dict[str, Any] = {}
        self.quantized: dict[str, tuple[Value, Value, Value | None, int]] = {}
        """Quantized tensors by text: what they were, their scale, zero point and axis."""
        self.anchor = ""
        """The text of a tensor on the device of the model, for tensors that are made at run time."""
        self._indent = 1
        self._taken = set(_RESERVED)
        self._numbers: list[dict[str, Number]] = [{}]
        self._held: dict[int, tuple[str, Array]] = {}

    # Lines.

    def line(self, text: str) -> None:
        self.lines.append(self.indentation + text)

    @property
    def indentation(self) -> str:
        return "    " * self._indent

    def name(self, wanted: str) -> str:
        """A new identifier that looks like ``wanted``."""
        stem = re.sub(r"\W+", "_", wanted).strip("_") or "value"
        if stem[0].isdigit() or stem in _RESERVED:
            stem = f"v_{stem}"
        found, count = stem, 1
        while found in self._taken:
            found, count = f"{stem}_{count}", count + 1
        self._taken.add(found)
        return found

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        """The lines inside belong to ``head``; numbers that are named there are not known outside."""
        self.line(head)
        self._indent += 1
        self._numbers.append({})
        yield
        self._numbers.pop()
        self._indent -= 1

    @contextmanager
    def captured(self) -> Iterator[list[str]]:
        """The lines inside go to the list that is yielded, one level deeper; ``insert`` puts them somewhere."""
        outer, self.lines = self.lines, []
        self._indent += 1
        self._numbers.append({})
        try:
            yield self.lines
        finally:
            self._numbers.pop()
            self._indent -= 1
            self.lines = outer

    def insert(self, head: str, lines: Sequence[str]) -> None:
        """Write ``head`` and the lines that were captured as its block."""
        self.line(head)
        self.lines += lines or ["    " * (self._indent + 1) + "pass"]

    def mark(self) -> tuple[int, list[dict[str, Number]]]:
        """A place to roll back to."""
        return len(self.lines), [dict(one) for one in self._numbers]

    def roll_back(self, mark: tuple[int, list[dict[str, Number]]]) -> None:
        """Remove the lines since ``mark``."""
        count, self._numbers = mark
        del self.lines[count:]

    def let(
        self,
        text: str,
        dtype: torch.dtype | None = None,
        dims: Sizes | None = None,
        name: str = "t",
    ) -> TensorValue:
        """Assign a tensor to a new name."""
        found = self.name(name)
        self.line(f"{found} = {text}")
        return TensorValue(found, dtype, dims)

    def assign(self, text: str, kind: str, name: str) -> str:
        """Assign a value of the type ``kind`` to a new name."""
        found = self.name(name)
        self.line(f"{found}: {kind} = {text}")
        return found

    # Numbers.

    def number(self, text: str, kind: Any = "int", is_size: bool = False) -> Number:
        """A name for the number that ``text`` computes; the same name for the same text."""
        for known in self._numbers:
            if text in known:
                return known[text]
        made = Number(self.name("n" if kind == "int" else "c"), kind, is_size)
        self.line(f"{made.text} = {text}")
        self._numbers[-1][text] = made
        return made

    def size(self, value: Value, axis: int) -> HostNumber:
        """The size of an axis of a tensor."""
        dims = self.sizes(value)
        if dims is not None and (found := dims[axis]) is not None:
            return found
        if dims is not None:
            axis %= len(dims)
        return self.number(f"{self.tensor(value)}.size({axis})", is_size=True)

    # What is known.

    def dims(self, value: Value) -> Dims | None:
        """The sizes as far as they are known now, or ``None`` if not even the rank is."""
        sizes = self.sizes(value)
        if sizes is None:
            return None
        return tuple(one if isinstance(one, int) else None for one in sizes)

    def sizes(self, value: Value) -> Sizes | None:
        """As ``dims``, with names for sizes that are known at run time."""
        if isinstance(value, (HostValue, ConstantValue)):
            shape: tuple[int, ...] = value.array.shape
            return shape
        return value.dims if isinstance(value, TensorValue) else None

    def rank(self, value: Value) -> int:
        """Raises ``NotImported`` if it is not known."""
        dims = self.dims(value)
        if dims is None:
            raise NotImported("The rank of an input is not known.")
        return len(dims)

    def dtype(self, value: Value) -> torch.dtype:
        """Raises ``NotImported`` if it is not known."""
        found = None if isinstance(value, OptionalValue) else value.dtype
        if found is None:
            raise NotImported("The element type of an input is not known.")
        return found

    def is_float(self, value: Value) -> bool:
        return self.dtype(value) in FLOATS

    def axis(self, value: Value, axis: int) -> int:
        """``axis`` counted from the front, if the rank is known."""
        dims = self.dims(value)
        return axis % len(dims) if dims else axis

    # Values as text.

    def tensor(self, value: Value | None) -> str:
        """The text of a tensor."""
        if isinstance(value, TensorValue):
            return value.text
        if isinstance(value, ConstantValue):
            return self._buffer(value)
        if isinstance(value, HostValue):
            return self._materialized(value)
        if isinstance(value, OptionalValue):
            return self.opened(value).text
        raise NotImported("A tensor is expected where there is none.")

    def opened(self, value: OptionalValue) -> TensorValue | SequenceValue:
        """What is inside of an optional, which has to be there."""
        found = self.name("inside")
        self.line(f"{found} = {value.text}")
        self.line(f"assert {found} is not None")
        if isinstance(value.inner, SequenceValue):
            return SequenceValue(found, value.inner.dtype, value.inner.dims)
        return TensorValue(found, value.inner.dtype, value.inner.dims)

    def host(self, value: Value | None) -> Array | None:
        """The elements of a tensor as numbers of the host, or ``None``."""
        if isinstance(value, HostValue):
            return value.array
        if isinstance(value, ConstantValue) and value.array.size <= HOST_ELEMENTS:
            if value.dtype.is_complex:
                return None
            plain = value.array
            if plain.dtype.kind not in "biuf":
                plain = plain.astype(np.float32)
            return plain.astype(object)
        return None

    def known(self, value: Value | None) -> Array | None:
        """The elements of a constant tensor, as an array of numbers, or ``None``."""
        if isinstance(value, ConstantValue):
            return value.array
        if isinstance(value, HostValue):
            if any(isinstance(one, Number) for one in value.array.flat):
                return None
            return value.array.astype(np.bool_ if value.dtype is torch.bool else np.int64)
        return None

    def known_ints(self, value: Value | None) -> list[int] | None:
        """The elements of a constant of integers, or ``None``."""
        found = self.known(value)
        return None if found is None else [int(one) for one in found.flat]

    def literal(self, value: Value | None) -> str | None:
        """A tensor of one number as text, or ``None``. Only for constants of which nobody needs the rank."""
        array = self.host(value)
        if array is None or array.size != 1:
            return None
        return number_text(array.reshape(()).item())

    def ints(self, value: Value | Sequence[HostNumber] | None) -> str:
        """The text of a List[int]."""
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(number_text, value))}]" if value else self.no_ints()
        assert value is None or not isinstance(value, Sequence), value
        array = self.host(value)
        if array is not None:
            return self.ints([_as_int(one) for one in array.flat])
        text = f"{self.tensor(value)}.reshape(-1).to(torch.int64).tolist()"
        return self.assign(text, "List[int]", "ints")

    def no_ints(self) -> str:
        return "torch.jit.annotate(List[int], [])"

    def floats(self, value: Value) -> str:
        """The text of a List[float]."""
        array = self.host(value)
        if array is not None:
            return f"[{', '.join(number_text(float(one)) for one in array.flat)}]"
        text = f"{self.tensor(value)}.reshape(-1).to(torch.float64).tolist()"
        return self.assign(text, "List[float]", "floats")

    def int(self, value: Value) -> str:
        """The text of an int: a tensor of one element."""
        array = self.host(value)
        if array is not None:
            return number_text(_as_int(array.reshape(()).item()))
        return self.number(f"int({self.tensor(value)}.item())").text

    def float(self, value: Value) -> str:
        """The text of a float."""
        array = self.host(value)
        if array is not None and not isinstance(one := array.reshape(()).item(), Number):
            return number_text(float(one))
        return f"float({self.tensor(value)}.item())"

    def bool(self, value: Value) -> str:
        """The text of a bool."""
        array = self.host(value)
        if array is None:
            return f"bool({self.tensor(value)}.item())"
        one = array.reshape(()).item()
        return f"bool({one})" if isinstance(one, Number) else str(bool(one))

    def sequence(self, value: Value | None) -> str:
        """The text of a List[Tensor]."""
        if isinstance(value, OptionalValue):
            value = self.opened(value)
        if not isinstance(value, SequenceValue):
            raise NotImported("A sequence is expected where there is none.")
        return value.text

    def constant(self, array: Array, dtype: torch.dtype, name: str = "constant") -> ConstantValue:
        return ConstantValue(name, np.asarray(array), dtype)

    def _buffer(self, value: ConstantValue) -> str:
        """The attribute that holds ``value``; equal memory is held once."""
        key = id(value.array)
        if key not in self._held:
            name = self.name(value.name)
            self.buffers[name] = to_tensor(value.array, value.dtype)
            self._held[key] = name, value.array  # keeps the array, and so its id, alive
        return f"self.{self._held[key][0]}"

    def _materialized(self, value: HostValue) -> str:
        known = self.known(value)
        if known is not None:
            return self._buffer(self.constant(known.astype(_NUMPY[value.dtype]), value.dtype))
        elements = ", ".join(number_text(one) for one in value.array.flat)
        device = f", device={self.anchor}.device" if self.anchor else ""
        if value.array.ndim == 0:
            text = f"torch.tensor({elements}, dtype={value.dtype}{device})"
        else:
            text = f"torch.tensor([{elements}], dtype={value.dtype}{device})"
        if value.array.ndim > 1:
            text += f".reshape({list(value.array.shape)})"
        return self.let(text).text


_NUMPY = {torch.int64: np.int64, torch.int32: np.int32, torch.bool: np.bool_}


def _as_int(number: HostNumber) -> HostNumber:
    if isinstance(number, Number):
        return number if number.kind == "int" else Number(f"int({number})", "int", True)
    return int(number)


def number_text(number: HostNumber) -> str:
    """A number as TorchScript's source has it."""
    if isinstance(number, float):
        if math.isnan(number) or math.isinf(number):
            return f'float("{number}")'
        return repr(number)
    return str(number)


def is_tensor(value: Value | None) -> bool:
    return isinstance(value, AnyTensor)
