# SPDX-License-Identifier: Apache-2.0
"""The structure of outputs as text: made, saved with a module, restored."""

import io
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import blade
from blade.config import Config
from blade.core.structure import restored, structure_of
from blade.errors import InputError


@dataclass
class Result:
    logits: torch.Tensor
    states: Any = None


class Pair(NamedTuple):
    first: torch.Tensor
    second: Any


A, B, C = torch.rand(3, 2)


@pytest.mark.parametrize(
    ("output", "flat"),
    [
        (A, A),
        ((A, None, B), (A, B)),
        ([A, [B, C]], (A, (B, C))),
        ({"y": A, "none": None, "z": [B]}, (A, B)),
        (OrderedDict(a=A, b=B), (A, B)),
        (Result(A), (A,)),
        (Result(A, (B, Pair(C, None))), (A, B, C)),
        (Pair(A, {"inner": B}), (A, (B,))),
        (None, ()),
    ],
    ids=["tensor", "tuple", "list", "dict", "ordered", "dataclass", "nested", "namedtuple", "none"],
)
def test_it_comes_back(output: Any, flat: Any) -> None:
    text = structure_of(output)
    assert text is not None
    again = restored(text, flat)
    assert type(again) is type(output) and repr(again) == repr(output)


@pytest.mark.parametrize("output", [3, (A, "text"), {1: A}, {A}, object()])
def test_what_has_no_text(output: Any) -> None:
    assert structure_of(output) is None


def test_other_counts_and_unknown_classes_are_named() -> None:
    text = structure_of((A, None, B))
    assert text is not None
    with pytest.raises(InputError, match="more tensors"):
        restored(text, (A,))
    with pytest.raises(InputError, match=r"2 tensor\(s\), the output has 3"):
        restored(text, (A, B, C))
    with pytest.raises(InputError, match="the class Gone of the module 'nowhere' is not known"):
        restored('{"dataclass": "nowhere:Gone", "keys": ["a"], "of": ["tensor"]}', A)
    with pytest.raises(InputError, match="the class system of the module 'os' is not known"):
        restored('{"dataclass": "os:system", "keys": ["a"], "of": ["tensor"]}', A)


class Returns(nn.Module):
    def forward(self, x: torch.Tensor, as_dict: bool = True) -> Any:
        y = torch.tanh(x) * 2
        return {"y": y, "hidden": None, "z": y + 1} if as_dict else Pair(y, y + 1)


@pytest.mark.needs("runtime", "torch_mlir")
def test_it_travels_with_the_module() -> None:
    config = Config(optimization_pipeline="DISC", timing=False, cache=False, min_cluster_size=1)
    model = Returns().eval()
    optimized = blade.optimize(model, torch.rand(2, 3), config)
    file = io.BytesIO()
    torch.jit.save(optimized, file)
    file.seek(0)
    x = torch.rand(4, 5)
    got, want = restored(torch.jit.load(file).blade_structure, optimized(x)), model(x)
    assert list(got) == ["y", "hidden", "z"] and got["hidden"] is None
    torch.testing.assert_close(got["z"], want["z"])


@pytest.mark.needs("runtime", "torch_mlir")
def test_two_structures_are_none() -> None:
    config = Config(optimization_pipeline="DISC", timing=False, cache=False, min_cluster_size=1)
    samples = [{"x": torch.rand(2, 3), "as_dict": flag} for flag in (True, False)]
    optimized = blade.optimize(Returns().eval(), samples, config)
    assert not hasattr(optimized, "blade_structure")
