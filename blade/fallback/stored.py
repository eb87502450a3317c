# SPDX-License-Identifier: Apache-2.0
"""Verified, measured candidates on disk: what was optimized once is neither compiled nor judged again.

    stored = look_up(extracted, backends, config)   # keys and candidates by backend
    keep(cache, candidate)                          # for the next time, once it was measured

A key covers all that conversion and verdict depend on, except what values the samples had:

* the subgraph, every weight's bytes and layout, how its inputs and outputs are declared;
* dtypes, sizes and strides of every sample and probe, the values of inputs that are plain numbers;
* the ``Config``, but for the fields that only say how to report (``_SILENT``);
* blade's code, torch's version and numerical settings, the number of threads, the machine, and what the
  backend says it depends on besides (``Backend.version``; a backend without one is not stored).

The optimized module as a whole is compared with the original at the samples' real values in every call.
"""

import hashlib
import json
import logging
import platform
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import Any, cast

import torch

from blade.backends.base import Backend
from blade.cache import Cache, code_version, digest, open_cache
from blade.config import Config
from blade.fallback.attempt import attempt
from blade.fallback.candidate import Candidate
from blade.fallback.cluster_module import cluster_module
from blade.fallback.measure import why_slower
from blade.graph.extract import Extracted
from blade.hardware import cpu_name, gpu_name
from blade.reason import Code, Reason, Stage
from blade.report import Timing, Verdict, reason_from
from blade.runtime.engine import make_engine

log = logging.getLogger(__name__)

KIND = "cluster"
REFUSED = "refused"
# What engines do not depend on: passes show in the graph, weights and budgets decide between engines.
_SILENT = (
    "background",
    "cache",
    "customize_jit_passes",
    "dump_dir",
    "sample_weights",
    "strict",
    "time_budget",
)
_PASSES = (
    Code.TIME_BUDGET,
    Code.CONVERSION_TIMEOUT,
    Code.BACKEND_UNAVAILABLE,
)  # another time, perhaps
# Which scope a node came from, and the number that makes a class of TorchScript another one.
_PASSING = re.compile(r', scope: [^"\n]*$|\.___torch_mangle_\d+', re.MULTILINE)
_LARGEST = 64 << 20  # bytes of constants of an engine's own (quantized weights, say) worth keeping


@dataclass(frozen=True)
class Stored:
    """By backend: the key of its candidate, and the candidate, or the Reason against it, if it was stored."""

    keys: Mapping[str, str] = field(default_factory=dict)
    candidates: Mapping[str, Candidate] = field(default_factory=dict)
    refused: Mapping[str, Reason] = field(default_factory=dict)

    def found(self, backend: str) -> Candidate | Reason | None:
        return self.candidates.get(backend) or self.refused.get(backend)


NOTHING = Stored()


