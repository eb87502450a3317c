# SPDX-License-Identifier: Apache-2.0
"""Builds the C++ runtime against the torch that is installed.

    pip install --no-build-isolation -e .        # or: python setup.py build_ext --inplace

``blade/libblade_runtime.so`` registers ``torch.classes.blade.Engine``; it needs neither Python nor
``libtorch_python``, so that C++ programs link it. ``blade/libblade_cuda.so`` lets engines run on CUDA
devices and registers itself with the first; it is built where torch has CUDA and CUDA's headers are
found, and uses no library of the toolkit: the driver is looked up at run time.
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from setuptools import Extension, find_packages, setup
from torch.utils import cpp_extension

CSRC = Path("blade/runtime/csrc")
API = Path("blade/include")  # for programs in C++
# Files compiled as one: reading torch's headers costs ten times what our own code does.
UNITS = {
    "executor": (
        *("program/parse", "program/loops", "program/liveness", "program/stages"),
        "program/program",
        *("memory/huge_pages", "memory/arena", "memory/borrowed_outputs"),
        *(
            "execute/execution_plan",
            "execute/late_sizes",
            "execute/workers",
            "execute/run_plan",
            "execute/stream_context",
        ),
        *("graphs/capture_policy", "graphs/captured_graph", "graphs/launch_order"),
    ),
    "device": (
        *("device/accelerator", "execute/packed_constants", "engine/variants", "engine/target"),
        *("execute/input_updates", "execute/executor"),
    ),
    "engine": (
        *(
            "engine/checksum",
            "engine/fork",
            "engine/policy",
            "engine/interrupt",
            "engine/originals",
            "engine/recheck",
        ),
        *("engine/runner", "engine/engine"),
        *("model/result_form", "model/model", "engine/register"),
    ),
    "libraries": (
        *("libraries/json", "libraries/payload", "libraries/onnx_bytes", "libraries/find_library"),
        *("libraries/onnxruntime", "libraries/openvino", "libraries/native_runner"),
    ),
    "api": ("api/stats", "api/program_archive", "api/saved_model"),
    "native": (
        *("device/cpu_features", "native/libm_symbols", "native/elf_loader"),
        *("native/native_library", "native/relocate"),
    ),
}
CUDA_UNITS = {
    "cuda": ("cuda/driver", "cuda/copy", "cuda/kernel"),
    "graphs": ("cuda/graph", "cuda/build", "cuda/capture", "cuda/accelerator"),
}
COMPILE = ["-O3", "-g0", "-fvisibility=hidden", "-Wall", "-Wextra"]
INSTALLED = "$ORIGIN/../torch/lib"  # torch's libraries, from a folder of site-packages
HERE = os.path.join(os.path.dirname(torch.__file__), "lib")  # from this folder


class BuildRuntime(cpp_extension.BuildExtension):
    """torch's build (ninja if present), for a library that is not a Python module."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs, no_python_abi_suffix=True)

    def run(self) -> None:
        self.stays_here = (
            self.inplace or self.editable_mode
        )  # setuptools sets the first to 0 meanwhile
        choose_compiler()
        super().run()

    def build_extension(self, ext: Extension) -> None:
        """What is built into this folder finds torch where it is now; a wheel names no folder of this machine."""
        here = [HERE] if self.stays_here else []
        name = os.path.basename(self.get_ext_filename(ext.name))
        ext.extra_link_args += [f"-Wl,-rpath,{':'.join([INSTALLED, *here])}", f"-Wl,-soname,{name}"]
        super().build_extension(ext)


def choose_compiler() -> None:
    """Set ``CXX`` and ``CC`` to compilers that link libstdc++ as a shared library, as torch does.

    A library with a libstdc++ of its own has types of its own: an exception that torch, or another library of ours,
    should catch ends the process.
    """
    if sys.platform != "linux":
        return
    given = os.environ.get("CXX") or "c++"
    if links_shared(given) is not False:  # what does not compile says so itself
        return
    for cxx, cc in (("/usr/bin/g++", "/usr/bin/gcc"), ("/usr/bin/clang++", "/usr/bin/clang")):
        if os.access(cc, os.X_OK) and links_shared(cxx):
            os.environ.update(CXX=cxx, CC=cc)
            print(f"blade: built with {cxx}: {given} links libstdc++ statically", file=sys.stderr)
            return
    raise SystemExit(
        f"blade: {given} links libstdc++ statically, so that exceptions would not cross from blade to torch. "
        "Set CXX and CC to a compiler that links it as a shared library"
    )


def links_shared(cxx: str) -> bool | None:
    """Whether libraries that ``cxx`` links need libstdc++ (or libc++) at run time; None if it does not compile."""
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "probe.cpp"), Path(folder, "probe.so")
        source.write_text("#include <iostream>\nvoid f() { std::cout << 1; }\n")
        build = [*shlex.split(cxx), "-shared", "-fPIC", "-o", str(library), str(source)]
        try:
            subprocess.run(build, check=True, capture_output=True)
            needed = subprocess.run(["ldd", str(library)], check=True, capture_output=True).stdout
        except (OSError, subprocess.CalledProcessError):
            return None
    return b"libstdc++" in needed or b"libc++" in needed


