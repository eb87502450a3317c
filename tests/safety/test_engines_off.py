# SPDX-License-Identifier: Apache-2.0
"""What this process may run: BLADE_ENGINES, the ops of programs in files, and nothing before the first call."""

import copy
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fake_backends import produces
from torch import nn

import blade
from blade.core.reason import Code
from blade.errors import ConfigError

pytestmark = pytest.mark.needs("runtime", "torch_mlir")
X = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))

# Prints the counts of the engine, and how much native code it brought.
LOAD = """
import json, sys
import torch
import blade

def code():
    with open("/proc/self/maps") as maps:
        return sum("r-xp" in line and line.split()[4] == "0" for line in maps)

before = code()
module = torch.jit.load(sys.argv[1])
mapped = code() - before
answer = module(torch.load(sys.argv[2]))
torch.save(answer, sys.argv[3])
print(json.dumps([mapped, blade.stats(module)["cluster_0"]]))
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).eval()
    path = tmp_path_factory.mktemp("saved") / "model.pt"
    config = blade.Config(optimization_pipeline="DISC", timing=False)
    torch.jit.save(blade.optimize(model, X, config), path)
    torch.save(model(X).detach(), path.with_suffix(".answer"))
    return path


@produces(Code.DISABLED)
@pytest.mark.parametrize(
    ("engines", "serves"),
    [("", True), ("off", False), ("openvino", False), ("openvino, disc", True)],
)
def test_engines_by_name(saved: Path, tmp_path: Path, engines: str, serves: bool) -> None:
    torch.save(X, tmp_path / "x")
    ran = subprocess.run(
        [sys.executable, "-c", LOAD, str(saved), str(tmp_path / "x"), str(tmp_path / "y")],
        env={**os.environ, "BLADE_ENGINES": engines},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    mapped, counts = json.loads(ran.stdout)
    assert counts["engine_runs"] == int(serves)
    assert (mapped > 0) is serves
    if not serves:
        assert counts[Code.DISABLED.value] == 1 and f"BLADE_ENGINES={engines}" in ran.stderr
    want = torch.load(saved.with_suffix(".answer"))
    torch.testing.assert_close(torch.load(tmp_path / "y"), want, rtol=1e-4, atol=1e-5)


def test_an_engine_that_was_off_is_saved_as_it_was(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("BLADE_ENGINES", "off")
        loaded = torch.jit.load(saved)
        assert "BLADE_ENGINES=off" in capfd.readouterr().err
        torch.jit.save(loaded, tmp_path / "again.pt")
    again = torch.jit.load(tmp_path / "again.pt")
    again(X)
    assert blade.stats(again)["cluster_0"]["engine_runs"] == 1


FOREIGN = torch.library.Library("blade_test_policy", "DEF")
FOREIGN.define("twice(Tensor x) -> Tensor")
FOREIGN.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")


def calling(op: str, extra: str = ""):
    """The state of an engine that calls ``op``, and its type; made as if it came from a file."""
    from blade.runtime.engine import make_engine

    program = "\n".join(
        [
            *("blade.disc 1", "isa", "inputs 1", "input 0 f32 cpu 1", "registers 2"),
            *("reg 0 dim 0 0", "reg 1 const 1", "guards 0", "slots 2", "slot 0 input 0"),
            *("slot 1 dyn f32 1 0 1", "instructions 1", f"call aten::neg 1 t:0{extra} 1 1"),
            *("outputs 1 1", "end"),
        ]
    )
    engine = make_engine("e", "disc", program, b"")
    (version, words, numbers, tensors), kind = engine.__getstate__()
    words = [words[0], words[1], program.replace("aten::neg", op), words[3]]
    changed = torch.ScriptObject.__new__(torch.ScriptObject)
    changed.__setstate__(((version, words, {**numbers, "checksum": 0}, tensors), kind))
    return version, words, numbers, tensors, kind


def load_calling(op: str):
    """An engine read from a state whose checksum is right: format 1's is computed here."""
    _, words, numbers, tensors, kind = calling(op)
    from checksum_of_format_1 import checksum

    numbers = {**numbers, "checksum": checksum(words[2].encode(), b"")}
    engine = torch.ScriptObject.__new__(torch.ScriptObject)
    engine.__setstate__(((1, words[:3], numbers, tensors), kind))
    return engine


@produces(Code.UNTRUSTED)
@pytest.mark.parametrize(
    "op", ["blade_test_policy::twice", "aten::from_file", "aten::set_", "blade::announce_runner"]
)
def test_ops_that_no_file_may_call(op: str) -> None:
    engine = load_calling(op)
    assert op in engine.why_unavailable() and "allow_ops" in engine.why_unavailable()
    assert engine.try_execute([torch.ones(3)]) is None
    assert engine.stats()[Code.UNTRUSTED.value] == 1


