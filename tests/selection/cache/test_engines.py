# SPDX-License-Identifier: Apache-2.0
"""The second optimize of a model takes engines and verdicts from the cache; anything else misses it."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import blade
from blade import Config
from blade.backends.disc.backend import DiscBackend
from blade.core.disk_cache import open_cache
from blade.report import Timing
from blade.selection.cache import fingerprint
from blade.selection.cache.section import ENGINES
from blade.selection.plan import assemble as compose
from blade.selection.plan import select
from blade.verification import verify

pytestmark = [pytest.mark.needs("torch_mlir", "runtime"), pytest.mark.usefixtures("cluster_cache")]

CONFIG = Config(optimization_pipeline="DISC", strict=True, timing=False)


class Net(torch.nn.Module):
    """``scale`` is a number in the graph, the rest are weights."""

    def __init__(self, scale: float = 0.5, width: int = 8) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(0)
        self.linear = torch.nn.Linear(width, width)
        for parameter in self.linear.parameters():
            parameter.data = torch.randn(parameter.shape, generator=rng)
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.linear(x).tanh() * self.scale + x, -1)


X = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the clusters that DISC compiled."""
    names: list[str] = []
    plain = DiscBackend.convert

    def counted(self: DiscBackend, cluster: Any, config: Config) -> Any:
        names.append(cluster.name)
        return plain(self, cluster, config)

    monkeypatch.setattr(DiscBackend, "convert", counted)
    return names


