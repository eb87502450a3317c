# SPDX-License-Identifier: Apache-2.0
"""Random scripts with branches, loops, breaks, writes, views and lists: cut and rebuilt, they are the same.

Values, what is left in the inputs, and which tensors share memory are compared with the Python code.
"""

import importlib.util
import itertools
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from cutting import rebuilt, run, script
from torch.utils import _pytree as pytree

VALUES = (
    "torch.relu({a}) + {b}",
    "{a} * {i}",
    "torch.sin({a}) - {b}",
    "{a}.t().t() * 2",
    "{a}.reshape(-1).view(3, 3)",
    "{a}.clone()",
    "{a} + {i} * 2",
    "{a}.t()",
    "torch.cat([{a}, {b}], 0)[1:4]",
    "torch.stack(kept)[0] + {a}",
    "kept[len(kept) - 1]",
)
EFFECTS = (
    "{a}.add_(0.5)",
    "{a}[0] = {b}[1] * 0.5",
    "{a}[1:].t()[1:].mul_(0.5)",
    "{a}.t().copy_(torch.sin({b}))",
    "kept.append({a})",
    "kept[0] = {a}",
    "count = count + int({a}.sum().item() > 0)",
)
CONDITIONS = ("bool({a}.sum() > 0)", "flag", "count > 1")
HEAD = """import torch


class Model(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor, n: int, flag: bool):
        count = 0
        kept = [x * 1, y]
"""


class Writer:
    """Writes statements; names made in a block are known in it alone."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.lines: list[str] = []
        self.fresh = map("v{}".format, itertools.count())

    def source(self) -> str:
        names = self.block(["x", "y"], ["2", "n", "count"], 2, self.random.randint(5, 12))
        results = ", ".join(self.random.choice(names) for _ in range(3))
        return HEAD + "\n".join([*self.lines, f"        return {results}, kept, count"]) + "\n"

    def block(self, names: list[str], ints: list[str], indent: int, count: int) -> list[str]:
        names = list(names)
        for _ in range(count):
            kind = self.random.random()
            if kind < 0.4:
                made = next(self.fresh)
                self.write(indent, f"{made} = {self.random.choice(VALUES)}", names, ints)
                names.append(made)
            elif kind < 0.72 or indent > 3:
                self.write(indent, self.random.choice(EFFECTS), names, ints)
            elif kind < 0.86:
                self.branch(names, ints, indent)
            else:
                self.loop(names, ints, indent)
        return names

    def branch(self, names: list[str], ints: list[str], indent: int) -> None:
        self.write(indent, f"if {self.random.choice(CONDITIONS)}:", names, ints)
        self.block(names, ints, indent + 1, self.random.randint(1, 4))
        self.write(
            indent + 1, f"{self.random.choice(names)} = torch.tanh({{a}}) + {{b}}", names, ints
        )
        self.write(indent, "else:", names, ints)
        self.block(names, ints, indent + 1, self.random.randint(1, 3))
        self.write(indent + 1, f"{self.random.choice(names)} = {{a}} * 0.5", names, ints)

    def loop(self, names: list[str], ints: list[str], indent: int) -> None:
        step = next(self.fresh)
        self.write(indent, f"for {step} in range({self.random.randint(1, 3)}):", names, ints)
        self.block(names, [*ints, step], indent + 1, self.random.randint(1, 4))
        carried = self.random.choice(names)
        self.write(indent + 1, f"{carried} = torch.tanh({{a}} + {carried}) * {step}", names, ints)
        if self.random.random() < 0.3:
            self.write(indent + 1, "if bool({a}.sum() > 2):", names, ints)
            self.write(indent + 2, "break", names, ints)

    def write(self, indent: int, text: str, names: list[str], ints: list[str]) -> None:
        pick = self.random.choice
        self.lines.append("    " * indent + text.format(a=pick(names), b=pick(names), i=pick(ints)))


def shared(*values: Any) -> list[tuple[int, int]]:
    """Which tensors in ``values`` share memory."""
    tensors = [t for t in pytree.tree_leaves(values) if isinstance(t, torch.Tensor)]
    keys = [t.untyped_storage().data_ptr() for t in tensors]
    return [(i, j) for j in range(len(keys)) for i in range(j) if keys[i] == keys[j]]


def load(source: str, folder: Path) -> torch.nn.Module:
    """TorchScript reads the source from a file."""
    path = folder / "random_program.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(f"program_{abs(hash(source))}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model: torch.nn.Module = module.Model()
    return model


@pytest.mark.parametrize("seed", range(16))
def test_a_random_program_means_what_it_meant(seed: int, tmp_path: Path) -> None:
    source = Writer(seed).source()
    model = load(source, tmp_path)
    rng = torch.Generator().manual_seed(seed)
    x, y, z = (torch.randn(3, 3, generator=rng) for _ in range(3))
    calls: list[tuple[Any, ...]] = [(x, y, 3, True), (z, x, 2, False), (-y, z, 5, False)]
    expected = [run(model, call) for call in calls]
    optimized = rebuilt(script(model, *calls[:2]))
    for call, (want, want_left) in zip(calls, expected, strict=True):
        got, left = run(optimized, call)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, equal_nan=True, msg=source)
        torch.testing.assert_close(left, want_left, rtol=1e-5, atol=1e-5, equal_nan=True)
        assert shared(got, left) == shared(want, want_left), source
