# SPDX-License-Identifier: Apache-2.0
"""How long a conversion will take: what the backend says, corrected by what others took on this machine.

    seconds = estimate_s(backend, cluster, config)
    note_s(backend, cluster, 12.5, config)             # this one took as long

A backend's own estimate knows how its work grows with the ops; the machine, and what else it does, is in one
factor per backend, kept in the cache beside its engines. Without a cache, or for a backend without a version,
the estimate stands as it is.
"""

import json
from math import isfinite, sqrt

import torch

from blade.backends.base import Backend, Cluster
from blade.cache import digest, open_cache
from blade.config import Config
from blade.hardware import cpu_name, gpu_name

KIND = "seconds"
LARGEST = 30.0  # correction: beyond, what was seen was an accident


def estimate_s(backend: Backend, cluster: Cluster, config: Config) -> float:
    """Seconds; 0 if the backend does not estimate."""
    return _own(backend, cluster) * _factor(backend, config)


def note_s(backend: Backend, cluster: Cluster, seconds: float, config: Config) -> None:
    """Remember that a conversion took so long: half of what the next one is corrected by."""
    cache, key, own = open_cache(config.cache), _key(backend), _own(backend, cluster)
    if cache is None or key is None or not own > 0:
        return
    seen = min(max(seconds / own, 1 / LARGEST), LARGEST)
    before = _factor(backend, config, unknown=seen)
    cache.put(KIND, key, json.dumps(sqrt(before * seen)).encode())


def _own(backend: Backend, cluster: Cluster) -> float:
    estimate = getattr(backend, "estimate_s", None)
    return 0.0 if estimate is None else float(estimate(cluster))


def _factor(backend: Backend, config: Config, unknown: float = 1.0) -> float:
    cache, key = open_cache(config.cache), _key(backend)
    data = cache.get(KIND, key) if cache is not None and key is not None else None
    found = unknown if data is None else json.loads(data)
    return found if isinstance(found, float) and isfinite(found) and found > 0 else unknown


def _key(backend: Backend) -> str | None:
    version = getattr(backend, "version", None)
    if version is None:
        return None
    machine = [cpu_name(), gpu_name(), f"{torch.get_num_threads()} threads"]
    return digest([backend.name, str(version), *machine])