def test_the_second_time_nothing_is_compiled_verified_or_measured(
    conversions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = blade.optimize(Net().eval(), X, CONFIG.evolve(timing=False))
    assert conversions == ["cluster_0"]

    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("done before")

    monkeypatch.setattr(verify, "_verify", never)
    monkeypatch.setattr(select, "measure_all", never)
    monkeypatch.setattr("blade.graph.torchscript.extract.to_fx", never)
    second = blade.optimize(Net().eval(), torch.randn(3, 8), CONFIG.evolve(timing=False))
    assert conversions == ["cluster_0"]
    mine, theirs = blade.report(second).clusters, blade.report(first).clusters
    assert [c.verdict for c in mine] == [c.verdict for c in theirs] != [None]
    for batch in (1, 3, 6):
        x = torch.randn(batch, 8)
        assert torch.equal(second(x), first(x))
        torch.testing.assert_close(second(x), Net()(x))
    assert blade.stats(second)["cluster_0"]["engine_runs"] == 6


CHANGES: dict[str, Callable[[], Any]] = {
    "a number in the graph": lambda: blade.optimize(Net(scale=0.25).eval(), X, CONFIG),
    "a weight": lambda: blade.optimize(_nudged(), X, CONFIG),
    "a size of the sample": lambda: blade.optimize(Net().eval(), X[:2], CONFIG),
    "a declared size": lambda: blade.optimize(
        Net().eval(), X, CONFIG.evolve(dynamic_shapes={0: {1: 8}})
    ),
    "a field of the config": lambda: blade.optimize(Net().eval(), X, CONFIG.evolve(max_failures=7)),
    "no cache wanted": lambda: blade.optimize(Net().eval(), X, CONFIG.evolve(cache=False)),
}


def _nudged() -> torch.nn.Module:
    net = Net().eval()
    net.linear.weight.data[7, 7] += 1e-3
    return net


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_not_the_same_is_compiled(change: str, conversions: list[str]) -> None:
    blade.optimize(Net().eval(), X, CONFIG)
    CHANGES[change]()
    assert len(conversions) == 2
    blade.optimize(Net().eval(), X, CONFIG)
    assert len(conversions) == 2  # the first one is still there


@pytest.mark.parametrize("what", ["code", "backend", "threads", "precision"])
def test_so_is_anything_in_another_environment(
    what: str, conversions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    blade.optimize(Net().eval(), X, CONFIG)
    before = torch.get_num_threads(), torch.get_float32_matmul_precision()
    if what == "code":
        monkeypatch.setattr(fingerprint, "code_version", lambda: "another")
    if what == "backend":
        monkeypatch.setattr(DiscBackend, "version", "another")
    try:
        if what == "threads":
            torch.set_num_threads(before[0] + 1)
        if what == "precision":
            torch.set_float32_matmul_precision("medium")
        blade.optimize(Net().eval(), X, CONFIG)
    finally:
        torch.set_num_threads(before[0])
        torch.set_float32_matmul_precision(before[1])
    assert len(conversions) == 2


@pytest.mark.parametrize("damage", [lambda data: data[:-9], lambda data: b""])
def test_a_damaged_entry_is_made_again(
    damage: Callable[[bytes], bytes], conversions: list[str]
) -> None:
    blade.optimize(Net().eval(), X, CONFIG)
    cache = open_cache()
    assert cache is not None
    [entry] = (cache.folder / ENGINES.kind).glob("*/*")
    entry.write_bytes(damage(entry.read_bytes()))
    for _ in range(2):
        optimized = blade.optimize(Net().eval(), X, CONFIG)
    assert len(conversions) == 2
    torch.testing.assert_close(optimized(X), Net()(X))


def test_an_entry_of_another_form_is_no_error(conversions: list[str]) -> None:
    """Whole, by its checksum, but not what this code wrote."""
    blade.optimize(Net().eval(), X, CONFIG)
    cache = open_cache()
    assert cache is not None
    [entry] = (cache.folder / ENGINES.kind).glob("*/*")
    cache.put(ENGINES.kind, entry.name, b"\x05\0\0\0\0\0\0\0[1,2]")
    blade.optimize(Net().eval(), X, CONFIG)
    assert len(conversions) == 2


def test_a_win_is_remembered_and_a_loss_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = [0.5, 2.0, 1e9]  # of the runs that measure, in turn

    def measured(engines: Any, original: Any, inputs: Any, *_: Any, **__: Any) -> list[Timing]:
        return [Timing(tuple(tuple(t.shape) for t in inputs[0]), speeds.pop(0), 1.0, 0.01)]

    monkeypatch.setattr(select, "measure_all", measured)
    monkeypatch.setattr(
        compose,
        "measure_all",
        lambda several, *rest, **options: [Timing((), 2.0, 1.0, 0.0) for _ in several],
    )
    config = CONFIG.evolve(timing=True)
    for backend, left in (("torchscript", 2), ("disc", 1), ("disc", 1)):
        [cluster] = blade.report(blade.optimize(Net().eval(), X, config)).clusters
        assert (cluster.backend, len(speeds)) == (backend, left)
        assert not cluster.timings or cluster.timings[0].speedup == 2.0


def test_another_process_finds_it(tmp_path: Path, conversions: list[str]) -> None:
    torch.save((Net().state_dict(), X), tmp_path / "net.pt")
    code = f"""
import sys, torch, blade
sys.path.insert(0, {str(Path(__file__).parent)!r})
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from test_engines import CONFIG, Net, X
torch.set_num_threads({torch.get_num_threads()})
blade.optimize(Net().eval(), X, CONFIG)
cache = blade.core.disk_cache.open_cache()
print(cache.hits, cache.misses)
"""
    blade.optimize(Net().eval(), X, CONFIG)
    run = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, env=os.environ
    )
    # that such a model is known, its trace, what its values look like, what was decided, and the engine
    assert run.stdout.split() == ["5", "0"]


def test_weights_stay_shared_with_the_fallback(conversions: list[str], tmp_path: Path) -> None:
    sizes = []
    for _ in range(2):
        optimized = blade.optimize(Net(width=256).eval(), torch.randn(3, 256), CONFIG)
        torch.jit.save(optimized, tmp_path / "net.pt")
        sizes.append((tmp_path / "net.pt").stat().st_size)
    assert len(conversions) == 1
    assert abs(sizes[0] - sizes[1]) < 2000 < 256 * 256 * 4
