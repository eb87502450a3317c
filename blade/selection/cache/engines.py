# SPDX-License-Identifier: Apache-2.0
"""The engine cache: verified, timed candidates on disk, which are neither compiled nor verified again.

    stored = look_up_engines(extracted, backends, config, contents)    # keys and candidates by backend
    put_engine(config, candidate)                                    # once it was timed

A key covers all that conversion and verdict depend on, except the values of the samples:

* the subgraph, every weight's bytes and layout, how its inputs and outputs are declared;
* dtypes, sizes and strides of every sample and probe, the values of inputs that are plain numbers;
* the ``Config``, except the fields without effect on engines (``fingerprint._SETTINGS_WITHOUT_EFFECT``);
* blade's code, torch's version and numerical settings, the number of threads, the machine, and what else the
  backend depends on (``Backend.version``; engines of a backend without one are not stored).

Every ``optimize`` compares the optimized module as a whole with the original at the samples' real values.
"""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from blade.config import Config
from blade.core.backend import Backend
from blade.core.disk_cache import digest
from blade.core.equal_constants import shared
from blade.core.reason import Code, Reason
from blade.fallback.cluster_module import cluster_module
from blade.graph.torchscript.extract import Extracted
from blade.report import Timing, Verdict, reason_from
from blade.runtime.engine import make_engine
from blade.selection.cache.fingerprint import (
    WeightDigests,
    bytes_of,
    identity,
    make_key,
    shapes_of,
    text_of,
)
from blade.selection.cache.section import ENGINES, REFUSALS
from blade.selection.plan.candidate import Candidate
from blade.timing.decision import Outcome, decide

log = logging.getLogger(__name__)

_PASSING_REFUSALS = (
    Code.TIME_BUDGET,
    Code.CONVERSION_TIMEOUT,
    Code.BACKEND_UNAVAILABLE,
)  # these may pass another time
_LARGEST = (
    64 << 20
)  # bytes; engines with more constants of their own (quantized weights, say) are not stored


@dataclass(frozen=True)
class CachedEngines:
    """By backend: the key of its candidate, and the stored candidate or Reason, if there is one."""

    keys: Mapping[str, str] = field(default_factory=dict)
    candidates: Mapping[str, Candidate] = field(default_factory=dict)
    refused: Mapping[str, Reason] = field(default_factory=dict)

    def found(self, backend: str) -> Candidate | Reason | None:
        return self.candidates.get(backend) or self.refused.get(backend)


NONE_CACHED = CachedEngines()


def look_up_engines(
    extracted: Extracted, backends: Sequence[Backend], config: Config, contents: WeightDigests
) -> CachedEngines:
    """Return the stored results for ``extracted``; none with ``dump_dir``, which needs conversions.

    Stored refusals are ignored under ``strict``: there they have to raise.
    """
    versions = {b.name: v for b in backends if (v := b.version) is not None}
    if not ENGINES.is_on(config) or config.dump_dir is not None or not versions:
        return NONE_CACHED
    base = make_key(extracted.name, lambda: _parts(extracted, contents), config)
    if base is None:
        return NONE_CACHED
    keys = {name: digest([base, name, str(version)]) for name, version in versions.items()}
    found = {name: get_engine(config, key, extracted, name) for name, key in keys.items()}
    candidates = {name: one for name, one in found.items() if one is not None}
    others = {} if config.strict else {n: key for n, key in keys.items() if n not in candidates}
    refused = {name: _get_refusal(config, key, extracted) for name, key in others.items()}
    return CachedEngines(
        keys, candidates, {name: one for name, one in refused.items() if one is not None}
    )


def put_refusal(config: Config, key: str | None, reason: Reason) -> None:
    """Store that there is no engine, and why, unless the reason may pass another time."""
    if reason.code not in _PASSING_REFUSALS:
        REFUSALS.keep(config, key, json.dumps(asdict(reason)).encode())


