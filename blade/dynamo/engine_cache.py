# SPDX-License-Identifier: Apache-2.0
"""The engine cache of torch.compile: verified, timed engines of a graph's clusters on disk.

    stored = look_up_engines(cut, backends, config, training)    # neither lowered nor compiled again
    keep_engine(config, key, cut.fallback, candidate)            # once it was selected from

A key covers the cluster, the bytes of its own constants, the form of those that the caller may write
(``Cluster.live``: no engine depends on their values), the ``Config``, and what ``fingerprint.make_key`` adds. The
entries are data. A stored engine is compared with the original at its first call, at that call's inputs alone.
"""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule

from blade.config import Config
from blade.core.backend import Backend
from blade.core.cluster import Cluster
from blade.core.disk_cache import digest
from blade.fallback.cluster_codec import constants_of, describe_cluster
from blade.graph.fx.extract import FxExtracted
from blade.report import Timing, Verdict
from blade.runtime.engine import make_engine
from blade.selection.cache.fingerprint import (
    WeightDigests,
    bytes_of,
    identity,
    make_key,
    shapes_of,
)
from blade.selection.cache.section import Section
from blade.selection.plan.candidate import Candidate

log = logging.getLogger(__name__)

GRAPH_ENGINES = Section("graph_engine")
_LARGEST = 64 << 20  # bytes of constants that an engine has of its own


@dataclass(frozen=True)
class StoredEngine:
    """An engine from the cache; ``timings`` hold at their shapes."""

    engine: torch.ScriptObject
    verdict: Verdict
    timings: tuple[Timing, ...]


@dataclass(frozen=True)
class StoredEngines:
    """By backend: keys of engines, and the engines that are there."""

    keys: Mapping[str, str] = field(default_factory=dict)
    engines: Mapping[str, StoredEngine] = field(default_factory=dict)


def look_up_engines(
    cut: FxExtracted, backends: Sequence[Backend], config: Config, training: bool
) -> StoredEngines:
    """The keys, and what is stored; nothing with ``dump_dir``, which needs conversions."""
    versions = {b.name: v for b in backends if (v := b.version) is not None}
    if not GRAPH_ENGINES.is_on(config) or config.dump_dir is not None or not versions:
        return StoredEngines()
    base = make_key(cut.name, lambda: [*_parts(cut.cluster), f"training={training}"], config)
    if base is None:
        return StoredEngines()
    keys = {name: digest([base, name, str(version)]) for name, version in versions.items()}
    restore = partial(_restore, name=cut.name, weights=dict(cut.fallback.named_buffers()))
    found = {
        name: GRAPH_ENGINES.look_up(config, key, restore, cut.name) for name, key in keys.items()
    }
    engines = {name: one for name, one in found.items() if one is not None}
    if engines:
        log.info("%s: %s from the cache", cut.name, ", ".join(engines))
    return StoredEngines(keys, engines)


def keep_engine(config: Config, key: str | None, original: GraphModule, one: Candidate) -> None:
    """Store an engine that was verified and, unless ``config.timing`` is off, timed."""
    if key is None or one.stored or one.engine is None:
        return
    _, words, numbers, tensors = one.engine._get_method("__getstate__")()
    payload, *held = tensors
    names = {identity(t): name for name, t in original.named_buffers()}
    refs: list[Any] = []
    blobs = [bytes_of(payload)]
    for tensor in held:
        name = names.get(identity(tensor))
        if name is None and tensor.device.type != "cpu":
            return  # it would come back on the CPU
        if name is None:
            blobs.append(bytes_of(tensor))
        refs.append(name or [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)])
    if sum(map(len, blobs[1:])) > _LARGEST:
        return
    head = {
        "runner": words[1],
        "program": words[2],
        "limits": {name: value for name, value in numbers.items() if name != "checksum"},
        "constants": refs,
        "blobs": [len(blob) for blob in blobs],
        "verdict": asdict(one.verdict),
        "timings": [asdict(t) for t in one.timings],
    }
    text = json.dumps(head).encode()
    data = b"".join([len(text).to_bytes(8, "little"), text, *map(bytes, blobs)])
    GRAPH_ENGINES.keep(config, key, data)


def _restore(data: bytes, name: str, weights: Mapping[str, torch.Tensor]) -> StoredEngine:
    size = int.from_bytes(data[:8], "little")
    head = json.loads(data[8 : 8 + size])
    blobs = _split(memoryview(data)[8 + size :], head["blobs"])
    payload = bytes(next(blobs))
    held = [
        weights[ref] if isinstance(ref, str) else _tensor(next(blobs), *ref)
        for ref in head["constants"]
    ]
    engine = make_engine(name, head["runner"], head["program"], payload, held, head["limits"])
    timings = tuple(
        Timing(**{**one, "shapes": tuple(map(tuple, one["shapes"]))}) for one in head["timings"]
    )
    return StoredEngine(engine, Verdict(**head["verdict"]), timings)


def _split(data: memoryview, sizes: Sequence[int]) -> Iterator[memoryview]:
    start = 0
    for size in sizes:
        yield data[start : start + size]
        start += size


def _tensor(data: memoryview, dtype: str, shape: Sequence[int]) -> torch.Tensor:
    made = torch.empty(list(shape), dtype=getattr(torch, dtype))
    if made.numel():
        made.view(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return made


def _parts(cluster: Cluster) -> list[str]:
    constants = constants_of(cluster).items()
    held = (
        [f"{name} {shapes_of((t,))}" for name, t in constants]
        if cluster.live
        else WeightDigests().of(constants)
    )
    return [describe_cluster(cluster), f"live={cluster.live}", *held]
