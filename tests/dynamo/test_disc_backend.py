# SPDX-License-Identifier: Apache-2.0
"""``torch.compile(backend="disc")``: what runs in engines, what stays FX, what changes under its feet."""

from collections.abc import Callable, Iterator
from typing import Any

import graphs
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional

import blade
from blade.core.reason import Code, Stage
from blade.dynamo.live_graphs import live_graphs

TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(16, 32)
        self.down = torch.nn.Linear(32, 16)
        self.norm = torch.nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.down(functional.gelu(self.up(x))))


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def compiled(model: Any, dynamic: bool | None = None, **options: Any) -> Any:
    return torch.compile(model, backend=blade.dynamo.disc, dynamic=dynamic, options=options or None)


def test_it_answers_as_eager_does_and_is_one_engine() -> None:
    model = Block().eval()
    x = torch.randn(3, 5, 16)
    torch.testing.assert_close(compiled(model, timing=False)(x), model(x), **TOLERANCE)
    [report] = graphs.reports()
    assert list(graphs.served().values()) == ["disc"] and not report.outside
    assert report.clusters[0].verdict is not None and report.clusters[0].verdict.checked > 1


def test_attention_is_not_asked_about_layouts_that_torchs_own_op_misreads() -> None:
    """Its flash attention for the CPU, here in the graph itself, takes the last axis for dense."""
    q, k, v = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 7, 8), torch.randn(1, 2, 7, 8)
    mask = torch.ones(5, 7, dtype=torch.bool).tril()
    fn = compiled(functional.scaled_dot_product_attention, timing=False)
    want = functional.scaled_dot_product_attention(q, k, v, mask)
    torch.testing.assert_close(fn(q, k, v, mask), want, **TOLERANCE)
    assert set(graphs.served().values()) == {"disc"}


def test_attention_with_fewer_heads_of_keys_is_one_engine() -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        found = functional.scaled_dot_product_attention(q + 1, k.tanh(), v * 2, enable_gqa=True)
        return found * 3

    run = compiled(attend, timing=False)
    for rows in (7, 64, 33):
        given = torch.randn(2, 4, rows, 8), torch.randn(2, 2, rows, 8), torch.randn(2, 2, rows, 8)
        torch.testing.assert_close(run(*given), attend(*given), **TOLERANCE)
    assert set(graphs.served().values()) == {"disc"}
    assert all(counts["engine_runs"] for counts in graphs.stats().values())


def test_fifty_shapes_are_one_graph() -> None:
    model = Block().eval()
    counter = CompileCounterWithBackend(blade.dynamo.disc)
    fn = torch.compile(model, backend=counter, dynamic=True)
    fn(torch.randn(4, 2, 16))
    frames = counter.frame_count
    for n in range(2, 52):
        x = torch.randn(2 + n % 7, n, 16)
        torch.testing.assert_close(fn(x), model(x), **TOLERANCE)
    assert counter.frame_count == frames
    [report] = graphs.reports()
    assert [c.backend for c in report.clusters] == ["disc"]


def test_no_call_goes_to_the_original_at_other_sizes() -> None:
    model = Block().eval()
    fn = compiled(model, dynamic=True, timing=False)
    fn(torch.randn(2, 3, 16))
    [before] = graphs.stats().values()
    for n in (2, 9, 17):
        fn(torch.randn(4, n, 16))
    [after] = graphs.stats().values()
    assert after["engine_runs"] == before["engine_runs"] + 3


