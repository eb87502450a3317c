# SPDX-License-Identifier: Apache-2.0
"""What would stop a GPU raises before: op by op, in TorchScript, and in everything that blade runs by itself.

A GPU is stood in for by the CPU: it counts as a device that asserts, and every exception that one of its kernels
raises is an assertion that would have ended the context.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from entrances import CONFIG
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import blade
from blade.capture import equivalence as compare
from blade.capture import references as observe
from blade.capture.capture import capture
from blade.dynamo import compete as served
from blade.verification import index_guard as bounds
from blade.verification.index_guard import IndexBoundsMode, in_bounds
from blade.verification.index_rules import RULES
from blade.verification.verify import verify

aten = torch.ops.aten
Function = Callable[[torch.Tensor], Any]
X, GRAD = torch.ones(3, 4), torch.ones(1, 2, 2, 2)
IMAGE, PIXELS = torch.ones(1, 2, 4, 4), torch.ones(1, 2, 2, 4, 4)


def ints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers)


def _pooled(positions: torch.Tensor, rank: int) -> torch.Tensor:
    """Positions of the maxima of ``IMAGE`` or ``PIXELS``, all of them the one given."""
    return positions.reshape([1] * (rank + 2)).expand([1, 2, *[2] * rank]).contiguous()


# Op -> a function of the contents in question, contents that it takes, and contents that it does not.
CASES: dict[str, tuple[Function, torch.Tensor, torch.Tensor]] = {
    "embedding": (lambda i: F.embedding(i, X), ints(0, 2), ints(0, 3)),
    "embedding_renorm": (
        lambda i: aten.embedding_renorm_(X.clone(), i, 1.0, 2.0),
        ints(2),
        ints(-1),
    ),
    "embedding_dense_backward": (
        lambda i: aten.embedding_dense_backward(torch.ones(1, 4), i, 3, -1, False),
        ints(2),
        ints(3),
    ),
    "_embedding_bag": (lambda i: aten._embedding_bag(X, i, ints(0)), ints(0, 2), ints(0, 3)),
    "_embedding_bag_forward_only": (
        lambda o: aten._embedding_bag_forward_only(X, ints(0, 1, 2), o),
        ints(0, 1, 3),
        ints(0, 2, 1),
    ),
    "_embedding_bag_dense_backward": (
        lambda i: aten._embedding_bag_dense_backward(
            torch.ones(1, 4), i, ints(0), ints(1), ints(), 3, False, 0, None
        ),
        ints(2),
        ints(3),
    ),
    "index": (lambda i: X[:, i], ints(-4, 3), ints(4)),
    "_unsafe_index": (lambda i: aten._unsafe_index(X, [i]), ints(-3, 2), ints(-4)),
    "index_put": (lambda i: aten.index_put(X, [None, i], ints(1).float()), ints(3), ints(4)),
    "_index_put_impl": (
        lambda i: aten._index_put_impl_(X.clone(), [i], ints(1).float()),
        ints(2),
        ints(3),
    ),
    "_unsafe_index_put": (
        lambda i: aten._unsafe_index_put(X, [i], ints(1).float()),
        ints(2),
        ints(3),
    ),
    "index_select": (lambda i: X.index_select(1, i), ints(3), ints(-1)),
    "index_add": (lambda i: X.index_add(0, i, torch.ones(1, 4)), ints(2), ints(3)),
    "index_copy": (lambda i: X.index_copy(0, i, torch.ones(1, 4)), ints(2), ints(3)),
    "index_reduce": (lambda i: X.index_reduce(0, i, torch.ones(1, 4), "amax"), ints(2), ints(3)),
    "index_fill": (lambda i: X.index_fill(0, i, 0.0), ints(-3), ints(-4)),
    "gather": (lambda i: X.gather(1, i.reshape(1, 1)), ints(3), ints(4)),
    "scatter": (lambda i: X.scatter(1, i.reshape(1, 1), 0.0), ints(3), ints(4)),
    "scatter_add": (lambda i: X.scatter_add(1, i.reshape(1, 1), X), ints(3), ints(4)),
    "scatter_reduce": (
        lambda i: X.scatter_reduce(1, i.reshape(1, 1), X, "sum"),
        ints(3),
        ints(-1),
    ),
    "take": (lambda i: X.take(i), ints(-12, 11), ints(12)),
    "put": (lambda i: X.clone().put_(i, torch.ones(1)), ints(11), ints(-13)),
    "nll_loss_forward": (lambda t: F.nll_loss(X, t), ints(0, -100, 3), ints(0, 1, 4)),
    "nll_loss_backward": (
        lambda t: aten.nll_loss_backward(torch.ones(()), X, t, None, 1, -100, torch.ones(())),
        ints(0, 1, -100),
        ints(0, 1, -1),
    ),
    "nll_loss2d_forward": (
        lambda t: F.nll_loss(IMAGE, t.expand(1, 4, 4)),
        ints(1),
        ints(2),
    ),
    "nll_loss2d_backward": (
        lambda t: aten.nll_loss2d_backward(
            torch.ones(()), IMAGE, t.expand(1, 4, 4), None, 1, -100, torch.ones(())
        ),
        ints(1),
        ints(2),
    ),
    "multi_margin_loss": (lambda t: F.multi_margin_loss(X, t), ints(0, 1, 3), ints(0, 1, 4)),
    "multilabel_margin_loss_forward": (
        lambda t: F.multilabel_margin_loss(X[0], t),
        ints(3, 0, -1, 1),
        ints(4, 0, -1, 1),
    ),
    "max_unpool2d": (
        lambda i: aten.max_unpool2d(GRAD, _pooled(i, 2), [4, 4]),
        ints(15),
        ints(16),
    ),
    "max_unpool3d": (
        lambda i: aten.max_unpool3d(
            torch.ones(1, 2, 2, 2, 2), _pooled(i, 3), [2, 4, 4], [1, 2, 2], [0, 0, 0]
        ),
        ints(31),
        ints(32),
    ),
    "max_pool2d_with_indices_backward": (
        lambda i: aten.max_pool2d_with_indices_backward(
            GRAD, IMAGE, [2], [2], [0], [1], False, _pooled(i, 2)
        ),
        ints(15),
        ints(16),
    ),
    "max_pool3d_with_indices_backward": (
        lambda i: aten.max_pool3d_with_indices_backward(
            torch.ones(1, 2, 1, 2, 2), PIXELS, [2], [2], [0], [1], False, _pooled(i, 3)[:, :, :1]
        ),
        ints(31),
        ints(32),
    ),
    "adaptive_max_pool2d_backward": (
        lambda i: aten.adaptive_max_pool2d_backward(GRAD, IMAGE, _pooled(i, 2)),
        ints(15),
        ints(16),
    ),
    "adaptive_max_pool3d_backward": (
        lambda i: aten.adaptive_max_pool3d_backward(
            torch.ones(1, 2, 2, 2, 2), PIXELS, _pooled(i, 3)
        ),
        ints(31),
        ints(32),
    ),
    "binary_cross_entropy": (
        lambda p: F.binary_cross_entropy(p, torch.ones(2)),
        torch.tensor([0.0, 1.0]),
        torch.tensor([0.5, torch.nan]),
    ),
    "bernoulli": (torch.bernoulli, torch.tensor([0.0, 1.0]), torch.tensor([0.5, 1.5])),
    "multinomial": (
        lambda p: torch.multinomial(p, 1),
        torch.tensor([0.0, 1.0]),
        torch.tensor([0.0, 0.0]),
    ),
    "poisson": (torch.poisson, torch.tensor([0.0, 9.0]), torch.tensor([1.0, -1.0])),
    "repeat_interleave": (lambda n: torch.repeat_interleave(n), ints(0, 2), ints(2, -1)),
    "lu_unpack": (lambda p: torch.lu_unpack(X[:, :3], p.int()), ints(1, 2, 3), ints(1, 2, 4)),
    "linalg_lu_solve": (
        lambda p: torch.linalg.lu_solve(torch.eye(3), p.int(), X),
        ints(3, 2, 3),
        ints(0, 2, 3),
    ),
    "masked_scatter": (
        lambda mask: X.masked_scatter(mask, torch.ones(4)),
        torch.tensor([True, False, False, False]),
        torch.tensor([True, True, False, False]),
    ),
    "_assert_async": (torch._assert_async, torch.tensor(1), torch.tensor(0)),
    "_functional_assert_async": (
        lambda x: aten._functional_assert_async(x, "no", x),
        torch.tensor(True),
        torch.tensor(False),
    ),
}
# Not checked by the CPU's kernels either, which read or write elsewhere.
UNCHECKED = {"embedding_dense_backward", "_embedding_bag_dense_backward", "_unsafe_index"}
UNCHECKED |= {"_unsafe_index_put", "nll_loss_backward", "nll_loss2d_backward", "embedding_renorm"}
UNCHECKED |= {"max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward"}
UNCHECKED |= {"adaptive_max_pool2d_backward", "adaptive_max_pool3d_backward"}
UNCHECKED |= {"_embedding_bag_forward_only", "linalg_lu_solve"}


def test_every_rule_has_a_case() -> None:
    assert CASES.keys() == RULES.keys()


@pytest.mark.parametrize("name", CASES)
def test_contents_that_an_op_takes_pass(name: str) -> None:
    function, fine, _ = CASES[name]
    with torch.no_grad(), IndexBoundsMode() as seen:
        function(fine)
    assert seen.why == ""


@pytest.mark.parametrize("name", CASES)
def test_other_contents_raise_before_the_kernel_runs(name: str) -> None:
    function, _, wrong = CASES[name]
    with torch.no_grad(), pytest.raises(IndexError), IndexBoundsMode() as seen:
        function(wrong)
    assert f"aten.{name}" in seen.why


@pytest.mark.parametrize("name", sorted(CASES.keys() - UNCHECKED))
def test_the_cpu_raises_for_the_same_contents(name: str) -> None:
    function, fine, wrong = CASES[name]
    with torch.no_grad():
        function(fine)
        with pytest.raises((IndexError, RuntimeError)):
            function(wrong)


def test_scripted_code_is_seen() -> None:
    def pick(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return x[i] * 2

    scripted = torch.jit.script(pick)
    with torch.no_grad(), IndexBoundsMode() as seen, torch.jit.optimized_execution(False):
        scripted(X, ints(2))
        with pytest.raises(RuntimeError):
            scripted(X, ints(3))
    assert "aten.index" in seen.why


def test_numbers_that_are_tensors_in_torchscript_are_taken() -> None:
    class Last(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = x.shape[0] * 2 - 1
            return x.repeat(2, 1)[rows // 2 : rows] + torch.stack([x.shape[0] * x.new_ones(())])

    traced = torch.jit.trace(Last(), torch.randn(5, 3))
    assert "NumToTensor" in str(traced.graph)
    x = torch.randn(7, 3)
    with torch.no_grad(), torch.jit.optimized_execution(False):
        with IndexBoundsMode():
            found = traced(x)
        assert torch.equal(found, traced(x))


@pytest.mark.parametrize(
    "function",
    [
        lambda i: F.cross_entropy(X, i.expand(3)),
        lambda i: F.embedding_bag(i.reshape(1, 1), X.mT),
        lambda i: X.index_fill(1, i, 1.0),
    ],
    ids=["cross_entropy", "embedding_bag", "index_fill"],
)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_ops_made_of_others_are_seen(function: Function, mode: Callable[[], Any]) -> None:
    """In inference mode they reach a dispatch mode whole."""
    with mode(), IndexBoundsMode():
        function(ints(3))
        with pytest.raises(IndexError):
            function(ints(4))


def test_nothing_is_done_on_a_cpu() -> None:
    with in_bounds(X, torch.device("cpu"), None) as seen, pytest.raises(IndexError):
        F.embedding(ints(3), X)
    assert seen.why == ""


class Device(TorchDispatchMode):
    """Counts the kernels that raised for contents, as those of a GPU would have stopped the device."""

    def __init__(self) -> None:
        super().__init__()
        self.stopped: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = bounds._with_tensors(bounds._bounds_of(func), args)
        try:
            return func(*args, **(kwargs or {}))
        except (IndexError, RuntimeError):
            if func._schema.name.removeprefix("aten::").removesuffix("_") in RULES:
                self.stopped.append(str(func))
            raise


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    monkeypatch.setattr(bounds, "asserts", lambda device: True)
    with Device() as found:
        yield found
    assert found.stopped == []


class Positions(nn.Module):
    """As in GPT: a table with as many rows as there are positions, of which a sample has all but one."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(50, 16), nn.Embedding(8, 16)
        self.norm = nn.LayerNorm(16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        return self.norm(self.words(ids) + self.positions(places))


class Baked(nn.Module):
    """Traced, it takes the row of the sample's last: at fewer rows there is none."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        if not torch.jit.is_scripting() and torch.jit.is_tracing():
            rows = 7
        last = torch.tensor([rows - 1], device=x.device)
        return torch.tanh(x.index_select(0, last)) * 2


class Picked(nn.Module):
    """Rows of a table that is an input: one of another size does not have them."""

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x.index_select(0, rows)) * 2


class Rounded(nn.Module):
    """Places made of floats: larger ones lie beyond the table."""

    def forward(self, x: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x.index_select(0, (where * 6).long())) * 2


IDS = torch.arange(14).reshape(2, 7)
TABLE, ROWS, WHERE = torch.randn(7, 5), torch.tensor([6, 0, 3]), torch.tensor([0.9, 0.1])
MODELS = [(Positions(), (IDS,)), (Picked(), (TABLE, ROWS)), (Rounded(), (TABLE, WHERE))]


def test_the_stand_in_stops_where_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (observe, compare):  # as on a device that cannot be used in a forked process
        monkeypatch.setattr(module, "can_try", lambda values: False)
    with Device() as found:
        capture(Positions().eval(), IDS, CONFIG)
    assert found.stopped


def test_capture_asks_the_original_with_care(device: Device) -> None:
    captured = capture(Positions().eval(), IDS, CONFIG)
    lengths = {probe[0].shape[1] for probe in captured.probes}
    assert lengths - {7} and max(lengths) <= 8


def test_capture_compares_a_trace_with_care(device: Device) -> None:
    captured = capture(Baked().eval(), torch.randn(7, 5), CONFIG)
    assert captured.how == "script"


@pytest.mark.needs("runtime")
@pytest.mark.parametrize("model, inputs", MODELS)
def test_nothing_stops_while_a_model_is_optimized(
    model: nn.Module, inputs: tuple[torch.Tensor, ...], device: Device
) -> None:
    """Verification cuts, shuffles and draws contents, for engines too."""
    made = blade.optimize(model.eval(), inputs, CONFIG)
    assert [c.backend for c in blade.report(made).clusters] == ["disc"], blade.report(
        made
    ).all_reasons()
    with torch.no_grad():
        torch.testing.assert_close(made(*inputs), model(*inputs))


@pytest.mark.needs("runtime")
def test_nothing_stops_while_torch_compile_verifies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not compiled under ``Device``, which would make dynamo step aside."""
    found = Device()
    verdicts = []

    def watched(*args: Any, **kwargs: Any) -> Any:
        with found:
            verdicts.append(verify(*args, **kwargs))
        return verdicts[-1]

    monkeypatch.setattr(bounds, "asserts", lambda device: True)
    monkeypatch.setattr(served, "verify", watched)
    torch._dynamo.reset()
    with torch.no_grad(), CONFIG:
        run = torch.compile(Rounded().eval(), backend=blade.dynamo.disc, dynamic=True)
        torch.testing.assert_close(run(TABLE, WHERE), Rounded()(TABLE, WHERE))
    assert [v.checked > 3 for v in verdicts] == [True]
    assert found.stopped == []
