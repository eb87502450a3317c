# SPDX-License-Identifier: Apache-2.0
"""Engines of ONNX Runtime and OpenVINO in programs without Python, by the libraries' C APIs."""

import importlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import blade
from blade.backends.shared.library_payload import pack, unpack
from blade.report import engines_of
from blade.runtime.engine import make_engine

onnx = pytest.importorskip("onnx")

pytestmark = pytest.mark.needs("runtime", "onnx", "onnxruntime", "openvino", "g++", "cmake")

Run = Callable[..., Any]
LIBRARIES = ("onnxruntime", "openvino")


class Tagger(torch.nn.Module):
    """Indices, a convolution whose output is returned permuted, weights of all sizes, and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(50, 32)
        self.mix = torch.nn.Conv1d(32, 48, 3, padding=1)
        self.head = torch.nn.Linear(48, 5)

    def forward(
        self, tokens: torch.Tensor, scale: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        mixed = self.mix(self.table(tokens).transpose(1, 2)).relu().transpose(1, 2)
        return self.head(mixed * scale), mixed


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[torch.nn.Module, Path]]:
    """By backend a model, and the file of it with one engine of that backend."""
    return {name: _save(name, tmp_path_factory.mktemp(name)) for name in LIBRARIES}


def _save(backend: str, folder: Path) -> tuple[torch.nn.Module, Path]:
    model = Tagger().eval()
    samples = (torch.randint(50, (2, 7)), torch.rand(2, 7, 1))
    config = blade.Config(optimization_pipeline=backend, timing=False, min_cluster_size=1)
    optimized = blade.optimize(model, samples, config)
    assert [e.backend() for _, e in engines_of(optimized)] == [backend]
    torch.jit.save(optimized, folder / "model.pt")
    return model, folder / "model.pt"


@pytest.mark.parametrize("backend", LIBRARIES)
def test_they_answer_at_every_size_from_many_threads(
    backend: str,
    run_without_python: Run,
    saved: dict[str, tuple[torch.nn.Module, Path]],
    tmp_path: Path,
) -> None:
    model, path = saved[backend]
    home = tmp_path / "home"
    home.mkdir()
    for batch, length in ((1, 1), (5, 30)):
        inputs = torch.randint(50, (batch, length)), torch.rand(batch, length, 1)
        answer = run_without_python(path, *inputs, calls=5, threads=4, HOME=str(home))
        torch.testing.assert_close(answer.outputs, model(*inputs))
        assert f"cluster_0: {backend} answered 20 of 20 calls\n" in answer.said, answer
        assert not answer.warned
    assert list(home.iterdir()) == []  # no ids, no telemetry


@pytest.mark.parametrize("backend", LIBRARIES)
def test_the_original_answers_where_the_library_is_not(
    backend: str,
    run_without_python: Run,
    saved: dict[str, tuple[torch.nn.Module, Path]],
    tmp_path: Path,
) -> None:
    model, path = saved[backend]
    inputs = torch.randint(50, (3, 4)), torch.rand(3, 4, 1)
    nowhere = {f"BLADE_{backend.upper()}": str(tmp_path / "nowhere")}
    answer = run_without_python(path, *inputs, calls=2, **nowhere)
    torch.testing.assert_close(answer.outputs, model(*inputs))
    assert f"{backend} answered 0 of 2 calls, the original 2 (backend_unavailable 2)" in answer.said
    assert f"BLADE_{backend.upper()} may name its file or folder" in answer.said


def _rewrite(path: Path, backend: str, stamp: str, change: Callable[[bytes], bytes]) -> None:
    """Put another version of the library, and another model, into the engine of the file ``path``."""
    loaded = torch.jit.load(path)
    [(name, engine)] = engines_of(loaded)
    (_, words, _, tensors), _ = engine.__getstate__()
    here = importlib.import_module(backend).__version__.partition("-")[0]
    head, model = unpack(tensors[0], {backend: here}, backend, len(tensors) - 1)
    payload = pack(head, {backend: stamp or here}, change(model))
    getattr(loaded, name).engine = make_engine(words[0], backend, words[2], payload, tensors[1:])
    torch.jit.save(loaded, path)


def _same(model: bytes) -> bytes:
    return model


def _of_another_domain(model: bytes) -> bytes:
    changed = onnx.load_from_string(model)
    changed.graph.node[0].domain = "com.microsoft"
    return bytes(changed.SerializeToString())


def _reads_a_file(model: bytes) -> bytes:
    """In an attribute of a node, where no weight of the engine can be."""
    changed = onnx.load_from_string(model)
    value = onnx.helper.make_tensor("stolen", onnx.TensorProto.FLOAT, [1], [0.0])
    value.data_location = onnx.TensorProto.EXTERNAL
    value.external_data.add(key="location", value="/etc/passwd")
    changed.graph.node[0].attribute.append(onnx.helper.make_attribute("extra", value))
    return bytes(changed.SerializeToString())


@pytest.mark.parametrize(
    ("stamp", "change", "said"),
    [
        (
            "0.0.1",
            _same,
            "of version 0.0.1, which is neither on the loader's path nor beside torch",
        ),
        ("", _of_another_domain, "it has ops of the domain 'com.microsoft'"),
        ("", _reads_a_file, "its tensor 'stolen' is in another file"),
        ("", lambda model: model[:-7], "or one that was cut off"),
    ],
    ids=["another version", "another domain", "a file", "cut off"],
)
@pytest.mark.parametrize("backend", LIBRARIES)
def test_what_cannot_be_trusted_does_not_reach_the_library(
    backend: str,
    stamp: str,
    change: Callable[[bytes], bytes],
    said: str,
    run_without_python: Run,
    saved: dict[str, tuple[torch.nn.Module, Path]],
    tmp_path: Path,
) -> None:
    model, path = saved[backend]
    _rewrite(Path(shutil.copy(path, tmp_path)), backend, stamp, change)
    inputs = torch.randint(50, (3, 4)), torch.rand(3, 4, 1)
    answer = run_without_python(tmp_path / path.name, *inputs)
    torch.testing.assert_close(answer.outputs, model(*inputs))
    assert "answered 0 of 1 calls, the original 1 (backend_unavailable 1)" in answer.said
    assert said in answer.said


@pytest.mark.parametrize("backend", LIBRARIES)
def test_an_index_out_of_range_is_the_originals_to_name(
    backend: str, run_without_python: Run, saved: dict[str, tuple[torch.nn.Module, Path]]
) -> None:
    _, path = saved[backend]
    inputs = torch.full((1, 2), 50), torch.rand(1, 2, 1)
    with pytest.raises(AssertionError, match="index out of range"):
        run_without_python(path, *inputs)