def _get_refusal(config: Config, key: str, extracted: Extracted) -> Reason | None:
    found = REFUSALS.look_up(
        config, key, lambda data: reason_from(json.loads(data)), extracted.name
    )
    return None if found is None else replace(found, subject=extracted.name)


def get_engine(config: Config, key: str, extracted: Extracted, backend: str) -> Candidate | None:
    """Return the candidate stored under ``key``, with the weights of ``extracted``, or ``None``."""
    name = extracted.name
    found = ENGINES.look_up(config, key, lambda data: _restore(data, extracted, backend), name)
    if found is not None:
        log.info("%s: %s from the cache", name, backend)
    return found


def put_engine(config: Config, candidate: Candidate) -> None:
    """Store ``candidate``, which has to be timed."""
    if candidate.key is None or candidate.stored or candidate.engine is None:
        return
    assert candidate.module is not None
    _, words, numbers, tensors = candidate.engine._get_method("__getstate__")()
    payload, *held = tensors
    names = {identity(t): name for name, t in candidate.module.fallback.named_buffers()}
    refs: list[Any] = []
    blobs = [payload.numpy().tobytes()]
    for tensor in held:
        name = names.get(identity(tensor))
        if name is None:
            blobs.append(bytes_of(tensor))
        refs.append(name or [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)])
    if sum(map(len, blobs[1:])) > _LARGEST:
        return
    head = {
        "runner": words[1],  # engines of one backend may be another's: quant's are DISC's
        "program": words[2],
        "limits": {name: value for name, value in numbers.items() if name != "checksum"},
        "constants": refs,
        "blobs": [len(blob) for blob in blobs],
        "verdict": asdict(candidate.verdict),
        "timings": [asdict(t) for t in candidate.timings],
    }
    text = json.dumps(head).encode()
    ENGINES.keep(config, candidate.key, b"".join([len(text).to_bytes(8, "little"), text, *blobs]))


def _restore(data: bytes, extracted: Extracted, backend: str) -> Candidate:
    size = int.from_bytes(data[:8], "little")
    head = json.loads(data[8 : 8 + size])
    blobs = _split(memoryview(data)[8 + size :], head["blobs"])
    payload = bytes(next(blobs))
    weights = dict(extracted.fallback.named_buffers())
    held = [
        weights[ref] if isinstance(ref, str) else shared(_tensor(next(blobs), *ref))
        for ref in head["constants"]
    ]
    runner, program = head["runner"], head["program"]
    engine = make_engine(extracted.name, runner, program, payload, held, head["limits"])
    timings = tuple(
        Timing(**{**one, "shapes": tuple(map(tuple, one["shapes"]))}) for one in head["timings"]
    )
    module = cluster_module(extracted, engine)
    verdict = Verdict(**head["verdict"])
    # Do not reuse a losing or unclear timing: it may stem from a busy machine. Measure again.
    if timings and decide(timings).outcome is not Outcome.FASTER:
        return Candidate(backend, engine, module, verdict)
    return Candidate(backend, engine, module, verdict, timings, stored=True)


def _split(data: memoryview, sizes: Sequence[int]) -> Iterator[memoryview]:
    start = 0
    for size in sizes:
        yield data[start : start + size]
        start += size


def _parts(extracted: Extracted, contents: WeightDigests) -> list[str] | None:
    """Parts that the keys of all backends share; ``None`` if a value cannot be described."""
    graph = text_of(extracted.fallback.graph)
    if "<Tensor>" in graph:  # a constant that is not among the weights
        return None
    return [
        graph,
        *contents.of(extracted.fallback.named_buffers()),
        *map(repr, extracted.declared()),
        *(shapes_of(one) for one in extracted.samples),
        "probes",
        *(shapes_of(one) for one in extracted.probes),
    ]


def _tensor(data: memoryview, dtype: str, shape: Sequence[int]) -> torch.Tensor:
    made = torch.empty(list(shape), dtype=getattr(torch, dtype))
    if made.numel():
        raw = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        made.view(-1).view(torch.uint8).copy_(raw)
    return made
