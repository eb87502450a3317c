# SPDX-License-Identifier: Apache-2.0
"""The second C++ library, ``_cuda*.so``: with it engines made for CUDA devices run here.

Without it such engines load all the same and say why they do not run: the original does.
"""

import atexit
import ctypes
import logging
from pathlib import Path

import torch

import blade.runtime.engine  # noqa: F401 - the library that this one registers itself with

logger = logging.getLogger(__name__)


def why_unavailable() -> str:
    """Empty, or a sentence: engines for CUDA devices cannot run in this process."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA."
    if "cuda" not in torch.ops.blade.accelerators():
        return _why_not_loaded
    return "" if torch.cuda.is_available() else "This process sees no CUDA device."


def load(package: Path) -> str:
    """Loads the library if it was built; the reason if it was not, or cannot be loaded."""
    if torch.version.cuda is None:
        return ""
    found = sorted(package.glob("_cuda*.so"))
    if not found:
        return (
            f"blade's CUDA runtime is not built: there is no _cuda*.so in {package}. Run `pip install "
            "--no-build-isolation -e .` in the source folder where CUDA's headers are (CUDA_HOME)."
        )
    try:
        torch.classes.load_library(str(found[0]))
        # engines that live until the interpreter goes need not be taken apart, kernel by kernel
        atexit.register(ctypes.CDLL(str(found[0])).blade_cuda_end)
    except (OSError, RuntimeError) as error:
        why = f"blade's CUDA runtime {found[0]} cannot be loaded: {error}"
        logger.warning("%s", why)
        return why
    return ""


_why_not_loaded = load(Path(__file__).resolve().parent.parent)
