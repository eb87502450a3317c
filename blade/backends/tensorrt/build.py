# SPDX-License-Identifier: Apache-2.0
"""Build a TensorRT engine from a cluster. TensorRT-RTX needs no GPU; ``tensorrt`` times kernels on one.

    built = build_engine(cluster, config)
    built.plan, built.head.profiles, built.model.program

The network is strongly typed: casts in the graph select 16 bits (``insert_casts``, with
``Config.enable_fp16``), QuantizeLinear and DequantizeLinear in the graph select int8. With a GPU, plans are
stripped of their weights, so that a saved file has them once; TensorRT-RTX cannot do that without a GPU.

Plans and kernel timings are cached, plans by everything that they are built from: a machine without a GPU can
fill the cache of one with a GPU.
"""

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch

from blade.backends.shared.half_precision import half_of
from blade.backends.shared.onnx.model import OnnxModel, external_weights, to_onnx
from blade.backends.tensorrt.deserialize import open_engine
from blade.backends.tensorrt.dtypes import NAMES
from blade.backends.tensorrt.insert_casts import to_half
from blade.backends.tensorrt.kernel_cache import device_name
from blade.backends.tensorrt.library import TensorRTLibrary, find_library, why_no_device
from blade.backends.tensorrt.network import new_network, parse
from blade.backends.tensorrt.payload import TensorRTHeader, TensorRTPayload, TensorSpec
from blade.backends.tensorrt.profiles import Profiles, find_profiles
from blade.config import Config
from blade.core.cluster import Cluster
from blade.core.disk_cache import (
    DiskCache,
    code_version,
    digest,
    open_cache,
)
from blade.core.reason import Code
from blade.errors import BackendError, Refused
from blade.program.guard_program import with_ranges

log = logging.getLogger(__name__)

PLANS, TIMINGS = "tensorrt-plan", "tensorrt-timing"
STRIPPED = ("STRIP_PLAN", "REFIT_IDENTICAL")


@dataclass(frozen=True)
class BuiltEngine:
    """An engine that was built but not loaded.

    ``program`` has the guards (FORMAT.md), including the profiles' ranges. ``constants``: the weights' names
    in the cluster, in the order that the engine takes them.
    """

    head: TensorRTHeader
    plan: bytes
    graph: bytes
    program: str
    constants: tuple[str, ...]

    def payload(self) -> bytes:
        return TensorRTPayload(self.head, self.plan, self.graph).to_bytes()


def build_engine(cluster: Cluster, config: Config) -> BuiltEngine:
    """Export, parse and build.

    Raises ``BackendError`` if no TensorRT is installed, ``Refused`` if it cannot build ``cluster``.
    """
    library = find_library()
    ranges = find_profiles(cluster, config)
    half = half_of(cluster, config)
    halved = cluster if half is None else to_half(cluster, half)
    model = to_onnx(
        halved, config, indices="trusted"
    )  # torch on CUDA does not raise either: it aborts
    weights = {name: attrgetter(held)(cluster.gm) for name, held in model.weights.items()}
    cache = open_cache(config.cache)
    job = _BuildJob(library, external_weights(model), weights, half is not None, cache)
    said: list[str] = []
    for profiles in ranges:
        variants = [_BuildVariant(profiles, stripped) for stripped in job.forms()]
        for variant in sorted(variants, key=job.is_new):
            plan = job.plan(variant, said)
            if plan is None:
                continue
            built = _built(cluster, job, model, variant, plan)
            if not variant.stripped or _takes_weights_back(library, built, weights, said):
                return built
        log.info("%s is not built for %s: %s", cluster.name, profiles.ranges, said)
    raise Refused(Code.CONVERSION_FAILED, library.said("does not build it", said))


@dataclass(frozen=True)
class _BuildVariant:
    """``stripped``: without weights in the plan."""

    profiles: Profiles
    stripped: bool


