# SPDX-License-Identifier: Apache-2.0
"""The real all-MiniLM-L6-v2: one cluster, one engine, every shape, in this process and in a fresh one."""

import copy
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import blade
from blade.core.reason import Code
from blade.verification.tolerance import allowed, distance

pytestmark = pytest.mark.needs("runtime", "torch_mlir", "minilm")

Inputs = dict[str, torch.Tensor]
NO_PATH = None  # the model's code decided on this, so the original answers
OUTPUTS = ("last_hidden_state", "pooler_output")


def random_shapes(count: int) -> list[tuple[int, int]]:
    """(batch, length): the edges by hand, then mostly short ones, so that the test stays short."""
    rng = random.Random(0)
    shapes = [(1, 1), (1, 2), (5, 1), (1, 512), (3, 127), (2, 128), (7, 3), (1, 17)]
    while len(shapes) < count:
        longest = rng.choice((16, 32, 32, 64, 160))
        shapes.append((rng.randint(1, 4), rng.randint(1, longest)))
    return shapes


@pytest.fixture(scope="module")
def optimized(minilm: nn.Module, make_inputs: Callable[..., Inputs]) -> torch.jit.ScriptModule:
    config = blade.Config(timing=False, strict=True)
    return blade.optimize(minilm, [make_inputs(1, 16), make_inputs(2, 64)], config)


@pytest.fixture(scope="module")
def saved(optimized: torch.jit.ScriptModule, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("minilm") / "model.pt"
    torch.jit.save(optimized, path)
    return path


@pytest.fixture(scope="module")
def fp64(minilm: nn.Module) -> nn.Module:
    return copy.deepcopy(minilm).double()


@pytest.fixture(scope="module")
def make_inputs() -> Callable[..., Inputs]:
    """Random tokens of two segments, random padding on the right of every row."""

    def make(batch: int, length: int, seed: int = 0) -> Inputs:
        rng = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, 30522, (batch, length), generator=rng)
        used = torch.randint(1, length + 1, (batch, 1), generator=rng)
        split = torch.randint(0, length + 1, (batch, 1), generator=rng)
        place = torch.arange(length)[None]
        return {
            "input_ids": ids,
            "attention_mask": (place < used).long(),
            "token_type_ids": (place >= split).long(),
        }

    return make


def answers(module: nn.Module, inputs: Inputs) -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        out = module(**inputs)
    return tuple(out[name] for name in OUTPUTS) if hasattr(out, "keys") else tuple(out)


def test_one_cluster_one_engine(optimized: torch.jit.ScriptModule) -> None:
    report = blade.report(optimized)
    [cluster] = report.clusters
    assert cluster.backend == "disc"
    assert report.outside == {}
    assert cluster.verdict is not None
    assert cluster.verdict.refused == 0
    assert list(blade.stats(optimized)) == ["cluster_0"]


def test_200_shapes_are_as_exact_as_eager_and_all_run_in_the_engine(
    optimized: torch.jit.ScriptModule,
    minilm: nn.Module,
    fp64: nn.Module,
    make_inputs: Callable[..., Inputs],
) -> None:
    shapes = random_shapes(200)
    before = blade.stats(optimized)["cluster_0"]
    for seed, (batch, length) in enumerate(shapes):
        inputs = make_inputs(batch, length, seed)
        eager, truth = answers(minilm, inputs), answers(fp64, inputs)
        for name, got, want, right in zip(OUTPUTS, answers(optimized, inputs), eager, truth):
            assert got.shape == want.shape
            assert got.dtype == want.dtype
            limit = allowed(torch.float32, distance(want, right))
            assert distance(got, right) <= limit, (name, batch, length)
    after = blade.stats(optimized)["cluster_0"]
    assert after["engine_runs"] - before["engine_runs"] == len(shapes)
    assert after["fallbacks"] == before["fallbacks"]


