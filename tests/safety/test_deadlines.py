# SPDX-License-Identifier: Apache-2.0
"""Deadlines hold whatever a process apart does with its end of the stream, and its files go with it."""

import os
import pickle
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fake_backends as fakes
import pytest
import torch
from fake_backends import Fake
from torch import nn

import blade
from blade.core.cluster import Cluster
from blade.core.reason import Code, Reason
from blade.fallback.isolated_convert import close_workers, convert_isolated
from blade.graph.torchscript.extract import extract

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
LIMIT_S = 60.0  # a call that takes longer is taken for one that never returns


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    from blade.capture.capture import capture
    from blade.graph.torchscript.view import view

    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU()).eval()
    captured = capture(model, X, blade.Config())
    graph = view(captured)
    [extracted] = extract(captured, graph, [list(range(len(graph.nodes)))])
    return extracted.cluster


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The temporary folder of this process, and of the workers that it starts from now on."""
    close_workers()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    yield tmp_path
    close_workers()


def _stream() -> int:
    """The descriptor through which the process that converts gives its answers."""
    for name in os.listdir("/proc/self/fd"):
        try:
            mode = os.fstat(int(name)).st_mode
        except OSError:
            continue
        if stat.S_ISSOCK(mode) and int(name) > 2:
            return int(name)
    raise AssertionError("no socket")


def dies_in_its_answer(cluster: Cluster) -> None:
    os.write(_stream(), _header(1000) + b"the beginning")
    os.kill(os.getpid(), signal.SIGKILL)


def stops_in_its_answer(cluster: Cluster) -> None:
    os.write(_stream(), _header(1000) + b"the beginning")
    time.sleep(600)


def writes_garbage(cluster: Cluster) -> None:
    os.write(_stream(), b"\xff" * 64)
    time.sleep(600)


def writes_a_frame_that_is_no_answer(cluster: Cluster) -> None:
    os.write(_stream(), _header(5) + b"hello")
    time.sleep(600)


def answers_another_request(cluster: Cluster) -> None:
    data = pickle.dumps((10**6, None))
    os.write(_stream(), _header(len(data)) + data)


def dies_with_a_file(cluster: Cluster) -> None:
    with tempfile.NamedTemporaryFile(prefix="weights-", delete=False) as file:
        file.write(b"weights")
    os.kill(os.getpid(), signal.SIGKILL)


def hangs_with_a_file(cluster: Cluster) -> None:
    with tempfile.NamedTemporaryFile(prefix="weights-", delete=False) as file:
        file.write(b"weights")
    time.sleep(600)


def _header(length: int) -> bytes:
    """What begins a message: of ``multiprocessing`` where that is what is spoken."""
    try:
        from blade.process import frames
    except ImportError:
        return length.to_bytes(4, "big")
    return frames._HEADER.pack(frames._MARK, length)


def converted(convert: Callable[[Cluster], None], cluster: Cluster, deadline_s: float) -> Any:
    """What ``convert_isolated`` gives; fails where it never returns."""
    backend = Fake(convert=convert, in_process=False)
    backend.register()
    found: list[Any] = []
    config = blade.Config(conversion_deadline_s=deadline_s)
    thread = threading.Thread(
        target=lambda: found.append(convert_isolated(backend, cluster, config)), daemon=True
    )
    thread.start()
    thread.join(LIMIT_S)
    assert found, "the call does not return"
    return found[0]


@pytest.mark.needs("runtime")
@pytest.mark.parametrize(
    ("convert", "deadline_s", "code", "words"),
    [
        (dies_in_its_answer, 300.0, Code.CONVERSION_CRASHED, "by signal 9 (SIGKILL)"),
        (stops_in_its_answer, 3.0, Code.CONVERSION_TIMEOUT, "conversion_deadline_s=3 s"),
        (writes_garbage, 300.0, Code.CONVERSION_FAILED, "spoiled the answer"),
        (writes_a_frame_that_is_no_answer, 300.0, Code.CONVERSION_FAILED, "spoiled the answer"),
    ],
)
def test_an_answer_that_is_none_is_a_reason(
    cluster: Cluster, convert: Any, deadline_s: float, code: Code, words: str
) -> None:
    reason = converted(convert, cluster, deadline_s)
    assert isinstance(reason, Reason)
    assert reason.code is code
    assert words in reason.detail
    assert not isinstance(converted(fakes.nothing, cluster, 300.0), Reason)  # the next one works


@pytest.mark.needs("runtime")
def test_an_answer_to_another_request_is_not_taken(cluster: Cluster) -> None:
    assert isinstance(converted(answers_another_request, cluster, 300.0), torch.ScriptObject)


@pytest.mark.needs("runtime")
@pytest.mark.parametrize(
    ("convert", "deadline_s"), [(dies_with_a_file, 300.0), (hangs_with_a_file, 3.0)]
)
def test_a_killed_conversion_leaves_no_files(
    cluster: Cluster, own_folder: Path, convert: Any, deadline_s: float
) -> None:
    reason = converted(convert, cluster, deadline_s)
    assert isinstance(reason, Reason)
    left = [p for p in own_folder.rglob("*") if not p.is_dir()]
    assert left == []
    close_workers()
    assert list(own_folder.iterdir()) == []


PARENT = """
import sys
sys.path[:] = {path!r}
import torch, blade
from test_deadlines import Fake, cluster, hangs_with_a_file
from blade.fallback.isolated_convert import convert_isolated
one = cluster.__wrapped__()
backend = Fake(convert=hangs_with_a_file, in_process=False)
backend.register()
convert_isolated(backend, one, blade.Config(conversion_deadline_s=500))
"""


@pytest.mark.needs("runtime")
def test_nothing_is_left_of_a_process_that_is_killed_while_it_converts(tmp_path: Path) -> None:
    here = [str(Path(__file__).parent), str(Path(__file__).parent.parent), *sys.path]
    program = PARENT.format(path=here)
    process = subprocess.Popen(
        [sys.executable, "-c", program], env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    try:
        assert _comes(lambda: list(tmp_path.rglob("weights-*")))
    finally:
        process.kill()
        process.wait()
    assert _comes(lambda: not [p for p in tmp_path.rglob("*") if p.name.startswith("weights-")])
    assert _comes(lambda: not list(tmp_path.iterdir())), list(tmp_path.rglob("*"))


def _comes(true: Callable[[], Any]) -> bool:
    for _ in range(int(LIMIT_S / 0.1)):
        if true():
            return True
        time.sleep(0.1)
    return False


def test_a_frame_is_read_with_a_deadline() -> None:
    from blade.process.frames import BrokenFrame, Frames, write_frame

    mine, theirs = socket.socketpair()
    with mine, theirs:
        frames = Frames(mine.fileno())
        write_frame(theirs.fileno(), b"hello")
        write_frame(theirs.fileno(), b"")
        assert (frames.wait(), frames.wait(), frames.take()) == (b"hello", b"", None)
        theirs.send(_header(100) + b"half")
        with pytest.raises(TimeoutError):
            frames.wait(time.monotonic() + 0.1)
        assert frames.is_within
        theirs.send(b"x" * 96)
        assert frames.wait() == b"half" + b"x" * 96
        theirs.send(_header(1 << 60))
        with pytest.raises(BrokenFrame):
            frames.wait()


def test_a_frame_is_written_with_a_deadline() -> None:
    from blade.process.frames import Frames, write_frame

    mine, theirs = socket.socketpair()
    with mine, theirs:
        mine.setblocking(False)
        with pytest.raises(TimeoutError):
            write_frame(mine.fileno(), bytes(1 << 24), time.monotonic() + 0.1)
        theirs.close()
        with pytest.raises(EOFError):
            Frames(mine.fileno()).wait()
