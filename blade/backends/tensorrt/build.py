# SPDX-License-Identifier: Apache-2.0
"""A cluster to a TensorRT engine. Needs no GPU with TensorRT-RTX; with ``tensorrt`` it times kernels on one.

    built = build_engine(cluster, config)
    built.plan, built.head.profiles, built.model.program

The network is strongly typed: 16 bits are casts in the graph (``half``, with ``Config.enable_fp16``), int8 is what
QuantizeLinear and DequantizeLinear in the graph say. Where there is a GPU, plans are stripped of their weights,
which a saved file then has once; TensorRT-RTX cannot do that without one.

Plans and timings of kernels are kept in the cache, plans by everything that they are built from: a machine
without a GPU can fill the cache of one that has one.
"""

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch

from blade.backends.base import Cluster
from blade.backends.tensorrt.deserialize import open_engine
from blade.backends.tensorrt.dtypes import NAMES
from blade.backends.tensorrt.half import to_half
from blade.backends.tensorrt.kernels import device_name
from blade.backends.tensorrt.library import Library, find_library, why_no_device
from blade.backends.tensorrt.network import new_network, parse
from blade.backends.tensorrt.payload import Head, Payload, Tensor
from blade.backends.tensorrt.profiles import Profiles, find_profiles
from blade.cache import Cache, code_version, digest, open_cache
from blade.config import Config
from blade.errors import BackendError, Refused
from blade.exchange.guards import with_ranges
from blade.exchange.half import half_of
from blade.exchange.onnx_model import OnnxModel, external_weights, to_onnx
from blade.reason import Code

log = logging.getLogger(__name__)

PLANS, TIMINGS = "tensorrt-plan", "tensorrt-timing"
STRIPPED = ("STRIP_PLAN", "REFIT_IDENTICAL")


@dataclass(frozen=True)
class Built:
    """An engine that was built and not loaded.

    ``program`` has the guards (FORMAT.md), the profiles' ranges among them. ``constants`` are the names in
    the cluster of the weights, in the order in which the engine has to be given them.
    """

    head: Head
    plan: bytes
    graph: bytes
    program: str
    constants: tuple[str, ...]

    def payload(self) -> bytes:
        return Payload(self.head, self.plan, self.graph).to_bytes()


def build_engine(cluster: Cluster, config: Config) -> Built:
    """Export, parse and build.

    Raises ``BackendError`` where no TensorRT is installed, ``Refused`` where it cannot build ``cluster``.
    """
    library = find_library()
    ranges = find_profiles(cluster, config)
    half = half_of(cluster, config)
    halved = cluster if half is None else to_half(cluster, half)
    model = to_onnx(halved, config, indices="trusted")  # nor does torch on CUDA, it aborts
    weights = {name: attrgetter(held)(cluster.gm) for name, held in model.weights.items()}
    cache = open_cache(config.cache)
    job = _Job(library, external_weights(model), weights, half is not None, cache)
    said: list[str] = []
    for profiles in ranges:
        variants = [_Variant(profiles, stripped) for stripped in job.forms()]
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
class _Variant:
    """``stripped``: without weights in the plan."""

    profiles: Profiles
    stripped: bool


