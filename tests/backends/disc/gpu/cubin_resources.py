# SPDX-License-Identifier: Apache-2.0
"""What a cubin says of itself: ``registers(cubin)``, per thread, and ``architecture(cubin)``, "sm_90a".

A cubin is an ELF file. Its section .nv.info lists attributes: a format, a kind, a size and that many bytes.
"""

import re
import struct
from collections.abc import Iterator

_REGISTERS, _SIZED = 0x2F, 0x04  # EIATTR_REGCOUNT; attributes with a size of their own


def registers(cubin: bytes) -> int:
    """The most registers that a thread of any function has."""
    return max(
        struct.unpack("<II", value)[1]
        for name, data in _sections(cubin)
        if name == ".nv.info"
        for kind, value in _attributes(data)
        if kind == _REGISTERS
    )


def architecture(cubin: bytes) -> str:
    """The architecture that ptxas made it for, from the PTX that is kept with it."""
    found = re.search(rb"\.target (sm_\w+)", cubin)
    assert found is not None
    return found[1].decode()


def _sections(elf: bytes) -> Iterator[tuple[str, bytes]]:
    assert elf[:5] == b"\x7fELF\x02"
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + k * size) for k in range(count)]
    start = headers[names][4]
    for name, _, _, _, offset, length in headers:
        end = elf.index(b"\0", start + name)
        yield elf[start + name : end].decode(), elf[offset : offset + length]


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(data):
        form, kind, size = struct.unpack_from("<BBH", data, at)
        at += 4
        if form == _SIZED:
            yield kind, data[at : at + size]
            at += size
