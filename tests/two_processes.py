# SPDX-License-Identifier: Apache-2.0
"""DistributedDataParallel in two processes: ``aot_disc`` beside eager, on Gloo or, with two GPUs, on NCCL.

backends = train_together(folder, "cpu")      # what served each process's clusters; raises where gradients differ
"""

import copy
import os
import socket
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

PROCESSES = 2
STEPS = 4


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(functional.gelu(self.up(x))))  # type: ignore[no-any-return]


def train_together(folder: Path, device: str) -> list[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_train, (port, str(folder), device), nprocs=PROCESSES)
    return [(folder / str(rank)).read_text() for rank in range(PROCESSES)]


def _train(rank: int, port: int, folder: str, kind: str) -> None:
    import blade
    from blade.dynamo.live_graphs import live_graphs

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    library = "nccl" if kind == "cuda" else "gloo"
    torch.distributed.init_process_group(library, rank=rank, world_size=PROCESSES)
    try:
        torch.manual_seed(0)
        model = Normed().to(device)
        plain = copy.deepcopy(model)
        shared = nn.parallel.DistributedDataParallel(model)
        run = torch.compile(shared, backend=blade.dynamo.aot_disc)
        eager = nn.parallel.DistributedDataParallel(plain)
        generator = torch.Generator().manual_seed(rank)
        for _ in range(STEPS):
            x = torch.randn(4, 8, generator=generator).to(device)
            for f in (run, eager):
                f(x).square().mean().backward()
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5)
                p.grad = q.grad = None
        backends = {c.backend for graph in live_graphs() for c in graph.report().clusters}
        Path(folder, str(rank)).write_text(" ".join(sorted(backends)))
    finally:
        torch.distributed.destroy_process_group()
