# SPDX-License-Identifier: Apache-2.0
"""Compile units to one object with a cubin for each, in parallel processes, or read them from the cache.

    data = compile_units([choice.unit for choice in emit(kernel, target)], target, cache)

The object has a line ``blade.cubins 1``, a line with the number of cubins, for each cubin a line with the
architecture, the name, the threads of a block, the bytes of shared memory and its size (and ``early``, see
``TritonUnit``), then the cubins.
"""

import importlib.metadata
import importlib.util
import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from blade.backends.disc.gpu.compile.server import compile_in_forks
from blade.backends.disc.gpu.compile.triton_unit import TritonUnit
from blade.backends.disc.target.gpu import GpuTarget
from blade.core.disk_cache import digest
from blade.core.reason import Code
from blade.errors import Refused

log = logging.getLogger(__name__)

MAGIC = "blade.cubins 1"


@dataclass(frozen=True)
class Cubin:
    """Code of one unit, and the launch parameters: threads of a block, bytes of shared memory."""

    code: bytes
    threads: int
    shared: int

    def as_bytes(self) -> bytes:
        return f"{self.threads} {self.shared}\n".encode() + self.code

    @classmethod
    def from_bytes(cls, data: bytes) -> "Cubin":
        head, _, code = data.partition(b"\n")
        threads, shared = map(int, head.split())
        return cls(code, threads, shared)


class KernelStore(Protocol):
    """A store of results by kind and key, such as ``DiskCache``."""

    def get(self, kind: str, key: str) -> bytes | None: ...

    def put(self, kind: str, key: str, data: bytes) -> None: ...


class InMemoryStore:
    """A store in memory, for use without a disk cache."""

    def __init__(self) -> None:
        self.kept: dict[tuple[str, str], bytes] = {}

    def get(self, kind: str, key: str) -> bytes | None:
        return self.kept.get((kind, key))

    def put(self, kind: str, key: str, data: bytes) -> None:
        self.kept[kind, key] = data


def why_unavailable() -> str | None:
    """``None`` if units can be compiled, else a sentence with the fix."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; install the package triton (blade's extra gpu names it)."
    return None


def compile_units(
    units: Iterable[TritonUnit], target: GpuTarget, cache: KernelStore | None = None
) -> bytes:
    """The object with every unit, each once. Raises ``Refused`` if Triton cannot compile one."""
    named = {unit.name: unit for unit in units}
    version = importlib.metadata.version("triton") if named else ""
    base = ["cubin", version, *target.isa, str(target.shared)]
    keys = {name: digest([*base, name, repr(asdict(unit))]) for name, unit in named.items()}
    found: dict[str, Cubin] = {}
    for name, key in keys.items():
        data = cache.get("cubin", key) if cache is not None else None
        if data is not None:
            found[name] = Cubin.from_bytes(data)
    for name, made in _compile([u for n, u in named.items() if n not in found], target).items():
        found[name] = made
        if cache is not None:
            cache.put("cubin", keys[name], made.as_bytes())
    early = {name for name, unit in named.items() if unit.early}
    return write_object({name: found[name] for name in named}, target, early)


def write_object(
    cubins: dict[str, Cubin], target: GpuTarget, early: Collection[str] = frozenset()
) -> bytes:
    """The bytes of the object; ``early``: names of units that may start early (``TritonUnit``)."""
    (isa,) = target.isa
    lines = []
    for name, one in cubins.items():
        words = f"{isa} {name} {one.threads} {one.shared} {len(one.code)}"
        lines.append(words + " early" * (name in early))
    return _object_of(lines, b"".join(c.code for c in cubins.values()))


def read_object(data: bytes) -> tuple[list[str], bytes]:
    """The lines of an object, one per cubin, and all cubins one after the other."""
    magic, _, rest = data.partition(b"\n")
    assert magic == MAGIC.encode(), magic
    count, _, rest = rest.partition(b"\n")
    lines = []
    for _ in range(int(count)):
        line, _, rest = rest.partition(b"\n")
        lines.append(line.decode())
    return lines, rest


def merge_objects(objects: Sequence[bytes]) -> bytes:
    """One object with the cubins of all ``objects``."""
    several = [read_object(data) for data in objects]
    return _object_of(
        [line for lines, _ in several for line in lines], b"".join(code for _, code in several)
    )


def _object_of(lines: Sequence[str], code: bytes) -> bytes:
    return "".join(f"{line}\n" for line in (MAGIC, len(lines), *lines)).encode() + code


def _compile(units: Sequence[TritonUnit], target: GpuTarget) -> dict[str, Cubin]:
    """Compile in other processes: Triton holds the GIL, and this process may run Triton's interpreter."""
    if not units:
        return {}
    made = {}
    for unit, found in zip(units, compile_in_forks(units, target), strict=True):
        if isinstance(found, str):
            log.info("Triton: %s", found)
            last = found.strip().splitlines()[-1]
            raise Refused(Code.CONVERSION_FAILED, f"Triton could not compile a kernel: {last}")
        made[unit.name] = Cubin(*found)
    return made
