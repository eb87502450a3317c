# SPDX-License-Identifier: Apache-2.0
"""Files of drop-ins, with the model and without it, in another process."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import blade
from blade.config import Config
from blade.errors import InputError

QUICK = Config(optimization_pipeline="disc", timing=False, time_budget=None)


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner = nn.Linear(4, 4)

    def forward(
        self, x: torch.Tensor, pairs: list[torch.Tensor], mode: str = "sum"
    ) -> dict[str, object]:
        y = self.inner(x) + (pairs[0] * pairs[1] if mode == "sum" else pairs[0])
        return {"scores": y, "none": None, "mode": mode, "both": [y.relu(), (y.tanh(),)]}


def _same(found: Any, expected: Any) -> None:
    assert found.pop("mode") == expected.pop("mode") and found.pop("none") is expected.pop("none")
    torch.testing.assert_close(found, expected)


@torch.no_grad()
def test_a_file_answers_in_another_process(tmp_path: Path) -> None:
    model = Tagger().eval()
    sample = {"x": torch.rand(3, 4), "pairs": [torch.rand(3, 4), torch.rand(3, 4)], "mode": "sum"}
    other = {"x": torch.rand(3, 4), "pairs": [torch.rand(3, 4)] * 2, "mode": "first"}
    fast = blade.accelerate(model, [sample, other], QUICK)
    blade.save(fast, tmp_path / "model.blade")
    x, a, b = torch.rand(3, 5, 4)
    expected = model(x, [a, b])
    torch.save((x, a, b, expected, model(x, [a, b], mode="first")), tmp_path / "calls.pt")
    code = f"""
import torch, blade
def assert_same(found, expected):
    assert found.pop("mode") == expected.pop("mode") and found.pop("none") is expected.pop("none")
    torch.testing.assert_close(found, expected)
model = blade.load({str(tmp_path / "model.blade")!r})
x, a, b, expected, first = torch.load({str(tmp_path / "calls.pt")!r})
assert_same(model(x, [a, b], mode="first"), first)
found = model(x, [a, b], "sum")
assert found["mode"] == "sum" and found["none"] is None and list(found) == list(expected)
assert type(found["both"]) is list and type(found["both"][1]) is tuple
assert_same(found, expected)
try:
    model(x, [a])
except RuntimeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (
        "Tagger: the file answers no call x: float32[?, ?], pairs: (float32[?, ?])" in done.stdout
    )


@torch.no_grad()
def test_with_the_model_everything_is_answered(tmp_path: Path) -> None:
    model = Tagger().eval()
    sample = (torch.rand(3, 4), [torch.rand(3, 4), torch.rand(3, 4)], "sum")
    path = tmp_path / "model.blade"
    with pytest.raises(InputError, match="no call is optimized yet"):
        blade.save(blade.accelerate(model), path)
    with pytest.raises(InputError, match="drop-in"):
        blade.save(model, path)
    blade.save(blade.accelerate(model, sample, QUICK), path)
    loaded = blade.load(path, model)
    assert isinstance(loaded, Tagger)
    x, a, b = torch.rand(3, 6, 4)
    _same(loaded(x, [a, b], "sum"), model(x, [a, b]))
    assert blade.stats(loaded)["original"]["calls"] == 0
    _same(loaded(x, [a, b], "other"), model(x, [a, b], "other"))
    assert blade.stats(loaded)["original"]["calls"] == 1
    with torch.no_grad():
        model.inner.bias += 1
    with pytest.raises(InputError, match=r"'inner\.bias' has other values"):
        blade.load(path, model)
    (tmp_path / "text").write_text("no archive")
    with pytest.raises(InputError, match=r"no file of blade\.save"):
        blade.load(tmp_path / "text")