def test_the_file_answers_the_same_in_a_fresh_process(
    saved: Path,
    optimized: torch.jit.ScriptModule,
    make_inputs: Callable[..., Inputs],
) -> None:
    cases = []
    for seed, shape in enumerate(random_shapes(24)):
        inputs = make_inputs(*shape, seed)
        cases.append((inputs, answers(optimized, inputs)))
    torch.save((cases, str(blade.report(optimized))), saved.with_name("cases.pt"))
    code = f"""
import torch, blade, sys
cases, report = torch.load({str(saved.with_name("cases.pt"))!r})
loaded = torch.jit.load({str(saved)!r})
for inputs, expected in cases:
    with torch.no_grad():
        for got, want in zip(loaded(**inputs), expected):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
counts = blade.stats(loaded)["cluster_0"]
assert counts == {{"calls": {len(cases)}, "engine_runs": {len(cases)}, "fallbacks": 0}}, counts
assert str(blade.report(loaded)) == report
assert "transformers" not in sys.modules and "torch_mlir" not in sys.modules
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


def test_the_file_holds_the_weights_once(saved: Path, minilm: nn.Module) -> None:
    weights = sum(p.numel() * p.element_size() for p in minilm.parameters())
    assert saved.stat().st_size < 1.1 * weights


def _changed(inputs: Inputs, **changes: torch.Tensor) -> Inputs:
    return {**inputs, **changes}


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda i: _changed(i, attention_mask=i["attention_mask"].bool()), Code.GUARD_DTYPE),
        (lambda i: _changed(i, attention_mask=i["attention_mask"].float()), Code.GUARD_DTYPE),
        (lambda i: _changed(i, input_ids=i["input_ids"].int()), Code.GUARD_DTYPE),
        (lambda i: _changed(i, input_ids=i["input_ids"].float()), Code.GUARD_DTYPE),
        (lambda i: _changed(i, input_ids=i["input_ids"][0]), NO_PATH),
        (lambda i: {k: v[..., None] for k, v in i.items()}, NO_PATH),
        (lambda i: {k: v.repeat(1, 60) for k, v in i.items()}, NO_PATH),
        (lambda i: _changed(i, attention_mask=torch.tensor([[1, 0]] * 2)), Code.GUARD_SHAPE),
        (lambda i: _changed(i, input_ids=i["input_ids"] + 30522), Code.ENGINE_RAISED),
        (lambda i: {k: v.to("meta") for k, v in i.items()}, Code.GUARD_DEVICE),
    ],
    ids=[
        "bool mask",
        "float mask",
        "int32 ids",
        "float ids",
        "ids of rank 1",
        "rank 3",
        "longer than 512",
        "short mask",
        "tokens out of range",
        "meta device",
    ],
)
def test_odd_calls_end_as_the_originals_do(
    optimized: torch.jit.ScriptModule,
    minilm: nn.Module,
    make_inputs: Callable[..., Inputs],
    change: Callable[[Inputs], Inputs],
    code: Code | None,
) -> None:
    def count() -> int:
        stats = blade.stats(optimized)
        if code is NO_PATH:
            return stats.get("original", {}).get("calls", 0)
        return stats["cluster_0"].get(code.value, 0)

    inputs = change(make_inputs(2, 10))
    before = count()
    optimized.cluster_0.engine.rearm()
    try:
        expected = answers(minilm, inputs)
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        # TorchScript wraps what an op raises; the op's own message is inside. Unpacking a shape is
        # Python's (a ValueError) and not in the graph: there, the first op that minds raises.
        with pytest.raises((type(error), RuntimeError)) as caught:
            answers(optimized, inputs)
        if not isinstance(error, ValueError):
            assert str(error).splitlines()[0] in str(caught.value)
    else:
        for got, want in zip(answers(optimized, inputs), expected):
            torch.testing.assert_close(got, want)
    assert count() == before + 1


def test_a_device_that_does_not_exist_is_refused_as_by_torch(
    make_inputs: Callable[..., Inputs], saved: Path
) -> None:
    with pytest.raises(RuntimeError, match="Expected one of cpu, cuda"):
        torch.jit.load(saved, map_location="gpu")
