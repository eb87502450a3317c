# SPDX-License-Identifier: Apache-2.0
"""A library is asked which ops it takes in a process of its own, once."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from blade.backends.inductor.backend import compiler_name
from blade.backends.shared import op_survey as known_ops
from blade.backends.shared.op_survey import OpSurvey
from blade.core.cluster import OpNode, ValueInfo

FLOAT = ValueInfo("tensor", torch.float32, torch.device("cpu"), 2)
ADD = OpNode("a", torch.ops.aten.add.Tensor, (FLOAT, FLOAT, 1), {}, (FLOAT,))
SIN = OpNode("s", torch.ops.aten.sin.default, (FLOAT,), {}, (FLOAT,))


def answers() -> list[str]:
    """Leaves a file behind, beside which it was started."""
    with Path(sys.path[0], "asked").open("a") as file:
        file.write("x")
    return ["aten.add.Tensor"]


def fails() -> list[str]:
    raise ImportError("libmissing.so")


@pytest.fixture
def folder(tmp_path: Path, cluster_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return tmp_path


def ops_of(ask: object) -> OpSurvey:
    return OpSurvey("lib", "Lib", frozenset({torch.float32}), lambda: "1", ask)  # type: ignore[arg-type]


def test_it_is_asked_once_and_elsewhere(folder: Path) -> None:
    asked = folder / "asked"
    for _ in range(2):
        ops = ops_of(answers)  # another one each time: what is on disk counts
        assert ops.why_not(ADD, keep=True) is None
        why = ops.why_not(SIN, keep=True)
        assert why is not None and "no rule for this op" in why.detail
        assert asked.read_text() == "x"
    ops_of(answers).why_not(ADD, keep=False)
    assert asked.read_text() == "xx"


def test_what_cannot_be_asked_takes_nothing_and_says_why(folder: Path) -> None:
    ops = ops_of(fails)
    calls = [ops.why_not(node, keep=True) for node in (ADD, SIN)]
    assert all(why is not None and "(ImportError: libmissing.so)" in why.detail for why in calls)
    known_ops._names.cache_clear()
    assert ops_of(answers).why_not(ADD, keep=True) is None  # no failure is kept


def test_the_compiler_is_the_one_that_inductor_asks_for() -> None:
    from torch._inductor import config

    assert config.cpp.cxx[-1] == compiler_name()


NO_COMPILERS = """
import sys, torch, blade
from blade.backends import registry
for name in registry.names():
    registry.available(name)
from blade.backends.inductor.ops import OPS
from test_known_ops import ADD
assert OPS.why_not(ADD, keep=True) is None
heavy = {"torch._inductor", "torch._dynamo", "triton", "torch.onnx", "tvm", "onnxscript"}
if not torch.cuda.is_available():
    heavy |= {"tensorrt", "tensorrt_rtx", "tensorrt_rtx_bindings"}
print(*sorted(heavy & set(sys.modules)))
"""


@pytest.mark.needs("runtime")
def test_no_compiler_of_others_is_loaded_here(folder: Path) -> None:
    """Hundreds of MB that would stay for as long as the process lives."""
    code = f"import sys; sys.path[:] = {[*sys.path, str(Path(__file__).parent)]!r}{NO_COMPILERS}"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == ""
