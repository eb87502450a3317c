# SPDX-License-Identifier: Apache-2.0
"""Training steps of one peer, in a process of its own: forward under autocast, backward, AdamW.

    steps = Steps("bert_base", "aot_disc", Where("cuda", "bfloat16"), tiny=False)
    steps.prepare(batch=1)           # until the first step has ended; then the losses of the first steps
    steps.time(batch=1, seconds=1.0)

Every peer starts from the same weights and sees the same batches and the same random state.
"""

import itertools
import time
from typing import Any

import torch

from gpu.device import Where, traced
from gpu.peers import reasons
from gpu.tiny import task_named

LOSSES = 20
BATCHES = 4  # made before, on the device, and used in turns


class Steps:
    def __init__(self, task: str, peer: str, where: Where, tiny: bool) -> None:
        self._where, self._peer = where, peer
        torch.manual_seed(0)
        with torch.device(
            where.device
        ):  # hundreds of millions of random numbers take a CPU a minute
            self._task = task_named(task, tiny)
        self._model = self._task.model.to(where.device)
        if where.channels_last:
            self._model = self._model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._weights = {k: v.cpu().clone() for k, v in self._model.state_dict().items()}
        self._run = _compiled(self._model, peer)
        self._optimizers: dict[int, torch.optim.Optimizer] = {}
        self._batches: dict[int, list[dict[str, torch.Tensor]]] = {}

    def hello(self) -> bool:
        self._where.wait()
        return True

    def prepare(self, batch: int) -> dict[str, Any]:
        rng = torch.Generator().manual_seed(1)
        made = [self._task.batch(batch, rng) for _ in range(BATCHES)]
        place = self._where.moved
        self._batches[batch] = [{k: place(t) for k, t in one.items()} for one in made]
        self._model.load_state_dict(self._weights)
        self._optimizers[batch] = self._optimizer()
        torch.manual_seed(2)
        self._where.wait()
        start = time.perf_counter()
        turns = itertools.cycle(self._batches[batch])
        losses = [self._step(batch, next(turns)).clone()]
        self._where.wait()
        seconds = time.perf_counter() - start
        losses += [self._step(batch, next(turns)).clone() for _ in range(LOSSES - 1)]
        values = [float(loss) for loss in losses]
        made = {"compile_s": seconds, "losses": values, "served": _served(self._peer)}
        return {**made, "start_mib": self._forget_peak()}

    def _optimizer(self) -> torch.optim.Optimizer:
        """AdamW, as fast as torch has it, or its step as a graph of the peer's."""
        parameters = self._model.parameters()
        if not self._peer.endswith(_WITH_OPTIMIZER):
            return torch.optim.AdamW(parameters, lr=1e-4, fused=True)
        made = torch.optim.AdamW(parameters, lr=1e-4, capturable=self._where.is_cuda)
        made.step = torch.compile(made.step, **_settings(self._peer))
        return made

    def _forget_peak(self) -> float:
        """What compiling and trying took at most, in MiB; from now on ``memory`` tells of steps alone."""
        peak = self.memory()
        if self._where.is_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        return peak

    def _step(self, batch: int, given: dict[str, torch.Tensor]) -> torch.Tensor:
        dtype = getattr(torch, self._where.dtype)
        if "reduce" in self._peer:
            torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast(self._where.device, dtype, enabled=dtype != torch.float32):
            loss = self._run(**given)
        self._optimizers[batch].zero_grad(set_to_none=True)
        loss.backward()
        self._optimizers[batch].step()
        return loss.detach()

    def time(self, batch: int, seconds: float) -> list[float]:
        """Seconds per step, steps queued; several stretches."""
        turns = itertools.cycle(self._batches[batch])
        self._step(batch, next(turns))
        self._where.wait()
        found: list[float] = []
        begin, number = time.perf_counter(), 1
        while time.perf_counter() - begin < seconds or len(found) < 2:
            start = time.perf_counter()
            for _ in range(number):
                self._step(batch, next(turns))
            self._where.wait()
            took = time.perf_counter() - start
            if number > 1 or took > seconds / 4:
                found.append(took / number)
            number = max(number, min(20, int(seconds / 4 / took)))
        return found

    def work(self, batch: int) -> dict[str, float] | None:
        """Kernels, copies and calls of the host in one step."""
        turns = itertools.cycle(self._batches[batch])
        made = traced(lambda k: self._step(batch, next(turns)), self._where, 2)
        return None if made is None else vars(made)

    def memory(self) -> float:
        """MiB reserved at most."""
        return torch.cuda.max_memory_reserved() / 2**20 if self._where.is_cuda else 0.0


_WITH_OPTIMIZER = "_optimizer"
_KINDS: dict[str, dict[str, Any]] = {
    "inductor_dynamic": {"dynamic": True},
    "inductor_static": {"dynamic": False},
    "reduce_overhead_static": {"dynamic": False, "mode": "reduce-overhead"},
    "aot_disc": {},
    "aot_disc_dynamic": {"dynamic": True},
}


def _compiled(model: Any, peer: str) -> Any:
    """The peers of training, by name."""
    torch._dynamo.config.recompile_limit = 64
    if peer == "eager":
        return model
    return torch.compile(model, **_settings(peer))


def _settings(peer: str) -> dict[str, Any]:
    """The arguments of ``torch.compile``. It does not know blade's backends by name where blade is not installed."""
    settings = _KINDS[peer.removesuffix(_WITH_OPTIMIZER)]
    if not peer.startswith("aot_disc"):
        return settings
    import blade

    return {**settings, "backend": blade.dynamo.aot_disc}


PEERS = (
    "eager",
    "aot_disc",
    "inductor_static",
    "inductor_dynamic",
    "reduce_overhead_static",
    "aot_disc_dynamic",
    "aot_disc_optimizer",
    "inductor_static_optimizer",
)


def _served(peer: str) -> dict[str, Any]:
    """As ``gpu.peers.served``, of every graph."""
    if not peer.startswith("aot_disc"):
        return {}
    from blade.dynamo import reports, stats

    made, counters = reports(), list(stats().values())
    return {
        "clusters": [f"{c.backend}: {sum(c.ops.values())} ops" for r in made for c in r.clusters],
        "engine_runs": sum(c.get("engine_runs", 0) for c in counters),
        "counters": counters,
        "seconds": {},
        "reasons": reasons(x for r in made for x in r.all_reasons()),
    }
