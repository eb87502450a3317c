# SPDX-License-Identifier: Apache-2.0
"""Whoever watches is told how far it is; the stages of ``optimize`` tell."""

import threading

import torch

import blade
from blade.core.progress import Step, announce, watched


def test_only_the_innermost_watcher_of_this_thread_is_told() -> None:
    outer: list[Step] = []
    inner: list[Step] = []
    announce("nobody")
    with watched(outer.append):
        with watched(inner.append):
            announce("convert", 1, 3, "cluster_1")
        thread = threading.Thread(target=announce, args=("elsewhere",))
        thread.start()
        thread.join()
        announce("select")
    assert inner == [Step("convert", 1, 3, "cluster_1")]
    assert outer == [Step("select")]


def test_optimize_tells_of_its_stages_and_clusters() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8))
    steps: list[Step] = []
    with watched(steps.append):
        optimized = blade.optimize(
            model.eval(), torch.randn(2, 8), blade.Config(timing=False, min_cluster_size=1)
        )
    stages = list(dict.fromkeys(s.stage for s in steps))
    assert stages == list(dict.fromkeys(["support", *blade.report(optimized).seconds]))
    assert any(s.stage == "convert" and s.what == "cluster_0" for s in steps)
    assert all(0 <= s.done <= s.total for s in steps)
