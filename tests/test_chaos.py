# SPDX-License-Identifier: Apache-2.0
"""A real model whose engines fail at random, call by call: no answer is lost and none is wrong."""

import copy
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from fake_backends import Fake, registered

import blade
from blade.core.reason import Code

pytestmark = pytest.mark.needs("runtime", "minilm")

CALLS = 1000
LAYERS = 2


class Coin:
    """A fault that is right until ``start``; then each call is right, raises, or is of a wrong form."""

    def __init__(self) -> None:
        self.rng = random.Random(0)
        self.lock = threading.Lock()
        self.counts = {"right": 0, "raises": 0, "wrong form": 0}
        self.started = False

    def __call__(
        self, outputs: list[torch.Tensor], inputs: Sequence[torch.Tensor], call: int
    ) -> Sequence[torch.Tensor]:
        if not self.started:
            return outputs
        with self.lock:
            side = self.rng.choice(list(self.counts))
            self.counts[side] += 1
        if side == "raises":
            raise self.rng.choice(
                [RuntimeError("out of luck"), MemoryError(), torch.OutOfMemoryError("64 GiB")]
            )
        if side == "wrong form":
            spoil = self.rng.choice(SPOILS)
            return spoil(outputs)
        return outputs


SPOILS: list[Callable[[list[torch.Tensor]], list[torch.Tensor]]] = [
    lambda outputs: [o[:0] for o in outputs],
    lambda outputs: [o.double() for o in outputs],
    lambda outputs: [o[None] for o in outputs],
    lambda outputs: [*outputs, outputs[0]],
    lambda outputs: outputs[1:],
]


@pytest.fixture(scope="module")
def small_minilm(minilm: torch.nn.Module) -> torch.nn.Module:
    """The real weights and ops; fewer layers, since all is run by an interpreter."""
    small = copy.deepcopy(minilm)
    small.encoder.layer = small.encoder.layer[:LAYERS]
    return small.eval()


def test_every_answer_is_the_originals(
    small_minilm: torch.nn.Module, minilm_inputs: Callable[..., dict[str, torch.Tensor]]
) -> None:
    coin = Coin()
    fake = Fake(run=coin, even_only=True)  # the guard turns odd batches away
    with registered(fake):
        # layer_norm stays TorchScript: several engines, each called with what others answered
        config = blade.Config(
            optimization_pipeline="fake",
            timing=False,
            strict=True,
            max_failures=10**9,
            customize_op_black_list=["aten::layer_norm"],
        )
        optimized = blade.optimize(small_minilm, minilm_inputs(2, 8), config)
        engines = blade.stats(optimized)
        assert len(engines) >= LAYERS
        samples = [minilm_inputs(b, n, seed=b * n) for b in (2, 3, 4) for n in (3, 5, 8)]
        with torch.no_grad():
            wanted = [small_minilm(**s).last_hidden_state for s in samples]
        coin.started = True

        def call(i: int) -> float:
            with torch.no_grad():
                got = optimized(**samples[i % len(samples)])
            answer = got["last_hidden_state"] if isinstance(got, dict) else got[0]
            want = wanted[i % len(samples)]
            assert answer.shape == want.shape
            assert answer.dtype == want.dtype
            return float((answer - want).abs().max())

        rounds = 3 * CALLS // (2 * len(engines)) + 9  # a third of the calls is turned away
        with ThreadPoolExecutor(2) as pool:
            worst = max(pool.map(call, range(rounds)))
    assert worst < 2e-5
    assert sum(coin.counts.values()) >= CALLS
    assert min(coin.counts.values()) > CALLS // 5
    stats = blade.stats(optimized).values()
    assert sum(s["engine_runs"] for s in stats) == coin.counts["right"]
    assert sum(s.get(Code.GUARD_SHAPE.value, 0) for s in stats) > CALLS // 5
    failed = coin.counts["raises"] + coin.counts["wrong form"]
    assert sum(s.get(Code.ENGINE_RAISED.value, 0) for s in stats) == failed
