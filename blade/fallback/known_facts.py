# SPDX-License-Identifier: Apache-2.0
"""Sizes, dtypes and memory orders of every value of a graph that ran before, from disk: that run is not made again.

    graph_view = view(captured, partial(facts_of, captured, config, contents))

The key covers the graph, its weights, and the samples and probes with all that is in them: sizes may depend on
values. Graphs with ops of others, which may be other ops tomorrow, run every time.
"""

import json
from typing import Any

import torch

from blade.cache import digest, open_cache
from blade.capture.captured import Captured
from blade.config import Config
from blade.fallback.attempt import attempt
from blade.fallback.identity import words_for
from blade.fallback.stored import Contents
from blade.graph.observe import Fact, Seen
from blade.graph.program import Program
from blade.graph.view import observe_runs
from blade.reason import Reason, Stage

KIND = "facts"
_OURS = ("aten::", "prim::")
_OTHERS = ("prim::PythonOp", "prim::CallMethod")  # what they do is not in the graph

Facts = tuple[Seen, ...]  # per sample, then per probe


def facts_of(captured: Captured, config: Config, contents: Contents, program: Program) -> Facts:
    """Those of all samples and probes of ``captured``, whose graph is ``program``."""
    cache = open_cache(config.cache)
    key = None if cache is None else _key_of(captured, contents, program)
    if cache is None or key is None:
        return observe_runs(captured, program)
    values = list(program.values)  # in the order of the text, which is part of the key
    data = cache.get(KIND, key)
    found = (
        None if data is None else attempt(Stage.CAPTURE, None, KIND, lambda: _read(data, values))
    )
    if found is None or isinstance(found, Reason):
        found = observe_runs(captured, program)
        cache.put(KIND, key, _written(found, values))
    return found


def _key_of(captured: Captured, contents: Contents, program: Program) -> str | None:
    kinds = {line.kind for line in program.lines}
    if not all(kind.startswith(_OURS) for kind in kinds) or not kinds.isdisjoint(_OTHERS):
        return None
    words = attempt(
        Stage.CAPTURE, None, KIND, lambda: words_for(captured, program, contents, values=True)
    )
    return None if words is None or isinstance(words, Reason) else digest(words)


def _written(facts: Facts, values: list[int]) -> bytes:
    place = {value: k for k, value in enumerate(values)}
    different = {fact: None for seen in facts for each in seen.values() for fact in each}
    number = {fact: k for k, fact in enumerate(different)}
    runs = [[[place[v], [number[f] for f in each]] for v, each in seen.items()] for seen in facts]
    plain = [[f.sizes, str(f.dtype), str(f.device), f.order] for f in different]
    return json.dumps({"facts": plain, "runs": runs}).encode()


def _read(data: bytes, values: list[int]) -> Facts:
    head = json.loads(data)
    facts = [_fact(*one) for one in head["facts"]]
    return tuple(
        {values[k]: tuple(facts[i] for i in each) for k, each in run} for run in head["runs"]
    )


def _fact(sizes: list[int], dtype: str, device: str, order: list[int] | None) -> Fact:
    kind: Any = getattr(torch, dtype.removeprefix("torch."))
    axes = None if order is None else tuple(order)
    return Fact(tuple(sizes), kind, torch.device(device), axes)
