# SPDX-License-Identifier: Apache-2.0
"""Each mistake is one sentence that says what to do, with its exit code, and nothing is written."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command_line import Command, Files

from blade.cli import main
from blade.cli.commands.doctor import environment
from blade.cli.shared.options import parse_config, parse_value
from blade.config import Config
from blade.errors import ConfigError

pytestmark = pytest.mark.needs("runtime", "torch_mlir")


def prepare(folder: Path) -> None:
    torch.save(3, folder / "number.pt")
    torch.save([], folder / "empty.pt")
    torch.save([torch.ones(1), "x"], folder / "words.pt")
    torch.save(Config, folder / "class.pt")
    torch.save({"y": torch.randn(2, 8)}, folder / "other_name.pt")
    (folder / "text.txt").write_text("hello")
    (folder / "nothing.pt").write_bytes(b"")
    (folder / "exists.pt").write_text("precious")
    torch.jit.script(torch.nn.Dropout()).save(str(folder / "training.pt"))


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        ("doctor --try dsic", 4, "did you mean 'disc'?"),
        ("report {f}/missing.pt", 3, "there is no such file"),
        ("report {f}", 3, "this is a folder"),
        ("report {f}/text.txt", 3, "carries no report of blade"),
        ("report {model}", 3, "carries no report of blade"),
        ("report {weights}", 3, "carries no report of blade"),
        ("bench {model}", 3, "carries no report of blade"),
        ("bench {optimized} --shape y=2x8", 2, "the inputs are"),
        ("bench {optimized} --shape x=2*8", 2, "NAME=8x128 is expected"),
        ("bench {optimized} --batch 3 --inputs {samples}", 2, "without --inputs"),
        ("bench {optimized} --peers openvino", 2, "--original MODEL.pt"),
        ("bench {optimized} --original {model} --peers magic", 2, "known are: openvino"),
        ("bench {optimized} --inputs {f}/other_name.pt", 3, "sample 0 does not run on this model"),
        ("partition {f}/missing.pt --inputs {samples}", 3, "there is no such file"),
        (
            "partition {f}/text.txt --inputs {samples}",
            3,
            "neither TorchScript nor written by torch",
        ),
        ("partition {f}/nothing.pt --inputs {samples}", 3, "neither TorchScript nor written by"),
        ("partition {weights} --inputs {samples}", 3, "only weights, not a model"),
        ("partition {f}/class.pt --inputs {samples}", 3, "add --allow-pickle"),
        ("partition {f}/class.pt --inputs {samples} --allow-pickle", 3, "not a torch.nn.Module"),
        ("partition {f}/number.pt --inputs {samples}", 3, "holds a int, not a model"),
        ("partition {model} --inputs {f}/missing.pt", 3, "there is no such file"),
        ("partition {model} --inputs {model}", 3, "this is a model in TorchScript"),
        ("partition {model} --inputs {f}/number.pt", 3, "it holds a int"),
        ("partition {model} --inputs {f}/words.pt", 3, "it holds a list with a str"),
        ("partition {model} --inputs {f}/empty.pt", 3, "at least one sample"),
        ("partition {model} --inputs {f}/class.pt", 3, "need --allow-pickle"),
        ("partition {model} --inputs {f}/other_name.pt", 3, "does not fit forward"),
        ("partition {f}/training.pt --inputs {samples}", 3, "model.eval()"),
        ("partition {model} --inputs {samples} --config timing", 2, "KEY=VALUE is expected"),
        ("partition {model} --inputs {samples} --config timng=1", 2, "did you mean 'timing'?"),
        ("partition {model} --inputs {samples} --config timing=7", 2, "Config.timing=7"),
        (
            "partition {model} --inputs {samples} --config optimization_pipeline=dsic",
            4,
            "did you mean 'disc'?",
        ),
        ("optimize {model} --inputs {samples} -o {f}/exists.pt", 3, "--force to overwrite it"),
        ("optimize {model} --inputs {samples} -o {f}/no/out.pt", 3, "create it first"),
        ("optimize {model} --inputs {samples} -o {f}", 3, "name the file to write"),
    ],
)
def test_a_mistake_is_one_sentence(
    argv: str, code: int, words: str, blade_cli: Command, files: Files, tmp_path: Path
) -> None:
    prepare(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    names = {**vars(files), "f": str(tmp_path)}
    done = blade_cli(*argv.format(**names).split())
    assert done.code == code, done.err
    assert words in done.err
    assert done.err.startswith("error: ") and done.err.count("\n") == 1
    assert "Traceback" not in done.err and done.out == ""
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_json_tells_of_errors_too(blade_cli: Command, tmp_path: Path) -> None:
    done = blade_cli("report", tmp_path / "missing.pt", "--json")
    message = f"{tmp_path}/missing.pt: there is no such file"
    assert done.code == 3 and done.data == {"error": {"exit": 3, "message": message}}


def test_a_traceback_on_demand(blade_cli: Command, tmp_path: Path) -> None:
    done = blade_cli("report", tmp_path / "missing.pt", "--traceback")
    assert done.code == 3
    assert done.err.startswith("Traceback") and done.err.endswith("there is no such file\n")


def test_what_a_model_prints_is_no_part_of_the_answer(
    blade_cli: Command, tmp_path: Path, files: Files
) -> None:
    class Chatty(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            print("here I am")  # noqa: T201 - that is what is tested
            return x.relu()

    torch.jit.script(Chatty().eval()).save(str(tmp_path / "chatty.pt"))
    done = blade_cli("partition", tmp_path / "chatty.pt", "--inputs", files.samples, "--json")
    assert done.code == 0
    assert done.data["outside"]["prim::Print"] == 1


def test_usage_and_help() -> None:
    for argv, code in ((["--help"], 0), (["--version"], 0), ([], 2), (["report"], 2), (["x"], 2)):
        with pytest.raises(SystemExit) as caught:
            main.run(argv)
        assert caught.value.code == code


def test_what_nobody_foresaw_is_a_sentence_and_70() -> None:
    """And a broken pipe none at all."""
    script = (
        "import sys; from blade.cli import main; from blade.cli.commands import report; "
        "report.run = lambda args: 1 / 0; "
        "sys.argv = ['blade', 'report', 'x'] + {more}; main.main()"
    )
    for more, traceback in (([], False), (["--traceback"], True)):
        done = subprocess.run(
            [sys.executable, "-c", script.format(more=more)],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 70
        assert "internal error: ZeroDivisionError: division by zero" in done.stderr
        assert ("Traceback" in done.stderr) is traceback


def test_config_values_are_read_as_python_then_json_then_text() -> None:
    values = {"3": 3, "False": False, "false": False, "null": None, "None": None, "DISC": "DISC"}
    values |= {"['aten::relu']": ["aten::relu"], '{"x": {0: (1, 8)}}': {"x": {0: (1, 8)}}}
    values |= {"a=b": "a=b", "": "", '"7"': "7"}
    assert {text: parse_value(text) for text in values} == values
    config = parse_config(["timing=false", 'dynamic_shapes={"x": {0: (1, 8)}}', "timing_repeats=3"])
    assert config == Config(timing=False, dynamic_shapes={"x": {0: (1, 8)}}, timing_repeats=3)


@pytest.mark.parametrize("entries", [["timing"], ["=3"], ["timing=True", "timing=False"]])
def test_config_entries_that_make_no_sense(entries: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"--config"):
        parse_config(entries)


def test_doctor_notes_variables_that_nobody_reads() -> None:
    found = environment({"BLADE_LOG": "info", "BLADE_CACHE_DIRR": "x", "PATH": "y"})
    assert found == [
        {
            "name": "BLADE_CACHE_DIRR",
            "value": "x",
            "note": "not read by blade; did you mean BLADE_CACHE_DIR?",
        },
        {"name": "BLADE_LOG", "value": "info", "note": None},
    ]
    assert json.dumps(found)