class Contents:
    """Digests of weights: those of one ``optimize``, each of which is read once."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], tuple[torch.Tensor, str]] = {}

    def of(self, named: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
        """Name, form and content of each."""
        every = list(named)
        fresh = {_identity(t): t for _, t in every if _identity(t) not in self._known}
        with ThreadPoolExecutor(
            max(1, torch.get_num_threads())
        ) as pool:  # hashing lets go of the lock
            for (key, tensor), content in zip(
                fresh.items(), pool.map(_content, fresh.values()), strict=True
            ):
                self._known[key] = tensor, content  # kept alive: its address stays its own
        return [f"{name} {form_of((t,))} {self._known[_identity(t)][1]}" for name, t in every]


def look_up(
    extracted: Extracted, backends: Sequence[Backend], config: Config, contents: Contents
) -> Stored:
    """What is stored of ``extracted``. Nothing with ``dump_dir``: what is dumped has to be made.

    Refusals do not count under ``strict``: there they have to raise.
    """
    cache = open_cache(config.cache)
    versions = {b.name: v for b in backends if (v := getattr(b, "version", None)) is not None}
    if cache is None or config.dump_dir is not None or not versions:
        return NOTHING
    base = _base(extracted, config, contents)
    if base is None:
        return NOTHING
    keys = {name: digest([base, name, str(version)]) for name, version in versions.items()}
    found = {name: recall(cache, key, extracted, name) for name, key in keys.items()}
    candidates = {name: one for name, one in found.items() if one is not None}
    others = {} if config.strict else {n: key for n, key in keys.items() if n not in candidates}
    refused = {name: _recall_refusal(cache, key, extracted) for name, key in others.items()}
    return Stored(keys, candidates, {name: one for name, one in refused.items() if one is not None})


def keep_refusal(config: Config, key: str | None, reason: Reason) -> None:
    """Store that there is no engine, and why; not what may well be otherwise the next time."""
    cache = open_cache(config.cache)
    if cache is not None and key is not None and reason.code not in _PASSES:
        cache.put(REFUSED, key, json.dumps(asdict(reason)).encode())


def _recall_refusal(cache: Cache, key: str, extracted: Extracted) -> Reason | None:
    data = cache.get(REFUSED, key)
    if data is None:
        return None
    found = attempt(Stage.CONVERT, None, extracted.name, lambda: reason_from(json.loads(data)))
    return replace(found, subject=extracted.name) if found.backend is not None else None


def recall(cache: Cache, key: str, extracted: Extracted, backend: str) -> Candidate | None:
    """The candidate kept under ``key``, over the weights of ``extracted``; ``None`` if there is none."""
    data = cache.get(KIND, key)
    if data is None:
        return None
    found = attempt(
        Stage.CONVERT, backend, extracted.name, lambda: _restore(data, extracted, backend)
    )
    if isinstance(found, Reason):
        log.info("%s: what the cache has is not used: %s", extracted.name, found.detail)
        return None
    log.info("%s: %s from the cache", extracted.name, backend)
    return found


def keep(cache: Cache, candidate: Candidate) -> None:
    """Store ``candidate``, once it was measured, for the next time."""
    if candidate.key is None or candidate.stored or candidate.engine is None:
        return
    assert candidate.module is not None
    _, words, numbers, tensors = candidate.engine._get_method("__getstate__")()
    payload, *held = tensors
    names = {_identity(t): name for name, t in candidate.module.fallback.named_buffers()}
    refs: list[Any] = []
    blobs = [payload.numpy().tobytes()]
    for tensor in held:
        name = names.get(_identity(tensor))
        if name is None:
            blobs.append(_bytes(tensor))
        refs.append(name or [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)])
    if sum(map(len, blobs[1:])) > _LARGEST:
        return
    head = {
        "runner": words[1],  # a backend's engines may be another's: quant's are those of disc
        "program": words[2],
        "limits": {name: value for name, value in numbers.items() if name != "checksum"},
        "constants": refs,
        "blobs": [len(blob) for blob in blobs],
        "verdict": asdict(candidate.verdict),
        "timings": [asdict(t) for t in candidate.timings],
    }
    text = json.dumps(head).encode()
    cache.put(KIND, candidate.key, b"".join([len(text).to_bytes(8, "little"), text, *blobs]))


def _restore(data: bytes, extracted: Extracted, backend: str) -> Candidate:
    size = int.from_bytes(data[:8], "little")
    head = json.loads(data[8 : 8 + size])
    blobs = _split(memoryview(data)[8 + size :], head["blobs"])
    payload = bytes(next(blobs))
    weights = dict(extracted.fallback.named_buffers())
    held = [
        weights[ref] if isinstance(ref, str) else _tensor(next(blobs), *ref)
        for ref in head["constants"]
    ]
    runner, program = head["runner"], head["program"]
    engine = make_engine(extracted.name, runner, program, payload, held, head["limits"])
    timings = tuple(
        Timing(**{**one, "shapes": tuple(map(tuple, one["shapes"]))}) for one in head["timings"]
    )
    module = cluster_module(extracted, engine)
    verdict = Verdict(**head["verdict"])
    # A loss may have been a busy moment of the machine's, and would be one for ever: measured again.
    if why_slower(timings) and timings:
        return Candidate(backend, engine, module, verdict)
    return Candidate(backend, engine, module, verdict, timings, stored=True)


def _split(data: memoryview, sizes: Sequence[int]) -> Iterator[memoryview]:
    start = 0
    for size in sizes:
        yield data[start : start + size]
        start += size


def _base(extracted: Extracted, config: Config, contents: Contents) -> str | None:
    """What the keys of all backends share; ``None`` if something has a value that cannot be told."""
    graph = text_of(extracted.fallback.graph)
    if "<Tensor>" in graph:  # a constant that is not among the weights
        return None
    return digest(
        [
            *environment(),
            *settings_of(config),
            graph,
            *contents.of(extracted.fallback.named_buffers()),
            *map(repr, extracted.declared()),
            *(form_of(one) for one in extracted.samples),
            "probes",
            *(form_of(one) for one in extracted.probes),
        ]
    )


def settings_of(config: Config) -> list[str]:
    """What of ``config`` engines depend on."""
    return [f"{k}={getattr(config, k)!r}" for k in Config.model_fields if k not in _SILENT]


def text_of(graph: torch.Graph) -> str:
    """The graph without what differs from one capture of a model to the next."""
    same = torch._C._jit_pass_canonicalize(cast(Any, graph))  # numbers the values
    return _PASSING.sub("", str(cast(Any, same).str(False)))


def environment() -> list[str]:
    """What results depend on besides the cluster: code, versions, machine, torch's global settings."""
    return [
        code_version(),
        f"{torch.__version__} {platform.python_version()} {platform.machine()} {cpu_name()}",
        f"{torch.get_num_threads()} threads, default {torch.get_default_dtype()}",
        f"{torch.get_float32_matmul_precision()} {torch.backends.mkldnn.enabled}",
        f"{torch.are_deterministic_algorithms_enabled()} {torch.is_autocast_enabled('cpu')}",
        f"{gpu_name()} {torch.backends.cudnn.allow_tf32} {torch.is_autocast_enabled('cuda')}",
    ]


def _content(tensor: torch.Tensor) -> str:
    return hashlib.sha256(_bytes(tensor)).hexdigest()


def _bytes(tensor: torch.Tensor) -> Any:
    """The elements in row-major order; a view of the memory where that is how they lie."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    return memoryview(cast(Any, flat.view(torch.uint8).numpy())) if flat.numel() else b""


def _tensor(data: memoryview, dtype: str, shape: Sequence[int]) -> torch.Tensor:
    made = torch.empty(list(shape), dtype=getattr(torch, dtype))
    if made.numel():
        raw = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        made.view(-1).view(torch.uint8).copy_(raw)
    return made


def form_of(inputs: Sequence[torch.Tensor]) -> str:
    return " ".join(
        f"{t.dtype} {t.device} {tuple(t.shape)} {t.stride()}"
        + (f" {t.item()}" if t.dim() == 0 else "")
        for t in inputs
    )


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype
