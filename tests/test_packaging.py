# SPDX-License-Identifier: Apache-2.0
"""What is installed is what is here: setup.py's packages and data are all of the folder ``blade``."""

import ast
import os
import runpy
import sys
from fnmatch import fnmatch
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "blade"
COMPILED = PACKAGE / "runtime" / "csrc"


def _in_setup(keyword: str) -> ast.expr:
    """What the call of ``setup`` is given as ``keyword``."""
    tree = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
    [call] = [
        n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == "setup"
    ]
    [value] = [k.value for k in call.keywords if k.arg == keyword]
    return value


def test_every_folder_of_modules_is_a_package() -> None:
    """An editable installation finds modules without it; a wheel has none of them."""
    find_packages = pytest.importorskip("setuptools").find_packages
    include = ast.literal_eval(_in_setup("packages").keywords[0].value)  # type: ignore[attr-defined]
    found = set(find_packages(str(ROOT), include=include))
    folders = {path.parent.relative_to(ROOT) for path in PACKAGE.rglob("*.py")}
    assert {".".join(folder.parts) for folder in folders} == found


def test_every_other_file_is_the_data_of_its_package() -> None:
    data = ast.literal_eval(_in_setup("package_data"))
    patterns = [
        f"{package.replace('.', '/')}/{name}" for package, names in data.items() for name in names
    ]
    files = [
        path.relative_to(ROOT).as_posix()
        for path in PACKAGE.rglob("*")
        if path.is_file() and path.suffix not in {".py", ".pyc"} and COMPILED not in path.parents
    ]
    assert files
    assert [name for name in files if not any(fnmatch(name, p) for p in patterns)] == []


def test_the_console_command_is_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tomllib = pytest.importorskip("tomllib")
    [(name, place)] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "scripts"
    ].items()
    monkeypatch.setattr(sys, "argv", [f"/usr/bin/{name}", "--help"])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with pytest.raises(SystemExit) as left:
        EntryPoint(name, place, "console_scripts").load()()
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage: blade ") and "optimize" in shown


@pytest.mark.parametrize("static", [True, False], ids=["static", "shared"])
def test_a_compiler_with_a_libstdcxx_of_its_own_is_not_taken(
    static: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exceptions of what it links would end the process."""
    if sys.platform != "linux" or not os.access("/usr/bin/g++", os.X_OK):
        pytest.skip("no /usr/bin/g++")
    monkeypatch.setattr("setuptools.setup", lambda **_: None)
    monkeypatch.chdir(ROOT)
    wrapper = tmp_path / "wrapped-g++"
    wrapper.write_text(
        f'#!/bin/sh\nexec /usr/bin/g++ {"-static-libstdc++" if static else ""} "$@"\n'
    )
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", str(wrapper))
    monkeypatch.setenv("CC", "as it was")
    setup = runpy.run_path("setup.py")
    if setup["links_shared"](str(wrapper)) is None:
        pytest.skip("no static libstdc++ to link")
    setup["choose_compiler"]()
    chosen = ("/usr/bin/g++", "/usr/bin/gcc") if static else (str(wrapper), "as it was")
    assert (os.environ["CXX"], os.environ["CC"]) == chosen
    if static:
        monkeypatch.setitem(setup["choose_compiler"].__globals__, "links_shared", lambda _: False)
        with pytest.raises(SystemExit, match="Set CXX and CC to a compiler"):
            setup["choose_compiler"]()