@dataclass(frozen=True)
class _BuildJob:
    library: TensorRTLibrary
    graph: bytes
    weights: Mapping[str, torch.Tensor]
    reduced: bool  # whether fewer mantissa bits than float32's are allowed
    cache: DiskCache | None

    def forms(self) -> tuple[bool, ...]:
        """Stripped or not, best first: weights can be left out if there is a device."""
        flags = [self.library.flag("BuilderFlag", name) for name in STRIPPED]
        can_strip = self.weights and all(f is not None for f in flags) and why_no_device() is None
        return (True, False) if can_strip else (False,)

    def key(self, variant: _BuildVariant) -> str:
        """The cache key of all that a plan depends on; TensorRT-RTX's do not depend on the device."""
        where = "any device" if self.library.is_rtx else device_name()
        parts = [code_version(), self.library.stamp, where, f"{self.reduced} {variant.stripped}"]
        return digest([*parts, repr(variant.profiles.shapes), self.graph, *self._contents])

    def is_new(self, variant: _BuildVariant) -> bool:
        """Whether it must be built, because no machine has put the plan into the cache."""
        return self.cache is None or self.cache.get(PLANS, self.key(variant)) is None

    def plan(self, variant: _BuildVariant, said: list[str]) -> bytes | None:
        """The serialized engine, from the cache or built; ``None`` on failure, which ``said`` explains."""
        key = self.key(variant)
        if self.cache is not None and (stored := self.cache.get(PLANS, key)) is not None:
            return stored
        with self.library.errors() as errors:
            plan = self._build(variant)
        said += errors
        if plan is not None and self.cache is not None:
            self.cache.put(PLANS, key, plan)
        return plan

    def _build(self, variant: _BuildVariant) -> bytes | None:
        builder, network, _ = self._network
        settings = builder.create_builder_config()
        self._set_flags(settings, variant.stripped)
        for profile in variant.profiles.shapes:
            added = builder.create_optimization_profile()
            for i, shapes in enumerate(zip(profile.min, profile.opt, profile.max, strict=True)):
                added.set_shape(network.get_input(i).name, *shapes)
            if settings.add_optimization_profile(added) < 0:
                return None
        timings = TimingCache(self.library, settings, self.cache)
        plan = builder.build_serialized_network(network, settings)
        timings.keep()
        return None if plan is None else bytes(plan)

    def _set_flags(self, settings: Any, stripped: bool) -> None:
        """Set the flags for IEEE 754 arithmetic; a version that lacks one does not need it."""
        for name in ("STRICT_NANS", *(STRIPPED if stripped else ())):
            if (flag := self.library.flag("BuilderFlag", name)) is not None:
                settings.set_flag(flag)
        # TF32 has the mantissa of float16, so it is allowed if float16 is.
        if (tf32 := self.library.flag("BuilderFlag", "TF32")) is not None and not self.reduced:
            settings.clear_flag(tf32)

    @cached_property
    def _network(self) -> tuple[Any, Any, Any]:
        """Builder, network, and the memory that the network reads during the build. Raises ``Refused``."""
        builder = self.library.trt.Builder(self.library.logger)
        network = new_network(self.library, builder)
        held = parse(self.library, network, self.graph, self.weights)
        return builder, network, held

    @cached_property
    def _contents(self) -> tuple[str, ...]:
        return tuple(f"{name} {_content(tensor)}" for name, tensor in self.weights.items())


def _takes_weights_back(
    library: TensorRTLibrary,
    built: BuiltEngine,
    weights: Mapping[str, torch.Tensor],
    said: list[str],
) -> bool:
    """Whether the stripped plan can be refitted, tested before it replaces one that contains its weights."""
    payload = TensorRTPayload(built.head, built.plan, built.graph)
    try:
        open_engine(library, payload, list(weights.values()))
    except BackendError as error:
        said.append(str(error))
        return False
    return True


class TimingCache:
    """The timing cache of a build: kernels are timed only once per device.

    TensorRT-RTX times nothing during the build; ``kernel_cache`` stores the kernels that it compiles later.
    """

    def __init__(self, library: TensorRTLibrary, settings: Any, cache: DiskCache | None) -> None:
        self.settings, self.cache = settings, cache
        self.key = digest([library.stamp, device_name()])
        self.used = False
        if cache is not None and not library.is_rtx:
            stored = cache.get(TIMINGS, self.key) or b""
            made = settings.create_timing_cache(stored)
            self.used = made is not None and bool(settings.set_timing_cache(made, False))

    def keep(self) -> None:
        """Store the timings that the build has added."""
        held = self.settings.get_timing_cache() if self.used else None
        data = None if held is None else held.serialize()
        if data is not None and self.cache is not None:
            self.cache.put(TIMINGS, self.key, bytes(data))


def _built(
    cluster: Cluster, job: _BuildJob, model: OnnxModel, variant: _BuildVariant, plan: bytes
) -> BuiltEngine:
    fakes = [n.meta["val"] for n in cluster.gm.graph.nodes if n.op == "placeholder"]
    (returned,) = cluster.gm.graph.output_node().args
    assert isinstance(returned, (list, tuple)), returned
    results = [n.meta["val"] for n in returned]  # type: ignore[union-attr]
    weights = model.weights if variant.stripped else {}
    head = TensorRTHeader(
        library=job.library.stamp,
        inputs=tuple(_tensor(n, fake) for n, fake in zip(model.inputs, fakes, strict=True)),
        outputs=tuple(
            _tensor(name, fake, order)
            for name, fake, order in zip(model.outputs, results, model.orders, strict=True)
        ),
        profiles=variant.profiles.shapes,
        weights={name: k for k, name in enumerate(weights)},
        key="" if job.cache is None else job.key(variant),
    )
    program = with_ranges(model.program, variant.profiles.ranges)
    graph = job.graph if weights else b""
    return BuiltEngine(head, plan, graph, program, tuple(weights.values()))


def _tensor(name: str, fake: torch.Tensor, order: tuple[int, ...] | None = None) -> TensorSpec:
    if fake.dtype not in NAMES:
        raise Refused(Code.UNSUPPORTED_DTYPE, f"TensorRT has no {fake.dtype}, which {name} is.")
    return TensorSpec(name, NAMES[fake.dtype], fake.dim(), order)


def _content(tensor: torch.Tensor) -> str:
    held = tensor.detach().cpu().contiguous().flatten()
    digested = hashlib.sha256(held.view(torch.uint8).numpy().data).hexdigest()
    return f"{tensor.dtype} {list(tensor.shape)} {digested}"
