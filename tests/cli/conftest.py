# SPDX-License-Identifier: Apache-2.0
"""A small model, its samples, and what ``optimize`` made of them, as files; built once."""

import pytest
import torch
from command_line import Command, Done, Files, Net

from blade.cli.main import run


@pytest.fixture
def blade_cli(capsys: pytest.CaptureFixture[str]) -> Command:
    """``blade_cli("report", file)``: the command in this process."""

    def call(*argv: object) -> Done:
        capsys.readouterr()
        code = run([str(arg) for arg in argv])
        seen = capsys.readouterr()
        return Done(code, seen.out, seen.err)

    return call


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("cli")
    names = ("model.pt", "samples.pt", "pickled.pt", "weights.pt", "optimized.pt")
    found = Files(folder, *(str(folder / name) for name in names))
    torch.manual_seed(0)
    net = Net().eval()
    samples = [torch.randn(2, 8), torch.randn(5, 8)]
    torch.jit.trace(net, samples[0]).save(found.model)
    torch.save(samples, found.samples)
    torch.save(net, found.pickled)
    torch.save(net.state_dict(), found.weights)
    argv = ["optimize", found.model, "--inputs", found.samples, "-o", found.optimized]
    config = ["--config", "timing_repeats=1", "min_cluster_size=1"]
    assert run([*argv, *config]) == 0
    return found