def test_ops_of_torch_and_those_allowed() -> None:
    (y,) = load_calling("aten::abs").try_execute([-torch.ones(3)])
    assert torch.equal(y, torch.ones(3))
    FOREIGN.define("thrice(Tensor x) -> Tensor")
    FOREIGN.impl("thrice", lambda x: x * 3, "CompositeExplicitAutograd")
    assert load_calling("blade_test_policy::thrice").why_unavailable() != ""
    blade.allow_ops("blade_test_policy::thrice")
    (y,) = load_calling("blade_test_policy::thrice").try_execute([torch.ones(3)])
    assert torch.equal(y, 3 * torch.ones(3))


@pytest.mark.parametrize("name", ["", "relu", "aten::", "::x", "aten::add.Tensor"])
def test_names_that_are_no_ops(name: str) -> None:
    with pytest.raises(ConfigError, match="allow_ops"):
        blade.allow_ops(name)


def test_a_copy_calls_what_its_model_called() -> None:
    """The program was compiled in this process, from the user's own model."""
    from blade.runtime.engine import make_engine

    FOREIGN.define("half(Tensor x) -> Tensor")
    FOREIGN.impl("half", lambda x: x / 2, "CompositeExplicitAutograd")
    _, words, *_ = calling("blade_test_policy::half")
    engine = make_engine("e", "disc", words[2], b"")
    for one in (engine, copy.deepcopy(engine)):
        (y,) = one.try_execute([torch.ones(3)])
        assert torch.equal(y, torch.ones(3) / 2)


CRASHES = """
extern "C" void boom(void**, const long*, long, long) { *reinterpret_cast<volatile int*>(8) = 1; }
"""
PACKED = "\n".join(
    [
        *("blade.disc 1", "isa", "inputs 1", "input 0 f32 cpu 1", "registers 1", "reg 0 dim 0 0"),
        *("guards 0", "packs 1", "pack boom f32 4 1 0 4 0", "slots 1", "slot 0 input 0"),
        *("instructions 0", "outputs 1 0", "end"),
    ]
)


@pytest.mark.needs("g++")
def test_loading_runs_nothing(tmp_path: Path) -> None:
    """Native code that packs weights runs at the first call; here it would end the process."""
    (tmp_path / "boom.cpp").write_text(CRASHES)
    compiler = shutil.which("g++")
    assert compiler
    subprocess.run(
        [compiler, "-O1", "-c", "-fno-exceptions", "boom.cpp", "-o", "boom.o"],
        cwd=tmp_path,
        check=True,
    )
    script = f"""
import copy, torch
from blade.runtime.engine import make_engine
code = open({str(tmp_path / "boom.o")!r}, "rb").read()
engine = make_engine("e", "disc", {PACKED!r}, code, [torch.ones(4)])
print("made", engine.why_unavailable())
print("copied", copy.deepcopy(engine).why_unavailable(), flush=True)
engine.try_execute([torch.ones(3)])
print("called")
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ran.stdout == "made \ncopied \n" and ran.returncode < 0, (ran.stdout, ran.stderr)


class Constructing(nn.Module):
    """TorchScript that makes an engine of its own, as code in a file may."""

    def __init__(self, program: str) -> None:
        super().__init__()
        self.program = program

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        code = torch.empty([0], dtype=torch.uint8)
        held = torch.jit.annotate(list[torch.Tensor], [])
        limits = torch.jit.annotate(dict[str, int], {})
        engine = torch.classes.blade.Engine("e", "disc", self.program, code, held, limits)
        outs = engine.try_execute([x])
        return x if outs is None else outs[0]


def test_engines_that_the_code_of_a_file_constructs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are as foreign as those it holds: closed ops, and a signature where one is asked for."""
    FOREIGN.define("tenth(Tensor x) -> Tensor")
    FOREIGN.impl("tenth", lambda x: x / 10, "CompositeExplicitAutograd")
    x = torch.ones(3)
    _, words, *_ = calling("blade_test_policy::tenth")
    assert torch.equal(torch.jit.script(Constructing(words[2]))(x), x)
    _, words, *_ = calling("aten::neg")
    script = torch.jit.script(Constructing(words[2]))
    assert torch.equal(script(x), -x)
    monkeypatch.setenv("BLADE_TRUSTED_KEYS", str(tmp_path))
    assert torch.equal(script(x), x)
