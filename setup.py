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
# Files compiled as one: reading torch's headers costs ten times what our own code does.
UNITS = {
    "executor": ("parse", "program", "pages", "arena", "frame", "execute", "updates", "executor"),
    "engine": ("runner", "engine", "register"),
    "native": ("cpu", "externals", "object", "library", "relocate"),
}


class BuildRuntime(cpp_extension.BuildExtension):
    """torch's build (ninja if present), for a library that is not a Python module."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs, no_python_abi_suffix=True)


def cxx_standard() -> str:
    """The C++ standard torch's own headers need."""
    major, minor = map(int, re.match(r"(\d+)\.(\d+)", torch.__version__).groups())
    return "-std=c++20" if (major, minor) >= (2, 12) else "-std=c++17"


def sources() -> list[str]:
    """One generated file per unit, rewritten only if it changed so that builds are incremental."""
    listed = sorted(name for names in UNITS.values() for name in names)
    assert listed == sorted(path.stem for path in CSRC.glob("*.cpp")), listed
    folder = Path("build/units")
    folder.mkdir(parents=True, exist_ok=True)
    for unit, names in UNITS.items():
        text = "".join(f'#include "{name}.cpp"\n' for name in names)
        path = folder / f"{unit}_unit.cpp"
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
    return [str(folder / f"{unit}_unit.cpp") for unit in UNITS]


def runtime() -> Extension:
    return Extension(
        "blade._runtime",
        sources=sources(),
        depends=sorted(str(path) for path in CSRC.iterdir()),
        include_dirs=[str(CSRC.resolve()), *cpp_extension.include_paths()],
        library_dirs=cpp_extension.library_paths(),
        libraries=["torch", "torch_cpu", "c10"],
        extra_compile_args=[
            "-O3",
            "-g0",
            "-fopenmp",
            "-fvisibility=hidden",
            "-Wall",
            "-Wextra",
            cxx_standard(),
        ],
        extra_link_args=[f"-Wl,-rpath,{os.path.join(os.path.dirname(torch.__file__), 'lib')}"],
        language="c++",
    )


setup(
    name="blade",
    packages=find_packages(include=["blade", "blade.*"]),
    package_data={
        "blade": ["*.so", "py.typed", "backends/disc/FORMAT.md"],
        "blade.report_page": ["*.html", "*.css", "*.js"],
    },
    ext_modules=[runtime()],
    cmdclass={"build_ext": BuildRuntime},
)
