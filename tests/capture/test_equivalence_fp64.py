# SPDX-License-Identifier: Apache-2.0
"""Models in 16 bits: a result is right that is about as far from float64 as the model itself."""

import pytest
import torch
from torch import nn
from wide_bytes import WideBytes

from blade.capture import equivalence_fp64, reference_model
from blade.capture.equivalence import find_differences
from blade.capture.equivalence_fp64 import Fp64Model
from blade.capture.references import ReferenceRuns, run_references
from blade.config import Config
from blade.core.captured import Reference

DTYPE = torch.bfloat16
FEATURES = 64


class Chaotic(nn.Module):
    """Every layer makes differences larger, as deep networks with random weights do."""

    def __init__(self, layers: int = 12, wide: bool = False, factor: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        scale = 3.0 * FEATURES**-0.5
        self.weights = nn.ParameterList(
            nn.Parameter((torch.randn(FEATURES, FEATURES) * scale).to(DTYPE)) for _ in range(layers)
        )
        self.wide, self.factor = wide, factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = x.dtype
        for w in self.weights:
            x = torch.sin(x.float() @ w.float()) if self.wide else torch.sin(x @ w)
        return (self.factor * x).to(dtype)


class Narrowed(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x.double()).float()


class Noisy(Chaotic):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 0.1 * torch.randn_like(x)


def seen(model: nn.Module, rows: int = 4) -> ReferenceRuns:
    torch.manual_seed(1)
    x = torch.randn(rows, FEATURES, dtype=DTYPE)
    return run_references(model.eval(), x, Config(), bake=True)


def traced(model: nn.Module) -> torch.jit.ScriptModule:
    return torch.jit.trace(model.eval(), torch.randn(4, FEATURES, dtype=DTYPE))


def test_a_result_nearer_to_float64_than_the_original_is_right() -> None:
    """It is further from the original than what a shallow model's results may be."""
    observed, module = seen(Chaotic(5)), traced(Chaotic(5, wide=True))
    assert find_differences(module, observed.references)
    assert not find_differences(module, observed.references, original=observed.original)


def test_so_is_one_in_32_bits() -> None:
    """Of a model whose rounding grows until it is beyond what a shallow one's may be, as TF32 is at once."""
    torch.manual_seed(1)
    x = torch.randn(4, FEATURES)
    observed = run_references(Chaotic(11).float().eval(), x, Config(), bake=True)
    module = torch.jit.trace(Chaotic(11).double().eval(), x.double())
    narrowed = torch.jit.trace(Narrowed(module), x)
    assert find_differences(narrowed, observed.references)
    assert not find_differences(narrowed, observed.references, original=observed.original)


def test_an_error_beyond_twice_the_originals_is_wrong() -> None:
    observed = seen(Chaotic(2))
    module = traced(Chaotic(2, wide=True, factor=1.2))
    found = find_differences(module, observed.references, original=observed.original)
    assert len(found) == len(observed.references)
    assert all("from a run in float64; the original is" in why for _, why in found)


def test_what_draws_numbers_has_no_truth() -> None:
    observed = seen(Noisy(2))
    module = traced(Chaotic(2))
    _, why = find_differences(module, observed.references, original=observed.original)[0]
    assert "float64" not in why


def test_chaos_beyond_half_of_the_largest_value_is_no_yardstick() -> None:
    observed, module = seen(Chaotic(60)), traced(Chaotic(60, wide=True))
    found = find_differences(module, observed.references, original=observed.original)
    assert found and "float64" not in found[0][1]


def test_an_error_small_by_luck_counts_as_the_usual_one(monkeypatch: pytest.MonkeyPatch) -> None:
    observed = seen(Chaotic(1))
    lucky, *others = observed.references
    assert len(others) >= 2
    errors = {id(lucky): 0.0, **{id(one): 0.02 for one in others}}

    def own(_: Fp64Model, one: Reference, *rest: object) -> float:
        return errors[id(one)]

    monkeypatch.setattr(Fp64Model, "_own", own)
    exact = Fp64Model(observed.original, observed.references)
    want = lucky.answers[0][0]
    assert isinstance(want, torch.Tensor)
    off = float(want.abs().max()) * 0.03
    assert exact.why_not(lucky, 0, 0, want, want + off) is None
    assert exact.why_not(lucky, 0, 0, want, want + 2 * off)


def test_the_wide_model_is_a_copy() -> None:
    model = Chaotic(1).eval()
    observed = seen(model)
    wide = observed.original.in_fp64()
    (sample,) = observed.samples
    answer = wide(*(x.double() for x in sample))
    assert isinstance(answer, torch.Tensor) and answer.dtype == torch.float64
    assert all(p.dtype == DTYPE for p in model.parameters())


class Overflows(nn.Module):
    """Has no numbers in float64, as a model that masks with the least number of its own dtype, twice."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (float("nan") if x.dtype == torch.float64 else self.factor)


def test_where_float64_has_no_numbers_the_original_has_to_be_met() -> None:
    observed = seen(Overflows(2.0))
    assert not find_differences(
        traced(Overflows(2.0)), observed.references, original=observed.original
    )
    wrong = find_differences(
        traced(Overflows(2.5)), observed.references, original=observed.original
    )
    assert len(wrong) == len(observed.references)


def test_where_all_cancels_out_rounding_may_be_another(monkeypatch: pytest.MonkeyPatch) -> None:
    observed = seen(Chaotic(1))
    exact = Fp64Model(observed.original, observed.references)
    truth = torch.full((4,), 1e-16, dtype=torch.float64)
    monkeypatch.setattr(Fp64Model, "_truth", lambda *_: truth)
    noise = torch.tensor([0.0, 3e-8, -1e-8, 0.0])
    one = observed.references[0]
    assert exact.why_not(one, 0, 0, noise, torch.zeros(4)) is None
    assert exact.why_not(one, 0, 0, noise, noise.flip(0)) is None
    assert exact.why_not(one, 0, 0, noise, 3 * noise) == ""


def test_what_is_as_near_as_can_be_is_right_however_far_the_original_is() -> None:
    observed = seen(Chaotic(60))
    exact = Fp64Model(observed.original, observed.references)
    one = observed.references[0]
    want = one.answers[0][0]
    [truth] = observed.original.in_fp64()(*(x.double() for x in one.sample)).split(len(want))
    assert exact.why_not(one, 0, 0, want, truth.to(DTYPE)) is None
    assert exact.why_not(one, 0, 0, want, want) == ""


class Blocks(nn.Module):
    """Products, attention and a lookup, as in a decoder; each of the eight layers has 64 KiB in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, FEATURES)
        self.layers = nn.ModuleList(nn.Linear(FEATURES, 2 * FEATURES) for _ in range(8))
        self.norm = nn.LayerNorm(FEATURES)
        self.register_buffer("scale", torch.ones(FEATURES))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for layer in self.layers:
            q, v = layer(self.norm(x).to(layer.weight.dtype)).chunk(2, -1)
            x = x + self.scale * nn.functional.scaled_dot_product_attention(q, q, v, is_causal=True)
        return x


