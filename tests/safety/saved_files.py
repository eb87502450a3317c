# SPDX-License-Identifier: Apache-2.0
"""A small optimized model in a file whose engines have a place for signatures, and files made by hand."""

from pathlib import Path

import torch

import blade
from blade.program.saved_file import STATE_VERSION


class Net(torch.nn.Module):
    """Two halves with an op between them that no engine takes: two clusters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 16)
        self.second = torch.nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.sort(torch.relu(self.first(x)))[0])


def optimized() -> torch.jit.ScriptModule:
    torch.manual_seed(0)
    black = ["aten::sort"]
    config = blade.Config(
        optimization_pipeline="disc",
        timing=False,
        min_cluster_size=1,
        customize_op_black_list=black,
    )
    return blade.optimize(Net().eval(), torch.randn(3, 8), config)


def save_optimized(path: Path) -> None:
    torch.jit.save(optimized(), str(path))
    version = bytes([0x4B, STATE_VERSION])  # BININT1
    rewrite(path, {"data.pkl": lambda data: _with_places(data, version)})


def rewrite(path: Path, changes: dict) -> None:
    """Each record of the archive as ``changes[name](data)`` makes it; others stay."""
    reader = torch._C.PyTorchFileReader(str(path))
    kept = {name: reader.get_record(name) for name in reader.get_all_records()}
    copy = path.with_suffix(".copy")
    writer = torch._C.PyTorchFileWriter(str(copy))
    for name, data in kept.items():
        if name not in ("version", ".data/serialization_id", "byteorder"):
            data = changes[name](data) if name in changes else data
            writer.write_record(name, data, len(data))
    writer.write_end_of_file()
    copy.rename(path)


def _with_places(data: bytes, version: bytes) -> bytes:
    """States of format 1 with the empty signature that format 2 has, fetched from one place by all."""
    import pickletools

    out, position, state, fetched = [], 0, None, False
    ops = list(pickletools.genops(data))
    texts: dict[int, str] = {}
    for i, (op, argument, start) in enumerate(ops):
        if op.name in ("BINUNICODE", "GLOBAL") and ops[i + 1][0].name in ("BINPUT", "LONG_BINPUT"):
            texts[ops[i + 1][1]] = argument
        name = texts.get(argument) if op.name in ("BINGET", "LONG_BINGET") else argument
        if name == "__torch__.torch.classes.blade Engine":
            state = "class"
        elif state == "class" and op.name == "BININT1":
            if argument == STATE_VERSION:
                return data
            out += [data[position:start], version]
            position, state = start + 2, "words"
        elif state == "words" and op.name == "APPENDS":
            place = b"j\xff\xff\x00\x00" if fetched else b"X\x00\x00\x00\x00r\xff\xff\x00\x00"
            out += [data[position:start], place]
            position, state, fetched = start, None, True
    return b"".join([*out, data[position:]])
