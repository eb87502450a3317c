# SPDX-License-Identifier: Apache-2.0
"""The 8-bit dtypes that a device multiplies and the config permits.

device_dtypes(torch.device("cuda"), config)       # {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
"""

import torch

from blade.config import Config
from blade.core.reason import Code
from blade.errors import Refused

EIGHT_BIT_DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
LEAST_CAPABILITY = {"fp8": (8, 9), "int8": (8, 0)}


def served_names(capability: tuple[int, int]) -> tuple[str, ...]:
    """The names of the 8-bit dtypes that a GPU of this compute capability multiplies."""
    return tuple(name for name, least in LEAST_CAPABILITY.items() if capability >= least)


def why_not_device(device: torch.device, config: Config) -> str | None:
    """``None`` if ``device`` multiplies an 8-bit dtype that ``config`` permits, else the reason."""
    if device.type == "cpu":
        return None if config.enable_int8 else "floats of 8 bits are multiplied by GPUs only"
    if device.type != "cuda":
        return f"no products of 8 bits are generated for {device}"
    return None if device_dtypes(device, config) else _no_dtype(device)


def device_dtypes(device: torch.device, config: Config) -> dict[str, torch.dtype]:
    """The permitted dtypes that ``device``, a GPU, multiplies, by name."""
    known = served_names(torch.cuda.get_device_capability(device))
    permitted = {"fp8": config.enable_fp8, "int8": config.enable_int8}
    return {name: EIGHT_BIT_DTYPES[name] for name in known if permitted[name]}


def check_kind(config: Config) -> None:
    """Raises ``Refused`` for a ``quantization_type`` without products on GPUs."""
    if config.quantization_type == "weight_only":
        raise Refused(
            Code.UNSUPPORTED_OP,
            'Config.quantization_type="weight_only": products with float activations are generated for CPUs '
            'only; "auto", "dynamic" and "static" are served on a GPU.',
        )


def _no_dtype(device: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    name = torch.cuda.get_device_name(device)
    return f"{name} has compute capability {major}.{minor}: floats of 8 bits take 8.9 or later, bytes 8.0"
