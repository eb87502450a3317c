# SPDX-License-Identifier: Apache-2.0
"""What a captured module is, and where it was run, in words: the same words, the same behaviour.

words = words_for(captured, program, contents, values=False)     # None: something cannot be put in words
"""

from torch.utils import _pytree as pytree

from blade.capture.attributes import attributes_of
from blade.capture.captured import Captured
from blade.fallback.stored import Contents, environment, form_of, text_of
from blade.graph.program import Program


def words_for(
    captured: Captured, program: Program, contents: Contents, *, values: bool
) -> list[str] | None:
    """Code, machine, graph, weights, and what samples and probes look like; with ``values`` also what is in them.

    ``None`` for a graph that may hold tensors which are not seen here.
    """
    text = text_of(captured.module.graph)
    if "prim::fork" in text or "prim::Closure" in text:
        return None
    held = [program.tensor_constant(v) for line in program.lines for v in line.outputs[:1]]
    attributes = [(a.name, a.get()) for a in attributes_of(captured.module)]
    runs = [*captured.samples, *captured.probes]
    leaves = [leaf for run in runs for leaf in pytree.tree_leaves(run)]
    tensors = [leaf for leaf in leaves if hasattr(leaf, "stride")]
    return [
        *environment(),
        text,
        *contents.of([("", t) for t in held if t is not None]),
        *contents.of([(n, t) for n, t in attributes if hasattr(t, "stride")]),
        *(f"{n} {v!r}" for n, v in attributes if not hasattr(v, "stride")),
        f"{len(captured.samples)} samples {pytree.tree_structure(runs)}",
        *(form_of((t,)) for t in tensors),
        *(repr(leaf) for leaf in leaves if not hasattr(leaf, "stride")),
        *(contents.of([("", t) for t in tensors]) if values else ()),
    ]
