# SPDX-License-Identifier: Apache-2.0
"""Estimate the seconds of a conversion: the backend's estimate, corrected by earlier conversions.

    seconds = estimate_s(backend, cluster, config)
    record_seconds(backend, cluster, 12.5, config)             # this one took 12.5 s

A backend's own estimate knows how its work grows with the ops. The machine and its load are one factor per
backend, stored in the cache beside its engines. Without a cache, or for a backend without a version, the
estimate is not corrected.
"""

import json
from math import isfinite, sqrt

import torch

from blade.config import Config
from blade.core.backend import Backend
from blade.core.cluster import Cluster
from blade.core.disk_cache import digest, open_cache
from blade.core.hardware import cpu_name, gpu_name

KIND = "seconds"
LARGEST = 30.0  # limit of the correction: larger factors were accidents


def estimate_s(backend: Backend, cluster: Cluster, config: Config) -> float:
    """Return seconds; 0 if the backend does not estimate."""
    return backend.estimate_s(cluster) * _factor(backend, config)


def record_seconds(backend: Backend, cluster: Cluster, seconds: float, config: Config) -> None:
    """Record the seconds of a conversion, which make up half of the next correction."""
    cache, key, own = open_cache(config.cache), _key(backend), backend.estimate_s(cluster)
    if cache is None or key is None or not own > 0:
        return
    seen = min(max(seconds / own, 1 / LARGEST), LARGEST)
    before = _factor(backend, config, unknown=seen)
    cache.put(KIND, key, json.dumps(sqrt(before * seen)).encode())


def _factor(backend: Backend, config: Config, unknown: float = 1.0) -> float:
    cache, key = open_cache(config.cache), _key(backend)
    data = cache.get(KIND, key) if cache is not None and key is not None else None
    found = unknown if data is None else json.loads(data)
    return found if isinstance(found, float) and isfinite(found) and found > 0 else unknown


def _key(backend: Backend) -> str | None:
    version = backend.version
    if version is None:
        return None
    machine = [cpu_name(), gpu_name(), f"{torch.get_num_threads()} threads"]
    return digest([backend.name, str(version), *machine])
