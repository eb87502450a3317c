# SPDX-License-Identifier: Apache-2.0
"""A cluster as a ScriptModule anyone can read: try the engine, else run the original subgraph.

Its ``.code`` is ``outs = self.engine.try_execute([x0, x1])``, then ``outs[0]`` where that is not ``None``,
else ``self.fallback(x0, x1)``, which is not inlined (interface.py). With several engines, a test of a size comes
first that says which is tried:

    size = x0.size(1)
    if size <= 40:
        outs = self.engine.try_execute([x0])
    else:
        outs = self.engine_1.try_execute([x0])
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from blade.fallback.interface import interface, signature
from blade.graph.extract import Extracted
from blade.report import ENGINES


class Cluster(torch.nn.Module):
    """Names the TorchScript class."""


@dataclass(frozen=True)
class Dispatch:
    """Which engine is tried at which size: ``serving[i]`` (``None``: no one) up to ``bounds[i]``, the last
    one beyond. ``size`` is a TorchScript expression over x0, x1, ..."""

    size: str
    bounds: tuple[int, ...]
    serving: tuple[torch.ScriptObject | None, ...]


def cluster_module(
    extracted: Extracted, engine: torch.ScriptObject | Dispatch | None
) -> torch.jit.ScriptModule:
    """The module that takes the cluster's place in the optimized model.

    ``engine`` is a ``torch.classes.blade.Engine``, several by size, or ``None`` for the original alone. The
    arity is the cluster's: one output is returned as a tensor, several as a tuple.
    """
    holder = Cluster().eval()
    serving = engine.serving if isinstance(engine, Dispatch) else (engine,)
    arity = len(extracted.inputs), len(extracted.outputs)
    if all(one is not None for one in serving):
        holder.__annotations__ = {"fallback": interface(*arity)}
    holder.fallback = extracted.fallback
    names: list[str | None] = []
    held: list[torch.ScriptObject] = []
    for one in serving:
        if one is not None and not any(one is other for other in held):
            held.append(one)
            setattr(holder, ENGINES[len(held) - 1], one)
        names.append(None if one is None else ENGINES[[o is one for o in held].index(True)])
    # Equal modules share one TorchScript class by default; each cluster needs its own forward.
    script = torch.jit._recursive.create_script_module(holder, lambda module: (), share_types=False)
    sizes = (engine.size, engine.bounds) if isinstance(engine, Dispatch) else ("", ())
    script.define(_source(*arity, names, *sizes))
    assert isinstance(script, torch.jit.ScriptModule)
    return script


def _source(
    inputs: int, outputs: int, engines: Sequence[str | None], size: str, bounds: Sequence[int]
) -> str:
    names = ", ".join(f"x{i}" for i in range(inputs))
    given = f"[{names}]" if inputs else "torch.jit.annotate(List[Tensor], [])"
    calls = [
        f"outs = self.{name}.try_execute({given})" if name else "outs = nobody" for name in engines
    ]
    lines = [signature(inputs, outputs)]
    if None in engines and bounds:
        lines.append("    nobody = torch.jit.annotate(Optional[List[Tensor]], None)")
    if bounds:
        tests = [f"if size <= {bound}:" for bound in bounds]
        tests = [tests[0], *(f"el{test}" for test in tests[1:]), "else:"]
        lines.append(f"    size = {size}")
        for test, call in zip(tests, calls, strict=True):
            lines += [f"    {test}", f"        {call}"]
    elif engines != [None]:
        lines += [f"    {calls[0]}"]
    if any(engines):
        answer = ", ".join(f"outs[{i}]" for i in range(outputs))
        lines += ["    if outs is not None:", f"        return {answer}"]
    lines.append(f"    return self.fallback({names})")
    return "\n".join(lines) + "\n"