def test_a_number_that_no_tensor_has_crosses_as_a_size() -> None:
    def fn(x: torch.Tensor, n: int) -> torch.Tensor:
        return (torch.relu(x) + 1).repeat(n, 1) * 2

    x = torch.randn(4, 8)
    run = torch.compile(fn, backend=blade.dynamo.disc, dynamic=True)
    for n in (3, 5, 7):
        torch.testing.assert_close(run(x, n), fn(x, n))
    assert set(graphs.served().values()) == {"disc"}


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: (x.relu() + 1).cumsum(0).sin() * 2,
        lambda x: torch.fft.fft(x.relu() + 1).abs() * 2 + 1,
        lambda x: (x.relu() * 2 + 1)[x.sum(1) > 0].exp() * 2 + 1,
        lambda x: (x + x.mean().item()).relu() * 2 + 1,
        lambda x: torch.svd(x @ x.T + 2 * torch.eye(x.shape[0]))[1].log() * 2 + 1,
    ],
)
def test_what_disc_does_not_take_stays_fx(fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.randn(6, 8)
    run = torch.compile(fn, backend=blade.dynamo.disc)
    torch.testing.assert_close(run(x), fn(x), **TOLERANCE)


def test_random_numbers_are_those_of_eager() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = functional.dropout(x.relu() + 1, 0.5)
        return functional.dropout(y * 2, 0.3) + torch.rand_like(x)

    x = torch.randn(6, 8)
    run = torch.compile(fn, backend=blade.dynamo.disc)
    run(x)
    torch.manual_seed(3)
    want = fn(x)
    torch.manual_seed(3)
    torch.testing.assert_close(run(x), want)
    assert set(graphs.served().values()) == {"disc"}


def test_inputs_and_buffers_are_written_where_they_are() -> None:
    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.mul_(0.9).add_(x.mean(0))
            x.add_(1)
            return (x * self.seen).relu() + 1

    one, other = Counting(), Counting()
    run = compiled(one)
    for _ in range(3):
        x = torch.randn(4, 8)
        y, place = x.clone(), one.seen.data_ptr()
        torch.testing.assert_close(run(x), other(y))
        torch.testing.assert_close(x, y)
        torch.testing.assert_close(one.seen, other.seen)
        assert one.seen.data_ptr() == place


def test_views_of_inputs_stay_views() -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = (x.relu() + 1) * 2
        return x[1:].transpose(0, 1), y

    x = torch.randn(4, 8)
    view, _ = torch.compile(fn, backend=blade.dynamo.disc)(x)
    view.zero_()
    assert not x[1:].any() and x[0].any()


@pytest.mark.parametrize("write", ["in_place", "data", "assigned", "other_module"])
def test_parameters_are_read_as_they_are_now(write: str) -> None:
    model = Block().eval()
    run = compiled(model, timing=False)
    x = torch.randn(3, 5, 16)
    run(x)
    fresh = torch.randn(32, 16)
    if write == "in_place":
        model.up.weight.copy_(fresh)
    elif write == "data":
        model.up.weight.data.copy_(fresh)  # no version counter tells of this
    elif write == "assigned":
        model.up.weight.data = fresh
    else:
        model.up = torch.nn.Linear(16, 32)
    torch.testing.assert_close(run(x), model(x), **TOLERANCE)


def test_plain_functions_full_graphs_and_modes() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"sum": (x + y).relu() * 2, "max": (x * y).amax(-1)}

    x, y = torch.randn(4, 8), torch.randn(8)
    for mode in ("default", "reduce-overhead", "max-autotune"):
        torch._dynamo.reset()
        run = torch.compile(fn, backend=blade.dynamo.disc, fullgraph=True, mode=mode)
        torch.testing.assert_close(run(x, y), fn(x, y))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"min_cluster_sise": 5}, "did you mean 'min_cluster_size'"),
        ({"min_cluster_size": 0}, "min_cluster_size"),
        ({"dynamic_shapes": {0: {0: True}}}, "use blade.optimize"),
    ],
)
def test_options_are_checked(options: dict[str, Any], text: str) -> None:
    with pytest.raises(Exception, match=text):
        torch.compile(Block().eval(), backend=blade.dynamo.disc, options=options)(
            torch.randn(2, 3, 16)
        )


