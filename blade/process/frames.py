# SPDX-License-Identifier: Apache-2.0
"""Messages between processes over a stream, read and written before a deadline.

    write_frame(fd, data, end)               # TimeoutError where the other end does not read
    frames = Frames(fd)
    data = frames.take()                     # a whole frame, or None; never waits
    data = frames.wait(end)                  # TimeoutError, EOFError, BrokenFrame

    requests = Requests(fd)                  # in a child process: what ``SpawnedProcess.post`` sends
    for request in requests:
        requests.answer(value)

``end`` is a time of ``time.monotonic()``. A frame is a mark, its length, and that many bytes; bytes without
the mark are no frame, and a frame of more than ``LARGEST`` bytes is refused. This file imports nothing of
blade: processes that have to start fast load it alone.
"""

import os
import pickle
import select
import socket
import struct
from collections.abc import Iterator
from math import inf
from time import monotonic
from typing import Any

LARGEST = 1 << 36  # bytes of one frame
_MARK = b"bladefrm"
_HEADER = struct.Struct("<8sQ")
_PIECE = 1 << 20  # bytes read at once
_FILES = 4  # at most, per request


class BrokenFrame(Exception):
    """The received bytes are not a frame."""


class Frames:
    """The frames received over ``fd``; the received part of an incomplete frame is kept."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._bytes = bytearray()

    @property
    def is_within(self) -> bool:
        """Whether a frame has begun and is incomplete."""
        return bool(self._bytes)

    def take(self) -> bytes | None:
        """The next frame if it is complete. Raises ``EOFError`` at the end, ``BrokenFrame`` for other bytes."""
        while (size := self._missing()) > 0:
            if not is_ready(self._fd):
                return None
            piece = _read(self._fd, min(size, _PIECE))
            if not piece:
                raise EOFError("the other end is closed")
            self._bytes += piece
        data = bytes(self._bytes[_HEADER.size :])
        self._bytes.clear()
        return data

    def wait(self, end: float = inf) -> bytes:
        """The next frame. Raises ``TimeoutError`` if it is incomplete at ``end``, and what ``take`` raises."""
        while (data := self.take()) is None:
            wait_for([self._fd], end)
        return data

    def _missing(self) -> int:
        """Number of bytes that the header, then the frame, still lacks."""
        if len(self._bytes) < _HEADER.size:
            return _HEADER.size - len(self._bytes)
        mark, length = _HEADER.unpack_from(self._bytes)
        if mark != _MARK or length > LARGEST:
            raise BrokenFrame(f"bytes came that are no message: {bytes(self._bytes[:16])!r}")
        return int(_HEADER.size + length - len(self._bytes))


class Requests:
    """The requests received over the socket ``fd``, until it is closed or none has come for ``idle_s``.

    A request is one byte with files attached: the first contains the pickled request; the others are open in
    ``files`` until the next request, and the receiver closes them. An answer is a frame.
    """

    def __init__(self, fd: int, idle_s: float = inf) -> None:
        self.connection = socket.socket(fileno=fd)
        self.files: list[int] = []
        self._idle_s = idle_s

    def __iter__(self) -> Iterator[Any]:
        while (data := self._next()) is not None:
            yield pickle.loads(data)

    def answer(self, value: object) -> None:
        write_frame(self.connection.fileno(), pickle.dumps(value))

    def _next(self) -> bytes | None:
        try:
            wait_for([self.connection.fileno()], monotonic() + self._idle_s)
            _, files, _, _ = socket.recv_fds(self.connection, 1, _FILES)
        except (TimeoutError, ConnectionResetError):
            return None
        for fd in files:
            os.set_inheritable(fd, False)
        if not files:
            return None
        request, *self.files = files
        with open(request, "rb") as file:
            return file.read()


def write_frame(fd: int, data: bytes, end: float = inf) -> None:
    """``data`` as one frame; with an ``end``, ``fd`` must not block. Raises ``TimeoutError`` and ``OSError``."""
    for part in (_HEADER.pack(_MARK, len(data)), data):
        left = memoryview(part)
        while left:
            wait_for([fd], end, select.POLLOUT)
            try:
                left = left[os.write(fd, left) :]
            except BlockingIOError:
                continue


def wait_for(fds: list[int], end: float, what: int = select.POLLIN) -> list[int]:
    """The ``fds`` that can be read (or written), or whose other end is closed. Raises ``TimeoutError``."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, what)
    while True:
        left = end - monotonic()
        milliseconds = None if left == inf else max(0, min(left, 1e6)) * 1000
        if found := poll.poll(milliseconds):
            return [fd for fd, _ in found]
        if left <= 0:
            raise TimeoutError("the deadline is over")


def is_ready(fd: int) -> bool:
    """Whether ``fd`` can be read without waiting."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


def _read(fd: int, size: int) -> bytes:
    try:
        return os.read(fd, size)
    except ConnectionResetError:
        return b""
