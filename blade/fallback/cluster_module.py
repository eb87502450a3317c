# SPDX-License-Identifier: Apache-2.0
"""A cluster as a ScriptModule anyone can read: try the engine, else run the original subgraph.

Its ``.code`` is ``outs = self.engine.try_execute([x0, x1])``, then ``outs[0]`` where that is not ``None``,
else ``self.fallback(x0, x1)``.
"""

import torch

from blade.graph.extract import Extracted


class Cluster(torch.nn.Module):
    """Names the TorchScript class."""


def cluster_module(
    extracted: Extracted, engine: torch.ScriptObject | None
) -> torch.jit.ScriptModule:
    """The module that takes the cluster's place in the optimized model.

    ``engine`` is a ``torch.classes.blade.Engine``, or ``None`` for the original alone. The arity is the
    cluster's: one output is returned as a tensor, several as a tuple.
    """
    holder = Cluster().eval()
    holder.fallback = extracted.fallback
    if engine is not None:
        holder.engine = engine  # type: ignore[assignment]
    # Equal modules share one TorchScript class by default; each cluster needs its own forward.
    script = torch.jit._recursive.create_script_module(holder, lambda module: (), share_types=False)
    count = len(extracted.inputs), len(extracted.outputs)
    script.define(_source(*count, with_engine=engine is not None))
    assert isinstance(script, torch.jit.ScriptModule)
    return script


def _source(inputs: int, outputs: int, *, with_engine: bool) -> str:
    names = ", ".join(f"x{i}" for i in range(inputs))
    parameters = "".join(f", x{i}: Tensor" for i in range(inputs))
    single = outputs == 1
    result = "Tensor" if single else f"Tuple[{', '.join(['Tensor'] * outputs)}]"
    lines = [f"def forward(self{parameters}) -> {result}:"]
    if with_engine:
        given = f"[{names}]" if inputs else "torch.jit.annotate(List[Tensor], [])"
        answer = ", ".join(f"outs[{i}]" for i in range(outputs))
        lines += [
            f"    outs = self.engine.try_execute({given})",
            "    if outs is not None:",
            f"        return {answer}",
        ]
    lines.append(f"    return self.fallback({names})")
    return "\n".join(lines) + "\n"
