# SPDX-License-Identifier: Apache-2.0
"""What the executor does on an accelerator, with a fake one that works in the CPU's memory."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from fake_device import container, counts, fake, fake_writer, two_step
from programs import Writer

from blade.core.reason import Code
from blade.runtime.engine import make_engine

pytestmark = pytest.mark.needs("g++")


@pytest.fixture(autouse=True)
def device():
    library = fake()
    library.fake_stream(0)
    yield library
    library.fake_capturing(False)
    library.fake_busy(False)


def run(engine, *inputs: torch.Tensor) -> list[torch.Tensor]:
    outputs = engine.try_execute(list(inputs))
    assert outputs is not None, (engine.last_error(), engine.why_unavailable(), engine.stats())
    return outputs


def plain(w: Writer, **limits: int):
    return w.engine(object=container(), limits={"cuda_graphs": 0, **limits})


def test_launches_get_pointers_ints_and_the_stream(device):
    engine = plain(two_step(fake_writer()))
    for stream, n in ((0, 5), (64, 5), (64, 0), (0, 130)):
        device.fake_stream(stream)
        x, y = torch.randn(n), torch.randn(n)
        assert torch.equal(run(engine, x, y)[0], -(x + y))


def test_an_empty_grid_is_skipped():
    w = fake_writer()
    x = w.input("f32", 1)
    (n,), one = w.dims(x, 1), w.const(1)
    out = w.tensor("output", [n])
    w.launch("neg", [n, one, one], [w.slot(f"input {x}"), out], [n])
    w.outputs = [out]
    engine = plain(w)
    before = counts().launches
    assert run(engine, torch.randn(0))[0].shape == (0,)
    assert counts().launches == before
    run(engine, torch.randn(3))
    assert counts().launches == before + 1


def test_a_grid_that_no_device_has():
    w = fake_writer()
    x = w.input("f32", 1)
    (n,), one = w.dims(x, 1), w.const(1)
    out = w.tensor("output", [n])
    w.launch("neg", [one, n, one], [w.slot(f"input {x}"), out], [n])
    w.outputs = [out]
    engine = plain(w)
    assert engine.try_execute([torch.randn(65536)]) is None
    assert "a grid cannot have 65536 blocks along axis 1" in engine.last_error()
    assert len(run(engine, torch.randn(65535))) == 1


def test_inputs_that_are_not_aligned_are_copied():
    engine = plain(two_step(fake_writer()))
    whole = torch.randn(9)
    x, y = whole[1:], torch.randn(8)
    assert x.data_ptr() % 16 != 0
    assert torch.equal(run(engine, x, y)[0], -(x + y))


def test_an_output_that_views_an_input_forbids_the_copy():
    w = two_step(fake_writer())
    w.outputs.append(w.view(0, [0], [1], w.const(0)))
    engine = plain(w)
    x, y = torch.randn(8), torch.randn(8)
    assert run(engine, x, y)[1].data_ptr() == x.data_ptr()
    assert engine.try_execute([torch.randn(9)[1:], y]) is None
    assert engine.stats()["guard_shape"] == 1


def with_number(rank: int = 0) -> Writer:
    """-(x + n) for an x of one element and a number."""
    w = two_step(fake_writer())
    w.registers[0] = "const 1"
    w.inputs = ["f32 cpu 1", f"f32 cpu {rank} number"]
    return w


@pytest.mark.parametrize("graphs", [0, 2])
def test_a_number_is_put_on_the_device_in_every_call(graphs: int) -> None:
    w = with_number()
    w.outputs.append(1)
    engine = w.engine(object=container(), limits={"cuda_graphs": graphs})
    x, number = torch.randn(1), torch.tensor(0.0)
    for _ in range(8):
        number += 1.5
        out, read = run(engine, x, number)
        assert torch.equal(out, -(x + number)) and torch.equal(read, number)
        assert read.data_ptr() != number.data_ptr()
    assert (engine.stats()["graph_replays"] > 0) == (graphs > 0)


def test_what_is_no_number() -> None:
    assert (
        "a number has no dimensions" in with_number(1).engine(object=container()).why_unavailable()
    )
    w = with_number()
    w.slot("update 1")
    assert "a number is not written to" in w.engine(object=container()).why_unavailable()
    w.inputs[1] = "f32 cpu 0 numbers"
    assert "unexpected 'numbers'" in w.engine(object=container()).why_unavailable()


def packed(kernel: str = "pack") -> Writer:
    """x + (-3 * weight), of 4 elements and two that stay zero."""
    w = fake_writer()
    x = w.input("f32", 1)
    (n,), one = w.dims(x, 1), w.const(1)
    out = w.tensor("output", [n])
    w.packs = [f"pack {kernel} f32 6 1 0 4 1 3"]
    w.launch("add", [one, one, one], [w.slot(f"input {x}"), w.slot("const 1"), out], [n])
    w.outputs = [out]
    return w


def test_packs_are_launches_and_follow_their_constants():
    weight = torch.randn(4)
    engine = packed().engine([weight], object=container())
    want = torch.cat([-3 * weight, torch.zeros(2)])
    zeros = torch.zeros(6)
    assert torch.equal(run(engine, zeros)[0], want)
    weight.mul_(2)
    for _ in range(3):  # graphs read the same memory
        assert torch.equal(run(engine, zeros)[0], 2 * want)


class Module(torch.nn.Module):
    """TorchScript: Python's lock is free while it runs."""

    def __init__(self, engine) -> None:
        super().__init__()
        self.engine = engine

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = self.engine.try_execute([x])
        return torch.empty(0) if outputs is None else outputs[0]


