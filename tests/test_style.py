# SPDX-License-Identifier: Apache-2.0
"""The rules of the house that a parser can check. Each test lists every offender."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "blade"
MODULES = sorted(PACKAGE.rglob("*.py"))
SOURCES = sorted(
    path
    for folder in ("blade", "tests", "examples", "benchmarks", "docs")
    for path in (ROOT / folder).rglob("*.py")
)
NATIVE = sorted((PACKAGE / "runtime" / "csrc").rglob("*.*"))

# The folders of the package from bottom to top; a file of the root is a row of its own. A module imports from its
# own folder and from those above it in this list.
ROOMS = """
errors version
config core
process
report/html report
timing
clustering
graph/shapes graph/fx graph/torchscript
program
runtime backends
verification
backends/shared backends/shared/onnx
backends/disc/target
backends/disc/ir
backends/disc/frontend/ops backends/disc/frontend
backends/disc/passes
backends/disc/fusion
backends/disc/program
backends/disc/reference
backends/disc/cpu/emit backends/disc/cpu/attention backends/disc/cpu/gemm backends/disc/cpu/conv
backends/disc/cpu/compile backends/disc/cpu
backends/disc/gpu/compile backends/disc/gpu/emit backends/disc/gpu/attention backends/disc/gpu/gemm
backends/disc/gpu/passes backends/disc/gpu/library backends/disc/gpu
backends/disc
backends/quant/analysis backends/quant/transforms backends/quant/search backends/quant
backends/onnxruntime backends/openvino backends/tensorrt backends/inductor backends/tvm
partition
capture/decisions capture/exported capture
fallback
selection/plan selection/cache selection/forecast selection
importers/onnx/functions importers/onnx/emit importers/onnx/ops importers/onnx importers
api dynamo
dropin
saving
__init__
cli/shared cli/commands cli
__main__
""".split()

# CXX is Inductor's, which is not imported to be asked for it.
ENVIRONMENT = {"BLADE_BACKENDS", "BLADE_ENGINES", "BLADE_LOG", "BLADE_TRUSTED_KEYS", "CXX"}
ENVIRONMENT |= {"BLADE_CACHE_DIR", "BLADE_CACHE_LIMIT_GB"}


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(_text(path), str(path))


@cache
def _nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(_tree(path)))


def _module(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name.removesuffix(".__init__")


FILES = {_module(path): path for path in MODULES}


def _room(module: str) -> str:
    """``blade.capture.trace`` -> ``capture``, ``blade.api`` -> ``api``, ``blade`` -> ``__init__``."""
    path = FILES[module].relative_to(PACKAGE)
    return path.parent.as_posix() if path.parent != Path(".") else path.stem


def _imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of every import of the package in the file, nested ones included."""
    for node in _nodes(path):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name in FILES)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{_name(path)}:{node.lineno}: imports are absolute"
            stem = node.module or ""
            for alias in node.names:
                named = f"{stem}.{alias.name}"
                if named in FILES or stem in FILES:
                    yield node.lineno, named if named in FILES else stem


def _calls(path: Path) -> Iterator[ast.Call]:
    return (node for node in _nodes(path) if isinstance(node, ast.Call))


def test_every_folder_has_a_place_in_the_order() -> None:
    assert len(MODULES) > 100
    rooms = {_room(module) for module, path in FILES.items() if _text(path).strip()}
    assert rooms - set(ROOMS) == set()
    assert [room for room, count in Counter(ROOMS).items() if count > 1 or room not in rooms] == []


def test_imports_point_one_way() -> None:
    rank = {room: k for k, room in enumerate(ROOMS)}
    upward = [
        f"{_name(path)}:{line} imports {name}"
        for module, path in FILES.items()
        for line, name in _imports(path)
        if rank[_room(name)] > rank[_room(module)]
    ]
    assert upward == []


def test_backends_do_not_import_each_other() -> None:
    own = {p.name for p in (PACKAGE / "backends").iterdir() if p.is_dir()} - {"shared"}
    others = [
        f"{_name(path)}:{line} imports {name}"
        for module, path in FILES.items()
        if module.startswith("blade.backends.")
        for line, name in _imports(path)
        if name.startswith("blade.backends.") and name.split(".")[2] in own - {module.split(".")[2]}
    ]
    assert others == []


