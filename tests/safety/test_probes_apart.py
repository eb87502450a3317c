# SPDX-License-Identifier: Apache-2.0
"""Inputs that blade makes up run apart first: a crash of the original there is a Reason, not the end of the process.

``in_another`` runs a scenario in a process of its own, so that a crash fails one test and does not end them all.
"""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import odd_ops
import pytest
import torch
from fake_backends import Fake, produces, registered
from odd_ops import SIZE, AtZeros, Odd, sample
from torch import nn

import blade
from blade.core.reason import Code, Reason, Stage

pytestmark = pytest.mark.needs("runtime")

FOLDERS = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]


def in_another(scenario: str, *arguments: str) -> None:
    """Calls a function of this module in another process, which has to come back from it."""
    program = (
        f"import sys; sys.path[:] = {[*FOLDERS, *sys.path]!r}; import test_probes_apart as t; "
        f"t.{scenario}(*{arguments!r})"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, f"it ended with {run.returncode}\n{run.stderr[-3000:]}"


def found(report: Any, code: Code) -> list[Reason]:
    return [r for r in report.all_reasons() if r.code is code]


def optimized(model: nn.Module, **fields: Any) -> Any:
    """With an in-process backend that takes everything but the odd ops."""
    with registered(Fake(refuses=["blade_odd::" + model.op] if isinstance(model, Odd) else ())):
        config = blade.Config(optimization_pipeline="fake", timing=False, **fields)
        return blade.optimize(model.eval(), sample(), config)


def captures(op: str, words: str) -> None:
    model = Odd(op)
    if op == "hangs":
        from blade.process import forked_trial as apart

        apart.DEADLINE_S = 1.0
    made = optimized(model)
    reasons = [r for r in found(blade.report(made), Code.PROBE_CRASHED) if r.stage is Stage.CAPTURE]
    assert reasons and reasons[0].subject == "Odd"
    assert words in reasons[0].detail
    for size in (SIZE, 4, 12):
        torch.testing.assert_close(made(sample(size)), model(sample(size)))


@produces(Code.PROBE_CRASHED)
@pytest.mark.parametrize(
    ("op", "words"),
    [
        ("dies", "by signal 11 (SIGSEGV)"),
        ("exits", "with exit status 3"),
        ("hangs", "did not come back within"),
    ],
)
def test_a_model_that_ends_the_process_at_odd_sizes(op: str, words: str) -> None:
    in_another("captures", op, words)
    assert Code.PROBE_CRASHED.value == "probe_crashed"


def verifies(in_process: str) -> None:
    odd_ops.break_i1e()
    backend = Fake(in_process=in_process == "True", convert=breaks_i1e)
    model = AtZeros().eval()
    with registered(backend):
        config = blade.Config(optimization_pipeline="fake", timing=False)
        made = blade.optimize(model, sample(), config)
    [cluster] = blade.report(made).clusters
    assert cluster.backend == "fake", cluster.reasons  # the engine passed everywhere else
    assert cluster.verdict is not None and cluster.verdict.checked > 3
    [reason] = cluster.reasons
    assert (reason.stage, reason.code) == (Stage.VERIFY, Code.PROBE_CRASHED)
    assert reason.subject == cluster.name
    assert reason.detail == (
        "At zeros (8x6), in a process apart, the original ended the process by signal 11 (SIGSEGV); "
        "nothing is verified there."
    )
    for size in (SIZE, 3, 1):
        torch.testing.assert_close(made(sample(size)), model(sample(size)))


def breaks_i1e(cluster: Any) -> None:
    """Also in the process that converts."""
    if not odd_ops._ATEN:
        odd_ops.break_i1e()


@pytest.mark.parametrize("in_process", ["True", "False"])
def test_a_cluster_whose_original_ends_the_process_at_other_contents(in_process: str) -> None:
    in_another("verifies", in_process)


def leaves_nothing() -> None:
    optimized(Odd("dies"))
    gc.collect()
    files, threads = _files(), threading.active_count()
    for _ in range(2):
        optimized(Odd("dies"))
        gc.collect()
    assert _files() == files
    assert threading.active_count() == threads
    with pytest.raises(ChildProcessError):  # neither running nor waiting to be asked for
        os.waitpid(-1, os.WNOHANG)


def _files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_no_process_and_no_open_file_is_left() -> None:
    in_another("leaves_nothing")


def is_interrupted() -> None:
    from blade.process import forked_trial as apart

    def interrupt() -> None:
        while not _children():
            time.sleep(0.01)
        time.sleep(1.0)  # until it hangs
        seen.extend(_children())
        os.kill(os.getpid(), signal.SIGINT)

    seen: list[int] = []
    apart.DEADLINE_S = 100.0
    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        optimized(Odd("hangs"))
    assert seen
    assert not _children()


def _children() -> list[int]:
    tasks = Path("/proc/self/task").iterdir()
    found: list[int] = []
    for task in tasks:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            found += map(int, (task / "children").read_text().split())
    return found


def test_an_interrupt_ends_the_process_apart() -> None:
    in_another("is_interrupted")


def test_results_come_in_order_and_after_a_crash() -> None:
    from blade.process.forked_trial import ForkedRunner

    def run(k: int) -> None:
        if k in (2, 5):
            os.kill(os.getpid(), signal.SIGKILL)
        if k == 3:
            raise ValueError("this is no crash")

    with ForkedRunner(run) as apart:
        apart.post(*range(7))
        results = [apart.result().why for _ in range(7)]
    assert [k for k, why in enumerate(results) if why is not None] == [2, 5]
    assert results[2] == "ended the process by signal 9 (SIGKILL)"


def test_after_some_crashes_nothing_more_is_tried() -> None:
    from blade.process.forked_trial import CRASHES, ForkedRunner

    with ForkedRunner(lambda k: os._exit(1)) as apart:
        apart.post(*range(CRASHES + 2))
        results = [apart.result().why for _ in range(CRASHES + 2)]
    assert set(results[:CRASHES]) == {"ended the process with exit status 1"}
    assert {str(why).partition(",")[0] for why in results[CRASHES:]} == {"was not tried"}


def test_a_damaged_heap_counts_at_the_input_that_did_it() -> None:
    import ctypes

    from blade.process.forked_trial import ForkedRunner

    def run(k: int) -> None:
        if k == 1:
            libc = ctypes.CDLL(None)
            libc.malloc.restype = ctypes.c_void_p
            block = libc.malloc(ctypes.c_size_t(2000))
            ctypes.memset(block - 8, 0xFF, 8)  # its size
            libc.free(ctypes.c_void_p(block))

    with ForkedRunner(run) as apart:
        apart.post(0, 1)
        results = [apart.result().why, apart.result().why]
    assert results[0] is None
    assert results[1] is not None and "ended the process by signal" in results[1]


def test_forking_beside_threads_warns_nobody() -> None:
    from blade.process.forked_trial import ForkedRunner

    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with ForkedRunner(lambda k: torch.randn(300, 300) @ torch.randn(300, 300)) as apart:
                apart.post(0)
                assert apart.result().why is None
    finally:
        done.set()
        thread.join()


def test_ops_have_threads_there() -> None:
    """OpenMP's threads are not there in a forked process: a region that waits for them would hang."""
    from blade.process.forked_trial import ForkedRunner

    x, weight, q = torch.randn(4, 16, 64, 64), torch.randn(32, 16, 3, 3), torch.randn(2, 8, 128, 64)
    large = torch.randn(512, 512)
    ops = [
        lambda: torch.conv2d(x, weight),
        lambda: large @ large,
        lambda: large.softmax(-1),
        lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q),
        lambda: torch.nn.functional.linear(large, large, large[0]),
        torch.get_num_threads,
    ]
    here = [op() for op in ops]  # now the threads are there
    with ForkedRunner(lambda k: ops[k](), answers=True) as apart:
        apart.post(*range(len(ops)))
        for want in here:
            [got] = apart.result().answers
            torch.testing.assert_close(got, want)


