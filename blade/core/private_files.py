# SPDX-License-Identifier: Apache-2.0
"""Folders and files that only this user may write, because their contents may become code.

    why_not_private(Path("/tmp/blade"))       # "/tmp/blade may be written by others (mode 0777) ...", or None
    with folder_within(root, ["kernel", "ab"]) as opened:
        data = read_within(opened, name)      # raises NotPrivate for a link, a FIFO, another user's file

The rules. The folder is a directory of this user (the effective one) that neither its group nor others may
write. A link is followed, and its target must obey the same rules. A parent directory that others may write
is refused, since they could replace the folder, unless it is sticky, as /tmp is; so is a link that another
user made. A parent directory that its group may write is refused as well, unless the group is the user's own
(it has the user's name, is the user's primary group and has no other member), as with umask 0002. Owners of
parent directories are not checked: a folder that their owner puts in place is not this user's. Access control
lists show in the group's bits.

Below the folder, each directory and file is opened relative to its parent, without following links, and
checked once it is open. A directory that others may write is accepted if only the owner can enter the folder.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

_LINKS = 40  # the kernel's limit
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class NotPrivate(OSError):
    """Raised for a file or folder that others may write or replace."""


def why_not_private(folder: Path) -> str | None:
    """A sentence on who else may write or replace ``folder``; ``None`` if only this user may.

    A missing folder is as private as its parents.
    """
    try:
        return next(_objections(folder), None)
    except OSError as error:
        return f"{folder} cannot be looked at: {error.strerror or error}."


def make_private(folder: Path) -> None:
    """Make ``folder`` and its missing parents, for this user alone; raises ``OSError``."""
    missing = []
    while not os.path.lexists(folder):
        missing.append(folder)
        folder = folder.parent
    for one in reversed(missing):
        with suppress(FileExistsError):  # another process made it
            one.mkdir(mode=0o700)


@contextmanager
def folder_within(root: Path, names: Sequence[str], *, make: bool = False) -> Iterator[int]:
    """A descriptor of the directory ``root/names[0]/...``; ``root`` has passed ``why_not_private``.

    ``make``: create missing directories. Raises ``OSError`` if it is missing, ``NotPrivate`` if others may write it.
    """
    here = os.open(os.path.realpath(root), _DIRECTORY)
    try:
        closed = not os.fstat(here).st_mode & 0o011  # only the owner can enter
        for name in names:
            if make:
                with suppress(FileExistsError):
                    os.mkdir(name, 0o700, dir_fd=here)
            inner = os.open(name, _DIRECTORY, dir_fd=here)
            os.close(here)
            here = inner
            found = os.fstat(here)
            if why := _of_others(f"the folder {name} in {root}", found, 0 if closed else 0o022):
                raise NotPrivate(why)
        yield here
    finally:
        os.close(here)


def read_within(folder: int, name: str) -> bytes:
    """The file ``name`` of the directory with this descriptor.

    Raises ``OSError`` if it is missing, ``NotPrivate`` if it is no regular file or others may write it.
    """
    opened = os.open(name, _FILE, dir_fd=folder)
    with os.fdopen(opened, "rb") as file:
        found = os.fstat(opened)
        if not stat.S_ISREG(found.st_mode):
            raise NotPrivate(f"{name} is no regular file.")
        if why := _of_others(name, found, 0o022):
            raise NotPrivate(why)
        return file.read()


def open_lock_within(folder: int, name: str) -> int:
    """A descriptor of the file ``name`` of the directory with this descriptor, made if it is missing, for locks.

    Raises ``OSError``, and ``NotPrivate`` if others may write it.
    """
    opened = os.open(
        name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder
    )
    if why := _of_others(name, os.fstat(opened), 0o022):
        os.close(opened)
        raise NotPrivate(why)
    return opened


def write_within(folder: int, name: str, content: bytes) -> None:
    """Atomically write the file ``name`` to the directory with this descriptor; raises ``OSError``."""
    new = f".new-{os.urandom(8).hex()}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    opened = os.open(new, flags, 0o600, dir_fd=folder)
    try:
        with os.fdopen(opened, "wb") as file:
            file.write(content)
        os.replace(new, name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        with suppress(OSError):
            os.unlink(new, dir_fd=folder)
        raise


def _objections(folder: Path) -> Iterator[str]:
    passed, is_there = _chain(folder)
    for one, state in passed[:-1] if is_there else passed:
        if why := _why_replaceable(one, state):
            yield f"{why}, so that another folder can be put in the place of {folder}."
    if not is_there:
        return
    path, found = passed[-1]
    if not stat.S_ISDIR(found.st_mode):
        yield f"{path} is no folder."
    elif why := _of_others(path, found, 0o022):
        yield why


def _chain(folder: Path) -> tuple[list[tuple[str, os.stat_result]], bool]:
    """The existing directories and links on the path to ``folder``, with status, and whether it exists."""
    left = deque(Path(os.path.abspath(folder)).parts)
    here, links = "", 0
    passed: list[tuple[str, os.stat_result]] = []
    while left:
        name = left.popleft()
        entry = os.path.dirname(here) if name == ".." else os.path.join(here, name)
        try:
            found = os.lstat(entry)
        except FileNotFoundError:
            return passed, False
        passed.append((entry, found))
        if not stat.S_ISLNK(found.st_mode):
            here = entry
            continue
        links += 1
        if links > _LINKS:
            raise OSError(f"too many links on the way to {folder}")
        left.extendleft(reversed(Path(os.readlink(entry)).parts))  # an absolute path restarts at /
    return passed, True


def _why_replaceable(path: str, found: os.stat_result) -> str | None:
    """Why others may replace the target of ``path``."""
    mode = stat.S_IMODE(found.st_mode)
    if stat.S_ISLNK(found.st_mode):
        own = found.st_uid in (0, os.geteuid())
        return None if own else f"{path} is a link that another user made (uid {found.st_uid})"
    if mode & stat.S_ISVTX:
        return None
    if mode & 0o002:
        return f"{path} may be written by everybody (mode {mode:04o}, not sticky)"
    if mode & 0o020 and not _is_own_group(found.st_gid):
        return f"{path} may be written by its group (mode {mode:04o}, gid {found.st_gid})"
    return None


def _of_others(name: str, found: os.stat_result, forbidden: int) -> str | None:
    """Why ``name`` is not private to this user; ``forbidden``: bits that its mode must not have."""
    mode, user = stat.S_IMODE(found.st_mode), os.geteuid()
    if found.st_uid != user:
        return f"{name} belongs to another user (uid {found.st_uid}, not {user})."
    if mode & forbidden:
        return f"{name} may be written by others (mode {mode:04o}): chmod go-w makes it private."
    return None


def _is_own_group(gid: int) -> bool:
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    alone = set(group.gr_mem) <= {user.pw_name}
    return gid == user.pw_gid and group.gr_name == user.pw_name and alone
