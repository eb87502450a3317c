# SPDX-License-Identifier: Apache-2.0
"""The second C++ library, ``libblade_cuda.so``, which runs engines for CUDA devices.

Without it such engines still load, report the reason, and run the original.
"""

import atexit
import ctypes
from pathlib import Path

import torch

import blade.runtime.engine  # noqa: F401 - the library that this one registers itself with
from blade.errors import warn_user


def why_unavailable() -> str:
    """Why engines for CUDA devices cannot run in this process; empty if they can."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA."
    if "cuda" not in torch.ops.blade.accelerators():
        return _why_not_loaded
    return "" if torch.cuda.is_available() else "This process sees no CUDA device."


def load(package: Path) -> str:
    """Load the library; returns the reason if it was not built or cannot be loaded, else an empty text."""
    if torch.version.cuda is None:
        return ""
    found = sorted(package.glob("libblade_cuda*.so"))
    if not found:
        return (
            f"blade's CUDA runtime is not built: there is no libblade_cuda.so in {package}. Run `pip install "
            "--no-build-isolation -e .` in the source folder where CUDA's headers are (CUDA_HOME)."
        )
    try:
        torch.classes.load_library(str(found[0]))
        # at exit, engines need not unload their kernels one by one
        atexit.register(ctypes.CDLL(str(found[0])).blade_cuda_end)
    except (OSError, RuntimeError) as error:
        why = f"blade's CUDA runtime {found[0]} cannot be loaded: {error}"
        warn_user(why)
        return why
    return ""


_why_not_loaded = load(Path(__file__).resolve().parent.parent)
