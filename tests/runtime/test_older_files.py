# SPDX-License-Identifier: Apache-2.0
"""Files that revision 6b27686 saved, before the package got its present folders, one per backend.

The model of each is softmax(Linear(24, 8)(gelu(Linear(16, 24)(x)))).
"""

from pathlib import Path

import pytest
import torch

import blade

pytestmark = pytest.mark.needs("runtime")
DATA = Path(__file__).parent / "data"
NATIVE = ("disc", "quant", "inductor", "tvm")


@pytest.mark.parametrize(
    "name",
    [
        "disc",
        "quant",
        "inductor",
        pytest.param("onnxruntime", marks=pytest.mark.needs("onnxruntime")),
        pytest.param("openvino", marks=pytest.mark.needs("openvino")),
        pytest.param("tvm", marks=pytest.mark.needs("tvm")),
    ],
)
def test_a_file_of_an_older_revision_loads_and_its_engine_answers(
    name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    loaded = torch.jit.load(DATA / f"{name}.pt")
    saved = torch.load(DATA / f"{name}.answer", weights_only=True)
    found = loaded(saved["inputs"])
    [stats] = blade.stats(loaded).values()
    served = stats["engine_runs"] == 1
    if not served and name in NATIVE:
        assert "this CPU lacks" in capfd.readouterr().err  # code for another machine's features
    else:
        assert served, stats
    torch.testing.assert_close(found, saved["optimized" if served else "original"])
    assert blade.report(loaded).clusters[0].backend == name