def torch_minor() -> tuple[int, int]:
    major, minor = map(int, re.match(r"(\d+)\.(\d+)", torch.__version__).groups())
    return major, minor


def cxx_standard() -> str:
    """The C++ standard torch's own headers need."""
    return "-std=c++20" if torch_minor() >= (2, 12) else "-std=c++17"


def requirements() -> list[str]:
    """Of what is built here: the runtime works with the minor version of torch that it was built against."""
    torch_mlir = (
        "torch-mlir==20261001; sys_platform == 'linux' and platform_machine in 'x86_64 aarch64'"
    )
    ours = ["numpy", "pydantic>=2.7", "rich", "typing-extensions>=4.6", torch_mlir]
    return ["torch=={}.{}.*".format(*torch_minor()), *ours]


def sources(units: dict[str, tuple[str, ...]]) -> list[str]:
    """One generated file per unit, rewritten only if it changed so that builds are incremental."""
    listed = {CSRC / f"{name}.cpp" for names in units.values() for name in names}
    folders = {path.parent for path in listed}
    assert listed == {path for folder in folders for path in folder.glob("*.cpp")}, listed
    target = Path("build/units")
    target.mkdir(parents=True, exist_ok=True)
    for unit, names in units.items():
        text = "".join(f'#include "{name}.cpp"\n' for name in names)
        path = target / f"{unit}_unit.cpp"
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
    return [str(target / f"{unit}_unit.cpp") for unit in units]


def headers() -> list[str]:
    """What a change in makes everything be compiled again."""
    return sorted(str(path) for path in (*CSRC.rglob("*"), *API.rglob("*.h")) if path.is_file())


def runtime() -> Extension:
    return Extension(
        "blade.libblade_runtime",
        sources=sources(UNITS),
        depends=headers(),
        include_dirs=[str(CSRC.resolve()), str(API.resolve()), *cpp_extension.include_paths()],
        library_dirs=cpp_extension.library_paths(),
        libraries=["torch", "torch_cpu", "c10"],
        extra_compile_args=[*COMPILE, "-fopenmp", cxx_standard()],
        language="c++",
    )


def interrupts() -> Extension:
    """The one library that is a Python module: ``csrc/engine/interrupt.h`` says why."""
    return Extension(
        "blade._interrupts",
        sources=[str(CSRC / f"python/{name}.cpp") for name in ("interrupts", "unchanged")],
        depends=headers(),
        include_dirs=cpp_extension.include_paths(),
        library_dirs=cpp_extension.library_paths(),
        libraries=["torch", "torch_cpu", "torch_python", "c10"],
        extra_compile_args=[*COMPILE, "-Wno-unused-parameter", cxx_standard()],
        language="c++",
    )


def cuda_headers() -> str | None:
    """The folder of ``cuda.h``: of an installed toolkit, or of NVIDIA's packages beside torch."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    folders = [Path(home) / "include" for home in homes if home]
    folders += sorted(Path(torch.__file__).parent.parent.glob("nvidia/*/include"))
    needed = ("cuda.h", "cuda_runtime_api.h")
    for folder in folders:
        if all((folder / name).is_file() for name in needed):
            return str(folder)
    return None


def cuda() -> list[Extension]:
    if torch.version.cuda is None:
        return []
    found = cuda_headers()
    if found is None:
        print(
            "blade: engines will not run on CUDA devices: CUDA's headers were not found "
            "(set CUDA_HOME to a toolkit, or install nvidia-cuda-runtime, and build again)",
            file=sys.stderr,
        )
        return []
    extension = Extension(
        "blade.libblade_cuda",
        sources=sources(CUDA_UNITS),
        depends=headers(),
        include_dirs=[str(CSRC.resolve()), *cpp_extension.include_paths(), found],
        library_dirs=cpp_extension.library_paths(),
        libraries=["torch", "torch_cuda", "torch_cpu", "c10_cuda", "c10"],
        extra_compile_args=[*COMPILE, "-Wno-unused-parameter", cxx_standard()],
        language="c++",
    )
    return [extension]


setup(
    name="blade",
    packages=find_packages(include=["blade", "blade.*"]),
    package_data={
        "blade": [
            "*.so",
            "py.typed",
            "selection/forecast/*.jsonl",
            "program/FORMAT.md",
            "include/blade/*.h",
            "share/cmake/blade/*.cmake",
        ],
        "blade.report.html": ["*.html", "*.css", "*.js"],
    },
    install_requires=requirements(),
    ext_modules=[runtime(), interrupts(), *cuda()],
    cmdclass={"build_ext": BuildRuntime},
)
