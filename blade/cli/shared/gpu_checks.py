# SPDX-License-Identifier: Apache-2.0
"""Check whether DISC can compile for this machine's GPUs, whether it can run there, and whether it works.

support()["why_no_code"], support()["why_no_runs"]        # sentences with the fix, or None
trials(gpus(), lambda device: ...)                        # the same GPUs, each with the result of trying DISC
"""

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

import torch

from blade.cli.shared import machine
from blade.core.attempt import attempt
from blade.core.reason import Reason, Stage


def support() -> dict[str, Any]:
    """Parts that compile (Triton) or run (the second C++ library, the driver), each with why it cannot."""
    from blade.backends.disc.gpu import available
    from blade.runtime import cuda

    return {
        "triton": machine.package_version("triton"),
        "driver": _driver(),
        "why_no_code": available.why_no_code(),
        "why_no_runs": cuda.why_unavailable() or None,
    }


def trials(
    gpus: Sequence[Mapping[str, Any]], one: Callable[[str], None], say: Callable[[Reason], str]
) -> list[dict[str, Any]]:
    """``gpus`` with "disc": why DISC does not work there (``None`` if it does), and the seconds of the trial.

    ``one(device)`` raises if DISC does not work there. For equal GPUs only the first is tried.
    """
    found: dict[tuple[Any, Any], dict[str, Any]] = {}
    for index, gpu in enumerate(gpus):
        kind = gpu["name"], gpu["compute_capability"]
        if kind not in found:
            found[kind] = _trial(f"cuda:{index}", one, say)
    return [{**g, "disc": found[g["name"], g["compute_capability"]]} for g in gpus]


def _trial(device: str, one: Callable[[str], None], say: Callable[[Reason], str]) -> dict[str, Any]:
    start = perf_counter()
    failed = attempt(Stage.CONVERT, "disc", device, lambda: one(device))
    why = say(failed) if isinstance(failed, Reason) else None
    return {"why_not": why, "seconds": round(perf_counter() - start, 2)}


def facts(
    gpus: Sequence[Mapping[str, Any]], support: Mapping[str, Any] | None
) -> list[tuple[str, str]]:
    """Rows for the table of the machine."""
    rows = []
    for gpu in gpus:
        capability = f"sm {gpu['compute_capability']}"
        rows.append(("GPU", f"{gpu['name']}, {capability}, {gpu['memory_gib']} GiB"))
        disc = gpu.get("disc")
        if disc is not None:
            why, took = disc["why_not"], f"tried in {disc['seconds']:.1f} s"
            rows.append(("", f"DISC does not work on it: {why}" if why else f"DISC works, {took}"))
    if not gpus:
        rows.append(("GPU", f"none: {machine.why_no_gpu()}"))
    if support is None:
        return rows
    triton, driver = support["triton"], support["driver"]
    code, runs = support["why_no_code"], support["why_no_runs"]
    with_what = f"compiles with Triton {triton}"
    on_what = "runs through its CUDA library" + (f", driver for CUDA {driver}" if driver else "")
    rows.append(("DISC on GPUs", f"cannot compile: {code}" if code else with_what))
    rows.append(("", f"cannot run: {runs}" if runs else on_what))
    return rows


def _driver() -> str | None:
    """The newest CUDA version that the driver supports, "13.0"."""
    ask = getattr(torch._C, "_cuda_getDriverVersion", None)
    if ask is None or not torch.cuda.is_available():
        return None
    number = int(ask())
    return f"{number // 1000}.{number % 1000 // 10}"