def test_what_cannot_be_sent_has_survived() -> None:
    from blade.process.forked_trial import ForkedRunner, TrialOutcome

    with ForkedRunner(lambda k: (lambda: k) if k else k, answers=True) as apart:
        apart.post(0, 1)
        assert [apart.result(), apart.result()] == [TrialOutcome(answers=(0,)), TrialOutcome()]


def test_what_was_tried_is_not_kept() -> None:
    """Neither the process nor the cluster, which holds weights."""
    from blade.verification import derived_inputs as derived

    earlier = set(_children())  # of other tests
    with registered(Fake()):
        config = blade.Config(optimization_pipeline="fake", timing=False)
        blade.optimize(nn.Sequential(nn.Linear(6, 6), nn.Tanh()).eval(), sample(), config)
    gc.collect()
    assert not [one for one in derived._surveys.values() if one._run is not None]
    assert not set(_children()) - earlier


def test_what_takes_far_longer_than_the_others_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    from blade.process import forked_trial as apart

    monkeypatch.setattr(apart, "LATER_S", 0.5)
    begin = time.monotonic()
    with apart.ForkedRunner(time.sleep, slack_s=100.0) as runner:
        runner.post(0.0, 0.001, 60.0)
        assert [runner.result().why for _ in range(2)] == [None, None]
        assert "did not come back" in str(runner.result().why)
    assert time.monotonic() - begin < 30
