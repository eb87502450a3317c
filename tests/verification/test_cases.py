# SPDX-License-Identifier: Apache-2.0
"""cases: what is derived from the samples, and that dimensions that belong together move together."""

import torch

from blade.verification.cases import Case, derived_shapes, random_contents, verification_cases
from blade.verification.generators import Generators


def _ids(batch: int, length: int) -> tuple[torch.Tensor, ...]:
    """Token ids, a mask of ones, and an embedding whose last axis is fixed."""
    ids = torch.arange(batch * length).reshape(batch, length) + 5
    return ids, torch.ones_like(ids), torch.randn(batch, length, 4)


SAMPLES = [_ids(2, 9)]
PROBES = [_ids(3, 11), _ids(5, 7)]


def _by_name(every: list[Case]) -> dict[str, Case]:
    named = {case.name: case for case in every}
    assert len(named) == len(every)
    return named


def _shapes(case: Case) -> list[tuple[int, ...]]:
    return [tuple(t.shape) for t in case.inputs]


def test_samples_and_probes_come_first_as_they_are() -> None:
    first = list(verification_cases(SAMPLES, PROBES))[:3]
    assert [case.kind for case in first] == ["sample", "probe", "probe"]
    assert all(a is b for a, b in zip(first[0].inputs, SAMPLES[0]))


def test_derived_ones_end_with_the_time_and_given_ones_do_not() -> None:
    assert [c.kind for c in verification_cases(SAMPLES, PROBES, seconds=0.0)] == [
        "sample",
        "probe",
        "probe",
    ]
    assert len(list(verification_cases(SAMPLES, PROBES, seconds=60.0))) == len(
        list(verification_cases(SAMPLES, PROBES))
    )


def test_sizes_one_and_odd_move_shared_dimensions_together() -> None:
    named = _by_name(list(verification_cases(SAMPLES, PROBES)))
    assert _shapes(named["size 1"]) == [(1, 1), (1, 1), (1, 1, 4)]
    # The largest of samples and probes (5 x 7) is cut; batch and length move each on their own.
    assert _shapes(named["size 1 in dimension 0"]) == [(1, 7), (1, 7), (1, 7, 4)]
    assert _shapes(named["size 1 in dimension 1"]) == [(5, 1), (5, 1), (5, 1, 4)]
    for shape in _shapes(named["odd sizes"]):
        assert shape[0] % 2 == 1
        assert shape[1] % 2 == 1
    assert all(t.is_contiguous() for t in named["odd sizes"].inputs)


def test_contents_change_and_stay_in_range() -> None:
    named = _by_name(list(verification_cases(SAMPLES, PROBES)))
    ids, mask, x = named["random contents"].inputs
    old_ids, _, old_x = SAMPLES[0]
    assert not torch.equal(ids, old_ids)
    assert ids.min() >= old_ids.min()
    assert ids.max() <= old_ids.max()
    assert set(mask.unique().tolist()) == {0, 1}, "a mask of ones gets zeros"
    assert x.min() >= old_x.min()
    assert x.max() <= old_x.max()
    shuffled = named["shuffled contents"].inputs[0]
    assert not torch.equal(shuffled, old_ids)
    assert torch.equal(shuffled.flatten().sort().values, old_ids.flatten())


def test_another_layout_has_the_same_values() -> None:
    case = _by_name(list(verification_cases(SAMPLES, PROBES)))["transposed layout"]
    for old, new in zip(SAMPLES[0], case.inputs):
        assert torch.equal(old, new)
        assert not new.is_contiguous()


def test_deterministic() -> None:
    for a, b in zip(
        verification_cases(SAMPLES, PROBES), verification_cases(SAMPLES, PROBES), strict=True
    ):
        assert a.name == b.name
        torch.testing.assert_close(a.inputs, b.inputs, rtol=0, atol=0, equal_nan=True)


def test_kinds_names_and_shapes_are_known_without_contents() -> None:
    derived = [c for c in verification_cases(SAMPLES, PROBES) if c.kind not in ("sample", "probe")]
    planned = list(derived_shapes(SAMPLES, PROBES))
    assert planned == [(c.kind, c.name, [t.shape for t in c.inputs]) for c in derived]


def test_the_callers_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    list(verification_cases(SAMPLES, PROBES))
    assert torch.equal(before, torch.get_rng_state())


def test_fixed_sizes_empty_scalars_and_odd_dtypes() -> None:
    odd = (
        torch.tensor(2.0),
        torch.empty(0, 3),
        torch.full((2,), torch.inf),
        torch.ones(2, dtype=torch.cfloat),
        torch.tensor([True, False]),
    )
    every = list(verification_cases([odd], []))
    assert {case.kind for case in every} == {"sample", "contents", "layout"}
    for case in every:
        assert _shapes(case) == [tuple(t.shape) for t in odd]
        assert [t.dtype for t in case.inputs] == [t.dtype for t in odd]
    assert list(verification_cases([], [])) == []


def test_extreme_contents() -> None:
    named = _by_name(list(verification_cases(SAMPLES, PROBES)))
    ids, mask, x = SAMPLES[0]
    for name, scale in (("large contents", 100.0), ("small contents", 1e-20), ("zeros", 0.0)):
        assert torch.equal(named[name].inputs[2], x * scale)
    odd = named["non-finite contents"].inputs[2]
    assert (odd.shape, int(odd.isinf().sum()), int(odd.isnan().sum())) == (x.shape, 2, 1)
    for case in named.values():
        if case.name in ("large contents", "zeros", "non-finite contents"):
            assert torch.equal(case.inputs[0], ids)  # indices stay legal
            assert torch.equal(case.inputs[1], mask)


def test_extreme_contents_are_for_floats_and_fit_the_smallest() -> None:
    assert "zeros" not in _by_name(list(verification_cases([(torch.arange(4),)], [])))
    for sample in (torch.tensor(2.0), torch.ones(1), torch.ones(0, 3)):
        named = _by_name(list(verification_cases([(sample,)], [])))
        assert named["non-finite contents"].inputs[0].shape == sample.shape


def test_integers_are_drawn_from_the_whole_of_int64() -> None:
    low, high = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
    for given in ([low, high], [high, high], [0, high]):
        tensor = torch.tensor(given)
        drawn = random_contents(tensor, Generators(0))
        assert drawn.shape == tensor.shape and int(drawn.min()) >= min(given) - 1


def test_selections_have_none_one_and_many() -> None:
    x = torch.tensor([[0.5, -1.0, 2.0], [0.0, -3.0, 4.0]])
    mask = torch.tensor([True, False, True])
    ids = torch.tensor([3, 0, 2])
    cases = _by_name(list(verification_cases([(x, mask, ids)], (), selects=True)))
    counts = {
        name: [int((t > 0).sum()) for t in cases[name].inputs]
        for name in ("few selected", "one selected", "many selected")
    }
    assert counts == {
        "few selected": [0, 0, 0],
        "one selected": [0, 1, 1],
        "many selected": [5, 3, 3],
    }
    assert torch.equal(cases["many selected"].inputs[0], x.abs())
    assert not {"few selected"} & _by_name(list(verification_cases([(x,)], ()))).keys()


def test_selections_keep_empty_tensors_and_indices_in_range() -> None:
    ids = torch.tensor([[-2, 5], [1, 3]])
    cases = _by_name(list(verification_cases([(torch.empty(0, 3), ids)], (), selects=True)))
    for name in ("few selected", "one selected", "many selected"):
        empty, given = cases[name].inputs
        assert empty.shape == (0, 3)
        assert int(given.min()) >= -2 and int(given.max()) <= 5
