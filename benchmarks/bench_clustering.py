# SPDX-License-Identifier: Apache-2.0
"""How long clustering takes as the graph grows, by graph family.

    python benchmarks/bench_clustering.py --sizes 5000 50000 --families chain transformer

One JSON line per measurement on stdout, a table on stderr at the end. ``growth`` is the exponent k
of time ~ n^k between a size and the one before; 1 is linear. Times are CPU seconds, the best of
``--repeat`` runs of ``cluster`` alone on one core. 90% of the nodes are supported unless the family
says otherwise.
"""

import argparse
import json
import math
import platform
import sys
import time
from collections.abc import Callable
from random import Random

from blade.clustering import Problem, cluster, schedule

DISC, NOBODY = frozenset({"disc"}), frozenset[str]()
Edges = list[tuple[int, int, int]]


def _labels(size: int, random: Random, supported: float = 0.9) -> list[frozenset[str]]:
    return [DISC if random.random() < supported else NOBODY for _ in range(size)]


def chain(size: int, random: Random) -> Problem:
    """A chain with a skip connection over every eighth stretch, 10% unsupported."""
    edges = [(v, v + 1, 64) for v in range(size - 1)]
    edges += [(v, v + 8, 64) for v in range(0, size - 8, 8)]
    return Problem(_labels(size, random), edges)


def wide(size: int, random: Random) -> Problem:
    """One source, branches of 20 nodes, one sink: as wide as size / 20."""
    edges: Edges = []
    for first in range(1, size - 1, 20):
        last = min(first + 19, size - 2)
        edges += [(0, first, 64), (last, size - 1, 64)]
        edges += [(v, v + 1, 64) for v in range(first, last)]
    return Problem(_labels(size, random), edges)


def _transformer_edges(size: int) -> Edges:
    """Blocks of 14 nodes: norm, q, k, v, attention, projection, add; norm, MLP, add."""
    block = [(0, 1), (1, 2), (1, 3), (1, 4), (2, 5), (3, 5), (4, 6), (5, 6), (6, 7), (7, 8), (0, 8)]
    block += [(8, 9), (9, 10), (10, 11), (11, 12), (12, 13), (13, 14), (8, 14)]
    return [
        (first + p, first + c, 64 * (1 + (c - p) % 3))
        for first in range(0, size - 15, 14)
        for p, c in block
    ]


def transformer(size: int, random: Random) -> Problem:
    """Every node supported: has to become one group."""
    return Problem([DISC] * size, _transformer_edges(size))


def transformer_cut(size: int, random: Random) -> Problem:
    """Transformer blocks with 2% of the nodes unsupported."""
    return Problem(_labels(size, random, 0.98), _transformer_edges(size))


def transformer_mask(size: int, random: Random) -> Problem:
    """Like ``transformer_cut``, with one mask that every block reads."""
    edges = [(p + 1, c + 1, w) for p, c, w in _transformer_edges(size - 1)]
    edges += [(0, first + 6, 16) for first in range(0, size - 15, 14)]
    return Problem([NOBODY, *_labels(size - 1, random, 0.98)], edges)


def unet(size: int, random: Random) -> Problem:
    """A chain down and up again with a connection between the two halves at every tenth node."""
    edges = [(v, v + 1, 64) for v in range(size - 1)]
    edges += [(v, size - 1 - v, 4096) for v in range(0, size // 2 - 1, 10)]
    return Problem(_labels(size, random, 0.98), edges)


def random_local(size: int, random: Random) -> Problem:
    """Two inputs per node, each up to 50 nodes back."""
    edges = [
        (random.randrange(max(0, v - 50), v), v, random.randrange(100))
        for v in range(1, size)
        for _ in range(2)
    ]
    return Problem(_labels(size, random), edges)


def random_global(size: int, random: Random) -> Problem:
    """Two inputs per node from anywhere before it."""
    edges = [
        (random.randrange(v), v, random.randrange(100)) for v in range(1, size) for _ in range(2)
    ]
    return Problem(_labels(size, random), edges)


FAMILIES: dict[str, Callable[[int, Random], Problem]] = {
    f.__name__: f
    for f in (
        chain,
        wide,
        transformer,
        transformer_cut,
        transformer_mask,
        unet,
        random_local,
        random_global,
    )
}


def _measure(family: str, size: int, repeat: int) -> dict[str, object]:
    problem = FAMILIES[family](size, Random(1))
    times = []
    for _ in range(repeat):
        start = time.process_time()
        clustering = cluster(problem)
        times.append(time.process_time() - start)
    start = time.process_time()
    order = schedule(problem, [group.nodes for group in clustering.groups])
    return {
        "family": family,
        "nodes": size,
        "edges": len(problem.edges),
        "groups": len(clustering.groups),
        "units": len(order),
        "cluster_s": round(min(times), 4),
        "schedule_s": round(time.process_time() - start, 4),
        "python": platform.python_version(),
        "machine": platform.machine(),
    }


def main() -> None:
    """Measure every family at every size; the table goes to stderr, so that stdout is JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1000, 5000, 10000, 20000, 50000])
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--repeat", type=int, default=1)
    args = parser.parse_args()
    rows = [
        f"{'family':<16} {'nodes':>7} {'edges':>7} {'groups':>7} {'seconds':>9} "
        f"{'us/node':>8} {'growth':>7}"
    ]
    for family in args.families:
        before: tuple[int, float] | None = None
        for size in args.sizes:
            row = _measure(family, size, args.repeat)
            print(json.dumps(row), flush=True)
            seconds = float(str(row["cluster_s"]))
            growth = "" if before is None else f"{_exponent(before, (size, seconds)):.2f}"
            before = (size, seconds)
            rows.append(
                f"{family:<16} {size:>7} {row['edges']:>7} {row['groups']:>7} {seconds:>9.3f} "
                f"{1e6 * seconds / size:>8.1f} {growth:>7}"
            )
    print("\n".join(rows), file=sys.stderr)


def _exponent(before: tuple[int, float], now: tuple[int, float]) -> float:
    return math.log(max(now[1], 1e-9) / max(before[1], 1e-9)) / math.log(now[0] / before[0])


if __name__ == "__main__":
    main()
