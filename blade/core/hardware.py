# SPDX-License-Identifier: Apache-2.0
"""Names of this machine's processors, for reports and for keys of the disk cache."""

import platform
from pathlib import Path

import torch


def cpu_name() -> str:
    """Model name and number of logical CPUs; "" if the system does not report them."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]} x{len(names)}" if names else platform.processor()


def gpu_name() -> str:
    """The current GPU; "" if this process has not used one, because a query would start the driver."""
    return torch.cuda.get_device_name() if torch.cuda.is_initialized() else ""
