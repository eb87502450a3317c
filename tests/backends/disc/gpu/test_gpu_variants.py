# SPDX-License-Identifier: Apache-2.0
"""Engines for several GPUs: a program for each, with its own tiles and kernels, and what is left out."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from every_kernel import F8, Narrow
from op_trace import trace
from run_program import compile_to_program
from torch import nn
from torch.nn import functional as F

from blade.backends.disc import backend as disc
from blade.backends.disc.compiler import CompiledProgram, compile_graph
from blade.backends.disc.frontend.lower import lower
from blade.backends.disc.gpu.compile.compile import merge_objects
from blade.backends.disc.gpu.passes.pipeline import FORMS
from blade.backends.disc.gpu_variants import with_targets
from blade.backends.disc.target.gpu import NAMED, GpuTarget
from blade.config import Config
from blade.config.fields import GPU_TARGETS
from blade.report.layer_notes import left_targets_of
from blade.selection.reporting import _left_targets

pytestmark = pytest.mark.needs("triton", "triton_interpreter")

ROWS = [(True, False)]


class Block(nn.Module):
    """An attention over rows, a product with a group behind it, and a norm."""

    def __init__(self, dtype: torch.dtype = torch.float16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide = nn.Linear(64, 96, dtype=dtype)
        self.norm = nn.LayerNorm(96, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = x.view(1, x.shape[0], 1, 64).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, q, q)
        return self.norm(F.gelu(self.wide(y.transpose(1, 2).reshape(x.shape[0], 64))))


def compiler_of(model: nn.Module, x: torch.Tensor) -> Callable[[GpuTarget], CompiledProgram]:
    model.requires_grad_(False)
    gm, shape_env = trace(model, [x], ROWS)
    return lambda target: compile_graph(gm, shape_env, target)


def test_the_config_names_the_table() -> None:
    assert tuple(NAMED) == GPU_TARGETS
    assert all(not target.here for target in NAMED.values())
    assert {name: target.isa for name, target in NAMED.items()} == {
        **{name: (name,) for name in ("sm_80", "sm_86", "sm_89", "sm_90")},
        "sm_100": ("sm_100a",),
        "sm_120": ("sm_120a",),
    }


@pytest.mark.parametrize("name", NAMED)
def test_a_program_for_each_target_answers_like_eager(name: str) -> None:
    model, x = Block().requires_grad_(False), torch.randn(5, 64).half()
    gm, shape_env = trace(model, [x], ROWS)
    program = compile_to_program(lower(gm, shape_env, forms=FORMS), None, NAMED[name])
    assert program.text.splitlines()[1] == f"isa cuda {NAMED[name].isa[0]}"
    for rows in (1, 5, 33):
        x = torch.randn(rows, 64).half()
        torch.testing.assert_close(program(x)[0], model(x), atol=4e-3, rtol=4e-3)


def test_an_engine_has_a_program_and_the_kernels_for_each_target() -> None:
    compile_for = compiler_of(nn.LayerNorm(64), torch.randn(4, 64))
    own = compile_for(NAMED["sm_90"])
    same, _ = with_targets(own, NAMED["sm_90"], ("sm_90",), compile_for)
    assert same is own
    found, left = with_targets(own, NAMED["sm_90"], ("sm_80", "sm_90", "sm_120"), compile_for)
    assert left == {}
    texts = ["blade.disc 1\n" + text for text in found.program.split("blade.disc 1\n")[1:]]
    assert texts[0] == own.program
    isas = [text.splitlines()[1].split()[2] for text in texts]
    assert isas == ["sm_90", "sm_80", "sm_120a"]
    count = int(found.object.split(b"\n")[1])
    index = [line.decode().split() for line in found.object.split(b"\n", 2 + count)[2 : 2 + count]]
    kernels = {(isa, name) for isa, name, *_ in index}
    for isa, text in zip(isas, texts, strict=True):
        words = [line.split() for line in text.splitlines()]
        names = {w[w.index("launch") + 1] for w in words if "launch" in w}
        assert names and {(isa, name) for name in names} <= kernels
    sizes = [int(words[4]) for words in index]
    assert len(found.object) == found.object.index(b"\x7fELF") + sum(sizes)
    assert found.constants == own.constants


def test_objects_without_kernels_are_merged() -> None:
    empty = b"blade.cubins 1\n0\n"
    one = b"blade.cubins 1\n1\nsm_80 k 32 0 2 early\nAB"
    assert merge_objects([empty, one]) == one
    two = merge_objects([one, one.replace(b"sm_80", b"sm_90").replace(b"AB", b"\nC")])
    assert two == b"blade.cubins 1\n2\nsm_80 k 32 0 2 early\nsm_90 k 32 0 2 early\nAB\nC"


def test_what_a_target_cannot_compile_is_left_out_with_the_words() -> None:
    """Floats of 8 bits are converted from sm_89 on."""
    compile_for = compiler_of(Narrow(64, 64, F8), torch.randn(4, 64))
    own = compile_for(NAMED["sm_90"])
    found, left = with_targets(own, NAMED["sm_90"], ("sm_80", "sm_89"), compile_for)
    assert set(left) == {"sm_80"} and "fp8e4nv" in left["sm_80"]
    assert found.program.count("isa cuda") == 2


def test_a_program_with_other_constants_is_left_out() -> None:
    compile_for = compiler_of(Block(), torch.randn(4, 64).half())
    own = compile_for(NAMED["sm_90"])

    def other(target: GpuTarget) -> CompiledProgram:
        made = compile_for(target)
        return replace(made, constants=tuple(c + 1 for c in made.constants))

    _, left = with_targets(own, NAMED["sm_90"], ("sm_80",), other)
    assert left == {"sm_80": "Its program has other constants."}


def test_the_backend_compiles_for_the_targets_of_the_config(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a device that is not here, so that the engine cannot run."""
    from blade.core.cluster import Cluster

    model, x = Narrow(64, 64, F8).requires_grad_(False), torch.randn(4, 64)
    gm, shape_env = trace(model, [x], ROWS)
    cluster: Any = Cluster.__new__(Cluster)
    fields = {"name": "c", "gm": gm, "shape_env": shape_env, "updates": (), "live": False}
    for name, value in fields.items():
        object.__setattr__(cluster, name, value)
    monkeypatch.setattr(disc, "_target", lambda device: NAMED["sm_90"])
    config = Config(gpu_targets=["sm_80", "sm_89"], cache=False)
    engine: Any = disc.DiscBackend()._engine(cluster, config, torch.device("cpu"), None)
    text = engine.program()
    assert [line for line in text.splitlines() if line.startswith("isa")] == [
        "isa cuda sm_90",
        "isa cuda sm_89",
    ]
    assert set(left_targets_of(text)) == {"sm_80"}
    [reason] = _left_targets("c", [engine])
    assert reason.detail.startswith("It has no code for sm_80, where the original runs: Triton")
