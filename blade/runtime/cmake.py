# SPDX-License-Identifier: Apache-2.0
"""Where CMake finds blade's runtime, its header, and the libtorch that it is built for.

cmake -S examples/cpp -B build -DCMAKE_PREFIX_PATH="$(python -c 'import blade; print(blade.cmake_prefix_path)')"
"""

from pathlib import Path

from torch.utils import cmake_prefix_path as _torch

cmake_prefix_path: str = f"{Path(__file__).resolve().parent.parent / 'share' / 'cmake'};{_torch}"
"""Two folders, as CMake's lists have them: blade's and torch's."""