def test_threads_that_see_a_constant_written_to_pack_it_once():
    """Who comes second must not clear what the first one computes with."""
    weight, zeros = torch.randn(4), torch.zeros(6)
    engine = packed("slow_pack").engine([weight], object=container(), limits={"cuda_graphs": 0})
    module = torch.jit.script(Module(engine))
    module(zeros)
    before = counts().launches
    with ThreadPoolExecutor(3) as pool:
        weight.mul_(2)
        first = pool.submit(module, zeros)
        while counts().launches == before:  # it packs, which takes a while
            time.sleep(0.001)
        weight.mul_(2)
        others = [pool.submit(module, zeros) for _ in range(2)]  # both find it written to
        first.result()
        want = torch.cat([-3 * weight, torch.zeros(2)])
        assert all(torch.equal(other.result(), want) for other in others)
    assert counts().launches == before + 2 + 3


def test_what_is_packed_while_somebody_records_is_packed_again(device):
    """It was recorded and has not run; the fake runs it all the same."""
    weight = torch.randn(4)
    engine = packed().engine([weight], object=container(), limits={"cuda_graphs": 0})
    zeros = torch.zeros(6)
    run(engine, zeros)  # the first call packs, and is not recorded
    weight.mul_(2)
    device.fake_capturing(True)
    run(engine, zeros)
    device.fake_capturing(False)
    before = counts().launches
    for _ in range(2):
        run(engine, zeros)
    assert counts().launches == before + 3


def test_profile_counts_by_events():
    w = two_step(fake_writer())
    texts, seconds = plain(w).profile([torch.randn(3), torch.randn(3)], 4)
    assert [text.split()[1] for text in texts] == ["add", "neg"]
    assert seconds == [1.0, 1.0]  # a launch each, in the fake's time


def test_what_somebody_records_has_memory_of_its_own(device):
    engine = two_step(fake_writer()).engine(object=container())
    x, y = torch.randn(4), torch.randn(4)
    for _ in range(3):
        run(engine, x, y)
    captures = engine.stats()["graph_captures"]
    device.fake_capturing(True)
    replays = engine.stats()["graph_replays"]
    for _ in range(3):
        assert torch.equal(run(engine, x, y)[0], -(x + y))
    assert engine.stats()["graph_captures"] == captures
    assert engine.stats()["graph_replays"] == replays


def test_a_launch_that_fails_falls_back():
    w = fake_writer()
    x = w.input("f32", 1)
    (n,), one = w.dims(x, 1), w.const(1)
    out = w.tensor("output", [n])
    w.launch("fail", [one, one, one], [w.slot(f"input {x}"), out], [n])
    w.outputs = [out]
    engine = plain(w, max_failures=2)
    assert engine.try_execute([torch.randn(3)]) is None
    assert engine.stats()["engine_raised"] == 1
    assert "fell over" in engine.last_error()


def test_kernels_are_freed_with_their_engine():
    before = counts().kernels
    engine = two_step(fake_writer()).engine(object=container())
    run(engine, torch.randn(3), torch.randn(3))
    assert counts().kernels == before + 2
    del engine
    assert counts().kernels == before


# what keeps an engine from running


def check_unavailable(engine, code: Code, words: str, inputs: list[torch.Tensor]) -> None:
    assert engine.try_execute(inputs) is None
    assert engine.stats()[code.value] == 1
    assert words in engine.why_unavailable()


VECTORS = [torch.ones(4), torch.ones(4)]


