# SPDX-License-Identifier: Apache-2.0
"""What the doctor says of GPUs, on machines made up: with and without Triton, library, driver, and a GPU that fails."""

from typing import Any

import pytest
from command_line import Command

from blade.cli.commands import doctor
from blade.cli.shared import gpu_checks as gpu
from blade.cli.shared import machine
from blade.errors import BackendError

pytestmark = pytest.mark.needs("runtime", "torch_mlir")

H100 = {"name": "NVIDIA H100", "compute_capability": "9.0", "memory_gib": 79.1}
OLD = {"name": "Tesla K80", "compute_capability": "3.7", "memory_gib": 11.2}
FINE = {"triton": "3.6.0", "driver": "13.0", "why_no_code": None, "why_no_runs": None}


class Machine:
    """What is tried is written down; ``broken`` devices raise."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        self.tried: list[str] = []

    def has(self, *gpus: dict[str, Any], broken: tuple[str, ...] = (), **support: Any) -> None:
        def attempted(name: str, device: str = "cpu") -> None:
            self.tried.append(device)
            if device in broken:
                raise BackendError(f"on a model of two layers: nothing ran on {device}")

        self._patch.setattr(machine, "gpus", lambda: list(gpus))
        self._patch.setattr(gpu, "support", lambda: {**FINE, **support})
        self._patch.setattr(doctor, "_try", attempted)


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_a_gpu_that_works(made_up: Machine, blade_cli: Command) -> None:
    made_up.has(H100, H100)
    text = blade_cli("doctor").out
    assert made_up.tried == ["cpu", "cuda:0"], "of equal GPUs one is tried"
    assert text.count("NVIDIA H100, sm 9.0, 79.1 GiB") == 2 and text.count("DISC works, tried") == 2
    assert "compiles with Triton 3.6.0" in text
    assert "runs through its CUDA library, driver for CUDA 13.0" in text
    assert "DISC works here." in text


def test_one_of_two_kinds_does_not_work(made_up: Machine, blade_cli: Command) -> None:
    made_up.has(H100, OLD, broken=("cuda:1",))
    done = blade_cli("doctor")
    assert done.code == 0 and "DISC works here, but not on every GPU" in done.out
    assert "DISC does not work on it: on a model of two layers: nothing ran on cuda:1" in " ".join(
        done.out.split()
    )
    found = blade_cli("doctor", "--json").data["gpus"]
    assert found[0]["disc"]["why_not"] is None
    assert "nothing ran on cuda:1" in found[1]["disc"]["why_not"]


def test_a_gpu_alone_is_enough(made_up: Machine, blade_cli: Command) -> None:
    made_up.has(H100, broken=("cpu",))
    done = blade_cli("doctor")
    assert done.code == 0 and "DISC works here on the GPU, and not on the CPU" in done.out


def test_neither_works(made_up: Machine, blade_cli: Command) -> None:
    made_up.has(H100, broken=("cpu", "cuda:0"))
    done = blade_cli("doctor")
    assert done.code == 1 and "DISC does not work here" in done.out


def test_what_is_missing_is_said_with_its_fix(made_up: Machine, blade_cli: Command) -> None:
    triton = "Triton cannot be imported; install the package triton."
    library = "blade's CUDA runtime is not built: set CUDA_HOME."
    made_up.has(H100, broken=("cuda:0",), triton=None, why_no_code=triton, why_no_runs=library)
    text = " ".join(blade_cli("doctor").out.split())
    assert f"DISC on GPUs cannot compile: {triton}" in text
    assert f"cannot run: {library}" in text


def test_this_machine_answers_for_itself(blade_cli: Command) -> None:
    """Whatever it has: each half works or says why."""
    found = blade_cli("doctor", "--json").data
    support = found["disc_on_gpus"]
    assert set(support) == set(FINE)
    if not found["gpus"]:
        assert support["why_no_code"] or support["why_no_runs"]
