# SPDX-License-Identifier: Apache-2.0
"""What an op that returns its argument passes on is written to as the argument itself."""

import pytest
import torch
from torch import nn

import blade
from blade.graph.torchscript.show_identities import show_identities

CONFIG = blade.Config(timing=False, min_cluster_size=1)


class Written(nn.Module):
    """Writes to what follows from constants, through ``kind`` of op."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layer = nn.Linear(4, 8)
        self.drop = nn.Dropout(0.1)
        self.features = nn.FeatureAlphaDropout(0.1)
        self.register_buffer("grid", torch.linspace(0, 1, 24).view(3, 8))

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        waves = torch.sin(30 * self.grid.clone())
        if self.kind == "dropout":
            x = self.drop(waves)
        elif self.kind == "feature_alpha_dropout":
            x = self.features(waves)
        else:
            x = waves.type_as(z)
        x *= self.layer(z).reshape(1, z.size(0) * 2)
        return x.tanh()


@pytest.mark.parametrize("kind", ["dropout", "feature_alpha_dropout", "type_as"])
@pytest.mark.parametrize("flat", [True, False])
def test_constants_are_not_written_to(
    kind: str, flat: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not flat:
        monkeypatch.setattr("blade.capture.trace.flat_trace", lambda *_: None)
    model, z = Written(kind).eval(), torch.randn(4)
    optimized = blade.optimize(model, z, CONFIG)
    for _ in range(3):
        z = torch.randn(4)
        with torch.no_grad():
            torch.testing.assert_close(optimized(z), model(z))


def test_what_is_not_written_to_stays() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = torch.dropout(torch.dropout(x, 0.5, True), 0.5, False).type_as(x)
        z = torch.dropout(torch.dropout(x.sin(), 0.5, False), 0.5, False)
        return z.mul_(y) + torch.dropout(x.cos(), 0.5, True).add_(y)

    graph = torch.jit.trace(function, torch.randn(3), check_trace=False).graph
    show_identities(graph)
    graph.lint()
    ops = [n.kind().partition("::")[2] for n in graph.nodes() if n.kind() != "prim::Constant"]
    assert ops == "dropout dropout type_as sin mul_ cos dropout add_ add".split()
