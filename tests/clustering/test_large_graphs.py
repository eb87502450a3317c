# SPDX-License-Identifier: Apache-2.0
"""The graph of groups on 100 to 400 nodes: long searches, and moves past groups that do not merge.

The small problems of ``test_quotient.py`` can be shrunk but seldom need more than a step or two of
either search. Here paths are long; the oracle is plain reachability over the original arcs.
"""

from collections.abc import Sequence
from itertools import pairwise
from random import Random

import pytest

from blade.clustering.quotient_graph import Quotient

Arcs = list[tuple[int, int]]
A, B, BOTH = 1, 2, 3

# (how far an arc reaches, arcs per node, masks drawn from): deep to wide, mild to mixed labels.
SHAPES = {
    "deep, one backend": (4, 1.2, (A,)),
    "deep, mixed": (6, 1.5, (BOTH,) * 12 + (A, B)),
    "branches, some unsupported": (12, 1.3, (A,) * 30 + (0,)),
    "sparse, one backend": (60, 1.0, (A,)),
    "wide, mixed": (120, 1.5, (BOTH,) * 20 + (A, B, 0)),
    "wide, often unsupported": (400, 2.0, (BOTH,) * 6 + (A, B, 0)),
}


def _random_dag(
    rng: Random, reach: int, density: float, masks: Sequence[int]
) -> tuple[list[int], Arcs, list[int]]:
    """Masks, arcs and one topological order of a DAG whose numbering is shuffled."""
    size = rng.randint(100, 400)
    order = rng.sample(range(size), size)
    arcs = set()
    for _ in range(round(density * size)):
        i = rng.randrange(size - 1)
        arcs.add((order[i], order[rng.randint(i + 1, min(size - 1, i + reach))]))
    return [rng.choice(masks) for _ in order], sorted(arcs), order


def _closure(start: int, arcs: Arcs) -> set[int]:
    """Everything reachable from ``start``, itself included."""
    near: dict[int, list[int]] = {}
    for before, after in arcs:
        near.setdefault(before, []).append(after)
    found, todo = {start}, [start]
    while todo:
        fresh = set(near.get(todo.pop(), ())) - found
        found |= fresh
        todo += fresh
    return found


def _between(x: int, y: int, arcs: Arcs) -> set[int]:
    """x, y and all on a path from one to the other, either way round."""
    back = [(after, before) for before, after in arcs]
    one_way = _closure(x, arcs) & _closure(y, back)
    return {x, y} | one_way | (_closure(y, arcs) & _closure(x, back))


def _check(quotient: Quotient, masks: Sequence[int], arcs: Arcs, part: Sequence[int]) -> None:
    """The groups are ``part``'s, with the mask all members share, in a topological order."""
    find, key = quotient.sets.find, quotient.order.key
    common: dict[int, int] = {}
    named: dict[int, int] = {}
    for v, p in enumerate(part):
        common[p] = common.get(p, BOTH) & masks[v]
        assert named.setdefault(p, find(v)) == find(v), "a group is torn apart"
    assert len(set(named.values())) == len(named), "groups ran together"
    assert all(quotient.mask[g] == common[p] for p, g in named.items())
    listed = list(quotient.order)
    assert sorted(listed) == sorted(named.values())
    assert all(key[one] < key[two] for one, two in pairwise(listed))
    crossing = {(find(x), find(y)) for x, y in arcs if part[x] != part[y]}
    assert all(key[one] < key[two] for one, two in crossing)
    assert {(g, s) for g in listed for s in quotient.succ[g]} == crossing
    assert {(p, g) for g in listed for p in quotient.pred[g]} == crossing


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("shape", SHAPES)
def test_merges_match_plain_reachability(shape: str, seed: int) -> None:
    rng = Random(f"{shape} {seed}")
    masks, arcs, order = _random_dag(rng, *SHAPES[shape])
    quotient = Quotient(masks, arcs)
    part = list(range(len(masks)))
    for _ in range(40):
        i = rng.randrange(len(order))
        j = min(len(order) - 1, i + rng.choice((1, 3, 10, 30, 100)))
        x, y = rng.sample((order[i], order[j]), 2)
        lifted = [(part[p], part[c]) for p, c in arcs if part[p] != part[c]]
        hull = _between(part[x], part[y], lifted)
        common = BOTH
        for v, p in enumerate(part):
            common &= masks[v] if p in hull else BOTH
        legal = part[x] == part[y] or common != 0
        kept = list(quotient.order)
        assert quotient.merge(x, y) == legal
        if legal:
            part = [min(hull) if p in hull else p for p in part]
        else:
            assert list(quotient.order) == kept, "a refusal changes nothing"
        _check(quotient, masks, arcs, part)
