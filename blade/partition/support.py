# SPDX-License-Identifier: Apache-2.0
"""Support: the backends that take each node, and every reason against.

backends, reasons = resolve(config)                  # the usable backends, in the order of trying
plan = support(graph_view.nodes, graph_view.excluded, backends, config)
plan.labels[7]                                       # frozenset({"disc"})
"""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from itertools import chain
from types import MappingProxyType

import torch

from blade.backends import registry
from blade.config import Config
from blade.core import torchscript
from blade.core.attempt import attempt
from blade.core.backend import Backend
from blade.core.cluster import OpNode, makes_sizes
from blade.core.reason import Code, Reason, Stage
from blade.errors import BackendError, ConfigError, Refused
from blade.graph.torchscript.listing import kind_of

AUTO = "auto"


@dataclass(frozen=True)
class Support:
    """``labels[v]`` names the backends that take node v; ``reasons`` say why the others do not."""

    labels: tuple[frozenset[str], ...]
    reasons: tuple[Reason, ...]


def resolve(config: Config) -> tuple[tuple[Backend, ...], tuple[Reason, ...]]:
    """Return the backends that ``config.optimization_pipeline`` asks for and that work in this process.

    BLADE_BACKENDS in the environment restricts "auto": ``BLADE_BACKENDS="disc,onnxruntime"``.

    Raises ``BackendError`` if a backend named in the config does not work; under "auto" such a backend
    becomes a ``Reason``.
    """
    pipeline = config.optimization_pipeline
    if pipeline.lower() != AUTO:
        backend = registry.load(pipeline)
        if not is_allowed(backend, config):
            raise ConfigError(
                f"Config.optimization_pipeline={pipeline!r}: it computes in reduced precision only; "
                "allow that with enable_int8=True or enable_fp8=True."
            )
        if (why := backend.why_unavailable()) is not None:
            raise BackendError(f"Config.optimization_pipeline={pipeline!r}: {why}")
        return (backend,), _check_precision((backend,), config, named=True)
    usable: list[Backend] = []
    reasons: list[Reason] = []
    for name in _considered():
        found = attempt(
            Stage.SUPPORT,
            name,
            name,
            partial(_usable, name, config),
            code=Code.BACKEND_UNAVAILABLE,
        )
        if isinstance(found, Reason):
            reasons.append(found)
        else:
            usable.append(found)
    return tuple(usable), (*reasons, *_check_precision(usable, config, named=False))


def warm_up(model: object, backends: Sequence[Backend]) -> None:
    """Tell the backends which device ``model`` is on, before any other call of them."""
    if not isinstance(model, (torch.nn.Module, torch.export.ExportedProgram)):
        return
    first = next(chain(model.parameters(), model.buffers()), None)
    if first is None:
        return
    for backend in backends:
        attempt(Stage.SUPPORT, backend.name, backend.name, partial(backend.warm_up, first.device))


def support(
    nodes: Sequence[OpNode],
    pinned: Mapping[int, Reason],
    backends: Sequence[Backend],
    config: Config,
    loops: Mapping[int, Sequence[int]] = MappingProxyType({}),
) -> Support:
    """Ask every backend about every node that is neither excluded (``pinned``) nor black-listed.

    A white-listed node goes to all backends whatever they answer; a backend that fails to convert it gives a
    reason like any other failure. Of the nodes in one of ``loops`` that a backend takes, no reasons are told. An
    excluded node stays excluded: moving it would change the meaning.

    Raises ``ConfigError`` if a list names an op that is neither in the graph nor known to TorchScript.
    """
    _check_known(nodes, config)
    black = _listed(nodes, config.customize_op_black_list)
    white = _listed(nodes, config.customize_op_white_list)
    labels: list[frozenset[str]] = []
    reasons: list[Reason] = []
    free = [n for i, n in enumerate(nodes) if i not in pinned and i not in black and not n.body]
    for backend in backends:
        _survey(backend, free, config)
    inside: set[int] = set()  # nodes in loops that somebody takes
    for i, node in enumerate(nodes):
        against: list[Reason] = []
        takers: list[str] = []
        if i in pinned:
            against.append(pinned[i])
        elif i in black:
            detail = f"{black[i]!r} is in Config.customize_op_black_list."
            against.append(Reason(Stage.SUPPORT, Code.BLACK_LISTED, None, node.name, detail))
        else:
            for backend in backends:
                why = _why_not_sizes(backend, node)
                if why is None and i not in white:
                    why = _why_not(backend, node, config)
                if why is None:
                    takers.append(backend.name.lower())
                else:
                    against.append(why)
        labels.append(frozenset(takers))
        inside.update(loops.get(i, ()) if takers else ())
        reasons += [] if i in inside else against
    return Support(tuple(labels), tuple(reasons))


