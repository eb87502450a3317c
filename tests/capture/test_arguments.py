# SPDX-License-Identifier: Apache-2.0
"""Arguments that are no tensors, or are left out: each value is a path, and others are the original's."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from saved import loaded
from torch import nn

import blade
from blade.capture.capture import capture
from blade.config import Config
from blade.core.reason import Code
from blade.errors import InputError

CONFIG = Config(optimization_pipeline="DISC", timing=False, cache=False, min_cluster_size=1)


class Pools(nn.Module):
    """Every kind of argument but containers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(  # type: ignore[no-untyped-def]
        self, x, pooling="mean", mask=None, scale=1.0, depth=1, normalize=False, **more
    ):
        for layer in self.layers[:depth]:
            x = torch.tanh(layer(x))
        if mask is not None:
            x = x * mask.unsqueeze(-1)
        x = x.mean(1) if pooling == "mean" else x.amax(1)
        return x / x.norm() if normalize else x * scale


def model() -> nn.Module:
    torch.manual_seed(0)
    return Pools().eval()


def x(rows: int = 2, length: int = 5) -> torch.Tensor:
    return torch.randn(rows, length, 8, generator=torch.Generator().manual_seed(rows))


def calls_of_original(module: torch.jit.ScriptModule) -> int:
    return int(blade.stats(module).get("original", {}).get("calls", 0))


SAMPLES: list[dict[str, Any]] = [
    {"x": x()},
    {"x": x(), "pooling": "max"},
    {"x": x(), "mask": torch.ones(2, 5)},
    {"x": x(), "normalize": True},
    {"x": x(), "depth": 3, "scale": 0.5},
]


@pytest.mark.needs("runtime", "torch_mlir")
def test_each_value_of_the_samples_is_a_path() -> None:
    original = model()
    optimized = blade.optimize(original, SAMPLES, CONFIG)
    assert len(blade.report(optimized).paths) == len(SAMPLES)
    for one in (optimized, loaded(optimized)):
        for sample in SAMPLES:
            given = sample | {"x": x(3, 7)}
            if "mask" in given:
                given["mask"] = torch.rand(3, 7)
            torch.testing.assert_close(one(**given), original(**given))
    assert calls_of_original(optimized) == 0
    counted = {k: v["calls"] for k, v in blade.stats(optimized).items() if k.startswith("path")}
    assert counted == {f"path {k + 1}": 2 for k in range(len(SAMPLES))}  # by the file as well


@pytest.mark.needs("runtime", "torch_mlir")
@pytest.mark.parametrize(
    ("given", "condition"),
    [
        ({"pooling": "sum"}, "pooling == 'mean'"),
        ({"scale": 2.0}, "scale == 1.0"),
        ({"depth": 2}, "depth == 1"),
        ({"normalize": True}, "normalize == False"),
        ({"mask": torch.ones(2, 5)}, "mask is None"),
    ],
    ids=lambda one: next(iter(one)) if isinstance(one, dict) else "",
)
def test_another_value_is_the_originals(given: dict[str, Any], condition: str) -> None:
    original = model()
    first = {"x": x(), "pooling": "mean", "scale": 1.0, "depth": 1, "normalize": False}
    optimized = blade.optimize(original, first | {"mask": None}, CONFIG)
    torch.testing.assert_close(optimized(x(), **given), original(x(), **given))
    assert calls_of_original(optimized) == 1
    elsewhere = loaded(optimized)
    torch.testing.assert_close(elsewhere(x()), original(x()))
    with pytest.raises(RuntimeError) as caught:
        _apart(elsewhere, x(), given)
    assert f"here {condition} has to hold" in str(caught.value)
    assert "test_arguments.py:" in str(caught.value)


def _apart(module: torch.jit.ScriptModule, x: torch.Tensor, given: dict[str, Any]) -> Any:
    """Call ``module`` as a process would that does not have its original."""
    numbers = [
        node.output().toIValue()
        for node in module.graph.findAllNodes("prim::Constant")
        if isinstance(node.output().toIValue(), int)
    ]
    for number in numbers:
        torch.ops.blade.announce_original(number, False)
    return module(x, **given)


