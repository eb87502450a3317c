# SPDX-License-Identifier: Apache-2.0
"""What tests of saved files share: saving what is called elsewhere, and the code that calls it there."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from saved_models import CASES, Case

import blade
from blade.runtime import make_engine

QUICK = blade.Config(timing=False, min_cluster_size=1)

OPEN_ALL = """
import copy, json, sys
from pathlib import Path
import torch
import blade
from blade.saving.load_file import format_of

def outcome(run, call):
    given = copy.deepcopy(call)
    with torch.no_grad():
        return run(*given), given

def assert_same(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)

found = {{}}
for path in sorted(Path({0!r}).glob("*.pt2")):
    calls = torch.load(path.with_suffix(".calls"))
    is_program = format_of(path) == "pt2"
    load = torch.export.load if is_program else torch._inductor.aoti_load_package
    ours, plain = blade.load(path), load(path)
    plain = plain.module() if is_program else plain
    for call, expected in calls:
        for run in (ours, plain):
            try:
                assert_same(outcome(run, call), expected)
            except Exception as error:
                found.setdefault(path.stem, []).append(f"{{type(error).__name__}}: {{error}}"[:600])
    found.setdefault(path.stem, []).append(blade.stats(ours))
print(json.dumps(found))
"""


def outcome_of(run: Any, call: Any) -> Any:
    given = copy.deepcopy(call)
    return run(*given), given


def optimized_case(name: str) -> tuple[Case, torch.jit.ScriptModule]:
    torch.manual_seed(0)
    case = CASES[name]()
    return case, blade.optimize(case.model.eval(), copy.deepcopy(case.samples), QUICK)


def write_calls(model: torch.nn.Module, calls: list[Any], archive: Path) -> None:
    torch.save([(call, outcome_of(model, call)) for call in calls], archive.with_suffix(".calls"))


def with_engine(module: torch.jit.ScriptModule, change: Callable[..., Any]) -> None:
    """Replace the engine by ``make_engine(*change(backend, program, object))``."""
    cluster: Any = module.cluster_0
    state, _ = cluster.engine.__getstate__()
    _, (name, backend, program, _), _, (object, *constants) = state
    backend, program = change(backend, program)
    cluster._c.setattr("engine", make_engine(name, backend, program, object, constants))


def optimized_in_parts(model: torch.nn.Module) -> torch.jit.ScriptModule:
    """Of ``Glued``, with several clusters."""
    config = QUICK.evolve(customize_op_black_list=["aten::cumsum", "aten::add_"])
    return blade.optimize(model, (torch.randn(3, 5, 16), torch.randn(3, 5, 32)), config)