def _considered() -> list[str]:
    """Return the backends that "auto" considers: all or those in the environment, in the registry's order.

    Raises ``ConfigError`` for an unknown name.
    """
    known = list(registry.names())
    given = os.environ.get("BLADE_BACKENDS")
    if given is None:
        return known
    named = [name.strip().lower() for name in given.split(",") if name.strip()]
    if unknown := [name for name in named if name not in known]:
        raise ConfigError(
            f"BLADE_BACKENDS={given!r}: there is no backend {unknown[0]!r}. Known are: {', '.join(known)}"
        )
    return [name for name in known if name in named]


def is_allowed(backend: Backend, config: Config) -> bool:
    """Whether ``config`` permits the backend, which it must if the engines have reduced precision."""
    return config.quantizes or not backend.reduced_precision


def _usable(name: str, config: Config) -> Backend:
    backend = registry.load(name)
    if not is_allowed(backend, config):
        raise Refused(
            Code.BACKEND_UNAVAILABLE,
            f"{name} computes less exactly than the original, which Config(enable_int8=True) allows, and "
            "Config(enable_fp8=True) on a GPU.",
        )
    if (why := backend.why_unavailable()) is not None:
        raise BackendError(why)
    return backend


def _survey(backend: Backend, nodes: Sequence[OpNode], config: Config) -> None:
    """Let the backend survey all nodes; a failure shows again, node by node, in ``why_not``."""
    survey = partial(backend.survey, nodes, config)
    attempt(Stage.SUPPORT, backend.name, backend.name, survey, config.strict)


def _why_not(backend: Backend, node: OpNode, config: Config) -> Reason | None:
    if node.body:
        return _why_not_loop(backend, node, config)
    return attempt(
        Stage.SUPPORT,
        backend.name,
        node.name,
        lambda: backend.why_not(node, config),
        config.strict,
        Code.UNSUPPORTED_OP,
    )


def _why_not_sizes(backend: Backend, node: OpNode) -> Reason | None:
    """Why not, for a node whose results' sizes depend on elements; a white list has no say in that."""
    if backend.sizes_from_elements or not makes_sizes(node):
        return None
    detail = f"A size of the result of {node.target} depends on elements, which {backend.name} does not take."
    return Reason(Stage.SUPPORT, Code.DATA_DEPENDENT, backend.name, node.name, detail)


def _why_not_loop(backend: Backend, node: OpNode, config: Config) -> Reason | None:
    """A backend takes a loop if it takes each of its ops."""
    if not backend.takes_loops:
        detail = f"{backend.name} runs no loops."
        return Reason(Stage.SUPPORT, Code.UNSUPPORTED_OP, backend.name, node.name, detail)
    every = (_why_not(backend, one, config) for one in node.body)
    return next((why for why in every if why is not None), None)


_NEEDS = {"fp8": " It takes a GPU of compute capability 8.9 or later, and Triton."}


def _check_precision(
    backends: Sequence[Backend], config: Config, *, named: bool
) -> tuple[Reason, ...]:
    """Report a permission that no backend can use; ``precisions`` of a backend lists those it can use."""
    reasons = []
    for field in ("fp16", "bf16", "int8", "fp8"):
        if not getattr(config, f"enable_{field}") or any(field in b.precisions for b in backends):
            continue
        who = ", ".join(b.name for b in backends) or "none is usable"
        detail = (
            f"Config.enable_{field} has no effect: no backend here ({who}) computes in {field}."
            + _NEEDS.get(field, "")
        )
        if named:
            raise ConfigError(detail)
        reasons.append(Reason(Stage.SUPPORT, Code.BACKEND_UNAVAILABLE, None, field, detail))
    return tuple(reasons)


def _check_known(nodes: Sequence[OpNode], config: Config) -> None:
    present = set(map(kind_of, nodes))
    for field in ("customize_op_black_list", "customize_op_white_list"):
        for entry in getattr(config, field):
            kind = entry.partition("@")[0]
            is_known = kind in present or kind.startswith("prim::")
            if not is_known and not torchscript.schemas_of(kind):
                known = sorted({schema.name for schema in torch._C._jit_get_all_schemas()})
                near = get_close_matches(kind, [*present, *known], n=3)
                meant = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
                raise ConfigError(f"Config.{field}: there is no op {kind!r}.{meant}")


def _listed(nodes: Sequence[OpNode], entries: Sequence[str]) -> dict[int, str]:
    """Map nodes to the entry that names them: a kind, or one occurrence of it in program order.

    Occurrences count from 0; negative ones count from the end, as in a Python list.
    """
    total = Counter(map(kind_of, nodes))
    seen: Counter[str] = Counter()
    found: dict[int, str] = {}
    for i, node in enumerate(nodes):
        kind = kind_of(node)
        here = {kind, f"{kind}@{seen[kind]}", f"{kind}@{seen[kind] - total[kind]}"}
        seen[kind] += 1
        found.update((i, entry) for entry in entries if entry in here)
    return found
