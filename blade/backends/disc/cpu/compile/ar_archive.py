# SPDX-License-Identifier: Apache-2.0
"""Write several objects as one ``ar`` archive, the Unix format of static libraries, without a symbol table.

    data = archive({"gemm_f32": b"\x7fELF...", "loop_5f3a": b"\x7fELF..."})

``ar x`` extracts it; the runtime (csrc/archive.cpp) loads every member.
"""

from collections.abc import Mapping

MAGIC = b"!<arch>\n"


def archive(objects: Mapping[str, bytes]) -> bytes:
    """The archive of ``objects`` by name, in order; long names go to the GNU table of names."""
    names = b"".join(f"{name}/\n".encode() for name in objects)
    parts = [MAGIC, _member("//", names)]
    offset = 0
    for name, data in objects.items():
        parts.append(_member(f"/{offset}", data))
        offset += len(name.encode()) + 2
    return b"".join(parts)


def _member(name: str, data: bytes) -> bytes:
    """A header of 60 bytes (name, time, owner, group, mode, size), the data, and padding to even length."""
    head = f"{name:<16}{0:<12}{0:<6}{0:<6}{'644':<8}{len(data):<10}`\n".encode()
    assert len(head) == 60, head
    return head + data + b"\n" * (len(data) % 2)
