# SPDX-License-Identifier: Apache-2.0
"""The fake accelerator of ``fake_accelerator.cpp``, compiled and registered once a process."""

import ctypes
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from programs import Writer

import blade

CSRC = Path(blade.__file__).parent / "runtime" / "csrc"
KERNELS = ("neg", "add", "pack", "slow_pack", "pack_0123456789ab", "fail", "fail_in_capture")


class Counts(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            *(
                "launches",
                "copies",
                "bytes_copied",
                "graphs",
                "graph_launches",
                "kernels",
                "moves",
                "told",
            ),
        )
    ]


@cache
def fake() -> ctypes.CDLL:
    torch_folder = Path(torch.__file__).parent
    folder = Path(tempfile.mkdtemp(prefix="blade-fake-"))
    library = folder / "fake.so"
    source = Path(__file__).with_name("fake_accelerator.cpp")
    headers = [f"-I{path}" for path in (CSRC, torch_folder / "include")]
    flags = ["-shared", "-fPIC", "-O1", "-std=c++20", "-fvisibility=default"]
    link = [f"-L{torch_folder / 'lib'}", "-lc10"]
    subprocess.run(["g++", *flags, *headers, str(source), "-o", str(library), *link], check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.fake_accelerator.restype = ctypes.c_void_p
    loaded.fake_counts.restype = ctypes.POINTER(Counts)
    loaded.fake_is_recording.restype = ctypes.c_bool
    loaded.fake_stream.argtypes = [ctypes.c_int64]
    loaded.fake_takes.argtypes = [ctypes.c_double]
    torch.ops.blade.register_accelerator("fake", loaded.fake_abi(), loaded.fake_accelerator())
    return loaded


def counts() -> Counts:
    found: Counts = fake().fake_counts().contents
    return found


def container(
    names: Sequence[str] = KERNELS, architecture: str = "fake_1", version: int = 1
) -> bytes:
    """What a compiler would hand over: here a kernel's binary is its name."""
    lines = [f"blade.cubins {version}", str(len(names))]
    lines += [f"{architecture} {name} 128 0 {len(name)}" for name in names]
    return "\n".join(lines).encode() + b"\n" + "".join(names).encode()


def fake_writer(architecture: str = "fake_1") -> Writer:
    return Writer(isa=f"fake {architecture}")


def two_step(w: Writer) -> Writer:
    """-(x + y) of two vectors of one size, over an arena slot."""
    x, y = w.input("f32", 1), w.input("f32", 1)
    (n,), one = w.dims(x, 1), w.const(1)
    a, b = w.slot(f"input {x}"), w.slot(f"input {y}")
    h, out = w.tensor("arena", [n]), w.tensor("output", [n])
    w.launch("add", [one, one, one], [a, b, h], [n])
    w.launch("neg", [one, one, one], [h, out], [n])
    w.outputs = [out]
    return w
