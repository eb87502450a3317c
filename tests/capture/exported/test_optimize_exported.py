# SPDX-License-Identifier: Apache-2.0
"""``optimize`` takes an ``ExportedProgram``: engines serve its sizes, and other calls raise."""

import io
from typing import Any

import pytest
import torch
from exported_models import Counts
from torch import nn
from torch._higher_order_ops.scan import scan
from torch.export import Dim

import blade
from blade.capture.capture import capture
from blade.capture.outputs import tensors_of
from blade.config import Config
from blade.errors import InputError

QUICK = Config(timing=False, min_cluster_size=1, strict=True)
AUTO = {0: Dim.AUTO}

pytestmark = pytest.mark.needs("runtime")


def expect_alike(optimized: Any, model: nn.Module, *inputs: Any) -> None:
    with torch.no_grad():
        torch.testing.assert_close(optimized(*inputs), model(*inputs))


def saved(module: torch.jit.ScriptModule) -> Any:
    buffer = io.BytesIO()
    torch.jit.save(module, buffer)
    buffer.seek(0)
    return torch.jit.load(buffer)


def test_a_batch_within_its_range() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16)).eval()
    sizes = {0: Dim("batch", min=3, max=64)}
    program = torch.export.export(model, (torch.randn(8, 8),), dynamic_shapes=(sizes,))
    optimized = blade.optimize(program, config=QUICK)
    assert "Sequential runs 3 of" in str(blade.report(optimized))
    for module in (optimized, saved(optimized)):
        for batch in (3, 5, 64):
            expect_alike(module, model, torch.randn(batch, 8))
        for batch in (2, 65):
            with pytest.raises(
                torch.jit.Error,
                match=r"RuntimeError: No captured path .* input.size\(0\) [<>]= \d+ does",
            ):
                module(torch.randn(batch, 8))
    assert blade.stats(optimized)["cluster_0"]["engine_runs"] == 3
    model[0].weight.data.zero_()  # the module has copies of the weights
    assert optimized(torch.randn(5, 8)).std(0).min() > 0


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True)

    def forward(self, x: dict[str, torch.Tensor], *, scale: torch.Tensor) -> dict[str, Any]:
        rows, (last, _) = self.lstm(x["states"] * scale + 1)
        return {"rows": torch.relu(rows + 1), "more": (last * 2, None)}


class Decides(nn.Module):
    def forward(self, x: dict[str, torch.Tensor], *, scale: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x["states"] * scale)
        return torch.cond(  # type: ignore[no-any-return]
            y.sum() > x["bound"], lambda z: z.sin() * 2, lambda z: z.cos() - 1, (y,)
        )


class Repeats(nn.Module):
    def forward(self, x: dict[str, torch.Tensor], *, scale: torch.Tensor) -> torch.Tensor:
        start = torch.tensor(0), x["states"] * scale + x["bound"].sign()
        return torch.while_loop(  # type: ignore[no-any-return]
            lambda k, y: k < 3, lambda k, y: (k + 1, torch.tanh(y) * 2 + y), start
        )[1]


class Scans(nn.Module):
    def forward(self, x: dict[str, torch.Tensor], *, scale: torch.Tensor) -> tuple[Any, Any]:
        def step(state: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            new = torch.tanh(state * 0.5 + row)
            return new, new * 2

        start = torch.zeros_like(x["states"][0]) + x["bound"].sign()
        return scan(step, start, x["states"] * scale)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [Recurrent, Decides, Repeats, Scans])
def test_control_flow_and_arguments_by_name(kind: type[nn.Module]) -> None:
    model = kind().eval()

    def inputs(batch: int, bound: float) -> dict[str, Any]:
        x = {"states": torch.randn(batch, 5, 3), "bound": torch.tensor(bound)}
        return {"x": x, "scale": torch.rand(3)}

    example = inputs(4, 1e3)
    shapes = {"x": {"states": AUTO, "bound": None}, "scale": None}
    program = torch.export.export(
        model, (example["x"],), {"scale": example["scale"]}, dynamic_shapes=shapes
    )
    optimized = blade.optimize(program, None, QUICK)
    for module in (optimized, saved(optimized)):
        for batch, bound in ((4, 1e3), (2, -1e3), (9, -1e3)):
            given = inputs(batch, bound)
            with torch.no_grad():
                got, want = module(given["x"], given["scale"]), tensors_of(model(**given))
            torch.testing.assert_close(got, want)
    assert any(one["engine_runs"] > 0 for one in blade.stats(optimized).values())


def test_a_buffer_that_is_written() -> None:
    model = nn.Sequential(nn.Linear(3, 3), Counts(), nn.ReLU()).eval()
    program = torch.export.export(model, (torch.randn(2, 3),), dynamic_shapes=(AUTO,))
    optimized = blade.optimize(program, None, QUICK)
    for batch in (2, 5, 7):
        expect_alike(optimized, model, torch.randn(batch, 3))
    assert program.state_dict["1.calls"] == 3  # those of ``model``, which counted alone


def test_its_constant_sizes_are_known_to_engines() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU()).eval()
    program = torch.export.export(model, (torch.randn(2, 5, 3),), dynamic_shapes=(AUTO,))
    captured = capture(program, None, QUICK)
    assert captured.how == "export"
    assert captured.fixed == {(0, 1), (0, 2)}
    assert {one.shape[0] for [one] in captured.probes} != {2}


def test_samples_take_the_place_of_the_example() -> None:
    model = nn.Linear(3, 3).eval()
    program = torch.export.export(model, (torch.randn(2, 3),), dynamic_shapes=(AUTO,))
    captured = capture(program, [torch.randn(4, 3), {"input": torch.randn(6, 3)}], QUICK)
    assert [tuple(one.shape) for [one] in captured.samples] == [(4, 3), (6, 3)]
    program.example_inputs = None
    with pytest.raises(InputError, match="no example_inputs; give samples"):
        capture(program, None, QUICK)
    with pytest.raises(InputError, match=r"does not run on sample 0 \(input: float32\[2, 4\]\)"):
        capture(program, torch.randn(2, 4), QUICK)


def test_a_program_without_a_form_in_torchscript() -> None:
    class Shows(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch.ops.higher_order.print("size")
            return x + 1

    program = torch.export.export(Shows(), (torch.randn(2),))
    with pytest.raises(InputError, match=r"ExportedProgram cannot be converted.*'print'"):
        capture(program, None, QUICK)
