# SPDX-License-Identifier: Apache-2.0
"""What this process computes on, by name: part of reports, and of the keys of what is kept on disk."""

import platform
from pathlib import Path

import torch


def cpu_name() -> str:
    """Model name and number of logical CPUs, "" where the system does not tell."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]} x{len(names)}" if names else platform.processor()


def gpu_name() -> str:
    """The current GPU, "" where nothing has used one in this process: asking would start the driver."""
    return torch.cuda.get_device_name() if torch.cuda.is_initialized() else ""
