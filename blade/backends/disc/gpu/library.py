# SPDX-License-Identifier: Apache-2.0
"""Which of a program's library instructions our kernels serve, and with which groups.

    library = Library(fused, target, plans)
    library.group(group)     # the launches of a product and the group that follows it, or None
    library.value(value)     # those of an attention, a pool or a product, [] if a group has it, None: ATen's

A pointwise group that is alone to read a ``linear`` or ``conv``, at its own point, is computed in the product's kernel
for the numbers of rows where that is fastest; for others ATen multiplies and the group runs by itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import sympy

from blade.backends.disc.fuse import Fused, Group, is_instruction
from blade.backends.disc.gpu.attention import attention, attention_key, long_class
from blade.backends.disc.gpu.epilogue import group_epilogue, plain_epilogue
from blade.backends.disc.gpu.gemm import Product, launch, product_of
from blade.backends.disc.gpu.launch import ByAten, LibraryLaunch
from blade.backends.disc.gpu.moments import moments
from blade.backends.disc.gpu.plan import Plan, between
from blade.backends.disc.gpu.pool import max_pool
from blade.backends.disc.gpu.target import GpuTarget
from blade.backends.disc.gpu.unit import condition
from blade.backends.disc.ir import Value
from blade.backends.disc.steps import AttentionCall, Counters, Scratch
from blade.backends.disc.views import view_of

Served = LibraryLaunch | ByAten | AttentionCall
LINEAR = ("linear", "scaled_linear")
PRODUCTS = (*LINEAR, "conv")
MOST_BLOCKS = 4096  # of a product whose depth several programs share


class Library:
    """Of one program. ``products`` are those there is a choice for; ``plans`` are the choices, by key."""

    def __init__(self, fused: Fused, target: GpuTarget) -> None:
        self.fused = fused
        self.target = target
        self.counters = Counters(MOST_BLOCKS)
        self.plans: Mapping[str, Plan] = {}
        self.attentions: dict[tuple[str, str | None], tuple[Value, list[LibraryLaunch]]] = {}
        self.kernels: Mapping[str, str] = {}  # of ATen, for long attentions, by key

    @cached_property
    def followed(self) -> Mapping[int, tuple[Group, Product]]:
        """Id of a product -> the group that is computed with it."""
        found: dict[int, tuple[Group, Product]] = {}
        readers = self._readers()
        taken: set[int] = set()
        for value in reversed(self.fused.graph.values):  # of two that a group reads, the later one
            if value.op not in PRODUCTS or value.id in self._returned:
                continue
            groups = readers.get(value.id, [])
            if len(groups) != 1 or groups[0] is None or id(groups[0]) in taken:
                continue
            epilogue = group_epilogue(groups[0], value, self.fused)
            product = None if epilogue is None else product_of(value, epilogue)
            if product is not None:
                taken.add(id(groups[0]))
                found[value.id] = (groups[0], product)
        return found

    @cached_property
    def alone(self) -> Mapping[int, Product]:
        """Id of a ``linear`` or ``scaled_linear`` that no group follows -> how it is computed."""
        values = self.fused.graph.values
        others = [v for v in values if v.op in LINEAR and v.id not in self.followed]
        made = {v.id: product_of(v, plain_epilogue(v)) for v in others}
        return {k: product for k, product in made.items() if product is not None}

    @property
    def products(self) -> Sequence[Product]:
        """Everything a plan is asked for."""
        return [*(product for _, product in self.followed.values()), *self.alone.values()]

    def follows(self, group: Group) -> tuple[Value, Product] | None:
        """The product that ``group`` is computed with, if there is one."""
        return self._products_of.get(id(group))

    @cached_property
    def _products_of(self) -> Mapping[int, tuple[Value, Product]]:
        values = (v for v in self.fused.graph.values if v.id in self.followed)
        pairs = ((v, *self.followed[v.id]) for v in values)
        return {id(group): (v, product) for v, group, product in pairs}

    def group(self, group: Group) -> list[Served] | None:
        """What runs for ``group`` and the product before it: by ATen, the group runs by itself after it.

        ``None``: it follows no product.
        """
        found = self.follows(group)
        return None if found is None else self._planned(*found)

    def attention(self, value: Value) -> list[LibraryLaunch | AttentionCall]:
        """What runs for an attention."""
        key = attention_key(value)
        kernel = self.kernels.get(key)
        long = sympy.false if kernel is None else long_class(value, self.target)
        if (key, kernel) not in self.attentions:
            launches = attention(value, self.target, self.fused.facts, long)
            assert launches is not None, value  # lowering makes none that has no kernel
            self.attentions[key, kernel] = (value, launches)
        like, launches = self.attentions[key, kernel]
        moved: dict[int, Value | Scratch | Counters] = {
            id(old): new for old, new in zip(like.args, value.args, strict=True)
        }
        moved[id(like)] = value
        calls = [] if kernel is None else [AttentionCall(value, kernel, condition(long))]
        return calls + [
            replace(one, operands=tuple(moved.get(id(o), o) for o in one.operands))
            for one in launches
        ]

    def certain(self, value: Value) -> Sequence[LibraryLaunch | AttentionCall]:
        """What runs for ``value`` whatever is chosen."""
        if value.op == "attention":
            return self.attention(value)
        if value.op == "group_moments":
            return moments(value, self.target, self.counters, self.fused.facts)
        if value.op == "spatial":
            return max_pool(value, self.target, self.fused.facts) or []
        return []

    def value(self, value: Value) -> list[Served] | None:
        """What runs for a library instruction; ``[]``: a group has it; ``None``: ATen's, always."""
        if value.id in self.followed:
            return []
        if launches := self.certain(value):
            return [*launches]
        product = self.alone.get(value.id)
        return None if product is None else self._planned(value, product)

    def _planned(self, value: Value, product: Product) -> list[Served]:
        steps: list[Served] = []
        low = 0
        for most, tile in self.plans[product.key].ranges:
            when = between(product.rows, low, most)
            low = 0 if most is None else most + 1
            if when == sympy.false:
                continue
            holds = condition(when)
            if tile is None:
                steps.append(ByAten(value, holds))
            else:
                facts, early = self.fused.facts, self.target.starts_early
                steps.append(launch(product, tile, holds, self.counters, facts, early))
        return steps

    @cached_property
    def _returned(self) -> set[int]:
        views = map(view_of, self.fused.graph.outputs)
        return {view.base.id for view in views if view is not None}

    def _readers(self) -> dict[int, list[Group | None]]:
        """Value id -> the groups that read its memory, each once; ``None``: an instruction."""
        readers: dict[int, list[Group | None]] = {}
        for v in self.fused.graph.values:
            group = self.fused.group_of.get(v.id)
            if group is None and not is_instruction(v):
                continue
            for a in v.args:
                view = view_of(a)
                if view is not None and group not in readers.setdefault(view.base.id, []):
                    readers[view.base.id].append(group)
        return readers
