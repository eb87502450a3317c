# SPDX-License-Identifier: Apache-2.0
"""Finds excluded nodes, which no backend may take because a cluster could not keep their semantics."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from blade.core.cluster import OpNode, ValueInfo, is_random
from blade.core.reason import Code, Reason, Stage
from blade.graph.torchscript.alias import OUTSIDE, Aliases
from blade.graph.torchscript.bind_overloads import resolve
from blade.graph.torchscript.describe import ObservedFacts
from blade.graph.torchscript.program import Line, Program
from blade.graph.torchscript.scalar_lines import FROM_CHAIN
from blade.graph.torchscript.scalars_to_fx import has_form

_IN_TRAINING = {
    "batch_norm": "training",
    "native_batch_norm": "training",
    "instance_norm": "use_input_stats",
}

_CARRIERS = ("prim::TupleConstruct", "prim::ListConstruct", "prim::DictConstruct")

_TO_SCALAR = FROM_CHAIN | {"aten::Bool", "aten::item", "aten::is_nonzero"}


@dataclass(frozen=True)
class _Returned:
    """The roots of each tensor that a caller receives if ``block``, the block of an If or the graph's, returns it."""

    block: int
    roots: tuple[frozenset[int], ...]


@dataclass(frozen=True)
class _RuleInput:
    """The context of a rule."""

    program: Program
    aliases: Aliases
    cheap: frozenset[int]
    facts: ObservedFacts
    head: Line
    lines: Sequence[int]
    reads: Mapping[int, bool]
    node: OpNode
    returned: Sequence[_Returned]


def find_excluded(
    program: Program,
    aliases: Aliases,
    cheap: frozenset[int],
    facts: ObservedFacts,
    units: Sequence[Sequence[int]],
    reads: Sequence[Mapping[int, bool]],
    nodes: Sequence[OpNode],
    in_loop: bool = False,
) -> dict[int, Reason]:
    """Node index -> the first rule that excludes it. ``reads`` omit numbers that may cross a boundary.

    ``in_loop``: for nodes within a loop that is a node itself. What they return stays in it.
    """
    returned = [] if in_loop else _returned(program, aliases, program.returns)
    pins: dict[int, Reason] = {}
    for index, unit in enumerate(units):
        head = program.lines[unit[0]]
        case = _RuleInput(
            program, aliases, cheap, facts, head, unit, reads[index], nodes[index], returned
        )
        for rule, code in _RULES:
            detail = rule(case)
            if detail is not None:
                subject = nodes[index].name
                pins[index] = Reason(Stage.SUPPORT, code, None, subject, detail)
                break
    return pins


def _returned(
    program: Program, aliases: Aliases, values: Sequence[int], block: int = 0
) -> list[_Returned]:
    """What a caller receives of ``values``, traced through tuples and lists: one for each branch that makes a tuple.

    A container that cannot be traced may hold several tensors: it counts twice.
    """
    found: dict[int, None] = {}
    branched: int | None = None
    pending = list(values)
    while pending:
        value = pending.pop(0)
        line = program.maker(value)
        is_known = line is not None and not aliases.may_be_written(value)
        if line is not None and is_known and line.kind in _CARRIERS:
            pending.extend(line.inputs[1::2] if line.kind == "prim::DictConstruct" else line.inputs)
        elif _is_branched(program, line, value) and is_known and branched is None:
            branched = value
        else:
            found[value] = None
    own = tuple(
        aliases.roots[value] for value in found for _ in range(1 if program.is_tensor(value) else 2)
    )
    if branched is None:
        return [_Returned(block, own)]
    line = program.lines[program.producer[branched]]
    place = line.outputs.index(branched)
    inner = [
        one
        for index in line.blocks
        for one in _returned(program, aliases, [program.blocks[index].returns[place]], index)
    ]
    return [_Returned(one.block, own + one.roots) for one in inner]


def _is_branched(program: Program, line: Line | None, value: int) -> bool:
    return line is not None and line.kind == "prim::If" and not program.is_tensor(value)


def _around(program: Program, block: int) -> set[int]:
    """``block`` and the blocks that it is in."""
    found = {block}
    while (owner := program.blocks[block].owner) is not None:
        block = program.lines[owner].block
        found.add(block)
    return found


def _unsupported(case: _RuleInput) -> str | None:
    if resolve(case.head.node) is None:
        return f"{case.head.kind} is not an ATen operator a backend could be asked about."
    lists = [o for o in case.node.outputs if o.kind == "list"]
    if lists:
        return f"{case.head.kind} makes a list of tensors that is used as a list."
    return None


