# SPDX-License-Identifier: Apache-2.0
"""Whether this machine can compile for a GPU and run the code, and the versions that an engine depends on."""

import importlib.metadata
from importlib.util import find_spec

import torch

from blade.backends.disc.target.gpu import target_of
from blade.runtime import cuda


def why_unavailable() -> str | None:
    """``None`` if kernels can be compiled and launched, else a sentence with the fix."""
    return why_no_code() or cuda.why_unavailable() or None


def why_no_code() -> str | None:
    """``None`` if kernels can be compiled, else a sentence with the fix."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA; install one with it."
    if not torch.cuda.is_available():
        return "torch sees no GPU: check the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES."
    if find_spec("triton") is None:
        return "Triton cannot be imported; install the package triton, which compiles the kernels."
    return None


def compiler() -> str:
    """The versions of the compiler and of the called libraries, and the name of the GPU.

    "" if this process has not used a GPU: then no GPU code is compiled, and a query would start the driver.
    """
    if not torch.cuda.is_initialized() or why_unavailable() is not None:
        return ""
    triton = importlib.metadata.version("triton")
    target, cudnn = target_of(), torch.backends.cudnn.version()
    name = torch.cuda.get_device_name()
    return f"triton {triton} CUDA {torch.version.cuda} cuDNN {cudnn} {name} {target}"
