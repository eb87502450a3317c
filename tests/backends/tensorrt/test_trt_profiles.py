# SPDX-License-Identifier: Apache-2.0
"""Sizes an engine serves: declared ones, as they reach a cluster, and what is derived where nothing is."""

import pytest
import torch
from trt_clusters import Plain, cluster_of

from blade.backends.tensorrt.profiles import Profile, Profiles, find_profiles, nearest
from blade.config import Config
from blade.errors import Refused


def two(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """``y`` has the batch of ``x``; its length is its own."""
    return (x.mean(1, keepdim=True) + y.sum(1, keepdim=True)).relu() * 2


X, Y = torch.randn(4, 16), torch.randn(4, 6)


def best(config: Config, *samples: tuple[torch.Tensor, ...]) -> Profiles:
    cluster = cluster_of(Plain(two), list(samples) if samples else (X, Y), config)
    return find_profiles(cluster, config)[0]


def test_nothing_declared() -> None:
    found = best(Config())
    [profile] = found.shapes
    assert profile.opt == ((4, 16), (4, 6))
    assert profile.min == ((1, 1), (1, 1))
    (rows, columns), (rows_of_y, own) = profile.max
    assert rows == rows_of_y >= 8 and columns >= 32 and own >= 12
    assert found.ranges[0, 1] == (1, columns) and found.ranges[1, 0] == (1, rows)


def test_declared_ranges() -> None:
    config = Config(dynamic_shapes={0: {0: (2, 32), 1: 16}, 1: {0: (2, 32), 1: (5, 7)}})
    found = best(config)
    [profile] = found.shapes
    assert profile == Profile(((2, 16), (2, 5)), ((4, 16), (4, 6)), ((32, 16), (32, 7)))
    assert found.ranges == {(0, 0): (2, 32), (1, 0): (2, 32), (1, 1): (5, 7)}


def test_a_declared_range_from_one_reaches_down_to_one() -> None:
    config = Config(dynamic_shapes={0: {0: (1, 32), 1: 16}, 1: {0: (1, 32), 1: 6}})
    assert best(config).ranges == {(0, 0): (1, 32), (1, 0): (1, 32)}


TUNING = {
    "min": [[1, 8], [1, 2]],
    "opts": [[[2, 16], [2, 2]], [[16, 32], [16, 8]]],
    "max": [[24, 64], [24, 9]],
}


def test_each_tuning_shape_is_a_profile() -> None:
    found = best(Config(dynamic_tuning_shapes=TUNING))
    low, high = ((1, 8), (1, 2)), ((24, 64), (24, 9))
    assert found.shapes == (
        Profile(low, ((2, 16), (2, 2)), high),
        Profile(low, ((16, 32), (16, 8)), high),
    )
    assert found.ranges == {(0, 0): (1, 24), (0, 1): (8, 64), (1, 0): (1, 24), (1, 1): (2, 9)}


def test_tuning_shapes_reach_a_cluster_by_what_the_model_does_to_them() -> None:
    """The cluster sees rows and columns multiplied; an op before it is another cluster's."""
    config = Config(dynamic_tuning_shapes={"min": [[1, 4]], "opts": [[[3, 4]]], "max": [[8, 4]]})
    model = Plain(lambda x: torch.cat([x, x, x]).exp().relu())
    cluster = cluster_of(model, torch.randn(2, 4), config)
    [profile] = find_profiles(cluster, config)[0].shapes
    assert (profile.min, profile.opt, profile.max) == (((1, 4),), ((3, 4),), ((8, 4),))


def test_distinct_samples_are_profiles() -> None:
    samples = [(torch.randn(n, 16), torch.randn(n, 6)) for n in (2, 8, 2)]
    assert [p.opt[0][0] for p in best(Config(), *samples).shapes] == [2, 8]


def test_sizes_a_model_cannot_have_are_no_ends() -> None:
    model = Plain(lambda x: x.reshape(x.shape[0] // 7, 7, 4).softmax(1) + 1)
    [*_, last] = found = find_profiles(cluster_of(model, torch.randn(21, 4)), Config())
    for profiles in found:
        [profile] = profiles.shapes
        assert all(shape[0][0] % 7 == 0 for shape in (profile.min, profile.opt, profile.max))
    assert last.shapes[0].min == last.shapes[0].max == ((21, 4),)


def test_a_cluster_without_samples_is_refused() -> None:
    cluster = cluster_of(Plain(two), (X, Y))
    with pytest.raises(Refused, match="no sample"):
        find_profiles(type(cluster)(**{**cluster.__dict__, "samples": (), "probes": ()}), Config())


def test_nearest() -> None:
    profiles = [Profile(((1,),), ((n,),), ((99,),)) for n in (2, 8, 64)]
    chosen = {n: nearest(profiles, ((n,),)) for n in (0, 1, 2, 3, 5, 9, 22, 23, 99)}
    assert chosen == {0: 0, 1: 0, 2: 0, 3: 0, 5: 1, 9: 1, 22: 1, 23: 2, 99: 2}
