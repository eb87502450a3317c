# SPDX-License-Identifier: Apache-2.0
"""What bench_gpu.py rests on, without a GPU: peers that die or hang, time that runs out, kernels that are counted."""

import itertools
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from gpu import rounds  # noqa: E402 - found beside the scripts
from gpu.device import Work, busy_us, by_kernel, distance, work_of  # noqa: E402
from gpu.remote import PeerFailed, Remote  # noqa: E402
from gpu.rounds import Clock, Runner  # noqa: E402
from rich.console import Console  # noqa: E402


class Peer:
    """Lives in the other process."""

    def __init__(self, size: int) -> None:
        self._size = size

    def double(self) -> int:
        return 2 * self._size

    def raise_it(self) -> None:
        raise ValueError("no such kernel")

    def die(self) -> None:
        os._exit(3)

    def hang(self) -> None:
        time.sleep(60)


@pytest.fixture
def remote() -> Iterator[Remote]:
    made = Remote("test_bench_gpu", "Peer", {"size": 4})
    yield made
    made.close()


def test_an_answer(remote: Remote) -> None:
    assert remote.ask("double", 60) == 8
    assert remote.ask("double", 60) == 8


@pytest.mark.parametrize(
    ("command", "limit", "text"),
    [
        ("raise_it", 60, "ValueError: no such kernel"),
        ("die", 60, "process died, exit code 3"),
        ("hang", 0.1, "hang took more than 0 s"),
    ],
)
def test_a_peer_that_fails_is_said_and_ended(
    remote: Remote, command: str, limit: float, text: str
) -> None:
    with pytest.raises(PeerFailed, match=text):
        remote.ask(command, limit)
    with pytest.raises(PeerFailed, match="process died"):
        remote.ask("double", 60)


class Scripted:
    """A remote that answers at once, or fails."""

    def __init__(self, fails_at: int = 99) -> None:
        self._left = fails_at

    def ask(self, command: str, limit: float, **kwargs: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            raise PeerFailed("broken")
        return {command: limit, **kwargs}

    def close(self) -> None:
        pass


def scripted(**fails_at: int) -> dict[str, Runner]:
    return {name: Runner(name, Scripted(at)) for name, at in fails_at.items()}  # type: ignore[arg-type]


def test_a_failed_peer_is_out_and_the_others_go_on() -> None:
    runners = scripted(good=99, bad=0)
    rounds.prepared(runners, Clock(60), 0.0, Console(quiet=True), batch=3)
    assert runners["good"].answer["batch"] == 3 and not runners["good"].failed
    assert "broken" in runners["bad"].failed
    asked: list[str] = []

    def turn(runner: Runner, limit: float) -> None:
        asked.append(runner.peer)

    assert rounds.in_turns(runners, Clock(60), 3, turn) == 3
    assert asked == ["good"] * 3


def test_turns_begin_with_another_peer_each_round() -> None:
    asked: list[str] = []

    def turn(runner: Runner, limit: float) -> None:
        asked.append(runner.peer)

    rounds.in_turns(scripted(a=9, b=9), Clock(60), 2, turn)
    assert asked == ["a", "b", "b", "a"]


def test_what_there_is_no_time_for_is_said() -> None:
    runners = scripted(late=99)
    rounds.prepared(runners, Clock(60), 58.0, Console(quiet=True))
    assert "no time was left" in runners["late"].failed
    asked: list[str] = []

    def turn(runner: Runner, limit: float) -> None:
        asked.append(runner.peer)

    assert rounds.in_turns(scripted(a=9), Clock(-1), 5, turn) == 1
    assert asked == ["a"], "one round is always made"


def test_kernels_copies_and_calls_of_the_host_are_counted_per_call() -> None:
    times = itertools.count(0.0, 100.0)

    def event(cat: str, name: str, dur: float = 1.0) -> dict[str, Any]:
        return {"cat": cat, "name": name, "ts": next(times), "dur": dur}

    one = [
        event("cuda_runtime", "cudaLaunchKernel"),
        event("cuda_driver", "cuLaunchKernelEx"),
        event("cuda_runtime", "cudaGraphLaunch"),
        event("cuda_runtime", "cudaMemcpyAsync"),
        event("cuda_runtime", "cudaDeviceSynchronize"),
        event("kernel", "triton_fused", 5.0),
        event("kernel", "sm90_gemm", 7.0),
        event("gpu_memcpy", "Memcpy DtoD", 2.0),
        {"ph": "M", "name": "process_name"},
    ]
    later = [e | {"ts": 1e4 + e.get("ts", 0.0)} for e in one]
    assert work_of(one + later, 2) == Work(kernels=2, copies=1, host_calls=4, device_us=14)
    assert work_of([event("cpu_op", "aten::add")], 1) is None


def test_a_kernel_that_waits_for_the_one_before_it_is_not_counted_twice() -> None:
    spans = [(10.0, 5.0), (0.0, 4.0), (12.0, 6.0), (13.0, 1.0), (18.0, 2.0)]
    assert busy_us([{"ts": ts, "dur": dur} for ts, dur in spans]) == 4 + 8 + 2


def test_kernels_are_listed_by_name_the_longest_first() -> None:
    events = [
        {"cat": "kernel", "name": "short", "dur": 1.0},
        {"cat": "kernel", "name": "long", "dur": 4.0},
        {"cat": "kernel", "name": "short", "dur": 2.0},
        {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "dur": 9.0},
    ]
    assert list(by_kernel(events * 2, 2).items()) == [("long", (1, 4.0)), ("short", (2, 3.0))]


def test_distance_is_of_all_numbers_and_nan_is_never_near() -> None:
    want = (torch.tensor([3.0, 4.0]), torch.tensor([1, 2]))
    assert distance((torch.tensor([3.0, 4.5]), want[1]), want) == pytest.approx(0.1)
    assert distance(torch.tensor([3.0, 4.0]), want[:1]) == 0.0
    assert distance(want[:1], want) == math.inf
    assert distance((torch.tensor([3.0, math.nan]), want[1]), want) == math.inf


def test_the_script_runs_without_a_gpu(tmp_path: Path) -> None:
    argv = ["kernels", "--dry-run", "--peers", "eager", "--patterns", "layer_norm"]
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "bench_gpu.py", *argv, "--json", tmp_path / "out.jsonl"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "layer_norm 1x2x768" in done.stdout
    assert '"layer_norm 1x2x768"' in (tmp_path / "out.jsonl").read_text()
