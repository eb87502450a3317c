# SPDX-License-Identifier: Apache-2.0
"""Where ONNX Runtime computes: sessions of the CPU, and those of a GPU with a stand-in for the library."""

import sys
from types import SimpleNamespace
from typing import Any

import fake_onnxruntime as fake
import pytest
import torch
from cutting import cut, trace
from torch._subclasses.fake_tensor import FakeTensorMode

from blade.backends.onnxruntime import backend, session
from blade.backends.onnxruntime import device as place
from blade.backends.onnxruntime.device import OrtDevice, ort_device_of, providers
from blade.backends.shared.library_payload import LibraryHeader, pack
from blade.backends.shared.library_sessions import OptionalLibrary
from blade.core.cluster import Cluster
from blade.core.reason import Code
from blade.errors import BackendError, Refused
from blade.program.guard_program import guard_program

MODEL = b"\x3a\x00"  # an empty graph; weights are inputs
STAMP = {"onnxruntime": "1.2"}


def on_gpu(index: int) -> Any:
    return SimpleNamespace(is_cuda=True, device=torch.device("cuda", index))


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """torch's current stream of device k is ``stream.handle + k``."""
    given = SimpleNamespace(handle=0)
    monkeypatch.setattr(
        torch.cuda,
        "current_stream",
        lambda device: SimpleNamespace(cuda_stream=given.handle + device.index),
    )
    return given


def test_on_the_cpu_a_place_is_a_number_of_threads() -> None:
    assert ort_device_of([torch.ones(2)]) == OrtDevice(torch.get_num_threads())
    assert providers(OrtDevice(2)) == ["CPUExecutionProvider"]
    assert place.run_options(OrtDevice(2)) is None


def test_on_a_gpu_it_is_the_device_of_the_inputs_and_its_current_stream(
    stream: SimpleNamespace,
) -> None:
    stream.handle = 4096
    found = ort_device_of([torch.ones(2), on_gpu(3)])
    assert found == OrtDevice(torch.get_num_threads(), 3, 4099)
    assert found.device == torch.device("cuda:3")
    [(name, settings), last] = providers(found)
    assert (name, last) == ("CUDAExecutionProvider", "CPUExecutionProvider")
    assert settings["device_id"] == "3" and settings["user_compute_stream"] == "4099"


def test_the_default_stream_has_a_handle_that_is_not_none(stream: SimpleNamespace) -> None:
    [(_, settings), _] = providers(ort_device_of([on_gpu(0)]))
    assert settings["user_compute_stream"] == "1"


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The stand-in, in the place of the library, and the host's memory in that of a GPU's."""
    monkeypatch.setitem(sys.modules, "onnxruntime", fake)
    monkeypatch.setattr(OptionalLibrary, "installed", lambda self: STAMP["onnxruntime"])
    monkeypatch.setattr(OrtDevice, "device", property(lambda self: torch.device("cpu")))
    place.has_cuda.cache_clear()
    place._without_waiting.cache_clear()
    fake.MADE.clear()
    yield fake
    place.has_cuda.cache_clear()
    place._without_waiting.cache_clear()


def cluster() -> Cluster:
    weight = torch.randn(3, 4)
    [extracted] = cut(trace(lambda x: torch.relu(x + weight) * 2, (torch.randn(3, 4),)))
    return extracted.cluster


def payload(device: str) -> torch.Tensor:
    head = LibraryHeader(
        weights=("w",), inputs=("x",), outputs=("y",), orders=(None,), device=device
    )
    data = pack(head, STAMP, MODEL)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def test_a_gpu_has_a_session_per_stream_and_weights_that_stay_bound(
    library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    current = OrtDevice(2, 1, 77)
    monkeypatch.setattr(session, "ort_device_of", lambda tensors: current)
    weight = torch.randn(3, 4)
    run = session.load("c", payload("cuda"), [weight], guard_program(cluster()))
    assert not library.MADE, "nothing is known of the stream yet"
    for _ in range(2):
        x = torch.randn(3, 4)
        [answer] = run([x])
        torch.testing.assert_close(answer, x + weight)
    [made] = library.MADE
    assert made.model == MODEL
    assert made.providers == providers(current)
    assert made.options.intra_op_num_threads == 2
    [binding] = made.bindings
    assert binding.calls == ["w", "x", "x"]
    assert [o.entries for o in made.run_options] == [
        {"disable_synchronize_execution_providers": "1"}
    ] * 2

    current = OrtDevice(2, 1, 78)
    run([torch.randn(3, 4)])
    assert [s.providers[0][1]["user_compute_stream"] for s in library.MADE] == ["77", "78"]


def test_a_gpu_engine_wants_a_library_with_its_kernels(
    library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake, "get_available_providers", lambda: ["CPUExecutionProvider"])
    with pytest.raises(BackendError, match="pip install onnxruntime-gpu"):
        session.load("c", payload("cuda"), [torch.randn(3, 4)], guard_program(cluster()))


@pytest.mark.parametrize(("has_cuda", "served"), [(True, True), (False, False)])
def test_gpu_nodes_are_taken_where_the_library_has_kernels(
    has_cuda: bool, served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "has_cuda", lambda: has_cuda)
    assert backend._is_served(torch.device("cuda:0")) is served
    assert backend._is_served(torch.device("cpu"))
    assert not backend._is_served(torch.device("mps"))


def test_an_engine_is_of_one_device() -> None:
    made = cluster()
    assert backend._device_of(made) == torch.device("cpu")
    with FakeTensorMode():
        elsewhere = torch.empty(3, 4, device="cuda:0")
    for node in made.gm.graph.nodes:
        if node.op == "placeholder":
            node.meta["val"] = elsewhere
    with pytest.raises(Refused, match="does not compute on cpu and cuda:0") as refused:
        backend._device_of(made)
    assert refused.value.code is Code.UNSUPPORTED_DEVICE
