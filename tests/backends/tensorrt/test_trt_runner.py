# SPDX-License-Identifier: Apache-2.0
"""Execution, against a stand-in for the part of TensorRT that needs a GPU (``fake_trt`` says what is faked).

Memory is the host's here, and streams are numbers; what is tested is blade's own side: which context a call gets,
what it is told in which order, whose memory results are in, and what happens when a step fails.
"""

import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import fake_trt
import pytest
import torch

from blade.backends.tensorrt import library, runner
from blade.backends.tensorrt.payload import TensorRTHeader, TensorRTPayload, TensorSpec, from_bytes
from blade.backends.tensorrt.profiles import Profile
from blade.errors import BackendError, BladeWarning
from blade.program.guard_program import with_ranges
from blade.runtime.engine import make_engine

LOW, HIGH = 1, 64
OPTS = (4, 32)


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Host memory for device memory, the fake for the library. Yields the current stream, to be changed."""
    found = library.wrap(fake_trt, is_rtx=False)
    stream = [7]
    monkeypatch.setattr(library, "find_library", lambda: found)
    monkeypatch.setattr(runner, "DEVICE", "cpu")
    monkeypatch.setattr(runner, "current_device", lambda: 0)
    monkeypatch.setattr(runner, "current_stream", lambda device: stream[0])
    monkeypatch.setattr(runner, "on_device", lambda device: nullcontext())
    monkeypatch.setattr(fake_trt.Runtime, "unsupported", None)
    yield stream


def scaled(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    """Two results: one of the input's shape, one of another and another type."""
    return [x * w, (x.sum(1) > 0)]


fake_trt.FUNCTIONS["scaled"] = scaled


def payload_of(weight: torch.Tensor, **changes: Any) -> TensorRTPayload:
    profiles = tuple(
        Profile(((LOW, 8),), ((opt, 8),), ((HIGH, 8),)) for opt in changes.pop("opts", OPTS)
    )
    ranges = [[p.min[0], p.opt[0], p.max[0]] for p in profiles]
    plan = fake_trt.make_plan(
        "scaled", [("x", "FLOAT", ranges)], [("y", "FLOAT"), ("z", "BOOL")], ["w"]
    )
    head = TensorRTHeader(
        library=f"tensorrt {fake_trt.__version__}",
        inputs=(TensorSpec("x", "FLOAT", 2),),
        outputs=(TensorSpec("y", "FLOAT", 2), TensorSpec("z", "BOOL", 1)),
        profiles=profiles,
        weights={"w": 0},
        key="",
    )
    graph = fake_trt.as_graph({"w": ("FLOAT", list(weight.shape))})
    return TensorRTPayload(TensorRTHeader(**{**head.__dict__, **changes}), plan, graph)


def load(payload: TensorRTPayload, weight: torch.Tensor) -> runner.Execution:
    data = torch.frombuffer(bytearray(payload.to_bytes()), dtype=torch.uint8)
    made = runner.load("cluster_0", data, [weight], "")
    assert isinstance(made, runner.Execution)
    return made


def contexts(execution: runner.Execution) -> list[fake_trt.Context]:
    return execution._engines[0].engine.contexts


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.randn(8)


def test_a_payload_survives_the_file(weight: torch.Tensor) -> None:
    payload = payload_of(weight)
    again = from_bytes(payload.to_bytes(), 1)
    assert again == payload


def test_results_are_right_at_every_size_and_own_their_memory(weight: torch.Tensor) -> None:
    execution = load(payload_of(weight), weight)
    kept = []
    for rows in (4, 1, 33, 64, 4):
        x = torch.randn(rows, 8)
        kept.append((scaled(x, weight), execution([x])))
    for want, got in kept:  # only now: no call may write over the results of an earlier one
        for a, b in zip(want, got, strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b)


def test_inputs_are_read_as_if_contiguous(weight: torch.Tensor) -> None:
    x = torch.randn(8, 16).mT
    got = load(payload_of(weight), weight)([x])
    assert torch.equal(got[0], x * weight)


def test_the_nearest_profile_is_taken_and_each_has_its_context(weight: torch.Tensor) -> None:
    execution = load(payload_of(weight), weight)
    for rows in (1, 4, 10, 12, 32, 64):
        execution([torch.randn(rows, 8)])
    used = {c.profile: len(c.streams) for c in contexts(execution)}
    assert used == {0: 3, 1: 3}  # 4 and 32 meet at the geometric mean, 11.3


def test_sizes_that_stay_are_not_set_again(weight: torch.Tensor) -> None:
    execution = load(payload_of(weight), weight)
    asked = []
    x = torch.randn(4, 8)
    execution([x])
    [context] = contexts(execution)
    context.set_input_shape = lambda *given: asked.append(given) or True  # type: ignore[method-assign]
    execution([x])
    assert asked == []
    execution([x[:3]])
    assert asked == [("x", (3, 8))]


def test_a_context_belongs_to_a_thread_and_a_stream(
    weight: torch.Tensor, on_the_host: list[int]
) -> None:
    execution = load(payload_of(weight, opts=(4,)), weight)
    x = torch.randn(4, 8)
    for stream in (7, 8, 7):
        on_the_host[0] = stream
        execution([x])
    assert [c.streams for c in contexts(execution)] == [[7, 7], [8]]
    other = threading.Thread(target=execution, args=([x],))
    other.start()
    other.join()
    assert len(contexts(execution)) == 3
    workspaces = {c.memory for c in contexts(execution)}
    assert len(workspaces) == 3


def test_profiles_on_one_stream_share_a_workspace(weight: torch.Tensor) -> None:
    execution = load(payload_of(weight), weight)
    for rows in OPTS:
        execution([torch.randn(rows, 8)])
    assert len(contexts(execution)) == 2 and len({c.memory for c in contexts(execution)}) == 1


