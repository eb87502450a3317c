# SPDX-License-Identifier: Apache-2.0
"""``torch.compile(backend="aot_disc")``: real loops whose losses follow eager's for 200 steps."""

import copy
import importlib.util
from dataclasses import replace

import graphs
import pytest
import torch
from small_models import TASKS, Task, losses

import blade

STEPS = 200


def make(name: str) -> Task:
    package = {"bert": "transformers", "gpt2": "transformers", "unet": "diffusers"}.get(name)
    if package is not None and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    return TASKS[name]()


@pytest.mark.parametrize("name", TASKS)
@torch._dynamo.config.patch(allow_rnn=True)
def test_losses_follow_eager(name: str) -> None:
    task = make(name)
    other = replace(task, model=copy.deepcopy(task.model))
    want = losses(other, other.model, STEPS)
    options = {"timing": False}
    got = losses(
        task, torch.compile(task.model, backend=blade.dynamo.aot_disc, options=options), STEPS
    )
    # rounding differs, and training doubles differences every few steps where it is unstable: beyond step 100 eager
    # itself, with weights changed by 1e-7, departs from its losses by 6% (resnet)
    torch.testing.assert_close(got[:60], want[:60], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(got[:100], want[:100], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(sum(got[-50:]), sum(want[-50:]), rtol=2e-2, atol=0.5)
    assert sum(want[-50:]) < sum(want[:50])
    found = graphs.served()
    for kind in ("forward", "backward"):
        mine = {k: v for k, v in found.items() if kind in k}
        assert "disc" in mine.values(), found
