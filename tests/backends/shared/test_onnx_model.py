# SPDX-License-Identifier: Apache-2.0
"""ONNX models of clusters: without weights, without this machine's paths, exported once."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from cutting import cut, trace

import blade
from blade.backends.shared.onnx import model as onnx_model
from blade.backends.shared.onnx.model import OnnxModel, external_weights, to_onnx
from blade.backends.shared.output_buffers import restore
from blade.core.cluster import Cluster
from blade.fallback.cluster_codec import constants_of

pytestmark = pytest.mark.needs("onnx")


class Net(torch.nn.Module):
    """A large weight, a small one, a table that is looked up, an output that is not row-major."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.table = torch.nn.Embedding(64, 48)
        self.linear = torch.nn.Linear(48, 40)

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = torch.nn.functional.gelu(self.linear(self.table(ids) + x))
        return h.softmax(-1), h.mean(1).exp(), h.transpose(1, 2)


def net_inputs(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, 64, (batch, length)), torch.randn(batch, length, 48)


def cluster_of(model: torch.nn.Module, *samples: Sequence[torch.Tensor]) -> Cluster:
    [extracted] = cut(trace(model, *map(tuple, samples)))
    return extracted.cluster


@pytest.fixture
def cluster() -> Cluster:
    return cluster_of(Net().eval(), net_inputs(3, 5), net_inputs(2, 7))


def with_weights(model: OnnxModel, tensors: Mapping[str, torch.Tensor]) -> bytes:
    """``external_weights``, brought: ``tensors`` are the cluster's constants by name."""
    import onnx

    proto = onnx.load_from_string(external_weights(model))
    for weight in proto.graph.initializer:
        if weight.data_location == onnx.TensorProto.EXTERNAL:
            del weight.external_data[:]
            weight.data_location = onnx.TensorProto.DEFAULT
            weight.raw_data = tensors[model.weights[weight.name]].detach().numpy().tobytes()
    data: bytes = proto.SerializeToString()
    return data


def evaluate(data: bytes, model: OnnxModel, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """By ONNX's own reference implementation."""
    import onnx
    from onnx.reference import ReferenceEvaluator

    feed = {name: t.numpy() for name, t in zip(model.inputs, inputs, strict=True)}
    made = ReferenceEvaluator(onnx.load_from_string(data)).run(None, feed)
    results: Any = zip(map(torch.as_tensor, made), model.orders, strict=True)
    return [restore(result, order) for result, order in results]


def test_with_its_weights_it_answers_as_the_cluster_at_every_size(cluster: Cluster) -> None:
    model = to_onnx(cluster, blade.Config(cache=False))
    data = with_weights(model, constants_of(cluster))
    for batch, length in ((3, 5), (1, 9), (4, 1), (1, 1)):
        inputs = net_inputs(batch, length)
        got, want = evaluate(data, model, inputs), cluster.gm(*inputs)
        torch.testing.assert_close(tuple(got), want, rtol=1e-5, atol=1e-6)
        assert [g.stride() for g in got if g.dim() == 3 and batch > 1 < length] == [
            w.stride() for w in want if w.dim() == 3 and batch > 1 < length
        ]


def test_weights_are_not_in_it_nor_names_of_this_machine(cluster: Cluster) -> None:
    import onnx

    model = to_onnx(cluster, blade.Config(cache=False))
    held = constants_of(cluster)
    large = {n for n, t in held.items() if t.numel() * 4 > onnx_model.INLINE_BYTES}
    assert set(model.weights.values()) == large and len(large) == 2 < len(held)
    assert len(model.data) < 10_000 < 4 * 64 * 48
    for text in (b".py", b"site-packages", str(Path.home()).encode()):
        assert text not in model.data
    onnx.checker.check_model(onnx.load_from_string(model.data))
    assert len(external_weights(model)) < 10_000


def test_an_export_is_found_again_whatever_the_large_weights_are(
    cluster: Cluster, cluster_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = to_onnx(cluster, blade.Config())
    other = Net(seed=1).eval()
    other.linear.bias = Net(seed=0).linear.bias  # small ones are in the model
    again = cluster_of(other, net_inputs(3, 5), net_inputs(2, 7))
    with monkeypatch.context() as patch:
        patch.setattr(onnx_model, "_translate", lambda *given: pytest.fail("exported again"))
        assert to_onnx(again, blade.Config()) == first
    other.linear.bias = Net(seed=1).linear.bias
    third = cluster_of(other, net_inputs(3, 5), net_inputs(2, 7))
    assert to_onnx(third, blade.Config()).data != first.data


def test_guards_of_the_exporter_reach_the_program(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    translate = onnx_model._translate

    def asks(cluster: Cluster, indices: Any) -> Any:
        model = translate(cluster, indices)
        [ids, *_] = [n for n in cluster.gm.graph.nodes if n.op == "placeholder"]
        assert ids.meta["val"].shape[1] < 512
        return model

    plain = to_onnx(cluster, blade.Config(cache=False)).program
    monkeypatch.setattr(onnx_model, "_translate", asks)
    limited = to_onnx(cluster, blade.Config(cache=False)).program
    assert "const 512" in limited and "const 512" not in plain
