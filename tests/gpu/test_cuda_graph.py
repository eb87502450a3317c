# SPDX-License-Identifier: Apache-2.0
"""Measuring kernels while another thread of the user's captures a graph: neither disturbs the other."""

import threading

import pytest
import torch

from blade.timing.cuda_graph import microseconds

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
