# SPDX-License-Identifier: Apache-2.0
"""A cluster as a readable ScriptModule: try the engine, else run the original subgraph.

Its ``.code`` is ``outs = self.engine.try_execute([x0, x1])``, then ``outs[0]`` where that is not ``None``,
else ``self.fallback(x0, x1)``, which is not inlined (``opaque_fallback``). With several engines, a test of a
size comes first and selects the engine to try:

    size = x0.size(1)
    if size <= 40:
        outs = self.engine.try_execute([x0])
    else:
        outs = self.engine_1.try_execute([x0])

An engine with recheck (``Config.recheck``) has its answer compared in place:

    if outs is not None:
        if self.engine.is_due():
            want = self.fallback(x0)
            if not self.engine.agrees(outs, [want]):
                return want
        return outs[0]
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch

from blade.core import torchscript
from blade.fallback.opaque_fallback import interface, signature
from blade.graph.torchscript.extract import Extracted
from blade.report import ENGINES
from blade.runtime.engine import Engine


class ClusterModule(torch.nn.Module):
    """Gives the TorchScript class its name."""


@dataclass(frozen=True)
class Dispatch:
    """The engine to try at each size: ``serving[i]`` (``None``: the original) up to ``bounds[i]``, the last
    one beyond. ``size`` is a TorchScript expression over x0, x1, ..."""

    size: str
    bounds: tuple[int, ...]
    serving: tuple[torch.ScriptObject | None, ...]


def cluster_module(
    extracted: Extracted, engine: torch.ScriptObject | Dispatch | None
) -> torch.jit.ScriptModule:
    """Return the module that replaces the cluster in the optimized model.

    ``engine`` is a ``torch.classes.blade.Engine``, several by size, or ``None`` for the original alone. The
    arity is the cluster's: one output is returned as a tensor, several as a tuple.
    """
    serving = engine.serving if isinstance(engine, Dispatch) else (engine,)
    arity = len(extracted.inputs), len(extracted.outputs)
    is_behind = all(one is not None for one in serving)
    holder = ClusterModule().eval()
    holder.fallback = extracted.fallback
    names: list[str | None] = []
    held: list[torch.ScriptObject] = []
    for one in serving:
        if one is not None and not any(one is other for other in held):
            held.append(one)
            setattr(holder, ENGINES[len(held) - 1], one)
        names.append(None if one is None else ENGINES[[o is one for o in held].index(True)])
    script = torchscript.without_methods(
        holder, {"fallback": interface(*arity)} if is_behind else None
    )
    sizes = (engine.size, engine.bounds) if isinstance(engine, Dispatch) else ("", ())
    rechecked = any("rechecks" in cast(Engine, one).stats() for one in held)
    script.define(_source(*arity, names, *sizes, rechecked=rechecked))
    assert isinstance(script, torch.jit.ScriptModule)
    return script


def _source(
    inputs: int,
    outputs: int,
    engines: Sequence[str | None],
    size: str,
    bounds: Sequence[int],
    rechecked: bool = False,
) -> str:
    names = ", ".join(f"x{i}" for i in range(inputs))
    given = f"[{names}]" if inputs else "torch.jit.annotate(List[Tensor], [])"
    calls = [
        f"outs = self.{name}.try_execute({given})" if name else "outs = nobody" for name in engines
    ]
    checks = [_recheck(name, names, outputs) if rechecked and name else [] for name in engines]
    lines = [signature(inputs, outputs)]
    if None in engines and bounds:
        lines.append("    nobody = torch.jit.annotate(Optional[List[Tensor]], None)")
    if bounds:
        tests = [f"if size <= {bound}:" for bound in bounds]
        tests = [tests[0], *(f"el{test}" for test in tests[1:]), "else:"]
        lines.append(f"    size = {size}")
        for test, call, check in zip(tests, calls, checks, strict=True):
            lines += [f"    {test}", f"        {call}", *(f"        {line}" for line in check)]
    elif engines != [None]:
        lines += [f"    {calls[0]}", *(f"    {line}" for line in checks[0])]
    if any(engines):
        answer = ", ".join(f"outs[{i}]" for i in range(outputs))
        lines += ["    if outs is not None:", f"        return {answer}"]
    lines.append(f"    return self.fallback({names})")
    return "\n".join(lines) + "\n"


def _recheck(engine: str, names: str, outputs: int) -> list[str]:
    wanted = "want" if outputs == 1 else ", ".join(f"want[{i}]" for i in range(outputs))
    return [
        "if outs is not None:",
        f"    if self.{engine}.is_due():",
        f"        want = self.fallback({names})",
        f"        if not self.{engine}.agrees(outs, [{wanted}]):",
        "            return want",
    ]
