# SPDX-License-Identifier: Apache-2.0
"""What is taken over from a static graph is what torch's shape functions give for the group by itself."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from blade.graph.fx.extract import extract_fx
from blade.graph.fx.view import view_fx

aten = torch.ops.aten
Function = Callable[..., Any]


def _block(x: torch.Tensor, w: torch.Tensor) -> Any:
    y, mean, scale = aten.native_layer_norm(x @ w, [6], None, None, 1e-5)
    left, right = y.transpose(0, 1).split([2, 4], -1)
    return left.exp(), right.softmax(-1).permute(2, 0, 1), mean + scale, y


def _image(x: torch.Tensor, w: torch.Tensor) -> Any:
    y = aten.convolution(x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    y, mean, scale = aten.native_batch_norm(y, None, None, None, None, True, 0.1, 1e-5)
    grad = aten.convolution_backward(
        y, x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False]
    )
    return y.relu(), mean, scale, grad[0], grad[1]


def _views(x: torch.Tensor, w: torch.Tensor) -> Any:
    y = x.relu()
    return y, y.view(-1), aten._unsafe_view(y * 2, [-1]), y.argmax(-1), (y > 0).sum()


CASES: dict[str, tuple[Function, torch.Tensor, torch.Tensor]] = {
    "block": (_block, torch.randn(3, 5, 4), torch.randn(4, 6)),
    "image": (_image, torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)),
    "channels last": (
        _image,
        torch.randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last),
        torch.randn(4, 3, 3, 3),
    ),
    "sliced": (_block, torch.randn(3, 5, 8)[..., ::2], torch.randn(4, 12)[:, 1:7]),
    "views": (_views, torch.randn(4, 6), torch.randn(2)),
}


@pytest.mark.parametrize("name", CASES)
def test_taken_over_is_as_asked_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, *tensors = CASES[name]
    mode = FakeTensorMode()
    with mode:
        traced = make_fx(function)(*map(mode.from_tensor, tensors))
    view = view_fx(traced.graph)
    group = range(len(view.nodes))
    taken = extract_fx("taken", view, group, {}).cluster.gm
    monkeypatch.setattr("blade.graph.fx.extract.is_fresh", lambda node: False)
    asked = extract_fx("asked", view, group, {}).cluster.gm
    assert _forms(taken) == _forms(asked)


def _forms(gm: torch.fx.GraphModule) -> list[Any]:
    """Target, results' form and whose memory they are in, node by node."""
    owners: dict[int, str] = {}
    found = []
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        several = value if isinstance(value, (list, tuple)) else (value,)
        forms = [
            (t.shape, t.stride(), t.dtype, owners.setdefault(t.untyped_storage()._cdata, node.name))
            for t in several
            if isinstance(t, torch.Tensor)
        ]
        found.append((str(node.target), type(value) in (list, tuple), forms))
    return found
