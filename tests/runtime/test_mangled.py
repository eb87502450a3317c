# SPDX-License-Identifier: Apache-2.0
"""Programs and native code with damage that no checksum tells: an error or another answer, never a crash.

``BROKEN`` ones in test_failures.py have messages of their own; here edits are drawn at random. Longer, and from
other seeds, in a process that may crash:

    python tests/runtime/test_mangled.py SEED SECONDS
"""

import faulthandler
import random
import resource
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from programs import Writer
from test_native import EXP, TABLE, assemble, exp_half

from blade.backends.disc.cpu.compile.ar_archive import archive
from blade.runtime.engine import Engine, make_engine

# What may stand in for a word: ends of ranges, other kinds, words of other places.
WORDS = [
    *("", "-", "n", "-1", "0", "1", "2", "3", "7", "63", "64", "65535", "1000000", "1000001", "1099511627776"),
    *("2147483647", "-2147483648", "9223372036854775807", "-9223372036854775808", "9223372036854775808", "x", "1.5"),
    *("f32", "f16", "i64", "bool", "c64", "f8", "cpu", "cuda", "input", "const", "view", "arena", "output", "dyn"),
    *("update", "reuse", "dim", "mul", "floordiv", "mod", "scale", "nan", "inf", "1e400", "t:0", "t:99", "r:0"),
    *("li:r0,r1", "li:", "lt:0,1", "lo:n,0", "lf:1,2", "lb:1", "d:cpu", "d:nowhere", "dt:f32", "s:", "i:", "f:x", ":"),
    *("aten::add.Tensor", "aten::neg.out", "aten::nothing", "aten", "::", ".", "call", "draw", "when", "kernel"),
    *("launch", "slots", "end", "packs", "pack", "late", "r0", "r2", "aten::nonzero", "aten::_local_scalar_dense"),
    *("loop", "index"),
]  # fmt: skip
SIZES = [(3, 4), (1, 1), (0, 4), (5, 2)]


def calls_program() -> tuple[Writer, list[torch.Tensor]]:
    """Calls over every kind of slot: relu, a view of it, a product, a sum, one part by a condition."""
    w = Writer()
    x = w.input("f32", 2)
    rows, columns = w.dims(x, 2)
    zero, one, two = w.const(0), w.const(1), w.const(2)
    half = w.reg(f"floordiv {columns} {two}")
    w.guard(w.reg(f"eq {w.reg(f'mod {columns} {two}')} {zero}"), "columns % 2 == 0")
    a, weight = w.slot(f"input {x}"), w.slot("const 0")
    h = w.tensor("arena", [rows, columns])
    left = w.view(h, [rows, half], [columns, one], zero)
    again = w.slot(f"arena f32 2 {rows} {columns} reuse {h}")
    y = w.tensor("output", [rows, columns])
    total = w.slot(f"dyn f32 1 {rows} {one}")
    w.call("aten::relu.out", f"t:{a}", f"t:{h}")
    w.call("aten::neg.out", f"t:{left}", f"t:{left}")
    w.call("aten::mul.out", f"t:{h}", f"t:{weight}", f"t:{again}")
    w.call("aten::add.out", f"t:{again}", f"t:{a}", "i:1", f"t:{y}")
    w.call("aten::sum.dim_IntList", f"t:{y}", "li:1", "b:0", "n", results=(total,))
    w.call("aten::abs.out", f"t:{y}", f"t:{y}")
    w.when(w.reg(f"gt {rows} {one}"))
    w.outputs = [y, total]
    return w, [torch.randn(1)]


def late_program() -> tuple[Writer, list[torch.Tensor]]:
    """A selection, a view, a kernel's worth of calls over its size, and a number that is read and guarded."""
    w = Writer()
    x = w.input("f32", 2)
    rows, columns = w.dims(x, 2)
    zero, one, found, number = w.const(0), w.const(1), w.reg("late"), w.reg("late")
    w.guard(w.reg(f"ge {number} {zero}"), "a count is not negative")
    a, mask = w.slot(f"input {x}"), w.tensor("arena", [rows, columns], "bool")
    chosen = w.slot(f"dyn f32 1 {found} {one}")
    h, again = w.tensor("arena", [found]), w.slot(f"arena f32 1 {found} reuse 3")
    count, least = w.slot("dyn i64 0"), w.reg(f"min {found} {number}")
    part, y = w.view(h, [least], [one], zero), w.tensor("output", [least])
    w.call("aten::gt.Scalar_out", f"t:{a}", "i:0", f"t:{mask}")
    w.call("aten::masked_select", f"t:{a}", f"t:{mask}", results=(chosen,))
    w.call("aten::exp.out", f"t:{chosen}", f"t:{h}")
    w.call("aten::count_nonzero", f"t:{mask}", "n", results=(count,))
    w.instructions.append(f"call aten::_local_scalar_dense 1 t:{count} 1 r{number}")
    w.call("aten::mul.out", f"t:{part}", f"t:{part}", f"t:{y}")
    w.call("aten::neg.out", f"t:{h}", f"t:{again}")
    w.outputs = [y, again]
    return w, []


