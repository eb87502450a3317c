# SPDX-License-Identifier: Apache-2.0
"""Tiny models of every family as programs for a GPU, interpreted, held to what an engine must pass to serve.

A few of them; all, in every precision, take an hour: BLADE_OP_SAMPLES=all pytest ...
"""

import os

import pytest
import torch
from interpreted_models import interpreted, ours_alone, wrong
from op_trace import trace
from run_program import compile_to_program
from tiny_model import in_dtype
from tiny_zoo import MODELS

import blade
from blade.backends.disc.frontend.lower import lower
from blade.backends.disc.gpu.passes.pipeline import FORMS

pytestmark = [pytest.mark.needs("triton_interpreter"), pytest.mark.needs("runtime")]

KINDS = ("fp16, ours", "bf16, ours", "fp32, ours", "fp32, half", "fp16, ATen")
FEW = (("distilbert", "fp16, ours"), ("llama_decode", "fp16, ATen"))
# torch's own bfloat16 convolutions on CPU make NaN of infinities
BROKEN = {("mobilenet_v2", "bf16, ours")}
EVERY = [(name, kind) for name in MODELS for kind in KINDS if (name, kind) not in BROKEN]
ALL = os.environ.get("BLADE_OP_SAMPLES") == "all"


@pytest.mark.parametrize(("name", "kind"), EVERY if ALL else FEW)
def test_a_model_for_gpu_passes_what_engines_must(name: str, kind: str) -> None:
    made = MODELS[name]()
    dtype, how = kind.split(", ")
    module, samples = in_dtype(made, dtype, made.shapes if ALL else made.shapes[:2])
    half = torch.float16 if how == "half" else None
    found = interpreted(module, samples, made.config, half, how == "ours")
    assert found
    assert not wrong(found)
    launched = {"attention", "linear", "loop", "row", "max_pool"}
    assert all(launched & one.ran.keys() for one in found)


class Scaled(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.softmax(-1) * 2


def test_the_judge_sees_a_wrong_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are one short."""
    from blade.backends.disc.gpu.emit import statements as body

    finish = body.TritonBody.finish

    def short(self: body.TritonBody, i: int, stmt: object, x: str) -> None:
        finish(self, i, stmt, f"tl.where(c > 0, {x}, 0.0)")  # type: ignore[arg-type]

    monkeypatch.setattr(body.TritonBody, "finish", short)
    [text] = wrong(
        interpreted(Scaled().eval(), [(torch.randn(3, 5),)], blade.Config(min_cluster_size=1))
    )
    assert "wrong_values" in text


def test_ours_alone_leaves_no_product_to_aten() -> None:
    linear = torch.nn.Linear(64, 48).half()
    x = torch.randn(700, 64).half()
    gm, shape_env = trace(lambda t: linear(t).relu(), [x], [(True, False)])
    with ours_alone(True):
        program = compile_to_program(lower(gm, shape_env, forms=FORMS))
    assert program.ran(x) == ["linear"]