def test_options_are_fields_of_config() -> None:
    run = compiled(Block().eval(), customize_op_black_list=["aten::gelu"])
    run(torch.randn(2, 3, 16))
    [report] = graphs.reports()
    assert report.outside == {"aten::gelu": 1}
    assert any(r.code is blade.Code.BLACK_LISTED for r in report.reasons)


def test_outside_of_clusters_parts_are_written_where_they_lie() -> None:
    """As in the user's graph: a functional one copies a whole tensor for each part."""

    def fill(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        made = torch.zeros(64, 8)
        for k in range(8):
            made[k] = torch.linalg.matrix_exp(x[k : k + 1, None])[0, 0] + y
        return made

    torch._dynamo.reset()
    compiled = torch.compile(fill, backend="disc", options={"min_cluster_size": 1000})
    x, y = torch.randn(8), torch.randn(8)
    torch.testing.assert_close(compiled(x, y), fill(x, y))
    graph: Any = live_graphs()[-1]
    code = graph.run.code
    assert "scatter" not in code and code.count("copy_.default") == 8


class Counts(torch.nn.Module):
    """Each call writes to a part of a tensor that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = torch.zeros(4, 8)

    def forward(self, x: torch.Tensor, at: int) -> torch.Tensor:
        self.seen[at] += x.sum(0)
        return self.seen.cumsum(0) * 2


@pytest.mark.needs("runtime")
@pytest.mark.parametrize("timing", [False, True])
def test_every_call_writes_once(timing: bool) -> None:
    """Whoever serves it, and whoever is tried."""
    torch._dynamo.reset()
    model, twin = Counts().eval(), Counts().eval()
    options = {"min_cluster_size": 1, "timing": timing}
    compiled = torch.compile(twin, backend="disc", options=options, dynamic=False)
    x = torch.rand(3, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for _ in range(4):
            torch.testing.assert_close(compiled(x, 1), model(x, 1))
            torch.testing.assert_close(twin.seen, model.seen)


@pytest.mark.needs("runtime")
def test_a_complex_number_is_refused_before_it_is_compiled() -> None:
    def scaled(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.addmm(x, x, y, beta=1 + 2j) - y

    torch._dynamo.reset()
    compiled = torch.compile(scaled, backend="disc", options={"min_cluster_size": 1})
    x, y = torch.randn(2, 4, 4, dtype=torch.complex64)
    torch.testing.assert_close(compiled(x, y), scaled(x, y))
    reasons = live_graphs()[-1].report().all_reasons()
    assert {(r.stage, r.code) for r in reasons if "complex number" in r.detail} == {
        (Stage.SUPPORT, Code.UNSUPPORTED_DTYPE)
    }


@pytest.mark.needs("runtime")
def test_pairs_are_complex_numbers_at_any_size() -> None:
    """torch's shape function asks where in its memory an input begins."""

    def turned(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(torch.view_as_complex(x) * torch.view_as_complex(y)) + x

    torch._dynamo.reset()
    options = {"min_cluster_size": 1, "timing": False}
    compiled = torch.compile(turned, backend="disc", options=options, dynamic=True)
    for rows in (5, 3):
        x, y = torch.randn(2, rows, 4, 2)
        torch.testing.assert_close(compiled(x, y), turned(x, y))
    report = live_graphs()[-1].report()
    assert not report.outside and not report.all_reasons()


class Named(torch.Tensor):
    """A tensor of a library's own class, whose ops are torch's."""


@pytest.mark.parametrize("grad", [False, True])
def test_subclasses_that_change_no_op(grad: bool) -> None:
    model, x = Block().eval(), torch.randn(3, 5, 16).as_subclass(Named)
    run = compiled(model)
    with torch.set_grad_enabled(grad):
        for _ in range(2):
            answer = run(x)
            assert type(answer) is Named and answer.requires_grad is grad
            torch.testing.assert_close(answer, model(x), **TOLERANCE)
