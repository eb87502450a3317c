# SPDX-License-Identifier: Apache-2.0
"""Decisions without consequences, which every layer takes at the same line, are no conditions."""

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel

from blade.capture.capture import capture
from blade.config import Config


class Layer(nn.Module):
    def __init__(self, is_causal: bool) -> None:
        super().__init__()
        self.linear, self.is_causal = nn.Linear(8, 8), is_causal

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        is_causal = x.shape[1] > 1 and vars(self)["is_causal"]  # no script
        y = self.linear(x) + bias
        return y.tril() if is_causal else y.tanh()


class Layers(nn.Module):
    def __init__(self, *causal: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(Layer, causal))

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, bias)
        return x


def sample(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(2, length, 8), torch.rand(2, length, 1)


def test_the_layers_of_bert_do_not_decide() -> None:
    form = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 50}
    model = BertModel(BertConfig(num_hidden_layers=2, num_attention_heads=2, **form)).eval()

    def ids(length: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randint(0, 50, (2, length)), torch.ones(2, length, dtype=torch.int64)

    captured = capture(model, ids(5), Config())
    assert captured.how == "trace" and not captured.reasons
    [path] = captured.paths
    assert not any("> (1)" in text for text in path.conditions)
    for length in (1, 2, 9):
        given = ids(length)
        want = model(*given)
        last, pooled = captured.module(*given)
        torch.testing.assert_close(last, want.last_hidden_state)
        torch.testing.assert_close(pooled, want.pooler_output)


@pytest.mark.parametrize("causal", [(True, True), (False, True), (True, False)])
def test_one_layer_decides(causal: tuple[bool, bool]) -> None:
    model = Layers(*causal).eval()
    captured = capture(model, sample(5), Config())
    assert len(captured.paths) == 2
    for length in (1, 2, 9):
        given = sample(length)
        torch.testing.assert_close(captured.module(*given), model(*given))
