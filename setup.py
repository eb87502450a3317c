# SPDX-License-Identifier: Apache-2.0
"""Builds the C++ runtime (``blade/_runtime*.so``) against the torch that is installed.

    pip install --no-build-isolation -e .        # or: python setup.py build_ext --inplace

The library registers ``torch.classes.blade.Engine``; it needs neither Python nor ``libtorch_python``,
so C++ programs can load it too.
"""

import os
import re
from pathlib import Path

import torch
from setuptools import Extension, find_packages, setup
from torch.utils import cpp_extension

CSRC = Path("blade/runtime/csrc")


class BuildRuntime(cpp_extension.BuildExtension):
    """torch's build (ninja if present), for a library that is not a Python module."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs, no_python_abi_suffix=True)


def cxx_standard() -> str:
    """The C++ standard torch's own headers need."""
    major, minor = map(int, re.match(r"(\d+)\.(\d+)", torch.__version__).groups())
    return "-std=c++20" if (major, minor) >= (2, 12) else "-std=c++17"


def runtime() -> Extension:
    return Extension(
        "blade._runtime",
        sources=sorted(str(path) for path in CSRC.glob("*.cpp")),
        include_dirs=cpp_extension.include_paths(),
        library_dirs=cpp_extension.library_paths(),
        libraries=["torch", "torch_cpu", "c10"],
        extra_compile_args=["-O3", "-g0", "-fopenmp", "-fvisibility=hidden", "-Wall", "-Wextra", cxx_standard()],
        extra_link_args=[f"-Wl,-rpath,{os.path.join(os.path.dirname(torch.__file__), 'lib')}"],
        language="c++",
    )


setup(
    name="blade",
    packages=find_packages(include=["blade", "blade.*"]),
    package_data={"blade": ["*.so", "py.typed", "backends/disc/FORMAT.md"]},
    ext_modules=[runtime()],
    cmdclass={"build_ext": BuildRuntime},
)
