# SPDX-License-Identifier: Apache-2.0
"""Tools that read a file run nothing from it, and tools that run it say so."""

import os
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_files import optimized, rewrite

import blade
from blade.cli import main
from blade.cli.shared.bench_samples import make
from blade.errors import InputError
from blade.program.saved_file import read_saved
from blade.report import ATTRIBUTE, Report
from blade.report.graph import InputReport

pytestmark = pytest.mark.needs("runtime", "torch_mlir")


class Part(torch.nn.Module):
    """TorchScript runs ``__setstate__`` while a file is loaded; this one writes a file."""

    def __init__(self, marker: str) -> None:
        super().__init__()
        self.marker = marker

    @torch.jit.export
    def __getstate__(self) -> tuple[str, bool]:
        return self.marker, self.training

    @torch.jit.export
    def __setstate__(self, state: tuple[str, bool]) -> None:
        torch.save([torch.ones(1)], state[0])
        self.marker = state[0]
        self.training = state[1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Whole(torch.nn.Module):
    def __init__(self, marker: str, text: str) -> None:
        super().__init__()
        self.part = Part(marker)
        setattr(self, ATTRIBUTE, text)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(x)


@pytest.fixture(scope="module")
def report_text() -> str:
    return blade.report(optimized()).to_json()


def run(*argv: object) -> int:
    return int(main.run([str(one) for one in argv]))


def test_report_runs_nothing_of_the_file(
    tmp_path: Path, report_text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    marker = tmp_path / "marker"
    path = tmp_path / "evil.pt"
    torch.jit.script(Whole(str(marker), report_text).eval()).save(str(path))
    marker.unlink(missing_ok=True)
    assert run("report", path) == 0
    shown = capsys.readouterr().out
    assert run("report", path, "--html", tmp_path / "page.html") == 0
    assert not marker.exists()
    assert shown == f"{Report.from_json(report_text)}\n"
    torch.jit.load(str(path))
    assert marker.exists()  # loading does run it


def test_no_engine_is_made_to_read_a_report(tmp_path: Path, capfd: Any) -> None:
    """The state of an engine that cannot be used is warned of when an engine is made of it."""
    path = tmp_path / "model.pt"
    torch.jit.save(optimized(), str(path))
    rewrite(path, {"data.pkl": lambda data: data.replace(b"blade.disc 1\n", b"blade.disc 0\n")})
    assert run("report", path) == 0
    assert "is not used" not in capfd.readouterr().err
    torch.jit.load(str(path))
    assert "is not used" in capfd.readouterr().err


class Touch:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def test_a_pickle_is_read_without_what_it_names(tmp_path: Path) -> None:
    """Global names in it are not imported, whatever is called of them."""
    marker, path = tmp_path / "marker", tmp_path / "model.pt"
    torch.jit.save(optimized(), str(path))
    evil = pickle.dumps(Touch(marker), protocol=2)
    pickle.loads(evil)
    assert marker.exists()
    marker.unlink()
    # the object is pushed and popped before the module
    rewrite(path, {"data.pkl": lambda data: data[:2] + evil[2:-1] + b"0" + data[2:]})
    saved = read_saved(path)
    assert saved.report is not None and len(saved.engines) == 2
    assert not marker.exists()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x02.",
        b"\x80\x02}]s.",
        b"\x80\x02" + b"]" * 50_000,
        b"\x80\x02(" * 20_000 + b".",
        b"\x80\x02X" + struct.pack("<i", 2**31 - 1) + b"x.",
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)R.",
        b"\x80\x02(X\x01\x00\x00\x00xtQ.",
        b"\x80\x02]R.",
    ],
    ids=["empty", "nothing", "key", "deep", "marks", "long", "no arguments", "id", "call"],
)
def test_damaged_pickles_are_input_errors(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.jit.save(torch.jit.script(torch.nn.Identity().eval()), str(path))
    rewrite(path, {"data.pkl": lambda _: data})
    with pytest.raises(InputError, match=r"model\.pt: data\.pkl cannot be read"):
        read_saved(path)


def test_a_report_does_not_steer_the_terminal(
    tmp_path: Path, report_text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "evil.pt"
    named = report_text.replace("cluster_0", "\\u001b]0;owned\\u0007\\u202e")
    torch.jit.script(Whole(str(tmp_path / "marker"), named).eval()).save(str(path))
    assert run("report", path) == 0
    shown = capsys.readouterr().out
    assert "?]0;owned?" in shown
    assert all(c.isprintable() or c == "\n" for c in shown)


def test_a_dtype_in_a_report_is_looked_up_in_a_table() -> None:
    for name in ("hub", "float32.is_complex", "__class__"):
        with pytest.raises(InputError, match="no random tensors are made of dtype"):
            make(InputReport("x", name, (2,)), torch.Generator())


@pytest.mark.parametrize("command", ["bench", "optimize", "partition", "bisect"])
def test_commands_that_run_a_file_say_so(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(command, "--help")
    assert (
        "The code in the file runs: give it only files that you trust." in capsys.readouterr().out
    )
