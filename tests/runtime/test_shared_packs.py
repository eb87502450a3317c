# SPDX-License-Identifier: Apache-2.0
"""Engines of one process hold what they pack of the same weights once."""

import gc
import subprocess
import sys
import textwrap
from collections.abc import Callable

import pytest
import torch
from fake_device import container, counts, fake
from test_accelerator import packed

from blade.core.equal_constants import shared

BY_CONTENT = "pack_0123456789ab"
ZEROS = torch.zeros(6)


def engine_of(weight: torch.Tensor, kernel: str = BY_CONTENT, **limits: int) -> torch.ScriptObject:
    fake()
    return packed(kernel).engine(
        [weight], object=container(), limits={"cuda_graphs": 0, "watch_constants": 0} | limits
    )


def answer(engine: torch.ScriptObject) -> torch.Tensor:
    outputs = engine.try_execute([ZEROS])
    assert outputs is not None, engine.last_error()
    return outputs[0]  # type: ignore[no-any-return]


def launches_of(engine: torch.ScriptObject) -> int:
    """1, and 1 more if the call packed."""
    before = counts().launches
    answer(engine)
    return int(counts().launches - before)


def expected(weight: torch.Tensor) -> torch.Tensor:
    return torch.cat([-3 * weight, torch.zeros(2)])


def test_what_one_engine_packed_serves_the_others() -> None:
    weight = torch.randn(4)
    first, second = engine_of(weight), engine_of(weight)
    assert launches_of(first) == 2
    assert launches_of(second) == 1
    assert torch.equal(answer(second), expected(weight))


@pytest.mark.parametrize("other", [lambda w: w, lambda w: w.detach(), lambda w: w.view(4)])
def test_a_write_is_packed_once_for_all(other: Callable[[torch.Tensor], torch.Tensor]) -> None:
    weight = torch.randn(4)
    first, second = engine_of(weight), engine_of(other(weight))
    assert [launches_of(e) for e in (first, second)] == [2, 1]
    for writer in (second, first):
        weight.mul_(2)
        assert launches_of(writer) == 2
        for engine in (first, second):
            assert torch.equal(answer(engine), expected(weight))
            assert launches_of(engine) == 1


def test_an_engine_that_comes_after_a_write_packs_again() -> None:
    weight = torch.randn(4)
    first = engine_of(weight)
    answer(first)
    weight.mul_(2)
    assert launches_of(engine_of(weight)) == 2
    assert launches_of(first) == 1
    assert torch.equal(answer(first), expected(weight))


def test_a_pack_lives_as_long_as_an_engine_that_reads_it() -> None:
    weight = torch.randn(4)
    first, second = engine_of(weight), engine_of(weight)
    answer(first)
    answer(second)
    del first
    gc.collect()
    assert launches_of(engine_of(weight)) == 1
    assert torch.equal(answer(second), expected(weight))
    del second
    gc.collect()
    assert launches_of(engine_of(weight)) == 2


@pytest.mark.parametrize(
    "other",
    [
        lambda weight: engine_of(weight.clone()),  # other memory
        lambda weight: engine_of(weight.data),  # other versions
        lambda weight: engine_of(weight, watch_constants=1),
    ],
)
def test_what_is_not_the_same_is_packed_apart(
    other: Callable[[torch.Tensor], torch.ScriptObject],
) -> None:
    weight = torch.randn(4)
    first = engine_of(weight)
    answer(first)
    second = other(weight)
    assert launches_of(second) == 2
    weight.mul_(2)
    assert torch.equal(answer(first), expected(weight))


def test_kernels_of_old_files_are_not_known_by_their_content() -> None:
    weight = torch.randn(4)
    assert [launches_of(engine_of(weight, "pack")) for _ in range(2)] == [2, 2]


def test_views_of_one_memory_are_compared_by_elements_where_they_are_looked_at_anyway() -> None:
    """As in a file that was loaded, in which each engine's constants have versions of their own."""
    weight = torch.randn(4)
    views = [torch.from_numpy(weight.numpy()) for _ in range(2)]
    first, second = (engine_of(v, watch_constants=1) for v in views)
    assert [launches_of(e) for e in (first, second)] == [2, 1]
    views[1].mul_(2)
    for engine in (second, first):
        assert torch.equal(answer(engine), expected(weight))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="statm is Linux's")
def test_paths_of_a_model_hold_packed_weights_once() -> None:
    """The resident memory of a fresh process, with a weight of 64 MiB and two kinds of calls."""
    source = """
        import torch, blade
        from torch import nn

        def resident():
            return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20

        config = blade.Config(optimization_pipeline="disc", timing=False, cache=False, time_budget=None,
                              min_cluster_size=1)
        model = nn.Sequential(nn.Linear(4096, 4096), nn.GELU()).eval()
        fast = blade.accelerate(model, [(torch.randn(2, 4096),), (torch.randn(2, 3, 4096),)], config)
        before = resident()
        with torch.no_grad():
            fast(torch.randn(3, 4096)), fast(torch.randn(3, 2, 4096))
        assert sum(s["engine_runs"] for s in blade.stats(fast).values() if "engine_runs" in s) >= 2
        held = resident()
        del fast
        import gc; gc.collect()
        print(held - resident())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source)], capture_output=True, text=True, check=True
    )
    assert 60 < float(done.stdout.splitlines()[-1]) < 100


def test_equal_constants_are_one_tensor_while_it_is_in_use() -> None:
    one = torch.arange(8192, dtype=torch.int8)
    assert shared(one) is one
    assert shared(one.clone()) is one
    assert shared(one.clone().view(64, 128)) is not one
    assert shared(one + 1) is not one
    assert shared(one.to(torch.uint8)) is not one
    del one
    again = torch.arange(8192, dtype=torch.int8)
    assert shared(again) is again
