# SPDX-License-Identifier: Apache-2.0
"""An engine for several architectures: which of its programs is run on which device, with a fake one."""

from collections.abc import Iterator, Sequence

import pytest
import torch
from fake_device import KERNELS, container, counts, fake, fake_writer
from programs import Writer

from blade.core.reason import Code
from blade.runtime.engine import make_engine

pytestmark = pytest.mark.needs("g++")


@pytest.fixture(autouse=True)
def original_device() -> Iterator[None]:
    fake().fake_stream(0)
    yield
    fake().fake_is(b"fake_1", 1000)


def negated(architecture: str, times: int) -> str:
    """A program that negates its input ``times`` times: how often it launches tells which one ran."""
    w: Writer = fake_writer(architecture)
    x = w.input("f32", 1)
    (n,), one = w.dims(x, 1), w.const(1)
    last = w.slot(f"input {x}")
    for k in range(times):
        out = w.tensor("output" if k == times - 1 else "arena", [n])
        w.launch("neg", [one, one, one], [last, out], [n])
        last = out
    w.outputs = [last]
    return w.text()


def objects(architectures: Sequence[str], shared: int = 0) -> bytes:
    """One object with the kernels of every architecture; the last one's need ``shared`` bytes of shared memory."""
    index, code = [], b""
    for name in architectures:
        need = shared if name == architectures[-1] else 0
        index += [f"{name} {kernel} 128 {need} {len(kernel)}" for kernel in KERNELS]
        code += "".join(KERNELS).encode()
    return "\n".join(["blade.cubins 1", str(len(index)), *index, ""]).encode() + code


def engine_for(
    *architectures: str, shared: int = 0, constants: Sequence[torch.Tensor] = ()
) -> torch.ScriptObject:
    """The k-th program launches k + 1 kernels."""
    text = "".join(negated(name, k + 1) for k, name in enumerate(architectures))
    limits = {"cuda_graphs": 0}
    return make_engine("test", "disc", text, objects(architectures, shared), constants, limits)


def ran(engine: torch.ScriptObject) -> int:
    """The number of the program that answered, from 0."""
    before, x = counts().launches, torch.randn(5)
    outputs = engine.try_execute([x])
    assert outputs is not None, engine.why_unavailable() or engine.last_error()
    times = counts().launches - before
    assert torch.equal(outputs[0], x * (-1) ** times)
    return times - 1


THREE = ("sm_90", "sm_80", "sm_86")


@pytest.mark.parametrize(
    ("device", "expected"),
    [("sm_90", 0), ("sm_80", 1), ("sm_86", 2), ("sm_87", 2), ("sm_89", 2)],
)
@pytest.mark.parametrize("constants", [0, 1])
def test_the_nearest_architecture_is_run(device: str, expected: int, constants: int) -> None:
    fake().fake_is(device.encode(), 1000)
    assert ran(engine_for(*THREE, constants=[torch.randn(4)] * constants)) == expected


@pytest.mark.parametrize("device", ["sm_75", "sm_100", "sm_120", "fake_1"])
def test_a_device_that_none_is_for_runs_the_original(device: str) -> None:
    fake().fake_is(device.encode(), 1000)
    engine = engine_for(*THREE)
    words = f"The engine has device code for sm_90, sm_80, sm_86, but fake:0 is {device}"
    assert words in engine.why_unavailable()
    assert "gpu_targets" in engine.why_unavailable()
    assert engine.try_execute([torch.randn(3)]) is None
    assert engine.stats()[Code.DEVICE_MISMATCH.value] == 1


def test_code_for_one_architecture_alone_runs_there_alone() -> None:
    fake().fake_is(b"sm_100", 1000)
    assert ran(engine_for("sm_90", "sm_100a")) == 1
    for other in (b"sm_103", b"sm_110"):
        fake().fake_is(other, 1000)
        assert "but fake:0 is" in engine_for("sm_90", "sm_100a").why_unavailable()


def test_code_whose_blocks_are_too_large_is_passed_over() -> None:
    """sm_86 has less shared memory than sm_80, whose code it runs otherwise."""
    fake().fake_is(b"sm_89", 100)
    assert ran(engine_for("sm_90", "sm_80", "sm_86", shared=101)) == 1
    engine = engine_for("sm_90", "sm_80", shared=101)
    words = "needs 101 bytes of shared memory, and a block has 100"
    assert words in engine.why_unavailable()
    assert engine.try_execute([torch.randn(3)]) is None


def test_a_single_program_runs_on_later_devices_of_its_major_version() -> None:
    text, data = negated("sm_80", 1), objects(["sm_80"], shared=100)
    for device, shared, answers in (
        ("sm_80", 10, True),
        ("sm_86", 100, True),
        ("sm_86", 99, False),
    ):
        fake().fake_is(device.encode(), shared)
        engine = make_engine("test", "disc", text, data, (), {"cuda_graphs": 0})
        assert (engine.try_execute([torch.randn(3)]) is not None) == answers
        assert ("bytes of shared memory" in engine.last_error()) != answers


def test_a_saved_engine_is_read_by_each_device(tmp_path) -> None:
    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.engine = engine_for(*THREE, constants=[torch.randn(4)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            outputs = self.engine.try_execute([x])
            return x if outputs is None else outputs[0]

    fake().fake_is(b"sm_90", 1000)
    torch.jit.script(Module()).save(str(tmp_path / "m.pt"))
    for place, device in enumerate(THREE):
        fake().fake_is(device.encode(), 1000)
        loaded = torch.jit.load(str(tmp_path / "m.pt"))
        assert ran(loaded.engine) == place
    assert container().startswith(b"blade.cubins 1")


def test_where_there_is_no_such_accelerator_the_first_program_says_so() -> None:
    text = negated("sm_90", 1) + negated("sm_80", 2)
    engine = make_engine("test", "disc", text.replace("isa fake", "isa cpux"), b"")
    assert engine.why_unavailable() != ""


def test_damaged_texts_are_refused_and_never_crash() -> None:
    fake().fake_is(b"sm_80", 1000)
    text = negated("sm_90", 1) + negated("sm_80", 2)
    data = objects(["sm_90", "sm_80"])
    for place in range(0, len(text), 3):
        for broken in (text[:place], text[:place] + "\nblade.disc 1\n" + text[place:]):
            make_engine("test", "disc", broken, data).why_unavailable()
    for name in (b"sm_", b"sm_a", b"sm_8", b"sm_99999999999", b"sm_8x", b"sm_90a"):
        fake().fake_is(name, 1000)
        assert (
            engine_for("sm_8", "sm_a").why_unavailable() != "" or name == b"sm_8" or name == b"sm_a"
        )
