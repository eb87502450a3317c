# SPDX-License-Identifier: Apache-2.0
"""The plan of every product: measured on the GPU that will run it, else from a table.

Per class of rows one tile, of products of 8 bits several, are measured against ATen's product with the following
group as a kernel of its own.
They are compiled together with the program's other units, so that all processors are busy once. What was
found is kept, by product, device and versions.
"""

import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import asdict

import sympy
import torch

from blade.backends.disc.facts import Facts
from blade.backends.disc.gpu.compile import Kept, compile_units
from blade.backends.disc.gpu.driver import DriverError, Function, load
from blade.backends.disc.gpu.emit import emit
from blade.backends.disc.gpu.gemm import Product, Tile, launch
from blade.backends.disc.gpu.measure import Bench, has_scaled_products, sizes_for, sizes_near
from blade.backends.disc.gpu.narrow_tiles import MANY
from blade.backends.disc.gpu.plan import Plan, classes_of, merged
from blade.backends.disc.gpu.target import GpuTarget
from blade.backends.disc.gpu.tiles import candidates, unmeasured
from blade.backends.disc.gpu.unit import Unit
from blade.backends.disc.kernel import Load, Store
from blade.backends.disc.steps import Counters
from blade.cache import code_version, digest

log = logging.getLogger(__name__)

WORTH = 0.97  # of ATen's time: what our kernel must not exceed to be taken


def choose(
    products: Iterable[Product],
    target: GpuTarget,
    facts: Facts,
    cache: Kept | None,
    others: Sequence[Unit] = (),
) -> dict[str, Plan]:
    """Plans by ``Product.key``. ``others``: units that may be compiled at the same time."""
    distinct = {product.key: product for product in products}
    if not distinct:
        return {}
    if not torch.cuda.is_available():
        return {key: unmeasured(product, target) for key, product in distinct.items()}
    keys = {key: _cache_key(key, target) for key in distinct}
    plans = {key: _kept(cache, keys[key]) for key in distinct}
    found = {key: plan for key, plan in plans.items() if plan is not None}
    rest = [product for key, product in distinct.items() if key not in found]
    for product, plan in zip(rest, _measured(rest, target, facts, cache, others), strict=True):
        found[product.key] = plan
        if cache is not None:
            cache.put("gemm", keys[product.key], _written(plan))
    return found


def _measured(
    products: Sequence[Product],
    target: GpuTarget,
    facts: Facts,
    cache: Kept | None,
    others: Sequence[Unit],
) -> list[Plan]:
    if not products:
        return []
    try:
        return _Measuring(products, target, facts, cache, others).plans()
    except (DriverError, torch.cuda.OutOfMemoryError, torch.AcceleratorError) as error:
        log.warning("products are not measured: %s", error)
        return [unmeasured(product, target) for product in products]


class _Measuring:
    """All that is compiled for the products of one program."""

    def __init__(
        self,
        products: Sequence[Product],
        target: GpuTarget,
        facts: Facts,
        cache: Kept | None,
        others: Sequence[Unit],
    ) -> None:
        self.products = products
        counters = Counters(1 << 16)
        self.tiles = {
            (p.key, most): candidates(p, most, target) for p in products for most in classes_of(p)
        }
        self.launches = {
            (p.key, tile): launch(p, tile, None, counters, facts, target.starts_early)
            for p in products
            for tile in {t: None for (key, _), ts in self.tiles.items() if key == p.key for t in ts}
        }
        self.follows = {p.key: emit(p.epilogue.kernel, target) for p in products if _follows(p)}
        units = [made.choice.unit for made in self.launches.values()]
        units += [choice.unit for choices in self.follows.values() for choice in choices]
        data = compile_units([*units, *others], target, cache)
        self.functions: dict[str, Function] = load(data, {unit.name for unit in units})

    def plans(self) -> list[Plan]:
        return [merged([(m, self.best(p, m)) for m in classes_of(p)]) for p in self.products]

    def best(self, product: Product, most: int | None) -> Tile | None:
        """The tile for this class, or ``None`` for ATen's product."""
        tiles = self.tiles[product.key, most]
        if product.scales is None and (most is None or not tiles):
            return None
        rows = product.rows if isinstance(product.rows, int) else most or MANY
        sizes = sizes_for(product, rows) if product.conv is None else sizes_near(product, rows)
        if sizes is None:
            return None if product.scales is None else tiles[-1]
        rows = int(sympy.sympify(product.rows).subs(sizes))
        bench = Bench(product, sizes, self.functions)
        if product.scales is not None:
            return self.fastest(product, tiles, bench)
        (tile,) = tiles
        theirs = bench.us(bench.theirs(self.follows.get(product.key, ())))
        ours = bench.us(bench.ours(self.launches[product.key, tile]))
        log.info(
            "product %d x %d of %d rows: %.2f us by ATen, %.2f us by %s",
            *(product.columns, product.depth, rows, theirs, ours, tile),
        )
        return tile if ours < WORTH * theirs else None

    def fastest(self, product: Product, tiles: Sequence[Tile], bench: Bench) -> Tile | None:
        """Of those for a product of 8 bits; ``None``: ATen's."""
        us: dict[Tile | None, float] = {
            t: bench.us(bench.ours(self.launches[product.key, t])) for t in tiles
        }
        if product.by_aten and has_scaled_products():
            us[None] = bench.us(bench.theirs(self.follows.get(product.key, ()))) / WORTH
        best = min(us, key=lambda tile: us[tile])
        log.info(
            "product %d x %d of %d rows in 8 bits: %.2f us by %s",
            *(product.columns, product.depth, bench.rows, us[best], best or "ATen"),
        )
        return best


def _follows(product: Product) -> bool:
    """Is there more after the product than its store?"""
    body = product.epilogue.kernel.body
    if not product.by_aten:
        return False  # nothing that would be a kernel of its own
    return not product.biased and not all(isinstance(s, (Load, Store)) for s in body)


def _cache_key(key: str, target: GpuTarget) -> str:
    name = torch.cuda.get_device_name()
    return digest(["gemm", key, name, repr(target), torch.__version__, code_version()])


def _written(plan: Plan) -> bytes:
    ranges = [(most, None if tile is None else asdict(tile)) for most, tile in plan.ranges]
    return json.dumps(ranges).encode()


def _kept(cache: Kept | None, key: str) -> Plan | None:
    data = None if cache is None else cache.get("gemm", key)
    if data is None:
        return None
    ranges = [(most, None if t is None else Tile(**t)) for most, t in json.loads(data)]
    return Plan(tuple(ranges))