def test_clustering_imports_no_torch() -> None:
    found = [
        f"{_name(path)}:{node.lineno}"
        for path in (PACKAGE / "clustering").rglob("*.py")
        for node in _nodes(path)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        and any(
            name.split(".")[0] == "torch"
            for name in (
                [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else [alias.name for alias in node.names]
            )
        )
    ]
    assert found == []


def test_only_the_graph_folders_write_torchscript_graphs() -> None:
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
        for node in _nodes(path)
        if isinstance(node, ast.Attribute) and node.attr in writes
    ]
    assert [f for f in found if not f.startswith("blade/graph/")] == []


def _caught(handler: ast.ExceptHandler) -> set[str]:
    if handler.type is None:
        return {""}
    types = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return {ast.unparse(one) for one in types}


def test_one_place_catches_every_exception_and_lets_interrupts_through() -> None:
    broad = {
        (_name(path), caught)
        for path in MODULES
        for node in _nodes(path)
        if isinstance(node, ast.ExceptHandler)
        for caught in _caught(node) & {"", "Exception", "BaseException"}
    }
    assert broad == {("blade/core/attempt.py", "Exception")}


def test_the_environment_is_read_by_listed_names_and_nothing_prints() -> None:
    """A variable's name is a literal where it is read, so that this test can see it."""
    bad = []
    for path in MODULES:
        for node in _nodes(path):
            if isinstance(node, (ast.Subscript, ast.Call)):
                source = node.value if isinstance(node, ast.Subscript) else node.func
                called = ast.unparse(source)
                if called in {"os.environ", "os.environ.get", "os.getenv"}:
                    key = node.slice if isinstance(node, ast.Subscript) else node.args[0]
                    if not (isinstance(key, ast.Constant) and key.value in ENVIRONMENT):
                        bad.append(f"{_name(path)}:{node.lineno} {ast.unparse(node)}")
                if called in {"print", "pprint.pprint"} and path.name != "__main__.py":
                    bad.append(f"{_name(path)}:{node.lineno} {ast.unparse(node)}")
    assert bad == []


def test_the_current_config_is_read_at_the_entrances_alone() -> None:
    readers = {
        _name(path)
        for path in MODULES
        for call in _calls(path)
        if ast.unparse(call.func) == "Config.current"
    }
    assert readers <= {
        "blade/api.py",
        "blade/dropin/accelerate.py",
        "blade/dynamo/options.py",
    }


def test_files_name_their_licence_and_modules_say_what_they_are() -> None:
    bare = [
        _name(path)
        for path in SOURCES
        if _text(path) and not _text(path).startswith("# SPDX-License-Identifier: Apache-2.0\n")
    ]
    silent = [
        _name(path)
        for path in MODULES
        if _text(path).strip() and _tree(path).body and not ast.get_docstring(_tree(path))
    ]
    assert (bare, silent) == ([], [])


VAGUE = re.compile(r"\bclass\s+\w*(Manager|Helper|Handler|Util)s?\b")


def test_names_say_what_a_thing_is() -> None:
    """Only files whose text has such a name are parsed: parsing all tests takes seconds."""
    files = [
        _name(path)
        for path in SOURCES
        if path.stem in {"utils", "util", "helpers", "common", "misc"}
    ]
    classes = [
        f"{_name(path)}:{node.lineno} {node.name}"
        for path in SOURCES
        if VAGUE.search(_text(path))
        for node in _nodes(path)
        if isinstance(node, ast.ClassDef) and VAGUE.match(f"class {node.name}")
    ]
    assert (files, classes) == ([], [])


def test_a_class_name_is_defined_once() -> None:
    found: dict[str, list[str]] = {}
    for path in MODULES:
        for node in _nodes(path):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(f"{_name(path)}:{node.lineno}")
    assert {name: places for name, places in found.items() if len(places) > 1} == {}


# Spelled apart, or this file would find itself.
UNFINISHED = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X|HA" + r"CK)\b")


def test_nothing_is_left_to_do() -> None:
    left = [
        f"{_name(path)}:{number} {line.strip()}"
        for path in [*SOURCES, *NATIVE]
        for number, line in enumerate(_text(path).splitlines(), 1)
        if UNFINISHED.search(line)
    ]
    assert left == []


def test_loggers_are_named_after_their_module() -> None:
    bad = [
        f"{_name(path)}:{call.lineno}"
        for path in MODULES
        for call in _calls(path)
        if ast.unparse(call.func) in {"logging.getLogger", "getLogger"}
        and [ast.unparse(arg) for arg in call.args] not in (["__name__"], ["'blade'"])
    ]
    assert bad == []


def test_test_files_have_names_of_their_own() -> None:
    """pytest imports them by base name alone: of two that share one, the second cannot be collected."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
