# SPDX-License-Identifier: Apache-2.0
"""Which ops TensorRT takes, as its own parser says: all in one export, each form once."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from op_compare import sizes_of
from op_samples import Sample, inputs
from op_table import SAMPLES
from trt_clusters import Mlp, Plain, nodes_of, traced_nodes

from blade.backends.tensorrt import parser
from blade.backends.tensorrt.parser import survey, why_not, why_not_built
from blade.config import Config
from blade.core.cluster import OpNode
from blade.core.reason import Code

pytestmark = pytest.mark.needs("tensorrt_rtx", "runtime")
UNCACHED = Config(cache=False)


@pytest.fixture(autouse=True)
def exports(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of ops in each export; verdicts of other tests are forgotten."""
    seen: list[int] = []
    export = parser.to_onnx

    def counted(cluster: Any, config: Config, **options: Any) -> Any:
        calls = [n for n in cluster.gm.graph.nodes if n.op == "call_function"]
        seen.append(sum("clone" not in str(n.target) for n in calls))
        return export(cluster, config, **options)

    monkeypatch.setattr(parser, "to_onnx", counted)
    monkeypatch.setattr(parser, "_verdicts", {})
    return seen


class WithMask(torch.nn.Module):
    """A transformers model as a function of tensors."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, types: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.model(ids, mask, types)[0]
        return found


def on_cuda(node: OpNode) -> OpNode:
    """As it would be described on a machine with a GPU."""

    def moved(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [moved(one) for one in value]
        is_tensor = getattr(value, "kind", "") == "tensor"
        return replace(value, device=torch.device("cuda")) if is_tensor else value

    kwargs = {name: moved(value) for name, value in node.kwargs.items()}
    return replace(
        node, args=tuple(moved(node.args)), kwargs=kwargs, outputs=tuple(moved(node.outputs))
    )


@pytest.mark.needs("minilm")
def test_a_model_is_asked_about_in_one_export_and_only_once(
    minilm: torch.nn.Module,
    minilm_inputs: Callable[..., dict[str, torch.Tensor]],
    exports: list[int],
    cluster_cache: Any,
) -> None:
    model = WithMask(minilm)
    nodes = traced_nodes(model, *minilm_inputs(2, 16).values())
    survey(nodes, Config())
    assert len(nodes) > 150 and len(exports) == 1 and exports[0] < 60
    assert [n.name for n in nodes if why_not_built(n, Config())] == []
    parser._verdicts.clear()
    survey(nodes, Config())  # as in another process
    assert len(exports) == 1


def test_a_machine_without_a_device_answers_for_no_other(
    exports: list[int], cluster_cache: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorRT may take with a device what it does not take without one, and the other way round."""
    [node, *_] = nodes_of(Mlp(), torch.randn(8, 64))
    for device in ("none", "NVIDIA A 8.6", "none", "NVIDIA B 8.9"):
        monkeypatch.setattr(parser, "device_name", lambda device=device: device)
        parser._environment.cache_clear()
        survey([node], Config())
    parser._environment.cache_clear()
    assert len(exports) == 3


def test_where_it_serves() -> None:
    nodes = nodes_of(Mlp(), torch.randn(8, 64))
    assert {why_not(n, UNCACHED).code for n in nodes} == {Code.UNSUPPORTED_DEVICE}  # type: ignore[union-attr]
    assert [why_not(on_cuda(n), UNCACHED) for n in nodes] == [None] * len(nodes)


@pytest.mark.parametrize(
    ("function", "sample", "code"),
    [
        (lambda x: x + 1, torch.randn(3).double(), Code.UNSUPPORTED_DTYPE),
        (lambda x: x + 1, torch.ones(3, dtype=torch.int16), Code.UNSUPPORTED_DTYPE),
        (lambda x: x * torch.rand_like(x), torch.randn(3), Code.RANDOM),
        (lambda x: x.nonzero() + 1, torch.randn(3), Code.DATA_DEPENDENT),
    ],
)
def test_what_is_told_without_the_parser(
    function: Callable[..., Any], sample: torch.Tensor, code: Code, exports: list[int]
) -> None:
    nodes = traced_nodes(Plain(function), sample)
    codes = {r.code for n in nodes if (r := why_not_built(on_cuda(n), UNCACHED)) is not None}
    assert code in codes and sum(exports) < len(nodes)


def test_what_the_parser_or_the_exporter_does_not_take(exports: list[int]) -> None:
    """Neither spoils the verdict on the ops beside it."""

    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.det(x.relu()).tanh() + torch.special.bessel_j0(x).exp().sum()

    nodes = traced_nodes(Plain(model), torch.randn(2, 4, 4))
    survey(nodes, UNCACHED)
    why = {n.target._schema.name: r.detail for n in nodes if (r := why_not_built(n, UNCACHED))}
    assert set(why) == {"aten::linalg_det", "aten::special_bessel_j0"}
    assert "does not take ONNX's Det" in why["aten::linalg_det"]
    assert "has no form in ONNX" in why["aten::special_bessel_j0"]
    assert len(exports) == 2


# Samples every op of which TensorRT takes, except in types it has not.
TAKEN = (
    "sinc|nan_to_num|lerp|prelu|glu|casts|view|flatten|permute|expand|slice|select|cat|pad|pixel_shuffle|"
    "tril|sum dims|mean dims|max dim|var|softmax axes|layer_norm|group_norm|linear|mm|bmm|matmul|addmm|"
    "baddbmm|attention|attention causal|rotary|topk|roll|flip|repeat|arange|norm|geglu"
).split("|")


def test_the_sample_table_in_one_batch(exports: list[int]) -> None:
    by_name: dict[str, Sample] = {s.name: s for s in SAMPLES}
    nodes = {
        name: traced_nodes(
            Plain(by_name[name].function), *inputs(by_name[name], next(sizes_of(by_name[name])))
        )
        for name in TAKEN
    }
    survey([n for own in nodes.values() for n in own], UNCACHED)
    refused = {
        f"{name}: {reason.detail}"
        for name, own in nodes.items()
        for n in own
        if (reason := why_not_built(n, UNCACHED)) is not None
        and reason.code != Code.UNSUPPORTED_DTYPE
    }
    assert refused == set()
    assert len(exports) == 1
