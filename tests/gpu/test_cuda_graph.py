# SPDX-License-Identifier: Apache-2.0
"""Measuring on a GPU: what is timed, and a thread of the user's that captures a graph meanwhile."""

import threading
from collections.abc import Callable

import pytest
import torch

from blade.timing.cuda_graph import microseconds
from blade.timing.interleaved import measure

pytestmark = pytest.mark.gpu


def test_beside_a_capture_of_another_thread() -> None:
    x = torch.randn(512, 512, device="cuda")
    y = torch.empty_like(x)
    begun, done = threading.Event(), threading.Event()
    graph = torch.cuda.CUDAGraph()

    def capture() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            graph.capture_begin(capture_error_mode="thread_local")
            begun.set()
            done.wait(30)
            torch.mul(x, 2, out=y)
            graph.capture_end()

    thread = threading.Thread(target=capture)
    thread.start()
    try:
        assert begun.wait(30)
        assert microseconds(lambda i: x.mm(x), 4) > 0
    finally:
        done.set()
        thread.join()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, 2 * x)


def test_several_threads_at_once() -> None:
    x = torch.randn(256, 256, device="cuda")
    found: list[float] = []
    threads = [
        threading.Thread(target=lambda: found.append(microseconds(lambda i: x.mm(x), 4)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == len(threads) and all(us > 0 for us in found)


def test_the_original_is_timed_op_by_op() -> None:
    """Without TorchScript's own compiler for chains of ops, which may take minutes."""
    seen: dict[str, set[bool]] = {"original": set(), "engine": set()}

    def called(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
        def call(x: torch.Tensor) -> torch.Tensor:
            seen[name].add(bool(torch._C._get_graph_executor_optimize()))
            return x + 1

        return call

    measure(called("engine"), called("original"), [torch.ones(3, device="cuda")], 2)
    assert seen == {"original": {False}, "engine": {True}}