def test_many_threads_at_once(weight: torch.Tensor) -> None:
    """Each context asserts that no other thread is inside it (``fake_trt``)."""
    execution = load(payload_of(weight), weight)
    together = threading.Barrier(6)

    def work(seed: int) -> bool:
        generator = torch.Generator().manual_seed(seed)
        together.wait()
        for _ in range(60):
            rows = int(torch.randint(LOW, HIGH + 1, (1,), generator=generator))
            x = torch.randn(rows, 8, generator=generator)
            got = execution([x])
            if not all(torch.equal(a, b) for a, b in zip(got, scaled(x, weight), strict=True)):
                return False
        return True

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(work, range(6)))
    assert all(len(c.threads) == 1 for c in contexts(execution))
    assert len(execution._engines) == 1


def test_a_shape_outside_every_profile_says_which(weight: torch.Tensor) -> None:
    execution = load(payload_of(weight), weight)
    with pytest.raises(
        RuntimeError, match=r"does not take x of shape \(65, 8\).*is not in profile 1"
    ):
        execution([torch.randn(65, 8)])
    x = torch.randn(64, 8)  # and the next call is not disturbed by it
    assert torch.equal(execution([x])[0], x * weight)


def test_outputs_in_another_memory_order(weight: torch.Tensor) -> None:
    turned = (TensorSpec("y", "FLOAT", 2, (1, 0)), TensorSpec("z", "BOOL", 1))
    x = torch.randn(4, 8)
    got = load(payload_of(weight, outputs=turned), weight)([x])
    assert got[0].shape == (8, 4) and torch.equal(got[0].mT, x * weight)


def test_weights_come_from_the_constants_and_are_watched(weight: torch.Tensor) -> None:
    execution = load(payload_of(weight), weight)
    x = torch.randn(4, 8)
    assert torch.equal(execution([x])[0], x * weight)
    weight.mul_(2)
    with pytest.raises(RuntimeError, match="weights were written"):
        execution([x])


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"library": "tensorrt 10.3.0"},
            "built by tensorrt 10.3.0, and tensorrt 99.1.2 is installed",
        ),
        ({"inputs": (TensorSpec("a", "FLOAT", 2),)}, "The engine has the inputs and outputs"),
        ({"inputs": (TensorSpec("x", "HALF", 2),)}, "The engine has the inputs and outputs"),
        ({"outputs": (TensorSpec("y", "FLOAT", 2),)}, "The engine has the inputs and outputs"),
        ({"weights": {}}, None),
        ({"weights": {"v": 0}}, "does not take the weights back"),
    ],
)
def test_what_is_not_as_it_was_built_is_not_run(
    weight: torch.Tensor, changes: dict[str, Any], why: str | None
) -> None:
    payload = payload_of(weight, **changes)
    if why is None:  # nothing to refit: the stand-in's contexts then miss their weights
        with pytest.raises(AssertionError, match="not refitted"):
            load(payload, weight)([torch.randn(4, 8)])
        return
    with pytest.raises(BackendError, match=why):
        load(payload, weight)


def test_the_number_of_profiles_is_checked(weight: torch.Tensor) -> None:
    payload = payload_of(weight)
    head = TensorRTHeader(**{**payload.head.__dict__, "profiles": payload.head.profiles[:1]})
    with pytest.raises(BackendError, match=r"has 2 optimization profile\(s\), built were 1"):
        load(TensorRTPayload(head, payload.plan, payload.graph), weight)


def test_a_device_that_cannot_run_it_is_a_load_time_fallback(
    weight: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_trt.Runtime, "unsupported", "compute capability 9.0 is not supported")
    engine = engine_of(payload_of(weight), weight)
    with pytest.warns(BladeWarning, match=r"compute capability 9\.0"):
        assert engine.try_execute([torch.randn(4, 8)]) is None
    assert "compute capability 9.0 is not supported" in engine.why_unavailable()
    assert engine.stats()["backend_unavailable"] == 1


def test_out_of_range_sizes_never_reach_the_engine(weight: torch.Tensor) -> None:
    engine = engine_of(payload_of(weight), weight)
    for rows, served in ((0, False), (1, True), (64, True), (65, False)):
        assert (engine.try_execute([torch.randn(rows, 8)]) is not None) == served
    assert engine.stats()["guard_shape"] == 2 and "engine_raised" not in engine.stats()


def test_engines_die_with_their_last_user(
    weight: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[fake_trt.Context]] = []
    create = fake_trt.Engine.create_execution_context

    def noted(*given: Any) -> fake_trt.Context:
        context = create(*given)
        made.append(weakref.ref(context))
        return context

    monkeypatch.setattr(fake_trt.Engine, "create_execution_context", noted)
    engine = engine_of(payload_of(weight), weight)
    assert engine.try_execute([torch.randn(4, 8)]) is not None
    gc.collect()
    assert made[0]() is not None
    del engine
    gc.collect()
    assert made[0]() is None


def engine_of(payload: TensorRTPayload, weight: torch.Tensor) -> Any:
    import blade.backends.tensorrt.backend  # noqa: F401 - registers the runner

    return make_engine("cluster_0", "tensorrt", program(), payload.to_bytes(), [weight])


def program() -> str:
    lines = """blade.disc 1
isa
inputs 1
input 0 f32 cpu 2
registers 2
reg 0 dim 0 0
reg 1 dim 0 1
guards 0
slots 2
slot 0 output f32 2 0 1
slot 1 output bool 1 0
instructions 0
outputs 2 0 1
end
"""
    return with_ranges(lines, {(0, 0): (LOW, HIGH), (0, 1): (8, 8)})