def test_tensors_come_first_and_the_others_have_defaults() -> None:
    captured = capture(model(), {"pooling": "max", "x": x(), "scale": 0.5, "mask": None}, Config())
    schema = str(captured.module.forward.schema)
    assert 'Tensor x, str pooling="max", Tensor? mask=None, float scale=0.5)' in schema
    assert Code.BAKED_ARGUMENT not in {one.code for one in captured.reasons}


class Between(nn.Module):
    """What decides lies between tensors."""

    def forward(
        self,
        x: torch.Tensor,
        mask: torch.Tensor | None = None,
        times: int = 1,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        y = torch.tanh(x) * times
        y = y if mask is None else y * mask
        return y if bias is None else y + bias.sum(0)


BETWEEN = {
    "all": ("x", "mask", "times", "bias"),
    "no bias": ("x", "mask", "times"),
    "no mask": ("x", "bias"),
    "one": ("x",),
}


def between(kind: str, rows: int = 4) -> dict[str, Any]:
    every = {"x": x(rows), "mask": torch.rand(rows, 5, 1), "times": 3, "bias": torch.randn(3, 8)}
    return {name: every[name] for name in BETWEEN[kind]}


@pytest.mark.needs("runtime", "torch_mlir")
@pytest.mark.parametrize("kinds", [("all", "no mask"), ("no mask", "all"), ("all", "one")])
def test_arguments_keep_the_order_of_the_model_s(kinds: tuple[str, ...]) -> None:
    original = Between().eval()
    samples = [tuple(between("all").values()) if k == "all" else between(k) for k in kinds]
    optimized = blade.optimize(original, samples, CONFIG)
    names = [one.name for one in optimized.forward.schema.arguments]
    assert names == ["self", "x", "mask", "times", "bias"]
    for kind in BETWEEN:
        given = between(kind, rows=3)
        given.setdefault("times", 3)  # the first sample's is the default
        torch.testing.assert_close(optimized(**given), original(**given))
        if kind in ("all", "no bias"):
            torch.testing.assert_close(optimized(*given.values()), original(*given.values()))


def test_a_tensor_behind_a_flag_is_traced() -> None:
    class Behind(nn.Module):
        def forward(self, flips: bool, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            found = {name: torch.tanh(one) for name, one in (("x", x), ("y", y))}  # not for scripts
            return found["x"] - found["y"] if flips else found["x"] + found["y"]

    captured = capture(Behind().eval(), (True, x(), x(2).flip(0)), Config())
    assert captured.how == "trace"
    assert [one.conditions for one in captured.paths] == [
        ("flips == True", "x is not None", "y is not None")
    ]
    for rows in (2, 5):
        given = True, x(rows), x(rows).flip(0)
        torch.testing.assert_close(captured.module(*given), Behind()(*given))


@pytest.mark.parametrize("samples", [("no bias", "one"), ("all", "no bias", "one")])
def test_a_tensor_that_later_samples_leave_out(samples: tuple[str, ...]) -> None:
    given = [{**between(k), "times": 3} for k in samples]
    captured = capture(Between().eval(), given, Config())
    for one in given:
        rows = {k: v[:2] if k in ("x", "mask") else v for k, v in one.items()}
        torch.testing.assert_close(captured.module(**rows), Between()(**rows))


def test_a_flag_without_consequences_is_no_path() -> None:
    class Ignores(nn.Module):
        def forward(self, x: torch.Tensor, verbose: bool = False, name: str = "") -> torch.Tensor:
            return x * 2

    samples = [{"x": x(), "verbose": False}, {"x": x(), "verbose": True}]
    captured = capture(Ignores().eval(), samples, Config())
    assert [one.conditions for one in captured.paths] == [()]
    names = [{"x": x(), "name": "a"}, {"x": x(), "name": "b"}]
    captured = capture(Ignores().eval(), names, Config())
    conditions = [one.conditions for one in captured.paths]
    assert conditions == [("name == 'a'",), ("name == 'b'",)]  # a third name may matter


def test_containers_of_numbers_are_constants() -> None:
    class Resizes(nn.Module):
        def forward(self, x: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
            return nn.functional.interpolate(x, size)

    captured = capture(Resizes().eval(), (torch.rand(1, 2, 4, 4), (3, 5)), Config())
    assert [r.subject for r in captured.reasons if r.code is Code.BAKED_ARGUMENT] == ["size"]
    assert captured.module(torch.rand(2, 2, 4, 4)).shape == (2, 2, 3, 5)


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        self.calls += 1
        return x * scale + self.calls


def test_a_model_with_a_state_is_captured_for_one_value() -> None:
    captured = capture(Counts().eval(), {"x": x(), "scale": 2.0}, Config(allow_tracing=True))
    assert "scale" not in str(captured.module.forward.schema)
    assert [r.subject for r in captured.reasons if r.code is Code.BAKED_ARGUMENT] == ["scale"]
    torch.testing.assert_close(captured.module(x()), x() * 2 + 1)
    several = [{"x": x(), "scale": 2.0}, {"x": x(), "scale": 3.0}]
    with pytest.raises(InputError, match=r"sample 1 .*scale: 3\.0.* captured for one value"):
        capture(Counts().eval(), several, Config(allow_tracing=True))


class Sums(nn.Module):
    def forward(self, parts: list[torch.Tensor]) -> torch.Tensor:
        total = torch.zeros(3)
        for part in parts:
            total = total + torch.tanh(part)
        return total


@pytest.mark.needs("runtime", "torch_mlir")
def test_a_list_of_another_length_is_the_originals() -> None:
    original = Sums().eval()
    optimized = blade.optimize(
        original, ([torch.rand(3), torch.rand(3)],), CONFIG.evolve(allow_tracing=True)
    )
    for length in (2, 1, 4):
        parts = [torch.rand(3) for _ in range(length)]
        torch.testing.assert_close(optimized(parts), original(parts))
    assert calls_of_original(optimized) == 2


class OnlyByKeyword(nn.Module):
    def forward(self, x: torch.Tensor, *, bias: torch.Tensor, **more: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) * 2 + bias - more["shift"]


@pytest.mark.needs("runtime", "torch_mlir")
def test_tensors_that_go_by_keyword_only() -> None:
    original = OnlyByKeyword().eval()
    optimized = blade.optimize(
        original, dict(zip(("x", "bias", "shift"), torch.rand(3, 4))), CONFIG
    )
    given = dict(zip(("x", "bias", "shift"), torch.rand(3, 7)))
    torch.testing.assert_close(optimized(**given), original(**given))


def test_an_optional_argument_in_the_middle_may_be_left_out() -> None:
    class Middle(nn.Module):
        def forward(self, x, skipped=None, mask=None):  # type: ignore[no-untyped-def]
            return x * mask if skipped is None else x

    captured = capture(Middle().eval(), {"x": x(), "mask": x()}, Config())
    torch.testing.assert_close(captured.module(x(3), x(3)), x(3) * x(3))


@dataclass
class Pair:
    first: torch.Tensor
    second: torch.Tensor


class FirstOf(nn.Module):
    def forward(self, pair: Pair) -> torch.Tensor:
        return pair.first.sin()


def test_tensors_in_dataclasses_do_not_become_constants() -> None:
    with pytest.raises(InputError, match=r"'pair'.*whose tensors would be constants"):
        blade.optimize(FirstOf().eval(), (Pair(x(), x()),), CONFIG)


@pytest.mark.needs("runtime")
@pytest.mark.parametrize("norm_first", [False, True])
def test_an_optional_mask_whose_form_decides(norm_first: bool) -> None:
    """The check of its form reads the mask where it is known to be a tensor, whatever freezing puts in front."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 8, 0.0, norm_first=norm_first, batch_first=True).eval()
    mask = torch.tensor([False, False, True])
    sample = {"src": torch.rand(3, 4), "src_mask": None, "src_key_padding_mask": mask}
    with blade.Config(timing=False, min_cluster_size=1):
        optimized = blade.optimize(layer, sample)
    for rows in (3, 5):
        x, hidden = torch.rand(rows, 4), torch.arange(rows) > 1
        with torch.no_grad():
            got = optimized(x, src_key_padding_mask=hidden)
            torch.testing.assert_close(got, layer(x, src_key_padding_mask=hidden))
