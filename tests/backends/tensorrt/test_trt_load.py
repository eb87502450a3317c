# SPDX-License-Identifier: Apache-2.0
"""What the real library does with a plan where no device can run it."""

import pytest
import torch
from trt_clusters import Mlp, cluster_of

from blade.backends.tensorrt import library, runner
from blade.backends.tensorrt.build import BuiltEngine, build_engine
from blade.backends.tensorrt.payload import TensorRTPayload
from blade.config import Config
from blade.errors import BackendError

pytestmark = [
    pytest.mark.needs("tensorrt_rtx", "runtime"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a CUDA device"),
]


@pytest.fixture(scope="module")
def built() -> BuiltEngine:
    return build_engine(cluster_of(Mlp(), torch.randn(8, 64)), Config(cache=False))


def load(data: bytes) -> None:
    runner.load("cluster_0", torch.frombuffer(bytearray(data), dtype=torch.uint8), [], "")


def test_without_a_device_nothing_is_tried(built: BuiltEngine) -> None:
    with pytest.raises(
        BackendError, match=r"run on CUDA devices, and torch .* is built without CUDA"
    ):
        load(built.payload())


def test_the_library_s_own_words_when_it_cannot_load(
    built: BuiltEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``deserialize_cuda_engine`` returns None, as on a GPU that TensorRT-RTX does not run on."""
    monkeypatch.setattr(runner, "current_device", lambda: 0)
    with pytest.raises(BackendError, match=r"cannot load the engine here: .*CUDA driver"):
        load(built.payload())


def test_another_version_is_told_before_the_plan_is_touched(built: BuiltEngine) -> None:
    head = type(built.head)(**{**built.head.__dict__, "library": "tensorrt_rtx 1.2.0.54"})
    with pytest.raises(
        BackendError, match=r"built by tensorrt_rtx 1.2.0.54, and tensorrt_rtx 1\.\d"
    ):
        load(TensorRTPayload(head, built.plan, built.graph).to_bytes())


def test_the_library_knows_which_devices_it_runs_on(monkeypatch: pytest.MonkeyPatch) -> None:
    found = library.find_library()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    for capability, runs in (((8, 9), True), ((9, 0), False), ((12, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda c=capability: c)
        why = library.why_not_device(found)
        assert (why is None) == runs
        assert runs or "does not run on NVIDIA H200 (compute capability 9.0)" in str(why)
