# SPDX-License-Identifier: Apache-2.0
"""Read a file of ``torch.jit.save`` as data: nothing in it is imported, compiled or called.

    saved = read_saved("model.pt")
    saved.report                        # the JSON text of its report, None if it has none
    saved.engines[0].state()            # the signed parts, with tensors read from the archive
    write_signatures("model.pt", {"cluster_0": "ed25519:..."})

torch's archive reader finds the records, ``saved_pickle`` reads them.
"""

import os
import pickle
import stat
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from blade.errors import InputError
from blade.program.saved_pickle import (
    BROKEN,
    Inert,
    Pickled,
    SavedTensor,
    Text,
    read_pickle,
)
from blade.program.signature import EngineState
from blade.report import ATTRIBUTE, ENGINES

STATE_VERSION = 2  # of engine states with a field for signatures
MAX_PICKLE_BYTES = 1 << 30
_ENGINE = "__torch__.torch.classes.blade.Engine"
_ARCHIVES = ("data", "constants")  # both may contain objects
_OWN = ("version", "byteorder", ".data/serialization_id")  # records that the writer writes itself


@dataclass(frozen=True)
class SavedEngine:
    """``name``: as in ``blade.stats`` ("cluster_0", "cluster_0/openvino").

    ``why_not`` is empty, or a sentence if its state is not in the form that this version of blade writes.
    """

    name: str
    why_not: str
    version: int = 0
    words: tuple[str, ...] = ()
    _numbers: Mapping[str, int] = field(default_factory=dict, repr=False)
    _tensors: tuple[SavedTensor, ...] = field(default=(), repr=False)
    _reader: Any = field(default=None, repr=False)

    @property
    def signature(self) -> str:
        return self.words[3] if len(self.words) > 3 else ""

    def state(self) -> EngineState:
        """The whole state. Raises ``InputError`` if the archive lacks the contents of a tensor."""
        tensors = [one.read(self._reader, self.name) for one in self._tensors]
        name, backend, program = self.words[:3]
        return EngineState(name, backend, program, self._numbers, tensors, self.signature)


@dataclass(frozen=True)
class Saved:
    """blade's data in a file: the text of its report, and its engines in the order stored."""

    report: str | None
    engines: tuple[SavedEngine, ...]


def read_saved(path: str | os.PathLike[str]) -> Saved:
    """Read a file. Raises ``InputError`` if it is not TorchScript, or its records are damaged."""
    reader = _open(Path(path))
    report: str | None = None
    engines: list[SavedEngine] = []
    for archive in _ARCHIVES:
        root = _read_pickle(Path(path), reader, archive).root
        fields = root.state if isinstance(root, Inert) else None
        found = fields.get(ATTRIBUTE) if isinstance(fields, dict) else None
        if archive == _ARCHIVES[0] and isinstance(found, str):
            report = str(found)
        engines += [_engine(name, one.state, reader) for name, one in _engines_in(root)]
    return Saved(report, tuple(engines))


def write_signatures(path: str | os.PathLike[str], signatures: Mapping[str, str]) -> None:
    """Store the text ``signatures[name]`` in each engine of that name. The file is replaced atomically.

    Raises ``InputError`` if an engine has no field for it, or the file cannot be written.
    """
    target = Path(path).resolve()
    reader = _open(target)
    changed = {
        f"{archive}.pkl": _with_signatures(_read_pickle(target, reader, archive), signatures)
        for archive in _ARCHIVES
    }
    try:
        with tempfile.TemporaryDirectory(prefix=".blade-sign-", dir=target.parent) as folder:
            copy = Path(folder, target.name)
            _write(copy, reader, changed)
            os.chmod(copy, stat.S_IMODE(target.stat().st_mode))
            os.replace(copy, target)
    except (OSError, RuntimeError) as error:
        raise InputError(f"{path}: it cannot be written: {error}") from error


def _open(path: Path) -> Any:
    if path.is_dir() or not path.exists():
        what = "this is a folder, not a file" if path.is_dir() else "there is no such file"
        raise InputError(f"{path}: {what}")
    try:
        reader = torch._C.PyTorchFileReader(str(path))
        records = set(reader.get_all_records())
    except RuntimeError as error:
        first = str(error).partition("\n")[0]
        raise InputError(f"{path}: this is no file of torch.jit.save: {first}") from error
    if not {"data.pkl", "constants.pkl"} <= records:
        raise InputError(f"{path}: this is no file of torch.jit.save: it lacks data.pkl")
    return reader