def _reads_scalar(case: _RuleInput) -> str | None:
    if case.head.kind not in _TO_SCALAR:
        return None
    return f"{case.head.kind} turns tensor elements into a scalar."


def _mutates(case: _RuleInput) -> str | None:
    if case.node.target._schema.is_mutable:
        return f"{case.node.target} writes into its argument."
    if _keeps_statistics(case.node):
        return f"{case.node.target} writes its running statistics, although its schema does not say so."
    return None


def _keeps_statistics(node: OpNode) -> bool:
    """Whether a batch norm may be in training and has running statistics to write."""
    flag = _IN_TRAINING.get(node.target.overloadpacket.__name__)
    if flag is None:
        return False
    names = [a.name for a in node.target._schema.arguments if not a.kwarg_only]
    given = dict(zip(names, node.args, strict=True))
    kept = isinstance(given.get("running_mean"), ValueInfo | torch.Tensor)
    return kept and given.get(flag) is not False


def _random(case: _RuleInput) -> str | None:
    if not is_random(case.node):
        return None
    return f"{case.node.target} draws random numbers from torch's generator."


def _aliases(case: _RuleInput) -> str | None:
    values = [v for i in case.lines for v in case.program.lines[i].outputs]
    if any(case.aliases.may_be_written(v) for v in values):
        return f"The result of {case.head.kind} may share memory with a tensor written in place."
    roots = case.aliases.union(values)
    shared = roots & case.aliases.union(case.head.inputs)
    if not shared:
        return None
    hits = _received(case, shared)
    if hits and OUTSIDE in shared:
        return f"The caller may see that the result of {case.head.kind} is a view of an input."
    constants = {
        root
        for v in case.head.inputs
        if case.program.tensor_constant(v) is not None
        for root in case.aliases.roots[v]
    }
    if hits and constants & shared:
        return f"The caller may see that the result of {case.head.kind} is a view of a weight."
    if hits > 1:
        return f"The caller receives {hits} tensors that share memory with each other."
    return None


def _received(case: _RuleInput, roots: frozenset[int]) -> int:
    """How many tensors with one of ``roots`` a caller may receive at once, where the op runs."""
    program, own = case.program, case.head.block
    around = _around(program, own)
    counts = [
        sum(not one.isdisjoint(roots) for one in returned.roots)
        for returned in case.returned
        if returned.block in around or own in _around(program, returned.block)
    ]
    return max(counts, default=0)


def _data_dependent(case: _RuleInput) -> str | None:
    target = case.node.target
    if torch.Tag.data_dependent_output in target.tags:
        return f"{target} turns tensor elements into a scalar."
    if any(o.kind != "tensor" for o in case.node.outputs):
        return f"{target} makes a value that is not a tensor out of tensor elements."
    for value in case.reads:
        kind = case.facts.info(value).kind
        if kind != "tensor":
            name = case.program.values[value].debugName()
            return f"%{name}, a {kind} known only when the model runs, is an argument."
    return None


def _inexpressible(case: _RuleInput) -> str | None:
    """A number that an op takes must have an FX form; without this rule the whole cluster would be refused."""
    pending = [v for i in case.lines for v in case.program.lines[i].reads]
    seen: set[int] = set()
    while pending:
        line = case.program.maker(pending.pop())
        if line is None or line.index not in case.cheap or line.index in seen:
            continue
        seen.add(line.index)
        if not has_form(line.kind):
            return f"It takes a number that {line.kind} makes of sizes, which has no symbolic form."
        pending.extend(line.reads)
    return None


def _unknown(case: _RuleInput) -> str | None:
    tensors = [case.facts.info(v) for v in case.reads] + list(case.node.outputs)
    for info in tensors:
        if info.dtype is None or info.rank is None or info.device is None:
            return "The samples do not settle dtype, device and rank of a tensor it touches."
    return None


_RULES: tuple[tuple[Callable[[_RuleInput], str | None], Code], ...] = (
    (_reads_scalar, Code.DATA_DEPENDENT),
    (_unsupported, Code.UNSUPPORTED_OP),
    (_mutates, Code.MUTATES),
    (_random, Code.RANDOM),
    (_aliases, Code.ALIASES),
    (_data_dependent, Code.DATA_DEPENDENT),
    (_inexpressible, Code.UNSUPPORTED_OP),
    (_unknown, Code.UNKNOWN_TYPE),
)