PROGRAMS = (calls_program, late_program)


def edited(text: str, draw: random.Random) -> str:
    """``text`` with one to three words, lines or characters changed."""
    for _ in range(draw.randint(1, 3)):
        lines = text.split("\n")
        at = draw.randrange(len(lines))
        words = lines[at].split(" ")
        kind = draw.random()
        if kind < 0.6:
            words[draw.randrange(len(words))] = draw.choice(WORDS)
        elif kind < 0.7:
            words.insert(draw.randrange(len(words) + 1), draw.choice(WORDS))
        elif kind < 0.8:
            del words[draw.randrange(len(words))]
        lines[at] = " ".join(words)
        if 0.8 <= kind < 0.9:
            del lines[at]
        elif kind >= 0.9:
            lines.insert(at, draw.choice(lines))
        text = "\n".join(lines)
    return text


def damaged(data: bytes, draw: random.Random) -> bytes:
    """``data`` with a few bytes, or a number at a multiple of 4, changed."""
    changed = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        if draw.random() < 0.5:
            changed[draw.randrange(len(changed))] = draw.randrange(256)
        else:
            size = draw.choice((2, 4, 8))
            at = draw.randrange(len(changed) - 8) // 4 * 4
            value = draw.choice((0, 1, 2**31, 2**63, 2**64 - 1, 2**32 + 1, draw.getrandbits(64)))
            changed[at : at + size] = (value % 2 ** (8 * size)).to_bytes(size, "little")
    return bytes(changed[: draw.randint(0, len(changed))] if draw.random() < 0.1 else changed)


def run_everywhere(engine: Engine) -> None:
    """Whatever the engine makes of it: an answer, or ``None`` and a counted reason."""
    for size in SIZES:
        answer = engine.try_execute([torch.randn(size)])
        assert answer is None or all(isinstance(t, torch.Tensor) for t in answer)
    stats = engine.stats()
    assert stats["calls"] == stats["engine_runs"] + stats["fallbacks"]


def mangle_program(draw: random.Random) -> None:
    program, constants = draw.choice(PROGRAMS)()
    engine = make_engine("mangled", "disc", edited(program.text(), draw), b"", constants)
    run_everywhere(engine)


def mangle_code(objects: list[bytes], draw: random.Random) -> None:
    """Loaded only: what runs is native code, and nobody can tell what damage makes that do."""
    exp_half().engine(object=damaged(draw.choice(objects), draw)).why_unavailable()


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    return written(tmp_path_factory.mktemp("objects"))


def written(folder: Path) -> list[bytes]:
    """Objects with calls, constants and tables, alone and in an archive."""
    alone = {
        name: assemble(folder, text, name) for name, text in (("exp_half", EXP), ("look_up", TABLE))
    }
    return [*alone.values(), archive(alone)]


def test_damaged_programs_never_crash() -> None:
    draw = random.Random(0)
    for program, constants in (make() for make in PROGRAMS):
        engine = program.engine(constants)
        run_everywhere(engine)
        assert not engine.why_unavailable()
        assert engine.stats()["engine_runs"]
    for _ in range(500):
        mangle_program(draw)


@pytest.mark.needs("torch_mlir")
def test_damaged_code_never_crashes(objects: list[bytes]) -> None:
    draw = random.Random(0)
    for _ in range(500):
        mangle_code(objects, draw)


def main(seed: int, seconds: float) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))
    with tempfile.TemporaryDirectory() as folder:
        objects = written(Path(folder))
    end, tried = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        draw = random.Random(f"{seed} {tried}")
        faulthandler.dump_traceback_later(60, exit=True)
        mangle_program(draw)
        mangle_code(objects, draw)
        tried += 1
    print(tried, "programs and objects survived")  # noqa: T201


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