def _read_pickle(path: Path, reader: Any, archive: str) -> Pickled:
    try:
        data: bytes = reader.get_record(f"{archive}.pkl")
        if len(data) > MAX_PICKLE_BYTES:
            raise ValueError(f"{len(data)} bytes are too many")
        return read_pickle(data, archive)
    except (*BROKEN, RuntimeError) as error:
        raise InputError(f"{path}: {archive}.pkl cannot be read: {error}") from error


def _engines_in(root: Any) -> Iterator[tuple[str, Inert]]:
    """Each engine once, with its name, at any depth; attributes in the order stored."""
    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = [("", root)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, (str, int, float, bytes, type(None))) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Inert):
            if value.class_name == _ENGINE:
                yield _name(path, value.state), value
                continue
            value = value.state
        if isinstance(value, dict):
            inside = list(value.items())
        elif isinstance(value, (list, tuple, set, frozenset)):
            inside = list(enumerate(value))
        else:
            continue
        prefix = f"{path}." if path else ""
        waiting += [(f"{prefix}{key}", one) for key, one in reversed(inside)]


def _name(path: str, state: Any) -> str:
    """The engine's name, as in ``report.stats``."""
    holder, _, attribute = path.rpartition(".")
    if attribute == ENGINES[0]:
        return holder
    words = _words(state)
    return f"{holder}/{words[1]}" if attribute in ENGINES and len(words) > 1 else path


def _words(state: Any) -> tuple[str, ...]:
    words = state[1] if isinstance(state, tuple) and len(state) == 4 else None
    good = isinstance(words, list) and all(isinstance(one, str) for one in words)
    return tuple(words) if good and words is not None else ()


def _engine(name: str, state: Any, reader: Any) -> SavedEngine:
    words = _words(state)
    if not words:
        return SavedEngine(name, "Its state is not in the form of blade's engines.")
    version, _, numbers, tensors = state
    if version != STATE_VERSION or len(words) != 4:
        why = (
            f"It was saved in format {version}, which has no place for a signature: optimize again."
        )
        return SavedEngine(name, why)
    good = isinstance(numbers, dict) and isinstance(tensors, list)
    if not good or not all(
        isinstance(key, str) and isinstance(value, int) for key, value in numbers.items()
    ):
        return SavedEngine(name, "Its state is not in the form of blade's engines.")
    if not all(isinstance(one, SavedTensor) for one in tensors):
        return SavedEngine(name, "It holds a tensor that is not dense.")
    return SavedEngine(name, "", version, words, dict(numbers), tuple(tensors), reader)


def _with_signatures(pickled: Pickled, signatures: Mapping[str, str]) -> bytes:
    """The pickle with new texts as signatures, and otherwise unchanged."""
    edits: dict[int, tuple[int, str]] = {}
    for name, engine in _engines_in(pickled.root):
        words = _words(engine.state)
        slot = words[3] if len(words) == 4 and engine.state[0] == STATE_VERSION else None
        if not isinstance(slot, Text):
            raise InputError(f"{name}: the saved engine has no place for a signature")
        edits[slot.start] = slot.end, signatures[name]
    for one in pickled.fetched:  # texts fetched from a literal that changes
        if one.memo in edits and one.start not in edits:
            edits[one.start] = one.end, one.text
    parts, position = [], 0
    for start, (end, text) in sorted(edits.items()):
        data = text.encode()
        literal = pickle.BINUNICODE + len(data).to_bytes(4, "little") + data
        parts += [pickled.data[position:start], literal]
        position = end
    return b"".join([*parts, pickled.data[position:]])


def _write(path: Path, reader: Any, changed: Mapping[str, bytes]) -> None:
    writer = torch._C.PyTorchFileWriter(str(path))
    writer.set_min_version(int(reader.get_record("version")))
    for name in reader.get_all_records():
        if name not in _OWN:
            data = changed[name] if name in changed else reader.get_record(name)
            writer.write_record(name, data, len(data))
    if reader.has_record("byteorder"):
        data = reader.get_record("byteorder")
        writer.write_record("byteorder", data, len(data))
    writer.write_end_of_file()
