# SPDX-License-Identifier: Apache-2.0
"""Every sample of the op table as a model of its own, through every entrance, compared with eager.

Sizes other than the sample's go through the same file (a guard that does not hold runs the original,
so an answer is owed wherever eager has one). What is not served by an engine has a Reason.
"""

import pytest
import torch
from entrances import CONFIG, ENTRANCES
from op_compare import different, eager, exact, sizes_of
from op_models import BROKEN, REFUSED, OneOp, through
from op_samples import Sample, inputs
from op_table import SAMPLES
from torch.utils._pytree import tree_leaves

import blade

pytestmark = [pytest.mark.needs("runtime"), pytest.mark.needs("torch_mlir")]


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_cannot_be_captured_is_said(name: str) -> None:
    [sample] = [s for s in SAMPLES if s.name == name]
    given = tuple(inputs(sample, next(sizes_of(sample))))
    with pytest.raises(blade.InputError, match=REFUSED[name]):
        blade.optimize(OneOp(sample).eval(), given, CONFIG.model_copy(update={"strict": True}))


THROUGH = [
    pytest.param(sample, entrance, id=f"{sample.name}-{entrance}")
    for sample in SAMPLES
    for entrance in ENTRANCES
    if sample.name not in (REFUSED if entrance == "optimize" else BROKEN)
]


@pytest.mark.parametrize(("sample", "entrance"), THROUGH)
def test_one_op_model(sample: Sample, entrance: str) -> None:
    sizes = list(sizes_of(sample))[:3]
    if entrance == "compile":  # Dynamo compiles anew where a size is 0 or 1
        sizes = sizes[:1] + [size for size in sizes[1:] if min(size.values(), default=2) > 1][:1]
    through(sample, entrance, sizes)


@pytest.mark.parametrize(
    "sample", [s for s in SAMPLES if s.name not in REFUSED], ids=lambda s: s.name
)
def test_one_op_model_with_declared_sizes(sample: Sample) -> None:
    """The same with every size fixed: engines for these sizes only; at others the original answers."""
    usual, other, *_ = sizes_of(sample)
    given = inputs(sample, usual)
    sizes = {k: dict(enumerate(t.shape)) for k, t in enumerate(given) if t.dim()}
    config = CONFIG.evolve(dynamic_shapes=sizes, allow_tracing=True)
    optimized = blade.optimize(OneOp(sample).eval(), tuple(given), config)
    report = blade.report(optimized)
    assert report.clusters or report.reasons, "nothing serves it, and nothing says why"
    for size in (usual, other):
        tensors = inputs(sample, size)
        want = eager(sample, tensors)
        if want is None or (
            size is other and any(r.code == "trace_specialized" for r in report.reasons)
        ):
            continue
        with torch.no_grad():
            got = [t for t in tree_leaves(optimized(*tensors)) if isinstance(t, torch.Tensor)]
        assert not (text := different(got, want, exact(sample, tensors))), f"{size}: {text}"


def test_declared_sizes_are_constants_of_the_program() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Softmax(-1)).eval()
    x = torch.randn(3, 5, 4)
    config = CONFIG.evolve(dynamic_shapes={0: {0: 3, 1: 5}})
    optimized = blade.optimize(model, x, config)
    [counters] = blade.stats(optimized).values()
    for shape, runs in (((3, 5, 4), 1), ((2, 5, 4), 1), ((3, 9, 4), 1)):
        y = torch.randn(shape)
        torch.testing.assert_close(optimized(y), model(y))
        [counters] = blade.stats(optimized).values()
        assert counters["engine_runs"] == runs
    assert counters["guard_shape"] == 2


def test_whole_numbers_by_zero_raise_as_in_eager() -> None:
    class Quotient(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.div(x + 1, y, rounding_mode="floor") * 2

    model = Quotient().eval()
    x, y = torch.arange(6), torch.arange(1, 7)
    optimized = blade.optimize(model, (x, y), CONFIG)
    assert torch.equal(optimized(x, y), model(x, y))
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        model(x, y - 1)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        optimized(x, y - 1)
