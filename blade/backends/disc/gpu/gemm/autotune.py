# SPDX-License-Identifier: Apache-2.0
"""The plan of every product: timed on the target GPU if it is here, else taken from a table.

Per class of rows one tile (several for 8-bit products) is timed against ATen's product followed by the
group as a separate kernel. Candidates are compiled together with the program's other units, to use all
cores. The result is cached by product, device and versions.
"""

import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import asdict

import torch

from blade.backends.disc.gpu.compile.compile import KernelStore, compile_units
from blade.backends.disc.gpu.compile.driver import CudaFunction, load
from blade.backends.disc.gpu.compile.triton_unit import TritonUnit
from blade.backends.disc.gpu.emit.kernel import emit
from blade.backends.disc.gpu.gemm.benchmark import (
    GemmBenchmark,
    has_scaled_products,
    sizes_for,
    sizes_near,
    sizes_of_images,
)
from blade.backends.disc.gpu.gemm.plan import GemmPlan, classes_of, merged
from blade.backends.disc.gpu.gemm.product import GemmProduct, GemmTile, launch
from blade.backends.disc.gpu.gemm.tile_table import candidates, unmeasured
from blade.backends.disc.gpu.gemm.tile_table_8bit import MANY
from blade.backends.disc.ir.kernel import Load, Store
from blade.backends.disc.ir.size_facts import SizeRelations
from blade.backends.disc.program.instructions import Counters
from blade.backends.disc.target.gpu import GpuTarget
from blade.core.cuda_driver import DriverError
from blade.core.disk_cache import code_version, digest

log = logging.getLogger(__name__)

MANY_PIXELS = 65536
SIDE = 28  # of the images that a depthwise convolution is timed on, too: cuDNN has other kernels for small ones
MOST_ELEMENTS = 1 << 27  # of a result that is timed
WORTH = 0.97  # our kernel is chosen if it takes at most this fraction of ATen's time


def choose_plans(
    products: Iterable[GemmProduct],
    target: GpuTarget,
    facts: SizeRelations,
    cache: KernelStore | None,
    others: Sequence[TritonUnit] = (),
) -> dict[str, GemmPlan]:
    """Plans by ``GemmProduct.key``. ``others``: units to compile at the same time."""
    distinct = {product.key: product for product in products}
    if not distinct:
        return {}
    if not (target.here and torch.cuda.is_available()):
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
    products: Sequence[GemmProduct],
    target: GpuTarget,
    facts: SizeRelations,
    cache: KernelStore | None,
    others: Sequence[TritonUnit],
) -> list[GemmPlan]:
    if not products:
        return []
    try:
        return _Autotuning(products, target, facts, cache, others).plans()
    except (DriverError, torch.cuda.OutOfMemoryError, torch.AcceleratorError) as error:
        log.warning("products are not measured: %s", error)
        return [unmeasured(product, target) for product in products]


class _Autotuning:
    """The candidates for the products of one program."""

    def __init__(
        self,
        products: Sequence[GemmProduct],
        target: GpuTarget,
        facts: SizeRelations,
        cache: KernelStore | None,
        others: Sequence[TritonUnit],
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
        self.functions: dict[str, CudaFunction] = load(data, {unit.name for unit in units})

    def plans(self) -> list[GemmPlan]:
        return [merged([(m, self.best(p, m)) for m in classes_of(p)]) for p in self.products]

    def best(self, product: GemmProduct, most: int | None) -> GemmTile | None:
        """The tile for this class; ``None``: ATen's product."""
        tiles = self.tiles[product.key, most]
        if product.scales is None and not tiles:
            return None
        rows = product.rows if isinstance(product.rows, int) else most or _many(product)
        sizes = sizes_for(product, rows) if product.conv is None else sizes_near(product, rows)
        if sizes is None:
            return None if product.scales is None else tiles[-1]
        if product.scales is not None:
            return self.fastest(product, tiles, GemmBenchmark(product, sizes, self.functions))
        (tile,) = tiles
        small = sizes_of_images(product, rows, SIDE) if product.depthwise else None
        times = [
            self.times(product, tile, GemmBenchmark(product, one, self.functions))
            for one in (sizes, small)
            if one is not None
        ]
        for theirs, ours in times:
            log.info(
                "product %d x %d of %d rows: %.2f us by ATen, %.2f us by %s",
                *(product.columns, product.depth, rows, theirs, ours, tile),
            )
        return tile if all(ours < WORTH * theirs for theirs, ours in times) else None

    def times(
        self, product: GemmProduct, tile: GemmTile, bench: GemmBenchmark
    ) -> tuple[float, float]:
        """Microseconds by ATen and by ``tile``."""
        theirs = bench.us(bench.theirs(self.follows.get(product.key, ())))
        return theirs, bench.us(bench.ours(self.launches[product.key, tile]))

    def fastest(
        self, product: GemmProduct, tiles: Sequence[GemmTile], bench: GemmBenchmark
    ) -> GemmTile | None:
        """The fastest of ``tiles`` for an 8-bit product; ``None``: ATen's product."""
        us: dict[GemmTile | None, float] = {
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


def _many(product: GemmProduct) -> int:
    """What stands for any number of rows."""
    if product.conv is not None:
        return MANY_PIXELS
    return max(MANY // 4, min(MANY, MOST_ELEMENTS // product.columns))


def _follows(product: GemmProduct) -> bool:
    """Does the epilogue do more than store the product?"""
    body = product.epilogue.kernel.body
    if not product.by_aten:
        return False  # there would be no separate kernel
    return not product.biased and not all(isinstance(s, (Load, Store)) for s in body)


def _cache_key(key: str, target: GpuTarget) -> str:
    name = torch.cuda.get_device_name()
    return digest(["gemm", key, name, repr(target), torch.__version__, code_version()])


def _written(plan: GemmPlan) -> bytes:
    ranges = [(most, None if tile is None else asdict(tile)) for most, tile in plan.ranges]
    return json.dumps(ranges).encode()


def _kept(cache: KernelStore | None, key: str) -> GemmPlan | None:
    data = None if cache is None else cache.get("gemm", key)
    if data is None:
        return None
    ranges = [(most, None if t is None else GemmTile(**t)) for most, t in json.loads(data)]
    return GemmPlan(tuple(ranges))
