# SPDX-License-Identifier: Apache-2.0
"""The library instructions of a program that our kernels compute, and the groups fused into them.

    library = LibraryLaunches(fused, target, plans)
    library.group(group)     # the launches of a product and the group that follows it, or None
    library.value(value)     # those of an attention, a pool or a product; [] if fused into a group; None:
    ATen's

If a pointwise group is the only reader of a ``linear`` or ``conv``, and reads it at its own point, the
product's kernel computes the group for the numbers of rows where that is fastest; for others ATen computes
the product and the group is a kernel of its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import sympy

from blade.backends.disc.fusion.fuse import Fused, FusionGroup, is_instruction
from blade.backends.disc.gpu.attention.calls import attention, attention_key, long_class
from blade.backends.disc.gpu.compile.triton_unit import condition
from blade.backends.disc.gpu.emit.library_launch import AtenCall, LibraryLaunch
from blade.backends.disc.gpu.gemm.conv_as_gemm import is_of_pixels
from blade.backends.disc.gpu.gemm.depthwise import depthwise_window
from blade.backends.disc.gpu.gemm.epilogue import GemmEpilogue, group_epilogue, plain_epilogue
from blade.backends.disc.gpu.gemm.plan import GemmPlan, between
from blade.backends.disc.gpu.gemm.product import GemmProduct, launch, product_of
from blade.backends.disc.gpu.library.group_moments import moments
from blade.backends.disc.gpu.library.pool import pool
from blade.backends.disc.ir.graph import Value
from blade.backends.disc.ir.views import view_of
from blade.backends.disc.program.instructions import AttentionCall, Counters, ScratchBuffer
from blade.backends.disc.target.gpu import GpuTarget

Served = LibraryLaunch | AtenCall | AttentionCall
LINEAR = ("linear", "scaled_linear")
PRODUCTS = (*LINEAR, "conv")
MOST_BLOCKS = 4096  # of a product whose depth several programs split
MOST_DEPTHS = 24  # of convolutions that have code of their own; DenseNet-121 has 60


class LibraryLaunches:
    """The launches of one program. ``products``: those with a choice; ``plans``: the choices, by key."""

    def __init__(self, fused: Fused, target: GpuTarget) -> None:
        self.fused = fused
        self.target = target
        self.counters = Counters(MOST_BLOCKS)
        self.plans: Mapping[str, GemmPlan] = {}
        self.attentions: dict[tuple[str, str | None], tuple[Value, list[LibraryLaunch]]] = {}
        self.kernels: Mapping[str, str] = {}  # ATen's kernels for long attentions, by key

    @cached_property
    def followed(self) -> Mapping[int, tuple[FusionGroup, GemmProduct]]:
        """Id of a product -> the group that is computed with it."""
        found: dict[int, tuple[FusionGroup, GemmProduct]] = {}
        readers = self._readers()
        taken: set[int] = set()
        for value in reversed(
            self.fused.graph.values
        ):  # if a group reads two products, the later one
            if value.op not in PRODUCTS or value.id in self._returned:
                continue
            groups = readers.get(value.id, [])
            if len(groups) != 1 or groups[0] is None or id(groups[0]) in taken:
                continue
            epilogue = group_epilogue(groups[0], value, self.fused)
            product = None if epilogue is None else self._product_of(value, epilogue)
            if product is not None:
                taken.add(id(groups[0]))
                found[value.id] = (groups[0], product)
        return found

    def _product_of(self, value: Value, epilogue: GemmEpilogue) -> GemmProduct | None:
        product = product_of(value, epilogue)
        if product is None or value.op != "conv" or product.window is not None:
            return product
        return replace(product, any_depth=self._has_many_depths)

    @cached_property
    def _has_many_depths(self) -> bool:
        """Are there so many convolutions of different depth that a kernel for each takes minutes to compile?"""
        values = (v for v in self.fused.graph.values if v.op == "conv" and is_of_pixels(v))
        return len({v.args[1].shape[1] for v in values}) > MOST_DEPTHS

    @cached_property
    def alone(self) -> Mapping[int, GemmProduct]:
        """Id of a ``linear``, ``scaled_linear`` or depthwise ``conv`` without a fused group -> its product."""
        values = [v for v in self.fused.graph.values if v.id not in self.followed]
        others = [v for v in values if v.op in LINEAR or (v.op == "conv" and depthwise_window(v))]
        made = {v.id: product_of(v, plain_epilogue(v)) for v in others}
        return {k: product for k, product in made.items() if product is not None}

    @property
    def products(self) -> Sequence[GemmProduct]:
        """All products that need a plan."""
        return [*(product for _, product in self.followed.values()), *self.alone.values()]

    def follows(self, group: FusionGroup) -> tuple[Value, GemmProduct] | None:
        """The product into which ``group`` is fused, if there is one."""
        return self._products_of.get(id(group))

    @cached_property
    def _products_of(self) -> Mapping[int, tuple[Value, GemmProduct]]:
        values = (v for v in self.fused.graph.values if v.id in self.followed)
        pairs = ((v, *self.followed[v.id]) for v in values)
        return {id(group): (v, product) for v, group, product in pairs}

    def group(self, group: FusionGroup) -> list[Served] | None:
        """The launches for ``group`` and its product; after ATen's product the group is a separate launch.

        ``None``: the group is not fused into a product.
        """
        found = self.follows(group)
        return None if found is None else self._planned(*found, self.plans[found[1].key])

    def attention(self, value: Value) -> list[LibraryLaunch | AttentionCall]:
        """The launches for an attention."""
        key = attention_key(value)
        kernel = self.kernels.get(key)
        long = sympy.false if kernel is None else long_class(value, self.target)
        if (key, kernel) not in self.attentions:
            launches = attention(value, self.target, self.fused.facts, long)
            assert launches is not None, value  # lowering creates only attentions with a kernel
            self.attentions[key, kernel] = (value, launches)
        like, launches = self.attentions[key, kernel]
        moved: dict[int, Value | ScratchBuffer | Counters] = {
            id(old): new for old, new in zip(like.args, value.args, strict=True)
        }
        moved[id(like)] = value
        calls = [] if kernel is None else [AttentionCall(value, kernel, condition(long))]
        return calls + [
            replace(one, operands=tuple(moved.get(id(o), o) for o in one.operands))
            for one in launches
        ]

    def certain(self, value: Value) -> Sequence[LibraryLaunch | AttentionCall]:
        """The launches for ``value`` that depend on no plan."""
        if value.op == "attention":
            return self.attention(value)
        if value.op == "group_moments":
            return moments(value, self.target, self.counters, self.fused.facts)
        if value.op == "spatial":
            return pool(value, self.target, self.fused.facts) or []
        return []

    def value(self, value: Value) -> list[Served] | None:
        """The launches for a library instruction; ``[]``: fused into a group; ``None``: always ATen."""
        if value.id in self.followed:
            return []
        if launches := self.certain(value):
            return [*launches]
        product = self.alone.get(value.id)
        if product is None:
            return None
        plan = self.plans[product.key]
        return self._planned(value, product, plan.by_one if value.op == "conv" else plan)

    def _planned(self, value: Value, product: GemmProduct, plan: GemmPlan) -> list[Served]:
        steps: list[Served] = []
        low = 0
        for most, tile in plan.ranges:
            when = between(product.rows, low, most)
            low = 0 if most is None else most + 1
            if when == sympy.false:
                continue
            holds = condition(when)
            if tile is None:
                steps.append(AtenCall(value, holds))
            else:
                facts, early = self.fused.facts, self.target.starts_early
                steps.append(launch(product, tile, holds, self.counters, facts, early))
        return steps

    @cached_property
    def _returned(self) -> set[int]:
        views = map(view_of, self.fused.graph.outputs)
        return {view.base.id for view in views if view is not None}

    def _readers(self) -> dict[int, list[FusionGroup | None]]:
        """Value id -> the groups that read its memory, each once; ``None`` stands for an instruction."""
        readers: dict[int, list[FusionGroup | None]] = {}
        for v in self.fused.graph.values:
            group = self.fused.group_of.get(v.id)
            if group is None and not is_instruction(v):
                continue
            for a in v.args:
                view = view_of(a)
                if view is not None and group not in readers.setdefault(view.base.id, []):
                    readers[view.base.id].append(group)
        return readers
