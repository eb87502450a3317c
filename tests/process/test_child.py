# SPDX-License-Identifier: Apache-2.0
"""A process is asked before a deadline, says how it ended, and leaves nothing behind."""

import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import child_mains as mains
import pytest

from blade.process import child as module
from blade.process.child import NoAnswer, SpawnedProcess, describe_status, limit_memory

LIMIT_S = 60.0


def start(main: Callable[..., None], *arguments: object, **options: Any) -> SpawnedProcess:
    return SpawnedProcess(main, *arguments, standalone=True, **options)


def comes(true: Callable[[], bool]) -> bool:
    end = time.monotonic() + LIMIT_S
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def runs(pid: int) -> bool:
    """Neither gone nor a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_requests_are_answered_in_order_by_one_process() -> None:
    with start(mains.echo) as child:
        for request in (1, "two", [3.0, None]):
            child.post(request)
        assert [child.answer(LIMIT_S) for _ in range(3)] == [1, "two", [3.0, None]]
        assert child.is_alive()
    assert not child.is_alive()


def test_standalone_means_without_blade_and_torch() -> None:
    names = ("blade", "torch", "child_mains")
    with start(mains.tells_its_modules, *names) as child:
        assert child.answer(LIMIT_S) == []
    with SpawnedProcess(mains.tells_its_modules, "child_mains") as child:
        assert child.answer(LIMIT_S) == ["child_mains"]  # imported by its name


def test_a_large_request_is_posted_before_it_is_read() -> None:
    data = bytes(1 << 26)
    with start(mains.answers_late, 1.0) as child:
        child.post(data)
        with pytest.raises(NoAnswer, match=r"^did not come back within 0.1 s$"):
            child.answer(0.1)
    with start(mains.answers_late, 0.1) as child:
        child.post(data)
        assert child.answer(LIMIT_S) == data


def test_files_travel_with_a_request() -> None:
    with start(mains.reads_files) as child, tempfile.TemporaryFile() as file:
        file.write(b"text")
        file.flush()
        for _ in range(2):
            child.post(None, file.fileno())
            assert child.answer(LIMIT_S) == (b"text", False)


@pytest.mark.parametrize(
    ("main", "arguments", "words", "output"),
    [
        (mains.exits, (3,), "ended the process with exit status 3", "some\nwords"),
        (mains.dies, (11,), "ended the process by signal 11 (SIGSEGV)", ""),
        (mains.raises, (), "ended the process with exit status 1", "ValueError: what is wrong"),
        (mains.writes_garbage, (), "wrote into a stream of others", ""),
        (mains.closes_its_stream, (), "ended the process by signal 9 (SIGKILL)", ""),
    ],
)
def test_why_there_is_no_answer(
    main: Any, arguments: Any, words: str, output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CLOSING_S", 1.0)
    with start(main, *arguments) as child:
        child.post(None)
        with pytest.raises(NoAnswer) as error:
            child.answer(LIMIT_S)
    assert words in str(error.value)
    assert error.value.output.endswith(output)


def test_what_was_written_since() -> None:
    with start(mains.exits, 0) as child:
        with pytest.raises(NoAnswer):
            child.answer(LIMIT_S)
        assert child.written() == "some\nwords"
        assert child.written(since=5) == "words"
        assert child.written(since=child.written_bytes()) == ""


def test_requests_end_after_a_while_without_one() -> None:
    with start(mains.echo, idle_s=0.1) as child:
        with pytest.raises(NoAnswer, match="exit status 0"):
            child.answer(LIMIT_S)
        assert not child.is_alive()


def test_closing_leaves_no_process_no_file_and_no_descriptor(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    child = start(mains.starts_another, folder=str(tmp_path))
    grandchild, file = child.answer(LIMIT_S)
    assert runs(grandchild) and Path(file).read_text() == "text"
    child.close()
    child.close()  # nothing more
    child.kill()
    assert comes(lambda: not runs(grandchild))
    assert Path(file).parent == tmp_path and not tmp_path.exists()
    assert os.listdir("/proc/self/fd") == before
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)  # nor is it a zombie


def test_one_that_is_dropped_is_ended() -> None:
    child = start(mains.echo)
    pid = child.pid
    del child
    gc.collect()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_one_that_cannot_be_started_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(OSError):
        start(mains.echo, folder=str(tmp_path))
    assert os.listdir("/proc/self/fd") == before
    assert not tmp_path.exists()


def test_a_fork_of_this_process_neither_has_it_nor_keeps_it(tmp_path: Path) -> None:
    child = start(mains.echo, folder=str(tmp_path))
    read, write = os.pipe()
    if (fork := os.fork()) == 0:
        signal.alarm(int(LIMIT_S))
        alive = child.is_alive()
        child.kill()
        child.close()
        os.write(write, b"alive" if alive else b"closed")
        signal.pause()
    assert os.read(read, 10) == b"closed"
    assert tmp_path.exists()
    child.post("still there")
    assert child.answer(LIMIT_S) == "still there"
    child.connection.close()  # as if this process had ended
    assert comes(lambda: not child.is_alive())  # though the fork lives
    child.close()
    os.kill(fork, signal.SIGKILL)
    os.waitpid(fork, 0)
    os.close(read)
    os.close(write)


PARENT = """
import sys, time
sys.path[:] = {path!r}
import child_mains
from blade.process.child import SpawnedProcess
child = SpawnedProcess(child_mains.echo, standalone=True)
print(child.pid, flush=True)
time.sleep(600)
"""


def test_it_ends_with_the_process_that_started_it() -> None:
    program = PARENT.format(path=sys.path)
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    with parent.stdout:
        pid = int(parent.stdout.readline())
        assert runs(pid)
        parent.kill()
        parent.wait()
    assert comes(lambda: not runs(pid))


def test_statuses_in_words() -> None:
    assert describe_status(0) == "with exit status 0"
    assert describe_status(-6) == "by signal 6 (SIGABRT)"


def limited(requests: Any) -> None:
    limit_memory(64)
    try:
        bytearray(256 << 20)
    except MemoryError:
        limit_memory(None)
        requests.answer(len(bytearray(256 << 20)))


def test_a_limit_of_memory_holds_until_it_is_lifted() -> None:
    with SpawnedProcess(limited) as child:
        assert child.answer(LIMIT_S) == 256 << 20
