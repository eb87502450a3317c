# SPDX-License-Identifier: Apache-2.0
"""What ``torch.nn`` runs as one op in inference: taken as the ops that it is, unless it then answers otherwise."""

import pytest
import torch
from torch import nn

import blade
from blade.capture.capture import capture

CONFIG = blade.Config(timing=False, optimization_pipeline="disc")
FUSED = {"aten::_transformer_encoder_layer_fwd", "aten::_native_multi_head_attention"}


class Attention(nn.Module):
    def __init__(self, weights: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.weights = weights

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answer, weights = self.attention(x, x, x, need_weights=self.weights)
        return answer + 1 if weights is None else answer + weights.sum()


class Padded(nn.Module):
    """Answers zeros where there is padding."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.encoder(x, src_key_padding_mask=padding)
        return answer


@pytest.mark.needs("runtime", "torch_mlir")
@pytest.mark.parametrize("model", [Attention(True), Attention(False)], ids=["weights", "none"])
def test_attention_is_one_cluster(model: nn.Module) -> None:
    optimized = blade.optimize(model.eval(), torch.randn(2, 5, 16), CONFIG)
    report = blade.report(optimized)
    assert [one.backend for one in report.clusters] == ["disc"] and not report.outside
    for sizes in [(1, 5), (3, 1), (2, 9)]:
        x = torch.randn(*sizes, 16)
        with torch.no_grad():
            torch.testing.assert_close(optimized(x), model(x))


def test_a_layer_without_padding_is_taken_apart() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    captured = capture(layer, torch.randn(2, 5, 16), CONFIG)
    assert captured.how == "trace"
    assert FUSED.isdisjoint(node.kind() for node in captured.module.graph.nodes())
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.needs("runtime")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_padding_is_answered_as_the_layer_does() -> None:
    model = Padded().eval()
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[0, 3:] = True
    optimized = blade.optimize(model, (torch.randn(2, 5, 16), padding), CONFIG)
    for x in (torch.randn(2, 5, 16), torch.randn(2, 5, 16)):
        with torch.no_grad():
            torch.testing.assert_close(optimized(x, padding), model(x, padding))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("is_aligned", [True, False])
def test_whether_padding_is_at_the_end_is_a_decision(is_aligned: bool) -> None:
    """Elsewhere the encoder makes no nested tensor, and computes what is in the padding."""
    model = Padded().eval()
    last, first = (torch.zeros(2, 5, dtype=torch.bool) for _ in range(2))
    last[0, 3:], first[0, :2] = True, True
    x, sample = torch.randn(2, 5, 16), last if is_aligned else first
    captured = capture(model, (x, sample), blade.Config(timing=False, allow_tracing=True))
    assert captured.how == "trace"
    for padding in (last, first):
        with torch.no_grad():
            try:
                answer = captured.module(x, padding)
            except torch.jit.Error as error:
                assert padding is not sample and "No captured path" in str(error)
            else:
                torch.testing.assert_close(answer, model(x, padding))
