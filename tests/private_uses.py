# SPDX-License-Identifier: Apache-2.0
"""Finds what the package uses of torch's private parts, and writes the table that ``test_private_uses.py`` compares.

    python tests/private_uses.py      # rewrites tests/private_uses.txt: read the diff before it is committed

Private is a dotted name of torch with a part that begins with an underscore, or in ``torch.fx.experimental`` and
``functorch``. Ops (``torch.ops.aten._softmax``) are none. Of objects of torch, it is an attribute with an underscore
that the package does not define.
"""

import ast
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "blade"
TABLE = Path(__file__).with_name("private_uses.txt")

IN_STUBS_ALONE = "torch._C.JitType"  # the base class of types, for annotations

# Types and functions of types that are torch's vocabulary: of graphs, trees, symbolic sizes and fake tensors. Any file
# may use them; all else that is private is used in one file, behind a function where others need it.
VOCABULARY = (
    *("torch._C.Argument", "torch._C.Block", "torch._C.FunctionSchema", "torch._C.Graph"),
    *("torch._C.Node", "torch._C.Value", IN_STUBS_ALONE, "torch._C.BoolType.get"),
    *("torch._C.FloatType.get", "torch._C.IntType.get", "torch._C.StringType.get"),
    *("torch._C.TensorType.get", "torch._C.ListType", "torch._C.TupleType"),
    *("torch._C.DispatchKey", "torch._C.DisableTorchFunctionSubclass"),
    *("torch._C._aoti.AOTIModelContainerRunnerCpu", "torch._check"),
    *("torch._dynamo.source.ConstantSource", "torch._ops.OpOverload"),
    *("torch._C.PyTorchFileReader", "torch._ops.HigherOrderOperator"),
    *("torch._subclasses.fake_tensor.", "torch.fx.experimental.symbolic_shapes."),
    *("torch.jit._trace.TracerWarning", "torch.utils._pytree."),
    *("torch.utils._python_dispatch.TorchDispatchMode", "torch.utils._sympy."),
)
# The minor versions of torch in which ``test_private_uses.py`` has found every name.
SEEN = ("2.11", "2.12", "2.13", "2.14", "2.15")

OPS = ("aten", "prims")  # torch.ops.aten, as files call it
# Attributes with an underscore of other objects than torch's.
OF_OTHERS = frozenset(
    {"_ParameterKind", "_checks", "_exit", "_getframe", "_is_croppable", "_sliding_window_tensor"}
)


def is_vocabulary(name: str) -> bool:
    """A name of the vocabulary, or a module of which it has names."""
    folders = tuple(v for v in VOCABULARY if v.endswith("."))
    return f"{name}.".startswith(folders) or name in VOCABULARY


def table(uses: Mapping[str, set[str]]) -> str:
    """A line per name: the files below blade/ that use it, or ``*``."""
    lines = [
        f"{name}  {'*' if is_vocabulary(name) else ' '.join(sorted(uses[name]))}"
        for name in sorted(uses)
    ]
    return "\n".join(lines) + "\n"


def found() -> dict[str, set[str]]:
    """Each private name, and ``.attribute`` of torch's objects, with the files that use it."""
    nodes = {path: _nodes(path) for path in PACKAGE.rglob("*.py")}
    own = {name for found in nodes.values() for name in _defined(found)} | OF_OTHERS
    uses: dict[str, set[str]] = {}
    for path, found in nodes.items():
        for name in _used(found, own):
            uses.setdefault(name, set()).add(path.relative_to(PACKAGE).as_posix())
    return uses


def _nodes(path: Path) -> list[ast.AST]:
    """Those that ``_defined`` and ``_used`` look at; what is most of a tree is left out once."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, _SEEN_NODES)]


_SEEN_NODES = (
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Name, ast.Attribute),
    *(ast.Import, ast.ImportFrom, ast.Constant),
)


def _defined(nodes: Sequence[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def _used(nodes: Sequence[ast.AST], own: set[str]) -> Iterator[str]:
    names: dict[str, str] = {}
    for node in nodes:
        for name, stands_for in _imported(node):
            names[name] = stands_for
            if _is_private(stands_for):
                yield stands_for
    inner: set[ast.AST] = set()
    for node in nodes:
        if isinstance(node, ast.Attribute) and node not in inner:
            chain, root = [node.attr], node.value
            while isinstance(root, ast.Attribute):
                inner.add(root)
                chain.insert(0, root.attr)
                root = root.value
            if isinstance(root, ast.Name) and root.id in OPS:
                continue
            if isinstance(root, ast.Name) and root.id in names:
                whole = ".".join([names[root.id], *chain])
                yield from [whole] if _is_private(whole) else []
            else:
                yield from (f".{name}" for name in chain if _is_hidden(name) and name not in own)
        elif isinstance(node, ast.Constant) and _is_private(text := str(node.value)):
            yield from [text] if text.replace(".", "").isidentifier() else []


def _imported(node: ast.AST) -> Iterator[tuple[str, str]]:
    """(name, what it stands for) of an import of torch."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            if alias.name.split(".")[0] in ("torch", "functorch"):
                yield (
                    (alias.asname, alias.name) if alias.asname else (alias.name.split(".")[0],) * 2
                )
                if not alias.asname and _is_private(alias.name):
                    yield alias.name, alias.name
    elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in (
        *("torch", "functorch"),
    ):
        yield from (
            (alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names
        )


def _is_private(name: str) -> bool:
    first, *others = name.split(".")
    if first not in ("torch", "functorch") or name.startswith("torch.ops.") or not others:
        return False
    experimental = name.startswith(("torch.fx.experimental.", "functorch."))
    return experimental or any(map(_is_hidden, others))


def _is_hidden(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


if __name__ == "__main__":
    TABLE.write_text(table(found()), encoding="utf-8")
