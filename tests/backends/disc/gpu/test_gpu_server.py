# SPDX-License-Identifier: Apache-2.0
"""The process that compiles: one for many requests, gone with its parent or when idle, and back when it is needed."""

import os
import signal
from collections.abc import Iterator

import pytest
import quick_cubin
from cpu_native import pointwise_kernel
from test_cpu_kernels import F32
from triton_interpreter import TARGET

from blade.backends.disc.gpu.compile import cubin, server
from blade.backends.disc.gpu.compile.server import compile_in_forks
from blade.backends.disc.gpu.compile.triton_unit import TritonUnit
from blade.backends.disc.gpu.emit.kernel import emit
from blade.process.child import NoAnswer
from blade.process.overlap import overlapping

pytestmark = pytest.mark.needs("triton")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(server, "_server", None)
    monkeypatch.setattr(cubin, "serve_compilations", quick_cubin.serve)
    yield
    if server._server is not None:
        server._server.close()


def unit(text: str) -> TritonUnit:
    return TritonUnit("unit", text, ())


def test_real_units_compile_one_request_after_the_other() -> None:
    units = [emit(pointwise_kernel(op, [F32, F32], F32), TARGET)[0].unit for op in ("add", "mul")]
    server.warm_up(TARGET)
    first = server._server
    both, again = compile_in_forks(units, TARGET), compile_in_forks(units[:1], TARGET)
    assert server._server is first
    for made, one in zip([*both, *again], [*units, units[0]], strict=True):
        assert isinstance(made, tuple), made
        assert made[0].startswith(b"\x7fELF") and one.name.encode() in made[0]
        assert made[1] == 32 * one.warps


def test_results_are_in_the_order_of_the_units_from_processes_of_their_own(quick: None) -> None:
    texts = ["a", "aaa", "", "aa"]
    found = compile_in_forks([unit(text) for text in texts], TARGET)
    assert [one[0].decode() for one in found] == texts  # type: ignore[union-attr]
    assert os.getpid() not in {one[2] for one in found}


def test_whoever_waits_has_something_else_done(quick: None) -> None:
    done: list[bool] = []
    with overlapping(lambda: done.append(server._lock.locked())):
        for text in ("a", "b"):
            assert compile_in_forks([unit(text)], TARGET)[0][0] == text.encode()
    assert done == [True]  # once, by the first request
    with overlapping(lambda: 1 // 0), pytest.raises(ZeroDivisionError):
        compile_in_forks([unit("c")], TARGET)
    assert compile_in_forks([unit("d")], TARGET)[0][0] == b"d"  # not the answer to "c"


@pytest.mark.parametrize("processors", [1, 3])
def test_one_that_fails_or_crashes_costs_the_others_nothing(
    quick: None, monkeypatch: pytest.MonkeyPatch, processors: int
) -> None:
    monkeypatch.setattr(server, "MAX_PROCESSES", processors)
    units = [unit(text) for text in ("a", "wrong", "crash", "b", "crash", "c")]
    found = compile_in_forks(units, TARGET)
    assert [found[k][0] for k in (0, 3, 5)] == [b"a", b"b", b"c"]
    assert isinstance(found[1], str) and found[1].strip().endswith("what is wrong")
    assert found[2] == found[4] == "the process that compiled it ended"  # abort() says nothing
    assert isinstance(compile_in_forks([unit("again")], TARGET)[0], tuple)


def test_after_a_while_without_work_it_is_gone_and_comes_back(
    quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "IDLE_S", 0.1)
    compile_in_forks([unit("a")], TARGET)
    first = server._server
    assert first is not None
    with pytest.raises(NoAnswer, match="ended the process with exit status 0"):
        first.answer(60)
    assert compile_in_forks([unit("b")], TARGET)[0][0] == b"b"
    assert server._server is not first


def test_one_that_was_killed_is_said_to_have_ended_and_replaced(quick: None) -> None:
    server.warm_up(TARGET)
    assert server._server is not None
    server._server.kill()
    os.waitid(os.P_PID, server._server.pid, os.WEXITED | os.WNOWAIT)
    assert compile_in_forks([unit("a")], TARGET)[0][0] == b"a"


def test_where_it_cannot_start_its_words_are_the_reason(
    quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cubin, "serve_compilations", quick_cubin.fails)
    [found] = compile_in_forks([unit("a")], TARGET)
    assert isinstance(found, str) and found.strip().endswith("ImportError: no such library")


def test_a_fork_of_the_process_starts_one_of_its_own(quick: None) -> None:
    [first] = compile_in_forks([unit("a")], TARGET)
    mine = server._server
    assert mine is not None
    if (pid := os.fork()) == 0:
        signal.alarm(60)  # a hang ends by this
        right = not mine.is_alive() and compile_in_forks([unit("b")], TARGET)[0][0] == b"b"
        assert server._server is not None
        server._server.close()
        mine.close()
        os._exit(0 if right and server._server is not mine else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert mine.is_alive()
    assert compile_in_forks([unit("a")], TARGET)[0][0] == first[0]
    assert server._server is mine


def test_where_no_file_can_be_written_that_is_the_answer(quick: None) -> None:
    child = server._started(TARGET)
    child.post(([{"name": "u", "text": "a"}], TARGET.triton, TARGET.shared, "/nowhere", 1))
    [found] = child.answer(60)
    assert "ended" in found
