# SPDX-License-Identifier: Apache-2.0
"""Units -> one object with a cubin for each: from the cache, or compiled in processes side by side.

    data = compile_units([choice.unit for choice in emit(kernel, target)], target, cache)

The object: a line ``blade.cubins 1``, one with the number of cubins, for each of them a line with the
architecture, the name, the threads of a block, the bytes of shared memory and its size (and ``early``,
see ``Unit``), then the cubins.
"""

import contextlib
import importlib.metadata
import importlib.util
import io
import logging
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from blade.backends.disc.gpu import cubin
from blade.backends.disc.gpu.target import GpuTarget
from blade.backends.disc.gpu.unit import Unit
from blade.cache import digest
from blade.errors import Refused
from blade.reason import Code

log = logging.getLogger(__name__)

MAGIC = "blade.cubins 1"
# What one unit takes, roughly, and a process until it compiles.
UNIT_S, CHARACTER_S, START_S = 0.3, 2e-4, 0.5
MAX_PROCESSES = 16


@dataclass(frozen=True)
class Cubin:
    """Code of one unit, and what its launches need: threads of a block, bytes of shared memory."""

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


class Kept(Protocol):
    """What keeps results by kind and key, as a ``Cache`` does."""

    def get(self, kind: str, key: str) -> bytes | None: ...

    def put(self, kind: str, key: str, data: bytes) -> None: ...


class Memory:
    """A store that ends with its owner, where there is no cache."""

    def __init__(self) -> None:
        self.kept: dict[tuple[str, str], bytes] = {}

    def get(self, kind: str, key: str) -> bytes | None:
        return self.kept.get((kind, key))

    def put(self, kind: str, key: str, data: bytes) -> None:
        self.kept[kind, key] = data


def why_unavailable() -> str | None:
    """``None`` where units can be compiled, else a sentence with the fix."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; install the package triton (blade's extra gpu names it)."
    return None


def compile_units(units: Iterable[Unit], target: GpuTarget, cache: Kept | None = None) -> bytes:
    """The object with every unit, each once. Raises ``Refused`` where Triton cannot compile one."""
    named = {unit.name: unit for unit in units}
    version = importlib.metadata.version("triton") if named else ""
    base = ["cubin", version, *target.isa]
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
    """The bytes of the object; ``early``: the names of those that may be started early (``Unit``)."""
    (isa,) = target.isa
    lines = [MAGIC, str(len(cubins))]
    for name, one in cubins.items():
        words = f"{isa} {name} {one.threads} {one.shared} {len(one.code)}"
        lines.append(words + " early" * (name in early))
    return "".join(f"{line}\n" for line in lines).encode() + b"".join(
        c.code for c in cubins.values()
    )


def _compile(units: Sequence[Unit], target: GpuTarget) -> dict[str, Cubin]:
    """In processes only: Triton compiles with Python's lock held, and this one may interpret kernels."""
    with contextlib.ExitStack() as stack:
        started = [
            (share, stack.enter_context(_Process(share, target))) for share in _shares(units)
        ]
        return {
            unit.name: made
            for share, process in started
            for unit, made in zip(share, process.result(), strict=True)
        }


def _shares(units: Sequence[Unit]) -> list[list[Unit]]:
    """Units for each process worth starting: longest first, to who is free first."""
    seconds = {unit.name: UNIT_S + CHARACTER_S * len(unit.text) for unit in units}
    processors = min(MAX_PROCESSES, len(os.sched_getaffinity(0)), len(units))
    shares: list[list[Unit]] = []
    busy: list[float] = []
    for unit in sorted(units, key=lambda u: -seconds[u.name]):
        first = min(range(len(busy)), key=busy.__getitem__, default=0)
        if not busy or (busy[first] > START_S and len(busy) < processors):
            first = len(busy)
            shares.append([])
            busy.append(START_S)
        shares[first].append(unit)
        busy[first] += seconds[unit.name]
    return shares


class _Process:
    """A child that compiles ``units``; it ends with the ``with`` block."""

    def __init__(self, units: Sequence[Unit], target: GpuTarget) -> None:
        # not "-m": that would import blade, and with it torch
        code = (
            "import importlib.util as u, sys; "
            f"sys.path[:] = {sys.path!r}; s = u.spec_from_file_location('cubin', {cubin.__file__!r}); "
            "m = u.module_from_spec(s); s.loader.exec_module(m); m.main()"
        )
        # what is compiled is kept in blade's cache, not in Triton's
        self.folder = tempfile.TemporaryDirectory(prefix="blade-")
        environment = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": f"{self.folder.name}/cache"}
        # files, as pipes would make one wait for the other; plain data, as it does not know our classes
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__
        with tempfile.TemporaryFile() as request:
            fields = [asdict(unit) for unit in units]
            pickle.dump((fields, target.arch, self.folder.name), request)
            request.seek(0)
            self.process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=request,
                stdout=subprocess.PIPE,
                stderr=self.errors,
                env={**os.environ, **environment},
            )

    def __enter__(self) -> "_Process":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()  # ended already, unless something raised
        self.process.wait()
        self.errors.close()
        self.folder.cleanup()

    def result(self) -> list[Cubin]:
        assert self.process.stdout is not None
        with self.process.stdout as file:
            output = file.read()
        if self.process.wait() != 0:
            self.errors.seek(0)
            lines = self.errors.read().decode(errors="replace").strip().splitlines()
            log.info("Triton: %s", "\n".join(lines))
            last = lines[-1] if lines else f"exit status {self.process.returncode}"
            raise Refused(Code.CONVERSION_FAILED, f"Triton could not compile a kernel: {last}")
        return [Cubin(*one) for one in pickle.load(io.BytesIO(output))]
