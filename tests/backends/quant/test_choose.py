# SPDX-License-Identifier: Apache-2.0
"""What is kept for its speed, with a clock that tells the time engines claim to take."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from fake_clock import Clock
from torch import nn

from blade.backends.quant.analysis.simulate import Inputs
from blade.backends.quant.prepare import prepare
from blade.backends.quant.search import choose as module
from blade.backends.quant.search.choose import ChosenEngine, choose, is_worth_it
from blade.backends.quant.search.cpu_plans import make_plans
from blade.backends.quant.search.layer_profile import LayerProfile
from blade.config import Config
from blade.core.cluster import Cluster
from blade.core.reason import Code
from blade.errors import Refused
from blade.report import Timing

Make = Callable[..., Cluster]


@dataclass
class Engine:
    """Takes ``seconds`` by its clock."""

    seconds: float
    clock: Clock
    outputs: list[torch.Tensor] = field(default_factory=list)

    def try_execute(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        self.clock.now += self.seconds
        return self.outputs


def timing(speedup: float, spread: float) -> Timing:
    return Timing(((1,),), speedup, 1.0, spread)


def test_a_gain_counts_if_it_exceeds_its_noise() -> None:
    assert is_worth_it([timing(1.5, 0.1), timing(1.0, 0.1)])
    assert not is_worth_it([timing(1.05, 0.1)])
    assert not is_worth_it([])


def test_a_gain_at_one_sample_makes_up_for_no_loss_at_another() -> None:
    assert not is_worth_it([timing(1.5, 0.1), timing(0.8, 0.1)])
    assert is_worth_it([timing(1.5, 0.1), timing(0.8, 0.3)])  # which may be noise


def test_noise_that_makes_it_faster_still_speaks_for_it() -> None:
    assert is_worth_it([Timing(((1,),), 1.2, 1.0, spread=0.9, below=0.1)])
    assert not is_worth_it([Timing(((1,),), 1.2, 1.0, spread=0.9, below=0.3)])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(32, 256), nn.Linear(256, 32)
        self.conv = nn.Conv1d(4, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(self.narrow(torch.relu(self.wide(x))))


def chosen(
    cluster_of: Make, costs: dict[str, float], **fields: object
) -> tuple[ChosenEngine, list[int]]:
    """By what each quantized weight adds to 1 ms, by shape; with the number of them per compilation."""
    cluster = cluster_of(Model(), [torch.randn(2, 4, 32)])
    config = Config(enable_int8=True, accuracy_budget=0.5, **fields)  # type: ignore[arg-type]
    clock, compiled = Clock(), []

    def compile_(quantized: Cluster) -> Engine:
        gm = quantized.gm
        shapes = [str(tuple(b.shape)) for b in gm.buffers() if b.dtype == torch.int8]
        kinds = {
            str(n.target).split(".")[1] for n in gm.graph.nodes if "decomposed" in str(n.target)
        }
        compiled.append(len(shapes))
        ms = 1.0 + sum(costs[s] for s in shapes) + sum(costs.get(k, 0.0) for k in kinds)
        return Engine(1e-3 * ms, clock)

    def profile(
        engine: Engine, weights: Mapping[str, torch.Tensor], inputs: Inputs
    ) -> LayerProfile:
        """A millisecond per layer, and what it costs more or less in int8."""
        costly = {
            n: costs[str(tuple(w.shape))] for n, w in weights.items() if w.dtype == torch.int8
        }
        return LayerProfile({n: 1e-3 * (1 + costly.get(n, 0.0)) for n in weights}, 0.0)

    prepared = prepare(cluster, config)
    plans = make_plans(prepared, config)
    return choose(cluster, prepared, plans, config, compile_, clock, profile), compiled


WIDE, NARROW, CONV = "(256, 32)", "(32, 256)", "(4, 4, 1)"


def test_a_layer_that_wins_no_time_is_not_quantized(cluster_of: Make) -> None:
    costs = {WIDE: -0.3, NARROW: 0.1, CONV: 0.02}
    found, compiled = chosen(cluster_of, costs, quantization_type="static")
    assert compiled == [3, 0, 1, 1]  # all, none, the clear one, and that again to keep
    by_name = {layer.layer: layer for layer in found.layers}
    assert {n: layer.precision for n, layer in by_name.items()} == {
        "wide": "int8 static",
        "narrow": "fp32",
        "conv": "fp32",
    }
    assert by_name["wide"].saved_ms == pytest.approx(0.3)
    together = "quantizing saves it and 1 layers measured with it -0.1200 ms"
    assert by_name["narrow"].why.startswith(together)
    assert found.engine.seconds == pytest.approx(0.7e-3)


def test_where_nothing_wins_nothing_is_quantized(cluster_of: Make) -> None:
    with pytest.raises(Refused, match="None of its 3 layers is faster in 8 bits") as caught:
        chosen(cluster_of, {WIDE: 0.1, NARROW: 0.1, CONV: 0.1}, quantization_type="static")
    assert caught.value.code == Code.SLOWER


@pytest.mark.parametrize(
    ("slow", "kind"), [("quantize_per_token", "static"), ("quantize_per_tensor", "dynamic")]
)
def test_auto_takes_what_is_faster(cluster_of: Make, slow: str, kind: str) -> None:
    costs = {WIDE: -0.2, NARROW: -0.2, CONV: -0.01, slow: 0.3}
    found, _ = chosen(cluster_of, costs)
    kinds = {layer.layer: layer.precision for layer in found.layers}
    if kind == "static":
        assert kinds["wide"] == kinds["narrow"] == "int8 static"
    else:  # the convolution has no other way, and is not worth it
        assert found.engine.seconds == pytest.approx(0.6e-3)
        assert (kinds["wide"], kinds["conv"]) == ("int8 dynamic", "fp32")


def test_no_time_left_means_no_more_compilations(
    cluster_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SEARCH_S", 0.0)
    found, compiled = chosen(cluster_of, {WIDE: -0.3, NARROW: 0.1, CONV: 0.02})
    assert len(compiled) == 1
    assert all(layer.precision != "fp32" for layer in found.layers)


def test_unmeasured_the_first_plan_is_taken(cluster_of: Make) -> None:
    found, compiled = chosen(cluster_of, {WIDE: 9.0, NARROW: 9.0, CONV: 9.0}, timing=False)
    assert len(compiled) == 1
    assert all(layer.saved_ms is None for layer in found.layers)


def test_clear_winners_need_no_compilation_of_their_own(cluster_of: Make) -> None:
    costs = {WIDE: -0.3, NARROW: -0.2, CONV: -0.2}
    found, compiled = chosen(cluster_of, costs, quantization_type="static")
    assert compiled == [3, 0]
    assert [layer.saved_ms for layer in found.layers] == pytest.approx([0.3, 0.2, 0.2])


def test_of_doubtful_layers_those_that_win_stay(cluster_of: Make) -> None:
    """Together they win; looked at one by one, one of them loses."""
    costs = {WIDE: -0.09, NARROW: -0.09, CONV: 0.05}
    found, compiled = chosen(cluster_of, costs, quantization_type="static")
    assert compiled == [
        3,
        0,
        2,
        2,
        2,
        2,
    ]  # all, none, less each of the three, less the one that loses
    assert [layer.precision for layer in found.layers] == ["int8 static"] * 2 + ["fp32"]


def test_what_wins_by_its_profile_alone_is_refused(cluster_of: Make) -> None:
    """The whole is what counts: quantizing activations takes more than all layers save."""
    costs = {WIDE: -0.3, NARROW: -0.2, CONV: -0.2, "quantize_per_tensor": 0.8}
    with pytest.raises(Refused, match="With 3 layers in 8 bits it is not faster than in float"):
        chosen(cluster_of, costs, quantization_type="static")
