# SPDX-License-Identifier: Apache-2.0
"""Read the pickles in a file of ``torch.jit.save`` without importing or calling anything.

    pickled = read_pickle(data, "data")
    pickled.root.state["cluster_0"]     # an ``Inert`` instance, whatever its class is called

Every object becomes an ``Inert`` one that keeps its state, every tensor its position in the archive. A text
knows the bytes of the pickle that push it, so that it can be replaced.
"""

import io
import pickle
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from blade.errors import InputError

_PurePython: Any = pickle._Unpickler  # type: ignore[attr-defined, unused-ignore]

STORAGES = {
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "ShortStorage": torch.int16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "HalfStorage": torch.float16,
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "BoolStorage": torch.bool,
    "BFloat16Storage": torch.bfloat16,
    "ComplexHalfStorage": torch.complex32,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
    "Float8_e4m3fnStorage": torch.float8_e4m3fn,
    "Float8_e5m2Storage": torch.float8_e5m2,
    "UInt16Storage": torch.uint16,
    "UInt32Storage": torch.uint32,
    "UInt64Storage": torch.uint64,
}
# Exceptions of reading a malformed or hand-made pickle.
BROKEN = (
    *(pickle.UnpicklingError, EOFError, LookupError, ValueError, TypeError, AttributeError),
    *(MemoryError, OverflowError, RecursionError, AssertionError),
)


class Inert:
    """An instance of any class, reduced to its state."""

    class_name = ""
    state: Any = None

    def __new__(cls, *args: object, **kwargs: object) -> "Inert":
        return super().__new__(cls)

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        object.__setattr__(self, "state", state)


@dataclass(frozen=True)
class _Storage:
    dtype: torch.dtype
    record: str


@dataclass(frozen=True)
class SavedTensor:
    storage: _Storage
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    def read(self, reader: Any, who: str) -> torch.Tensor:
        """Read it from the archive to the CPU. Raises ``InputError`` if the record is missing or too short."""
        try:
            memory = torch.frombuffer(
                bytearray(reader.get_record(self.storage.record)) or bytearray(16),
                dtype=torch.uint8,
            )
            size = self.storage.dtype.itemsize
            whole = memory[: len(memory) // size * size].view(self.storage.dtype)
            return whole.as_strided(self.sizes, self.strides, self.offset)
        except (RuntimeError, ValueError, TypeError, OverflowError) as error:
            first = str(error).partition("\n")[0]
            raise InputError(f"{who}: the contents of a tensor cannot be read: {first}") from error


class Text(str):
    """A text and the bytes of the pickle that push it."""

    start: int
    end: int
    memo: int | None  # index of the memo entry that it was fetched from, if any


class Fetched(NamedTuple):
    start: int
    end: int
    memo: int
    text: str


class _Unpickler(_PurePython):  # type: ignore[misc]
    """Python's unpickler, not the C one: it knows the position of a text in the pickle."""

    dispatch: ClassVar[dict[int, Any]] = dict(_PurePython.dispatch)

    def __init__(self, data: bytes, archive: str) -> None:
        self.file = io.BytesIO(data)
        super().__init__(self.file)
        self.archive = archive
        self.fetched: list[Fetched] = []
        self.classes: dict[str, type[Inert]] = {}

    def find_class(self, module: str, name: str) -> Any:
        """A new ``Inert`` class, without any lookup; a pickle may change it without affecting others."""
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda *args: _tensor(args)
        if module == "torch.jit._pickle":
            return lambda value, *types: value
        if module == "torch" and name in STORAGES:
            return name
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        full = f"{module}.{name}"
        if full not in self.classes:
            self.classes[full] = type("Inert", (Inert,), {"class_name": full})
        return self.classes[full]

    def persistent_load(self, pid: Any) -> Any:
        kind, storage, key, *_ = pid
        if kind != "storage" or not isinstance(storage, str) or not isinstance(key, str):
            raise pickle.UnpicklingError("a reference that is no tensor's storage")
        return _Storage(STORAGES[storage], f"{self.archive}/{key}")

    def load_text(self) -> None:
        start = self.file.tell() - 1
        _PurePython.load_binunicode(self)
        self._locate(start, None)

    def load_fetch(self) -> None:
        start = self.file.tell() - 1
        _PurePython.load_binget(self)
        self._after_fetch(start)

    def load_long_fetch(self) -> None:
        start = self.file.tell() - 1
        _PurePython.load_long_binget(self)
        self._after_fetch(start)

    def _after_fetch(self, start: int) -> None:
        top = self.stack[-1]
        if isinstance(top, Text):
            origin = top.start if top.memo is None else top.memo
            self._locate(start, origin)
            self.fetched.append(Fetched(start, self.file.tell(), origin, str(top)))

    def _locate(self, start: int, memo: int | None) -> None:
        text = Text(self.stack[-1])
        text.start, text.end, text.memo = start, self.file.tell(), memo
        self.stack[-1] = text

    dispatch[pickle.BINUNICODE[0]] = load_text
    dispatch[pickle.BINGET[0]] = load_fetch
    dispatch[pickle.LONG_BINGET[0]] = load_long_fetch


class Pickled(NamedTuple):
    data: bytes
    root: Any
    fetched: list[Fetched]


def _tensor(args: tuple[Any, ...]) -> Any:
    storage, offset, sizes, strides, _, _, *more = args
    plain = isinstance(storage, _Storage) and isinstance(offset, int) and not more
    shaped = all(isinstance(n, int) for n in (*sizes, *strides))
    return (
        SavedTensor(storage, offset, tuple(sizes), tuple(strides)) if plain and shaped else Inert()
    )


def read_pickle(data: bytes, archive: str) -> Pickled:
    """Read one pickle; ``archive`` is the folder of its tensors. Raises one of ``BROKEN`` for other data."""
    unpickler = _Unpickler(data, archive)
    return Pickled(data, unpickler.load(), unpickler.fetched)
