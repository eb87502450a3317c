# SPDX-License-Identifier: Apache-2.0
"""Engines in files: fresh processes, shared weights, and files that do not fit this process."""

import copy
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from programs import Writer, relu_program
from torch import nn

from blade.core.reason import Code
from blade.runtime.engine import make_engine


class Holder(nn.Module):
    """An engine and its fallback, as blade splices them into a module."""

    def __init__(self, engine, weight: torch.Tensor) -> None:
        super().__init__()
        self.engine = engine
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outs = self.engine.try_execute([x])
        if outs is None:
            return torch.mm(x, self.weight)
        return outs[0]


def mm_program(columns: int = 64) -> Writer:
    w = Writer()
    x = w.input("f32", 2)
    rows, _ = w.dims(x, 2)
    y = w.tensor("output", [rows, w.const(columns)])
    w.call("aten::mm.out", f"t:{w.slot(f'input {x}')}", f"t:{w.slot('const 0')}", f"t:{y}")
    w.outputs = [y]
    return w


def scripted(weight: torch.Tensor, **engine) -> torch.jit.ScriptModule:
    module = Holder(None, weight)
    module.engine = mm_program(weight.size(1)).engine([module.weight], **engine)
    return torch.jit.script(module.eval())


IN_A_FRESH_PROCESS = """
import sys, torch
import blade.runtime.engine
module = torch.jit.load(sys.argv[1])
x = torch.full((3, 64), 0.5)
y = module(x)
assert torch.equal(y, torch.mm(x, module.weight))
print(sorted(module.engine.stats().items()))
before = module.weight.clone()
module.weight.fill_(1.0)  # the engine must see it: the weights are shared
assert torch.equal(module(x), torch.full((3, 64), 32.0))
assert not torch.equal(before, module.weight)
"""


def test_a_fresh_process_runs_the_engine_on_shared_weights(tmp_path: Path):
    path = tmp_path / "model.pt"
    scripted(torch.randn(64, 64)).save(str(path))
    done = subprocess.run(
        [sys.executable, "-c", IN_A_FRESH_PROCESS, str(path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[('calls', 1), ('engine_runs', 1), ('fallbacks', 0)]"
    assert "Warning" not in done.stderr


def test_weights_are_stored_once(tmp_path: Path):
    path = tmp_path / "model.pt"
    scripted(torch.randn(64, 4096)).save(str(path))
    assert path.stat().st_size < 1.2 * 64 * 4096 * 4


def test_deepcopy_keeps_working():
    module = scripted(torch.randn(64, 64))
    twin = copy.deepcopy(module)
    x = torch.randn(2, 64)
    torch.testing.assert_close(twin(x), module(x))
    assert twin.engine.stats()["engine_runs"] == 1
    assert module.engine.stats()["engine_runs"] == 1


def save(engine, path: Path) -> None:
    torch.jit.script(Holder(engine, torch.randn(64, 64))).save(str(path))


def check_unavailable(path: Path, capfd, code: Code, words: str) -> None:
    """Loading warns once and says why; every call runs the original and is counted."""
    loaded = torch.jit.load(str(path))
    warned = capfd.readouterr().err
    assert warned.count("Warning: blade: engine 'test' is not used; the original runs") == 1
    assert words in warned
    x = torch.randn(2, 64)
    torch.testing.assert_close(loaded(x), x @ loaded.weight)
    assert loaded.engine.stats() == {"calls": 1, "engine_runs": 0, "fallbacks": 1, code.value: 1}
    assert words in loaded.engine.why_unavailable()


def test_another_cpu(tmp_path: Path, capfd):
    w = mm_program()
    w.isa = "warp_drive"
    path = tmp_path / "model.pt"
    save(w.engine([torch.randn(64, 64)]), path)
    check_unavailable(path, capfd, Code.CPU_MISMATCH, "'warp_drive'")


def test_a_newer_program(tmp_path: Path, capfd):
    engine = make_engine("test", "disc", mm_program().text(2), b"", [torch.randn(64, 64)])
    path = tmp_path / "model.pt"
    save(engine, path)
    check_unavailable(path, capfd, Code.VERSION_MISMATCH, "version 2")


def test_an_unknown_backend(tmp_path: Path, capfd):
    engine = mm_program().engine([torch.randn(64, 64)], backend="teapot")
    path = tmp_path / "model.pt"
    save(engine, path)
    check_unavailable(path, capfd, Code.BACKEND_UNAVAILABLE, "'teapot'")


def test_an_unknown_op(tmp_path: Path, capfd):
    w = mm_program()
    w.instructions = [line.replace("aten::mm", "aten::mmm") for line in w.instructions]
    path = tmp_path / "model.pt"
    save(w.engine([torch.randn(64, 64)]), path)
    check_unavailable(path, capfd, Code.BACKEND_UNAVAILABLE, "'aten::mmm.out'")


def test_damaged_native_code(tmp_path: Path, capfd):
    engine = mm_program().engine([torch.randn(64, 64)], object=b"\x7fELF and then nothing")
    path = tmp_path / "model.pt"
    save(engine, path)
    check_unavailable(path, capfd, Code.CORRUPT_PAYLOAD, "native code")


def edit_file(path: Path, old: bytes, new: bytes) -> None:
    """Replaces bytes in the members of a saved module (a zip file)."""
    assert len(old) == len(new)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    assert any(old in data for data in members.values())
    writer = torch._C.PyTorchFileWriter(str(path))
    for name, data in members.items():
        short = name.split("/", 1)[1]
        if short not in ("version", ".data/serialization_id", "byteorder"):
            data = data.replace(old, new)
            writer.write_record(short, data, len(data))
    writer.write_end_of_file()


@pytest.mark.parametrize(
    ("old", "new"),
    [(b"call aten::mm.out", b"call aten::ms.out"), (b"native code here", b"native c0de here")],
)
def test_a_file_that_was_changed_on_the_way(tmp_path: Path, capfd, old: bytes, new: bytes):
    w = mm_program()
    path = tmp_path / "model.pt"
    # another backend's payload is any bytes; disc's would have to be an object
    backend = "teapot" if old.startswith(b"native") else "disc"
    engine = make_engine("test", backend, w.text(), b"native code here", [torch.randn(64, 64)])
    if backend == "disc":
        engine = w.engine([torch.randn(64, 64)])
    save(engine, path)
    edit_file(path, old, new)
    check_unavailable(path, capfd, Code.CORRUPT_PAYLOAD, "checksum")


def test_a_state_of_a_newer_format_is_kept_as_it_is(tmp_path: Path):
    engine = mm_program().engine([torch.randn(64, 64)])
    (version, words, numbers, tensors), kind = engine.__getstate__()
    assert version == 2
    newer = torch.ScriptObject.__new__(torch.ScriptObject)
    newer.__setstate__(((7, [*words, "more"], numbers, tensors), kind))
    assert "format 7" in newer.why_unavailable()
    assert newer.try_execute([torch.randn(2, 64)]) is None
    assert newer.stats()["version_mismatch"] == 1
    again, _ = newer.__getstate__()
    assert again[0] == 7 and again[1] == [*words, "more"] and again[2] == numbers


def test_limits_and_names_survive(tmp_path: Path):
    engine = relu_program().engine(limits={"max_failures": 1})
    path = tmp_path / "model.pt"
    save(engine, path)
    loaded = torch.jit.load(str(path))
    assert loaded.engine.__getstate__()[0][2]["max_failures"] == 1
    assert loaded.engine.name() == "test" and loaded.engine.backend() == "disc"
    assert loaded.engine.program() == relu_program().text()
