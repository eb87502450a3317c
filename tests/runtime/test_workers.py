# SPDX-License-Identifier: Apache-2.0
"""The runtime's own threads: right values whoever helps, no more threads than asked for, quotas, forks."""

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
import torch

pytestmark = pytest.mark.needs("runtime", "torch_mlir")

SETUP = dedent(
    """
    import os, sys, threading, time
    import torch, blade
    torch.manual_seed(0)
    layers = [torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256), torch.nn.LayerNorm(256)]
    model = torch.nn.Sequential(*layers).eval()
    config = blade.Config(optimization_pipeline="disc", min_cluster_size=1, timing=False)
    x = torch.randn(64, 256)
    optimized = blade.optimize(model, x, config)
    want = model(x)
    threads = lambda: len(os.listdir("/proc/self/task"))
    right = lambda: torch.testing.assert_close(optimized(x), want, rtol=1e-4, atol=1e-5)
    time.sleep(0.3)  # threads that were joined a moment ago are still counted
    """
)


def run(code: str, **environment: str) -> str:
    """What ``code`` prints in a process of its own."""
    command = [sys.executable, "-c", SETUP + dedent(code)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_threads_that_share_a_cpu_are_not_waited_for() -> None:
    """As beside a busy process: the main thread's calls run with fewer threads, and torch's setting stays."""
    code = """
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(4)
    x = torch.randn(2048, 256)
    want = model(x)
    def ticks_of(thread):
        return sum(map(int, open(f"/proc/self/task/{thread}/stat").read().split()[13:15]))
    def ticks():
        found = {thread: ticks_of(thread) for thread in os.listdir("/proc/self/task")}
        return found.pop(str(os.getpid())), sum(found.values())
    with torch.no_grad():
        for _ in range(40): right()
        main, others = ticks()
        for _ in range(80): optimized(x)
        later_main, later_others = ticks()
    print(torch.get_num_threads(), later_others - others < later_main - main)
    """
    assert run(code, OMP_NUM_THREADS="4").split() == ["4", "True"]


def test_many_callers_get_right_answers_and_start_no_teams() -> None:
    code = """
    torch.set_num_threads(4)
    def work():
        with torch.no_grad():
            for _ in range(20):
                right()
    right()
    before = threads()
    callers = [threading.Thread(target=work) for _ in range(32)]
    for one in callers: one.start()
    most = threads()
    for one in callers: one.join()
    print(most - before <= 32 + 3, blade.stats(optimized)["cluster_0"]["engine_runs"])
    """
    assert run(code, OMP_NUM_THREADS="4").split() == ["True", "641"]


def test_a_caller_that_is_not_the_main_thread_shares_the_helpers() -> None:
    code = """
    torch.set_num_threads(3)
    start, made, done = threads(), [], threading.Event()
    def call(ready):
        for _ in range(10): right()
        made.append(threads() - start)
        ready.set()
        done.wait()  # while it lives, so would a team of its own
    callers = []
    for _ in range(4):
        ready = threading.Event()
        callers.append(threading.Thread(target=call, args=(ready,)))
        callers[-1].start()
        ready.wait()
    done.set()
    for one in callers: one.join()
    print(made)
    """
    # the callers so far, and two helpers of all of them
    assert run(code, OMP_NUM_THREADS="3").strip() == "[3, 4, 5, 6]"


@pytest.mark.parametrize("by", ["torch.set_num_threads(1)", "OMP_NUM_THREADS"])
def test_with_one_thread_none_is_started(by: str) -> None:
    code = f"""
    {by if by.startswith("torch") else ""}
    before = threads()
    for _ in range(10): right()
    print(threads() - before)
    """
    count = "4" if by.startswith("torch") else "1"
    assert run(code, OMP_NUM_THREADS=count).split() == ["0"]


def test_a_forked_process_has_helpers_of_its_own() -> None:
    code = """
    torch.set_num_threads(3)
    for _ in range(10): right()
    child = os.fork()
    if child == 0:
        for _ in range(10): right()
        os._exit(7)
    for _ in range(10): right()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    assert run(code, OMP_NUM_THREADS="3").split() == ["7"]


@pytest.mark.parametrize(
    ("group", "files", "cpus"),
    [
        ("0::/", {"cpu.max": "150000 100000"}, 2),
        ("0::/", {"cpu.max": "50000 100000"}, 1),
        ("0::/", {"cpu.max": "max 100000"}, 0),
        ("0::/a/b", {"a/cpu.max": "300000 100000", "a/b/cpu.max": "max 100000"}, 3),
        ("0::/a", {"a/cpu.max": "800000 100000", "cpu.max": "400000 100000"}, 4),
        ("1:cpu:/", {"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2),
        ("1:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 0),
        ("0::/", {"cpu.max": "nonsense"}, 0),
        ("", {}, 0),
    ],
)
def test_the_quota_of_the_control_group(
    tmp_path: Path, group: str, files: dict[str, str], cpus: int
) -> None:
    proc = tmp_path / "proc/self"
    proc.mkdir(parents=True)
    (proc / "cgroup").write_text(group + "\n")
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    assert torch.ops.blade.cpu_quota(str(tmp_path)) == cpus
