# SPDX-License-Identifier: Apache-2.0
"""The process that compiles: one for many requests, gone with its parent or when idle, and back when it is needed."""

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator

import pytest
from cpu_native import pointwise_kernel
from test_cpu_kernels import F32
from triton_interpreter import TARGET

from blade.backends.disc.gpu import cubin, server
from blade.backends.disc.gpu.emit import emit
from blade.backends.disc.gpu.server import compile_in_forks
from blade.backends.disc.gpu.unit import Unit
from blade.meanwhile import meanwhile

pytestmark = pytest.mark.needs("triton")

# As cubin's, but for what takes long: it compiles by a look at the text.
_QUICK = """
import importlib.util, os, sys
spec = importlib.util.spec_from_file_location("cubin", {file!r})
cubin = importlib.util.module_from_spec(spec)
spec.loader.exec_module(cubin)
def compile_unit(unit, arch, folder):
    print("on stdout")
    if unit.text == "crash":
        os.abort()
    assert unit.text != "wrong", "what is wrong"
    return unit
cubin._prepare = cubin._keep_in = lambda given: None
cubin.compile_unit = compile_unit
cubin.pack = lambda unit: (unit.text.encode(), 128, os.getpid())
cubin.serve({arch}, {idle_s})
"""


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(server, "_server", None)
    monkeypatch.setattr(server, "_PROGRAM", _QUICK)
    yield
    if server._server is not None:
        server._server.end()


def unit(text: str) -> Unit:
    return Unit("unit", text, ())


def test_real_units_compile_one_request_after_the_other() -> None:
    units = [emit(pointwise_kernel(op, [F32, F32], F32), TARGET)[0].unit for op in ("add", "mul")]
    server.expect(TARGET)
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
    with meanwhile(lambda: done.append(server._lock.locked())):
        for text in ("a", "b"):
            assert compile_in_forks([unit(text)], TARGET)[0][0] == text.encode()
    assert done == [True]  # once, by the first request
    with meanwhile(lambda: 1 // 0), pytest.raises(ZeroDivisionError):
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
    assert first is not None and first.process.wait(timeout=60) == 0
    assert compile_in_forks([unit("b")], TARGET)[0][0] == b"b"
    assert server._server is not first


def test_one_that_was_killed_is_said_to_have_ended_and_replaced(quick: None) -> None:
    server.expect(TARGET)
    assert server._server is not None
    server._server.process.kill()
    server._server.process.wait()
    assert compile_in_forks([unit("a")], TARGET)[0][0] == b"a"


def test_where_it_cannot_start_its_words_are_the_reason(
    quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_PROGRAM", "raise ImportError('no such library')")
    [found] = compile_in_forks([unit("a")], TARGET)
    assert isinstance(found, str) and found.strip().endswith("ImportError: no such library")


def test_a_fork_of_the_process_starts_one_of_its_own(quick: None) -> None:
    compile_in_forks([unit("a")], TARGET)
    mine = server._server
    assert mine is not None and mine.serves(TARGET.arch)
    mine.owner += 1
    assert not mine.serves(TARGET.arch)
    compile_in_forks([unit("b")], TARGET)
    assert server._server is not mine and mine.process.poll() is None  # it is another's to end
    mine.owner -= 1
    mine.end()
    assert mine.process.poll() is not None


def test_it_ends_when_nobody_can_ask_any_more() -> None:
    program = _QUICK.format(file=cubin.__file__, arch=90, idle_s=600)
    run = subprocess.run(
        [sys.executable, "-c", program], input=b"", capture_output=True, timeout=60
    )
    assert run.returncode == 0 and run.stdout == b""
    request = pickle.dumps(([{"name": "u", "text": "a"}], "/nowhere", 1))
    run = subprocess.run(
        [sys.executable, "-c", program], input=request, capture_output=True, timeout=60
    )
    [found] = pickle.loads(run.stdout)  # where no file can be written
    assert "ended" in found
