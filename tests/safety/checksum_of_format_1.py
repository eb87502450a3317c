# SPDX-License-Identifier: Apache-2.0
"""The checksum that files of format 1 carry, over program and object."""

MASK = (1 << 64) - 1


def checksum(program: bytes, code: bytes) -> int:
    """A signed 64-bit number: FNV-1a over 8-byte words, the rest byte by byte, lengths included."""
    value = 14695981039346656037
    for data in (program, code):
        value = _mix(value, len(data))
        whole = len(data) // 8 * 8
        for at in range(0, whole, 8):
            value = _mix(value, int.from_bytes(data[at : at + 8], "little"))
        for byte in data[whole:]:
            value = _mix(value, byte)
    value ^= value >> 32
    return value - (1 << 64) if value >> 63 else value


def _mix(value: int, word: int) -> int:
    value = ((value ^ word) * 1099511628211) & MASK
    return value ^ (value >> 29)
