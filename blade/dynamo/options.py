# SPDX-License-Identifier: Apache-2.0
"""The ``mode`` and ``options`` of ``torch.compile`` as a ``Config``."""

from collections.abc import Mapping
from typing import Any

from blade.config import Config
from blade.errors import ConfigError

_WITHOUT_GRAPHS = "max-autotune-no-cudagraphs"
MODES = ("default", "reduce-overhead", "max-autotune", _WITHOUT_GRAPHS)
# Fields that do not apply to a graph of torch.compile.
_ABOUT_CAPTURE = (
    *("allow_tracing", "preserved_attributes", "freeze_module", "customize_jit_passes"),
    *("dynamic_shapes", "dynamic_tuning_shapes", "sample_weights"),
    *("enable_int8", "enable_fp8", "quantization_type", "accuracy_budget", "calibration_method"),
    *("calibration_samples", "symmetric_activations", "weight_bits"),
)


def config_of(mode: str | None, options: Mapping[str, Any] | None) -> Config:
    """The innermost active ``with Config(...)`` with ``options`` on top; the backend is DISC unless they name one.

    With ``optimization_pipeline="auto"`` all backends, or those in BLADE_BACKENDS, compete for each cluster at
    the first call; ``time_budget`` limits this competition per graph.

    All modes are equal, as no engine is tuned per size, except "max-autotune-no-cudagraphs", which turns CUDA
    graphs off. Raises ``ConfigError`` for an option that is not a field of ``Config``, or that sets what
    ``torch.compile`` decides (capture, sizes).
    """
    if mode is not None and mode not in MODES:
        raise ConfigError(f"torch.compile(mode={mode!r}): one of {', '.join(MODES)} is expected")
    given = dict(options or {})
    if wrong := [name for name in given if name in _ABOUT_CAPTURE]:
        raise ConfigError(
            f"options={{{wrong[0]!r}: ...}} has no meaning for torch.compile, which captures the model itself "
            "and says which sizes vary (dynamic=..., mark_dynamic); use blade.optimize for it"
        )
    said = {"cuda_graphs": False} if mode == _WITHOUT_GRAPHS else {}
    return Config.current().evolve(**{"optimization_pipeline": "DISC", **said, **given})
