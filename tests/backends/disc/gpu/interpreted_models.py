# SPDX-License-Identifier: Apache-2.0
"""Whole models compiled for a GPU and run in Triton's interpreter, held to blade's own judge.

    found = interpreted(module, [inputs, others])       # a Verdict, or the Reason against it, per cluster

Every cluster that blade makes of ``module`` is compiled as for CUDA; what is launched runs in the
interpreter, what is called on the CPU. ``verify`` then asks at the samples, all of which must be served, and at
sizes and contents of its own.

    export PYTHONPATH=.:tests:tests/backends/disc
    python tests/backends/disc/gpu/interpreted_models.py bert,vit fp16+ours,fp32

tells of tiny_zoo.py's models ("all"), in "fp16", "bf16" or "fp32", with "+ours" products of our own alone, in
"+half" precision.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from run_program import GuardFailed, compile_graph_to_program
from torch import nn

import blade
from blade.backends.disc.backend import DiscBackend
from blade.backends.disc.gpu.gemm import autotune as choose
from blade.backends.disc.gpu.gemm.plan import GemmPlan, classes_of, merged
from blade.backends.disc.gpu.gemm.product import GemmProduct
from blade.backends.disc.gpu.gemm.tile_table import candidate
from blade.backends.disc.target.gpu import GpuTarget
from blade.core.attempt import attempt
from blade.core.cluster import Cluster
from blade.core.reason import Code, Reason, Stage
from blade.errors import Refused
from blade.report import Verdict
from blade.verification.verify import verify

Inputs = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Found:
    """What came of one cluster. ``ran``: how often each kind of function was launched, or each op called."""

    cluster: Cluster
    verdict: Verdict | Reason
    ran: Counter[str] = field(default_factory=Counter)


class Interpreted:
    """What ``verify`` asks of an engine, of a program that is interpreted."""

    def __init__(self, cluster: Cluster, half: torch.dtype | None) -> None:
        gm, shape_env, updates = cluster.gm, cluster.shape_env, cluster.updates
        self.program = compile_graph_to_program(gm, shape_env, updates, half)
        self.ran: Counter[str] = Counter()
        self.counts: dict[str, int] = {}
        self.error = ""

    def try_execute(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        try:
            outputs, ran = self.program.traced(*inputs)
        except GuardFailed:
            self._count(Code.GUARD_SHAPE)
            return None
        except (RuntimeError, IndexError) as error:
            self.error = str(error)
            self._count(Code.ENGINE_RAISED)
            return None
        self.ran.update(ran)
        return outputs

    def _count(self, code: Code) -> None:
        self.counts[code.value] = self.counts.get(code.value, 0) + 1

    def stats(self) -> dict[str, int]:
        return dict(self.counts)

    def rearm(self) -> None: ...

    def last_error(self) -> str:
        return self.error

    def backend(self) -> str:
        return "disc"

    def why_unavailable(self) -> str:
        return ""


def interpreted(
    module: nn.Module,
    samples: Sequence[Inputs],
    config: blade.Config | None = None,
    half: torch.dtype | None = None,
    ours: bool = False,
) -> list[Found]:
    """``ours``: products and convolutions are all computed by generated kernels, where there is one."""
    found: list[Found] = []

    def convert(_: DiscBackend, cluster: Cluster, config: blade.Config) -> Any:
        made = attempt(Stage.CONVERT, "disc", cluster.name, lambda: Interpreted(cluster, half))
        if isinstance(made, Reason):
            found.append(Found(cluster, made))
        else:
            budget = None if half is None else config.accuracy_budget
            verdict = verify(cluster, made, cluster.gm, "disc", budget=budget)  # type: ignore[arg-type]
            found.append(Found(cluster, verdict, made.ran))
        raise Refused(Code.SLOWER, "The program was interpreted; the original runs.")

    config = config or blade.Config()
    config = config.evolve(timing=False, cache=False, optimization_pipeline="disc")
    with mock.patch.object(DiscBackend, "convert", convert), ours_alone(ours), torch.no_grad():
        blade.optimize(module, list(samples), config)
    return found


@contextmanager
def ours_alone(ours: bool) -> Iterator[None]:
    """Plans in which no product is ATen's."""

    def plan(product: GemmProduct, target: GpuTarget) -> GemmPlan:
        least = classes_of(product)[0]
        return merged([(m, candidate(product, m or least, target)) for m in classes_of(product)])

    if not ours:
        yield
        return
    with mock.patch.object(choose, "unmeasured", plan):
        yield


def wrong(found: Sequence[Found]) -> list[str]:
    """What the judge has against them."""
    return [
        f"{one.cluster.name}: {one.verdict.code.value}: {one.verdict.detail}"
        for one in found
        if isinstance(one.verdict, Reason)
    ]


def main() -> None:
    from tiny_model import in_dtype
    from tiny_zoo import MODELS
    from triton_front import refused
    from triton_interpreter import ran, why_unavailable

    assert not (why := why_unavailable()), why
    names, kinds, *sizes = sys.argv[1:]
    for name in MODELS if names == "all" else names.split(","):
        for kind in kinds.split(","):
            ran.clear()
            dtype, _, how = kind.partition("+")
            made = MODELS[name]()
            shapes = [tuple(map(int, size.split("x"))) for size in sizes] or made.shapes
            module, samples = in_dtype(made, dtype, shapes)
            half = torch.float16 if how == "half" else None
            for one in interpreted(module, samples, made.config, half, how == "ours"):
                _say(f"{name} {kind} {one.cluster.name}: {one.verdict}\n    {dict(one.ran)}")
            for error in refused(ran.values()).values() if ran else ():
                _say(f"{name} {kind}: Triton's front end: {error}")


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
