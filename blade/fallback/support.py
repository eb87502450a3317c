# SPDX-License-Identifier: Apache-2.0
"""Who would take which node, and every reason against.

backends, reasons = resolve(config)                  # the usable backends, in the order of trying
plan = support(graph_view.nodes, graph_view.pinned, backends, config)
plan.labels[7]                                       # frozenset({"disc"})
"""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch

from blade.backends import registry
from blade.backends.base import Backend, OpNode
from blade.config import Config
from blade.errors import BackendError, ConfigError, Refused
from blade.fallback.attempt import attempt
from blade.graph.listing import kind_of
from blade.reason import Code, Reason, Stage

AUTO = "auto"


@dataclass(frozen=True)
class Support:
    """``labels[v]`` names the backends that take node v; ``reasons`` say why the others do not."""

    labels: tuple[frozenset[str], ...]
    reasons: tuple[Reason, ...]


def resolve(config: Config) -> tuple[tuple[Backend, ...], tuple[Reason, ...]]:
    """The backends ``config.optimization_pipeline`` asks for that work in this process.

    BLADE_BACKENDS in the environment restricts "auto": ``BLADE_BACKENDS="disc,onnxruntime"``.

    Raises ``BackendError`` if one that was named does not; of those behind "auto" each one that does
    not becomes a ``Reason``.
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


def expect(model: object, backends: Sequence[Backend]) -> None:
    """Tell the backends that want to know it where ``model`` is, before anything is asked of them."""
    if not isinstance(model, torch.nn.Module):
        return
    first = next(chain(model.parameters(), model.buffers()), None)
    for backend in backends:
        told = getattr(backend, "expect", None)
        if first is not None and told is not None:
            attempt(Stage.SUPPORT, backend.name, backend.name, partial(told, first.device))


def support(
    nodes: Sequence[OpNode],
    pinned: Mapping[int, Reason],
    backends: Sequence[Backend],
    config: Config,
) -> Support:
    """Ask every backend about every node that is neither ``pinned`` nor black-listed.

    A white-listed node goes to all backends whatever they say; if one then fails to convert it, that
    is found out like any other failure. What is pinned stays so: that is about keeping semantics.
    """
    black = _listed(nodes, config.customize_op_black_list)
    white = _listed(nodes, config.customize_op_white_list)
    labels: list[frozenset[str]] = []
    reasons: list[Reason] = []
    free = [n for i, n in enumerate(nodes) if i not in pinned and i not in black]
    for backend in backends:
        _survey(backend, free, config)
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
                why = None if i in white else _why_not(backend, node, config)
                if why is None:
                    takers.append(backend.name.lower())
                else:
                    against.append(why)
        labels.append(frozenset(takers))
        reasons += against
    return Support(tuple(labels), tuple(reasons))


def _considered() -> list[str]:
    """What "auto" looks at: all backends, or those that the environment names, in the registry's order.

    Raises ``ConfigError`` for a name that no backend has.
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
    """A backend whose engines are lossy needs the permission to reduce precision."""
    return config.quantizes or not getattr(backend, "lossy", False)


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
    """What goes wrong here shows again, node by node, when ``why_not`` is asked."""
    if (survey := getattr(backend, "survey", None)) is not None:
        attempt(
            Stage.SUPPORT, backend.name, backend.name, lambda: survey(nodes, config), config.strict
        )


def _why_not(backend: Backend, node: OpNode, config: Config) -> Reason | None:
    return attempt(
        Stage.SUPPORT,
        backend.name,
        node.name,
        lambda: backend.why_not(node, config),
        config.strict,
        Code.UNSUPPORTED_OP,
    )


_NEEDS = {"fp8": " It takes a GPU of compute capability 8.9 or later, and Triton."}


def _check_precision(
    backends: Sequence[Backend], config: Config, *, named: bool
) -> tuple[Reason, ...]:
    """A permission nobody can use is said aloud; a backend tells in ``precisions`` what it can use."""
    reasons = []
    for field in ("fp16", "bf16", "int8", "fp8"):
        if not getattr(config, f"enable_{field}") or any(
            field in getattr(b, "precisions", ()) for b in backends
        ):
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


def _listed(nodes: Sequence[OpNode], entries: Sequence[str]) -> dict[int, str]:
    """Node -> the entry that names it: a kind, or one occurrence of it in program order.

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