class Gated(Blocks):
    """Writes to a parameter, the same values, which only a copy permits."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.layers[0].weight.clamp_(-1, 1)
        return super().forward(ids)


def run_wide(
    model: type[Blocks], monkeypatch: pytest.MonkeyPatch, kept: int
) -> tuple[list[torch.Tensor], int]:
    """The outputs of the float64 model at each reference, and the most bytes of float64 alive."""
    monkeypatch.setattr(equivalence_fp64, "KEPT", kept)
    monkeypatch.setattr(reference_model, "WIDENED_AT_USE", 1 << 10)
    torch.manual_seed(0)
    ids = torch.randint(0, 32, (2, 9))
    observed = run_references(model().to(DTYPE).eval(), ids, Config(), bake=True)
    exact = Fp64Model(observed.original, observed.references)
    with WideBytes() as seen:
        found = [exact._truth(one, 0, 0) for one in observed.references]
    assert len(found) > 2
    return [t for t in found if t is not None], seen.peak


@pytest.mark.parametrize("model", [Blocks, Gated])
def test_large_weights_are_widened_at_use(
    model: type[Blocks], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, of_copy = run_wide(model, monkeypatch, 1 << 30)
    at_use, of_uses = run_wide(model, monkeypatch, 1 << 13)
    assert len(kept) == len(at_use)
    for want, got in zip(kept, at_use, strict=True):
        assert type(got) is torch.Tensor
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert of_copy >= 8 << 16
    assert (of_uses < 4 << 16) == (model is Blocks)  # outputs, results of ops and small weights


def test_outputs_are_kept_up_to_a_bound_and_errors_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    observed = seen(Chaotic(2))
    runs: list[Reference] = []
    run = Fp64Model._run

    def counted(self: Fp64Model, one: Reference) -> equivalence_fp64.Leaves | None:
        runs.append(one)
        return run(self, one)

    monkeypatch.setattr(Fp64Model, "_run", counted)
    monkeypatch.setattr(equivalence_fp64, "KEPT", 0)
    exact = Fp64Model(observed.original, observed.references)
    for one in observed.references:
        want = one.answers[0][0]
        assert exact.why_not(one, 0, 0, want, 1.5 * want)
        assert list(exact._found) == [id(runs[-1])]
    assert len(runs) <= 2 * len(observed.references)  # once for errors, once for values


class Cancels(nn.Module):
    """One number a row, which is nearly zero where the columns of a row are nearly equal."""

    def __init__(self, off: float = 0.0) -> None:
        super().__init__()
        self.off = off

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :32].sum(1, keepdim=True) - x[:, 32:].sum(1, keepdim=True) + self.off


def test_an_output_that_nearly_cancels_is_as_exact_as_it_is_elsewhere() -> None:
    """The one number of a recommender at one row: it is off by the rounding of what cancels."""
    torch.manual_seed(1)
    half = torch.randn(1, 32)
    near = torch.cat([half, half + 1e-7], 1)
    samples = [torch.randn(6, 64), near, torch.randn(3, 64)]
    observed = run_references(Cancels().eval(), [(x,) for x in samples], Config(), bake=True)
    own = observed.references

    def differences(off: float) -> int:
        module = torch.jit.trace(Cancels(off).eval(), near)
        return len(find_differences(module, own, original=observed.original))

    assert float(Cancels()(near).abs()) < 1e-4
    assert differences(4e-6) == 0
    assert differences(1e-3) > 0
    alone = run_references(Cancels().eval(), near, Config(), bake=True)
    module = torch.jit.trace(Cancels(4e-6).eval(), near)
    assert find_differences(module, alone.references, original=alone.original)


@pytest.mark.parametrize(("factor", "is_met"), [(1e-40, True), (1e-20, False)])
def test_numbers_that_have_lost_digits_are_not_compared_digit_by_digit(
    factor: float, is_met: bool
) -> None:
    """What vanishes is 0 to kernels that flush such numbers; 1e-20 is exact still."""
    x = torch.randn(4, FEATURES)
    observed = run_references(Overflows(factor).eval(), x, Config(), bake=True)
    module = torch.jit.trace(Overflows(1.01 * factor).eval(), x)
    assert bool(find_differences(module, observed.references)) != is_met
