# SPDX-License-Identifier: Apache-2.0
"""The rules of the house that a parser can check; CONTRIBUTING.md says why they are there."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "blade"
MODULES = sorted(PACKAGE.rglob("*.py"))
SOURCES = sorted(
    path
    for folder in ("blade", "tests", "examples", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
)

# From top to bottom. A part may import from its own layer and from lower ones, never from a higher one;
# parts of one layer may import each other, except that backends may not.
LAYERS: list[set[str]] = [
    {"__main__"},
    {"cli"},
    {"__init__"},
    {"api", "dynamo"},
    {"capture", "fallback"},
    {"graph", "backends", "exchange"},
    {"clustering", "runtime"},
    {
        "budget",
        "cache",
        "config",
        "config_fields",
        "reason",
        "report",
        "report_graph",
        "report_page",
        "report_text",
        "progress",
        "precision",
        "turns",
        "errors",
        "hardware",
        "garbage",
        "meanwhile",
        "version",
    },
]

# Plain data that stages hand down lives with the stage that makes it, and counts as this layer.
CONTRACTS = {"blade.capture.captured": 5}

# A table may be long, logic may not.
MAX_LINES = 400
LONG_TABLES = {
    "tests/op_samples.py",
    "tests/op_samples_nn.py",
    "tests/op_samples_training.py",
    "tests/op_samples_views.py",
}

# CXX is Inductor's, which is not imported to be asked for it.
ENVIRONMENT = {"BLADE_BACKENDS", "BLADE_CACHE_DIR", "BLADE_LOG", "CXX"}


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def _part(module: str) -> str:
    """``blade.capture.trace`` -> ``capture``."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def _module(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name.removesuffix(".__init__")


def _layer(module: str) -> int:
    if module in CONTRACTS:
        return CONTRACTS[module]
    part = _part(module)
    found = [i for i, layer in enumerate(LAYERS) if part in layer]
    assert found, f"blade/{part} is in no layer: add it to LAYERS"
    return found[0]