def test_another_architecture():
    """With constants the device is known when the engine is loaded; without, at the call."""
    w = two_step(fake_writer("fake_7"))
    w.slot("const 0")
    engine = w.engine([torch.randn(3)], object=container(architecture="fake_7"))
    words = "has device code for fake_7, but fake:0 is fake_1"
    check_unavailable(engine, Code.DEVICE_MISMATCH, words, VECTORS)
    engine = two_step(fake_writer("fake_7")).engine(object=container(architecture="fake_7"))
    assert engine.try_execute(VECTORS) is None
    assert engine.stats()["device_mismatch"] == 1
    assert words in engine.last_error()


def test_cuda_where_there_is_none():
    if "cuda" in torch.ops.blade.accelerators():
        pytest.skip("the CUDA runtime is loaded")
    w = Writer(isa="cuda sm_90")
    x = w.input("f32", 1, "cuda")
    w.outputs = [w.slot(f"input {x}")]
    check_unavailable(w.engine(), Code.BACKEND_UNAVAILABLE, "libblade_cuda.so", VECTORS[:1])


def test_launches_in_a_program_of_the_cpu():
    w = two_step(Writer())
    check_unavailable(
        w.engine(), Code.CORRUPT_PAYLOAD, "has a launch, but its isa is the CPU's", VECTORS
    )


def test_kernels_in_a_program_of_an_accelerator():
    w = fake_writer()
    n = w.const(1)
    w.kernel("neg", n, n, n, [], [])
    engine = w.engine(object=container())
    check_unavailable(
        engine, Code.CORRUPT_PAYLOAD, "has a kernel of the CPU, but its isa is fake", []
    )


def test_a_program_and_an_input_of_different_devices():
    w = Writer()
    w.input("f32", 1, "cuda")
    check_unavailable(w.engine(), Code.CORRUPT_PAYLOAD, "input 0 is on cuda", VECTORS[:1])


def test_a_constant_that_is_not_aligned():
    w = fake_writer()
    x = w.input("f32", 1)
    (n,), one = w.dims(x, 1), w.const(1)
    out = w.tensor("output", [n])
    w.launch("add", [one, one, one], [w.slot(f"input {x}"), w.slot("const 0"), out], [n])
    w.outputs = [out]
    engine = w.engine([torch.randn(5)[1:]], object=container())
    check_unavailable(engine, Code.DEVICE_MISMATCH, "a multiple of 16 bytes", VECTORS[:1])


def test_a_kernel_that_is_not_in_the_object():
    engine = two_step(fake_writer()).engine(object=container(["add"]))
    check_unavailable(engine, Code.CORRUPT_PAYLOAD, "needs the kernel 'neg'", VECTORS)


def test_device_code_of_a_newer_version():
    engine = two_step(fake_writer()).engine(object=container(version=2))
    check_unavailable(engine, Code.VERSION_MISMATCH, "version 2", VECTORS)


def test_damaged_device_code_is_refused_and_never_crashes():
    """Every truncation, every byte flipped: available or not, loading survives."""
    data = container()
    for size in range(len(data)):
        assert two_step(fake_writer()).engine(object=data[:size]).why_unavailable() != ""
    for position in range(len(data)):
        broken = bytearray(data)
        broken[position] ^= 0xFF
        two_step(fake_writer()).engine(object=bytes(broken)).why_unavailable()
    engine = two_step(fake_writer()).engine(object=data + b"x")
    check_unavailable(engine, Code.CORRUPT_PAYLOAD, "more in it than its index says", VECTORS)


def test_code_may_be_marked_to_start_early():
    marked = container().replace(b"neg 128 0 3\n", b"neg 128 0 3 early\n")
    assert two_step(fake_writer()).engine(object=marked).why_unavailable() == ""
    engine = two_step(fake_writer()).engine(object=marked.replace(b" early", b" later"))
    check_unavailable(engine, Code.CORRUPT_PAYLOAD, "other words than it should", VECTORS)


def test_libraries_that_were_not_built_together():
    with pytest.raises(RuntimeError, match="build blade again"):
        torch.ops.blade.register_accelerator("other", fake().fake_abi() + 1, 0)
    assert "other" not in torch.ops.blade.accelerators()


def test_damaged_programs_with_launches():
    lines = two_step(fake_writer()).text().split("\n")
    place = next(i for i, line in enumerate(lines) if line.startswith("launch"))
    good = lines[place]
    for bad in (
        "launch",
        "launch add",
        "launch add 0 0",
        good + " 1",
        "when",
        "when 99 " + good,
        "when 0",
    ):
        text = "\n".join([*lines[:place], bad, *lines[place + 1 :]])
        engine = make_engine("test", "disc", text, container())
        check_unavailable(engine, Code.CORRUPT_PAYLOAD, "does not parse", VECTORS)
