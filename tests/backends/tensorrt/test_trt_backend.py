# SPDX-License-Identifier: Apache-2.0
"""The backend as the pipeline sees it: where it is missing, and what is said then."""

import importlib.util
import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from trt_clusters import Mlp, Plain, cluster_of

import blade
from blade.backends import registry
from blade.backends.shared.half_precision import HALF_OPS, choose, name_of
from blade.backends.tensorrt import insert_casts as half
from blade.backends.tensorrt import library
from blade.backends.tensorrt.backend import TensorRTBackend
from blade.config import Config

pytestmark = pytest.mark.needs("runtime")


def test_importing_the_backend_imports_no_tensorrt() -> None:
    code = (
        "import sys, blade.backends.tensorrt.backend as b; b.TensorRTBackend();"
        "print([m for m in sys.modules if m.startswith(('tensorrt', 'onnx'))])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.needs("tensorrt_rtx")
@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a CUDA device")
def test_named_without_a_device_it_fails_and_says_what_to_do() -> None:
    with pytest.raises(blade.BackendError) as error:
        blade.optimize(Mlp().eval(), torch.randn(8, 64), Config(optimization_pipeline="TensorRT"))
    text = str(error.value)
    assert "its engines run on CUDA devices" in text and "build_engine" in text


def test_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    there = importlib.util.find_spec
    library.find_library.cache_clear()
    try:
        monkeypatch.setattr(
            importlib.util,
            "find_spec",
            lambda name: None if name.startswith("tensorrt") else there(name),
        )
        why = TensorRTBackend().why_unavailable()
    finally:
        library.find_library.cache_clear()
    assert (
        why is not None and "pip install tensorrt_rtx_cu13_libs tensorrt_rtx_cu13_bindings" in why
    )


def test_a_folder_of_that_name_is_no_tensorrt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tensorrt_of_mine").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.util.find_spec("tensorrt_of_mine") is not None
    assert not library._is_there("tensorrt_of_mine")


class _Old:
    __version__ = "8.6.1"


def test_a_tensorrt_without_strongly_typed_networks_is_too_old() -> None:
    with pytest.raises(
        blade.BackendError, match=r"tensorrt 8\.6\.1 is installed; blade needs 10 or later"
    ):
        library.wrap(_Old, is_rtx=False)


def test_it_is_registered() -> None:
    assert isinstance(registry.load("TensorRT"), TensorRTBackend)


@pytest.mark.needs("tensorrt_rtx")
def test_a_saved_engine_finds_its_runner_in_a_process_that_only_imports_blade() -> None:
    """The file of a machine that could build it, on one that cannot run it: the original answers."""
    engine = TensorRTBackend().convert(cluster_of(Mlp(), torch.randn(8, 64)), Config(cache=False))

    class Holder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.engine = engine

        def forward(self, x: torch.Tensor) -> bool:
            return self.engine.try_execute([x]) is None

    file = io.BytesIO()
    torch.jit.save(torch.jit.script(Holder()), file)
    code = (
        "import sys, io, torch, blade; m = torch.jit.load(io.BytesIO(sys.stdin.buffer.read()));"
        "print(m(torch.randn(8, 64)), m.engine.why_unavailable())"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], input=file.getvalue(), capture_output=True, check=True
    )
    if not torch.cuda.is_available():
        assert found.stdout.decode().startswith("True TensorRT engines run on CUDA devices")
        assert (
            b"the original runs instead" in found.stderr
            or b"not used" in found.stderr
            or found.stdout
        )


HALVED: list[tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = [
    (lambda x: torch.nn.functional.gelu(x @ x.mT).softmax(-1), (torch.randn(4, 8, 8),)),
    (
        lambda x, m: (x @ x.mT).masked_fill(m, -3e38).softmax(-1) @ x,
        (torch.randn(8, 8), torch.ones(8, 8).triu(1) > 0),
    ),
    (lambda x: torch.nn.functional.layer_norm(x @ x, (8,)) + x, (torch.randn(8, 8),)),
    (lambda x: (x @ x).mT.reshape(-1) * 2, (torch.randn(8, 8),)),
    (lambda x: x.exp() + 1, (torch.randn(8),)),
]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", range(len(HALVED)))
def test_half_precision_casts(case: int, dtype: torch.dtype) -> None:
    """Products in 16 bits, results in float32, close to the original by what 16 bits can hold."""
    function, given = HALVED[case]
    cluster = cluster_of(Plain(function), given if len(given) > 1 else given[0])
    guards = len(cluster.shape_env.guards)
    halved = half.to_half(cluster, dtype)
    assert len(cluster.shape_env.guards) == guards
    for node in halved.gm.graph.nodes:
        if name_of(node.target) in HALF_OPS:
            assert node.meta["val"].dtype == dtype
        if name_of(node.target) in half.WIDE:
            assert node.meta["val"].dtype == torch.float32
    for inputs in (*cluster.samples, *cluster.probes):
        want, got = cluster.gm(*inputs), halved.gm(*inputs)
        for a, b in zip(got, want, strict=True):
            assert a.dtype == b.dtype
            scale = float(b.abs().max())
            assert float((a - b).abs().max()) <= 40 * torch.finfo(dtype).eps * scale


def test_bfloat16_where_float16_would_overflow() -> None:
    small = cluster_of(Plain(lambda x: (x @ x).relu() + 1), torch.randn(8, 8))
    large = cluster_of(Plain(lambda x: (x @ x).relu() + 1), torch.randn(8, 8) * 200)
    assert choose(small) == torch.float16 and choose(large) == torch.bfloat16