def _imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute module or module.name) of every import in the file, nested ones included."""
    package = _module(path) if path.name == "__init__.py" else _module(path).rpartition(".")[0]
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            base = parents[: len(parents) - node.level + 1] if node.level else []
            stem = ".".join([*base, *filter(None, [node.module])])
            for alias in node.names:
                yield node.lineno, _submodule(stem, alias.name)


def _submodule(stem: str, name: str) -> str:
    """``from blade import config`` imports ``blade.config``; ``from blade.config import Config`` does not."""
    folder = ROOT.joinpath(*stem.split("."))
    is_module = (folder / name).is_dir() or (folder / f"{name}.py").is_file()
    return f"{stem}.{name}" if is_module else stem


def test_there_is_something_to_check() -> None:
    assert len(MODULES) > 10


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_imports_point_one_way(path: Path) -> None:
    own = _layer(_module(path))
    upward = [
        f"{_name(path)}:{line} imports {name}"
        for line, name in _imports(path)
        if name.split(".")[0] == "blade" and _layer(name) < own
    ]
    assert upward == []


@pytest.mark.parametrize("path", sorted((PACKAGE / "backends").rglob("*.py")), ids=_name)
def test_backends_do_not_import_each_other(path: Path) -> None:
    backends = {p.name for p in (PACKAGE / "backends").iterdir() if p.is_dir()}
    own = path.relative_to(PACKAGE / "backends").parts[0]
    others = [
        f"{_name(path)}:{line} imports {name}"
        for line, name in _imports(path)
        if name.startswith("blade.backends.") and name.split(".")[2] in backends - {own}
    ]
    # base.py and the registry serve all backends: they name one only as a string.
    assert others == []


@pytest.mark.parametrize("path", sorted((PACKAGE / "clustering").rglob("*.py")), ids=_name)
def test_clustering_knows_no_torch(path: Path) -> None:
    assert [name for _, name in _imports(path) if name.split(".")[0] == "torch"] == []


def test_only_the_graph_package_writes_torchscript_graphs() -> None:
    writes = {
        "insertNode",
        "insertBefore",
        "insertAfter",
        "eraseInput",
        "eraseOutput",
        "moveBefore",
    }
    found = [
        f"{_name(path)}:{node.lineno} {node.attr}"
        for path in MODULES
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Attribute) and node.attr in writes
    ]
    assert [f for f in found if not f.startswith("blade/graph/")] == []


def _caught(handler: ast.ExceptHandler) -> set[str]:
    if handler.type is None:
        return {""}
    types = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return {ast.unparse(one) for one in types}


def test_exactly_one_place_catches_everything() -> None:
    broad = [
        _name(path)
        for path in MODULES
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.ExceptHandler)
        and _caught(node) & {"", "Exception", "BaseException"}
    ]
    assert broad == ["blade/fallback/attempt.py"]


def test_that_place_does_not_catch_an_interrupt() -> None:
    handlers = [
        node
        for node in ast.walk(_tree(PACKAGE / "fallback" / "attempt.py"))
        if isinstance(node, ast.ExceptHandler)
    ]
    assert not any(_caught(handler) & {"", "BaseException"} for handler in handlers)


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_no_print_but_in_the_cli(path: Path) -> None:
    calls = [
        node.lineno
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {"print", "pprint.pprint"}
    ]
    assert calls == [] or path.name == "__main__.py"


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_no_environment_variables_but_these(path: Path) -> None:
    """A name is read as a literal where it is used, so that this test can see it."""
    bad = []
    for node in ast.walk(_tree(path)):
        if isinstance(node, (ast.Subscript, ast.Call)):
            source = node.value if isinstance(node, ast.Subscript) else node.func
            if ast.unparse(source) not in {"os.environ", "os.environ.get", "os.getenv"}:
                continue
            key = node.slice if isinstance(node, ast.Subscript) else node.args[0]
            if not (isinstance(key, ast.Constant) and key.value in ENVIRONMENT):
                bad.append(f"{node.lineno}: {ast.unparse(node)}")
    assert bad == []


def test_config_current_is_read_at_the_entrances_alone() -> None:
    readers = {
        _name(path)
        for path in MODULES
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Config.current"
    }
    assert readers <= {"blade/api.py", "blade/dynamo/options.py"}


@pytest.mark.parametrize("path", SOURCES, ids=_name)
def test_a_file_names_its_licence_and_is_short(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    if lines:
        assert lines[0] == "# SPDX-License-Identifier: Apache-2.0"
    if _name(path) not in LONG_TABLES:
        assert len(lines) <= MAX_LINES


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_a_module_says_what_it_is(path: Path) -> None:
    if path.read_text(encoding="utf-8").strip() and _tree(path).body:
        assert ast.get_docstring(_tree(path)), "a module starts with a docstring"


@pytest.mark.parametrize("path", SOURCES, ids=_name)
def test_names_say_what_a_thing_is(path: Path) -> None:
    assert path.stem not in {"utils", "util", "helpers", "common", "misc"}
    vague = [
        node.name
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.ClassDef)
        and re.search(r"(Manager|Helper|Handler|Util)s?$", node.name)
    ]
    assert vague == []


# Spelled apart, or this file would find itself.
UNFINISHED = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X|HA" + r"CK)\b")


@pytest.mark.parametrize(
    "path",
    [*SOURCES, *sorted((PACKAGE / "runtime" / "csrc").rglob("*.*"))],
    ids=_name,
)
def test_nothing_is_left_to_do(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [f"{i}: {line}" for i, line in enumerate(lines, 1) if UNFINISHED.search(line)] == []


def test_loggers_are_named_after_their_module() -> None:
    bad = [
        f"{_name(path)}:{node.lineno}"
        for path in MODULES
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in {"logging.getLogger", "getLogger"}
        and [ast.unparse(arg) for arg in node.args] not in (["__name__"], ["'blade'"])
    ]
    assert bad == []


def test_test_files_have_names_of_their_own() -> None:
    """pytest imports them by base name alone: of two that share one, the second cannot be collected."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(set(names)) == sorted(names)
