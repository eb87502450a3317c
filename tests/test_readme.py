# SPDX-License-Identifier: Apache-2.0
"""The code in the documents and the examples works, each in a process of its own, as a reader would run it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from blade.cli.commands.doctor import VARIABLES
from blade.config import Config

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
# the ways in, each shown by a document whose blocks run
WAYS_IN = {
    "README.md": ("blade.optimize(", "blade.report(", "blade.stats("),
    "docs/usage.md": (
        *("blade.optimize(", "blade.report(", "blade.stats(", "blade.rearm(", "blade.Config("),
        "enable_int8=True",
    ),
    "docs/deployment.md": ("blade.save(", "blade.load(", "torch.export.load("),
    "docs/torch_compile.md": ('backend="disc"', 'backend="aot_disc"', "blade.dynamo.reports("),
}


def _blocks(document: str, language: str = "python") -> list[str]:
    text = (ROOT / document).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


BLOCKS = [
    pytest.param(block, id=f"{document}-{number}")
    for document in WAYS_IN
    if document != "README.md"  # whose output is compared, too
    for number, block in enumerate(_blocks(document))
]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
TIMEOUT_S = 600


def _run(folder: Path, *command: str) -> str:
    """Runs in an empty folder; errors show the whole output."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("document", WAYS_IN)
def test_document_shows_its_ways_in(document: str) -> None:
    code = "".join(_blocks(document))
    assert [name for name in WAYS_IN[document] if name not in code] == []


@pytest.mark.needs("runtime", "torch_mlir")
@pytest.mark.parametrize("block", BLOCKS)
def test_block_runs(block: str, tmp_path: Path) -> None:
    script = tmp_path / "block.py"
    script.write_text(block, encoding="utf-8")
    assert "cluster_0" in _run(tmp_path, str(script))


@pytest.mark.needs("runtime", "torch_mlir")
def test_readme_shows_what_its_code_prints(tmp_path: Path) -> None:
    """The sentence, the cluster's row and the counters, numbers masked; a busy machine may choose the original."""
    [code], [output] = _blocks("README.md"), _blocks("README.md", "text")
    script = tmp_path / "block.py"
    script.write_text(code, encoding="utf-8")
    printed, shown = _form(_run(tmp_path, str(script))), _form(output)
    if "engine_runs" not in printed[-1]:
        assert printed[0].startswith("The model stays TorchScript")
        return
    assert printed[-1] == shown[-1]
    for begin in (
        "Sequential runs #x as fast as TorchScript",
        "cluster_# disc # #x# # # #x (#-#) #",
    ):
        assert any(line.startswith(begin) for line in shown), begin
        assert any(line.startswith(begin) for line in printed), begin


def _form(text: str) -> list[str]:
    """The lines of ``text`` without numbers, rules and widths."""
    text = re.sub(r"\d+(\.\d+)?(e-?\d+)?", "#", text)
    return [" ".join(re.sub("─+", "─", line).split()) for line in text.splitlines()]


def _rows(document: str) -> dict[str, str]:
    """Field: default, of every table row that names fields of ``Config``."""
    text = (ROOT / document).read_text(encoding="utf-8")
    told: dict[str, str] = {}
    for names, defaults in re.findall(r"^\| (`[a-z][^|]+) \| (`[^|]+) \|", text, re.MULTILINE):
        keys, values = (re.findall(r"`([^`]+)`", cell) for cell in (names, defaults))
        told |= dict(zip(keys, values * len(keys) if len(values) == 1 else values))
    return told


def _defaults() -> dict[str, str]:
    actual = {name: getattr(Config(), name) for name in Config.model_fields}
    return {name: f'"{v}"' if isinstance(v, str) else str(v) for name, v in actual.items()}


def test_config_table_lists_every_field_and_its_default() -> None:
    assert _rows("docs/config.md") == _defaults()


def test_readme_settings_have_the_defaults_of_config() -> None:
    told = _rows("README.md")
    assert len(told) >= 5
    assert told.items() <= _defaults().items()


def test_config_document_lists_every_environment_variable() -> None:
    text = (ROOT / "docs/config.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\| `(BLADE_\w+)` \|", text, re.MULTILINE)) == sorted(VARIABLES)


def test_documents_name_files_that_exist() -> None:
    missing = []
    for document in [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "benchmarks").glob("*.md"),
    ]:
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text(encoding="utf-8")):
            path = Path(os.path.relpath((document.parent / link).resolve(), ROOT)).as_posix()
            if not (ROOT / path).exists():
                missing.append(f"{document.name}: {link}")
    assert missing == []


@pytest.mark.needs("runtime", "torch_mlir", "minilm")
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(example: Path, tmp_path: Path) -> None:
    out = _run(tmp_path, str(example))
    assert list(tmp_path.iterdir()) == []  # nothing is left behind
    for pattern, least in SHOWN[example.stem]:
        found = [float(number) for number in re.findall(pattern, out)]
        assert found and min(found) >= least, out


# What an example must have printed, and the least each of these numbers may be. Not
# the speed, nor which engine was chosen, which depends on it.
SHOWN: dict[str, list[tuple[str, float]]] = {
    "01_quickstart": [(r"│\s+(\d\.\d{7}) │", 0.999999)],
    "02_own_backend": [
        (r"(\d+) rows: largest difference \d\.\de-0[6-9]", 1),
        (r"'engine_runs': (\d+)", 3),
    ],
}
