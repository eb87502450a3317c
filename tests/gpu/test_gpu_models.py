# SPDX-License-Identifier: Apache-2.0
"""Small models on CUDA through ``optimize``, save and load: every call at every shape, against float64 on the CPU."""

from collections.abc import Callable

import pytest
import torch
from entrances import Optimized
from gpu_models import DEVICE, MODELS, Shape, built, doubled, placed, relative

pytestmark = [pytest.mark.gpu, pytest.mark.needs("runtime")]

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
SHAPES: tuple[Shape, ...] = ((3, 10), (1, 7), (4, 33), (2, 1))
CALLS = 4  # plain, captured, and replayed


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_small_model(name: str, dtype: str, record_property: Callable[[str, object], None]) -> None:
    model, kind = MODELS[name], DTYPES[dtype]
    module, exact = built(model, kind)
    rng = torch.Generator().manual_seed(1)
    run = Optimized(module, placed(model.inputs(SHAPES[0], rng), kind))
    codes = ", ".join(sorted({str(r.code) for r in run.reasons()}))
    record_property("disc_on_cuda", "taken" if run.served() else codes)
    assert run.served(), run.reasons()
    for number, shape in enumerate(SHAPES, 1):
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        for _ in range(CALLS):
            given = placed(model.inputs(shape, rng), kind)
            with torch.no_grad():
                want, eager, got = exact(*doubled(given)), module(*given), run(*given)
            assert (got.shape, got.dtype, got.device) == (eager.shape, eager.dtype, eager.device)
            # a few units in the last place where eager happens to be exact
            allowed = 2 * relative(eager, want) + torch.finfo(kind).eps
            assert relative(got, want) <= allowed, shape
            kept.append((got, want))
        # what was returned before is not overwritten by later calls
        for got, want in kept:
            assert relative(got, want) <= 2 * allowed, f"{shape}: changed by a later call"
        assert run.engine_runs() >= run.served() * CALLS * number, "the original answered"


class Causal(torch.nn.Module):
    """Each row attends to those before it that are no padding."""

    def forward(self, x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        heads = x.unflatten(-1, (2, 32)).transpose(1, 2)
        length = x.shape[1]
        places = torch.arange(length, device=x.device)
        seen = (places[:, None] >= places) & kept.bool()[:, None, None, :]
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(heads, heads, heads, seen).transpose(1, 2).flatten(2) * 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_see_nothing_are_zero(dtype: str) -> None:
    """Padded on the left; cuDNN, which serves halves in eager, attends to what is masked there."""
    kind, rng = DTYPES[dtype], torch.Generator().manual_seed(3)

    def inputs(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        kept = torch.ones(batch, length, dtype=torch.int64)
        kept[0, : length // 3] = 0
        return torch.randn(batch, length, 64, generator=rng).to(DEVICE, kind), kept.to(DEVICE)

    run = Optimized(Causal().eval(), inputs(2, 9))
    assert run.served(), run.reasons()
    for shape in ((2, 9), (3, 20), (3, 20), (3, 20)):
        given = inputs(*shape)
        got, want = run(*given), Causal()(*doubled(given))
        assert relative(got, want) <= 4 * torch.finfo(kind).eps
        assert not got[0, : shape[1] // 3].any()


def test_inputs_that_lie_anywhere() -> None:
    """Strided, transposed, and misaligned in memory: answers are those of whole tensors."""
    model = MODELS["mlp"]
    module, exact = built(model, torch.float32)
    rng = torch.Generator().manual_seed(2)
    run = Optimized(module, placed(model.inputs((3, 10), rng), torch.float32))
    [whole] = placed(model.inputs((6, 5), rng), torch.float32)
    memory = torch.empty(whole.numel() + 1, device=DEVICE)
    off = memory[1:].view_as(whole).copy_(whole)  # not at a multiple of 16 bytes
    views = (whole, whole.transpose(0, 1), whole[::2], off)
    for view in views * 3:
        with torch.no_grad():
            got, eager, want = run(view), module(view), exact(view.cpu().double())
        assert relative(got, want) <= 2 * relative(eager, want) + torch.finfo(torch.float32).eps
    assert run.engine_runs() == run.served() * 3 * len(views)


def test_answers_under_a_graph_of_the_caller() -> None:
    """A user who captures a CUDA graph gets DISC's launches in it."""
    model = MODELS["mlp"]
    module, exact = built(model, torch.float32)
    rng = torch.Generator().manual_seed(3)
    [static] = placed(model.inputs((4, 10), rng), torch.float32)
    run = Optimized(module, (static,))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run(static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(static)
    for _ in range(3):
        [given] = placed(model.inputs((4, 10), rng), torch.float32)
        static.copy_(given)
        graph.replay()
        with torch.no_grad():
            assert relative(captured, exact(given.cpu().double())) <= 1e-5
