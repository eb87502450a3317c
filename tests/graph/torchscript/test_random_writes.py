# SPDX-License-Identifier: Apache-2.0
"""Random programs compute the same, bit by bit, once they are functionalized."""

import re
import warnings
from typing import Any

import pytest
import torch
from random_writes import WritingProgram

from blade.graph.torchscript.functionalize import functionalize

_PROGRAMS = 80
_SHARE = 0.5
"""Share of the writes that become functional, at least; the others may be seen."""

Returned = tuple[torch.Tensor, ...]


def _run_in_python(source: str, x: torch.Tensor, n: int) -> Returned | None:
    """``None`` where torch refuses to write, as to a tensor that was expanded."""
    names: dict[str, Any] = {"torch": torch, "Tensor": torch.Tensor, "Tuple": tuple}
    exec(source, names)
    try:
        return names["forward"](None, x, n)
    except RuntimeError:
        return None


def _compile(source: str) -> torch.jit.ScriptModule:
    module = torch.jit._recursive.create_script_module(
        torch.nn.Module(), lambda _: (), share_types=False
    )
    module.define(source)
    return module


def _writes(module: torch.jit.ScriptModule) -> int:
    return len(re.findall(r"aten::[a-z_]+_\(", str(module.graph)))


def _same(found: Returned, wanted: Returned) -> bool:
    pairs = list(zip(found, wanted, strict=True))
    return all(torch.equal(a, b) and a.dtype == b.dtype for a, b in pairs)


def _checked(seed: int) -> tuple[int, int] | None:
    """The writes of a program before and after; ``None`` if torch cannot run it.

    torch's own passes lose writes to what is in a list, and its interpreter mixes up the values of some loops
    that follow each other.
    """
    source = WritingProgram(seed).source()
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
    cases = [(x, 2), (-x.abs(), 1)]
    wanted = []
    for given, n in cases:
        own = given.clone()
        wanted.append((_run_in_python(source, own, n), own))
    module, plain = _compile(source), _compile(source)
    before = _writes(module)
    if wanted[0][0] is None:
        return None
    functionalize(module, [(x.clone(), 2)])
    torch._C._jit_pass_lint(module.graph)
    with torch.jit.optimized_execution(False):
        for (given, n), (result, written) in zip(cases, wanted, strict=True):
            if result is None:
                continue
            own = given.clone()
            try:
                if not _same(plain(given.clone(), n), result):
                    return None
                found = module(own, n)
            except RuntimeError:
                return None
            assert _same(found, result), f"{source}\n{module.graph}"
            assert torch.equal(own, written), source
    return before, _writes(module)


@pytest.mark.parametrize("part", range(2))
def test_functionalized_programs_compute_the_same(part: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # writing to expanded tensors is deprecated
        counts = [_checked(seed) for seed in range(part, _PROGRAMS, 2)]
    ran = [count for count in counts if count is not None]
    before, after = (sum(column) for column in zip(*ran, strict=True))
    assert len(ran) > 0.8 * len(counts)
    assert before > _PROGRAMS
    assert after < (1 - _SHARE) * before