@dataclass(frozen=True)
class _Job:
    library: Library
    graph: bytes
    weights: Mapping[str, torch.Tensor]
    reduced: bool  # whether fewer mantissa bits than float32's are allowed
    cache: Cache | None

    def forms(self) -> tuple[bool, ...]:
        """Stripped or not, best first: weights can be left out where a device compiles the plan."""
        flags = [self.library.flag("BuilderFlag", name) for name in STRIPPED]
        can_strip = self.weights and all(f is not None for f in flags) and why_no_device() is None
        return (True, False) if can_strip else (False,)

    def key(self, variant: _Variant) -> str:
        """Of everything a plan depends on; plans of TensorRT-RTX do not depend on the device."""
        where = "any device" if self.library.is_rtx else device_name()
        parts = [code_version(), self.library.stamp, where, f"{self.reduced} {variant.stripped}"]
        return digest([*parts, repr(variant.profiles.shapes), self.graph, *self._contents])

    def is_new(self, variant: _Variant) -> bool:
        """Whether it would have to be built; a plan that another machine has built is as good."""
        return self.cache is None or self.cache.get(PLANS, self.key(variant)) is None

    def plan(self, variant: _Variant, said: list[str]) -> bytes | None:
        """The serialized engine, from the cache or built; ``None`` if it cannot be, which ``said`` explains."""
        key = self.key(variant)
        if self.cache is not None and (stored := self.cache.get(PLANS, key)) is not None:
            return stored
        with self.library.errors() as errors:
            plan = self._build(variant)
        said += errors
        if plan is not None and self.cache is not None:
            self.cache.put(PLANS, key, plan)
        return plan

    def _build(self, variant: _Variant) -> bytes | None:
        builder, network, _ = self._network
        settings = builder.create_builder_config()
        self._set_flags(settings, variant.stripped)
        for profile in variant.profiles.shapes:
            added = builder.create_optimization_profile()
            for i, shapes in enumerate(zip(profile.min, profile.opt, profile.max, strict=True)):
                added.set_shape(network.get_input(i).name, *shapes)
            if settings.add_optimization_profile(added) < 0:
                return None
        timings = Timings(self.library, settings, self.cache)
        plan = builder.build_serialized_network(network, settings)
        timings.keep()
        return None if plan is None else bytes(plan)

    def _set_flags(self, settings: Any, stripped: bool) -> None:
        """Numbers as IEEE 754 has them: what a version lacks of these flags it has no need of."""
        for name in ("STRICT_NANS", *(STRIPPED if stripped else ())):
            if (flag := self.library.flag("BuilderFlag", name)) is not None:
                settings.set_flag(flag)
        # TF32 has the mantissa of float16: allowed where that is.
        if (tf32 := self.library.flag("BuilderFlag", "TF32")) is not None and not self.reduced:
            settings.clear_flag(tf32)

    @cached_property
    def _network(self) -> tuple[Any, Any, Any]:
        """Builder, network and what the network reads while it is built. Raises ``Refused``."""
        builder = self.library.trt.Builder(self.library.logger)
        network = new_network(self.library, builder)
        held = parse(self.library, network, self.graph, self.weights)
        return builder, network, held

    @cached_property
    def _contents(self) -> tuple[str, ...]:
        return tuple(f"{name} {_content(tensor)}" for name, tensor in self.weights.items())


def _takes_weights_back(
    library: Library, built: Built, weights: Mapping[str, torch.Tensor], said: list[str]
) -> bool:
    """Tried here, before the plan that has its weights inside is given up for it."""
    payload = Payload(built.head, built.plan, built.graph)
    try:
        open_engine(library, payload, list(weights.values()))
    except BackendError as error:
        said.append(str(error))
        return False
    return True


class Timings:
    """The timing cache of a build: what was measured once on a device is not measured again.

    TensorRT-RTX measures nothing when it builds; what it compiles later is kept by ``kernels``.
    """

    def __init__(self, library: Library, settings: Any, cache: Cache | None) -> None:
        self.settings, self.cache = settings, cache
        self.key = digest([library.stamp, device_name()])
        self.used = False
        if cache is not None and not library.is_rtx:
            stored = cache.get(TIMINGS, self.key) or b""
            made = settings.create_timing_cache(stored)
            self.used = made is not None and bool(settings.set_timing_cache(made, False))

    def keep(self) -> None:
        """Store what the build has added."""
        held = self.settings.get_timing_cache() if self.used else None
        data = None if held is None else held.serialize()
        if data is not None and self.cache is not None:
            self.cache.put(TIMINGS, self.key, bytes(data))


def _built(cluster: Cluster, job: _Job, model: OnnxModel, variant: _Variant, plan: bytes) -> Built:
    fakes = [n.meta["val"] for n in cluster.gm.graph.nodes if n.op == "placeholder"]
    (returned,) = cluster.gm.graph.output_node().args
    assert isinstance(returned, (list, tuple)), returned
    results = [n.meta["val"] for n in returned]  # type: ignore[union-attr]
    weights = model.weights if variant.stripped else {}
    head = Head(
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
    return Built(head, plan, graph, program, tuple(weights.values()))


def _tensor(name: str, fake: torch.Tensor, order: tuple[int, ...] | None = None) -> Tensor:
    if fake.dtype not in NAMES:
        raise Refused(Code.UNSUPPORTED_DTYPE, f"TensorRT has no {fake.dtype}, which {name} is.")
    return Tensor(name, NAMES[fake.dtype], fake.dim(), order)


def _content(tensor: torch.Tensor) -> str:
    held = tensor.detach().cpu().contiguous().flatten()
    digested = hashlib.sha256(held.view(torch.uint8).numpy().data).hexdigest()
    return f"{tensor.dtype} {list(tensor.shape)} {digested}"
