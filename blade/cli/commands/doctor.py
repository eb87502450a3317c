# SPDX-License-Identifier: Apache-2.0
"""``python -m blade doctor``: show what works on this machine, and how to fix what does not."""

import argparse
import difflib
import os
from collections.abc import Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any

from blade.cli.shared import gpu_checks as gpu
from blade.cli.shared import machine
from blade.cli.shared.options import Commands, add_command
from blade.cli.shared.progress_bar import progress_bar
from blade.cli.shared.result import (
    CommandResult,
    ExitCode,
    add_row,
    plain_table,
    to_text,
)
from blade.core.attempt import attempt
from blade.core.progress import announce
from blade.core.reason import Code, Reason, Stage
from blade.errors import BackendError

TEXT = """Say what works here and what to do about the rest.

Every backend with its version, or why it cannot be used; CPU, GPUs, compilers, versions, cache and
environment. DISC is tried on a small model, on the CPU and on every kind of GPU; --try tries every other
backend that is available, too.
Exit code 1 if DISC works neither on the CPU nor on a GPU."""

VARIABLES = (
    "BLADE_LOG",
    "BLADE_CACHE_DIR",
    "BLADE_CACHE_LIMIT_GB",
    "BLADE_BACKENDS",
    "BLADE_ENGINES",
    "BLADE_TRUSTED_KEYS",
    "BLADE_ONNXRUNTIME",
    "BLADE_OPENVINO",
)


def add(commands: Commands, shared: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser = add_command(commands, shared, "doctor", TEXT)
    parser.add_argument(
        "--try",
        dest="tried",
        nargs="*",
        metavar="NAME",
        help="build an engine with these backends, too; without a name, with every one",
    )
    return parser


def run(args: argparse.Namespace) -> CommandResult:
    with progress_bar("doctor"):
        runtime = machine.runtime()
        works = runtime["why_not"] is None
        backends = _backends(args.tried, works=works)
        gpus = machine.gpus()
        on_gpus = gpu.support() if works else None
        if works:
            gpus = gpu.trials(gpus, partial(_try, "disc"), _sentence)
    disc = next((b for b in backends if b["name"] == "disc"), None)
    served = [g for g in gpus if "disc" in g and g["disc"]["why_not"] is None]
    healthy = bool(served) or (disc is not None and disc["why_not"] is None)
    data = {
        "healthy": healthy,
        "versions": machine.versions(),
        "runtime": runtime,
        "backends": backends,
        "cpu": machine.cpu(),
        "gpus": gpus,
        "disc_on_gpus": on_gpus,
        "compilers": machine.compilers(),
        "cache": machine.cache(),
        "environment": environment(os.environ),
    }
    return CommandResult(data, _render(data), ExitCode.OK if healthy else ExitCode.FOUND)


def environment(variables: Mapping[str, str]) -> list[dict[str, str | None]]:
    """Every BLADE_* variable that is set, with a ``note`` if blade does not read it."""
    found = []
    for name in sorted(name for name in variables if name.startswith("BLADE_")):
        near = difflib.get_close_matches(name, VARIABLES, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        note = None if name in VARIABLES else f"not read by blade{hint}"
        found.append({"name": name, "value": variables[name], "note": note})
    return found


def _backends(tried: Sequence[str] | None, *, works: bool) -> list[dict[str, Any]]:
    """``why_not`` is ``None`` if a backend works; ``seconds``: duration of the trial; ``note``: a remark."""
    from blade.backends import registry

    names = registry.names()
    for name in tried or ():
        registry.load(name)  # raises for a name that is not known
    trials = {"disc", *(name.lower() for name in (names if tried == [] else tried or ()))}
    found = []
    for done, name in enumerate(names):
        announce("backends", done, len(names), name)
        # Importing a broken library may raise anything.
        asked = attempt(
            Stage.SUPPORT, name, name, partial(_ask, name), code=Code.BACKEND_UNAVAILABLE
        )
        version, why = (None, _sentence(asked)) if isinstance(asked, Reason) else asked
        seconds = None
        if why is None and works and name in trials:
            start = perf_counter()
            failed = attempt(Stage.CONVERT, name, name, partial(_try, name))
            seconds = round(perf_counter() - start, 2)
            if isinstance(failed, Reason):
                why = f"it is installed but does not work: {_sentence(failed)}"
        note = None if why is not None else registry.load(name).summary
        one = {"name": name, "version": version, "note": note, "why_not": why, "seconds": seconds}
        found.append(one)
    return found


def _sentence(reason: Reason) -> str:
    """The error as a sentence; blade's own errors are sentences already."""
    text = (reason.error or "").partition("\n  at ")[0]
    kind, _, message = text.partition(": ")
    return message if kind.endswith(BackendError.__name__) and message else reason.detail


def _ask(name: str) -> tuple[str | None, str | None]:
    """Version, and why unavailable; only an available backend is asked for its version."""
    from blade.backends import registry

    backend = registry.load(name)
    if (why := backend.why_unavailable()) is not None:
        return None, why
    version = backend.version
    # the first line is the version; the rest identifies the machine
    return (None if version is None else (str(version).splitlines() or [""])[0]), None


def _try(name: str, device: str = "cpu") -> None:
    """Optimize a small model with one backend alone, and compare; raises if the backend does not serve."""
    import torch

    from blade.api import optimize
    from blade.backends import registry
    from blade.config import Config
    from blade.report import report, stats

    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU())
    model, sample = model.to(device), torch.randn(3, 16, device=device)
    other = torch.randn(5, 16, device=device)
    lossy = registry.load(name).reduced_precision
    config = Config(
        optimization_pipeline=name, timing=False, cache=False, min_cluster_size=1, enable_int8=lossy
    )
    optimized = optimize(model.eval(), sample, config)
    tolerance = 0.1 if lossy else 1e-3  # a coarse check: verification judges accuracy
    with torch.no_grad():
        for x in (sample, other):
            torch.testing.assert_close(optimized(x), model(x), rtol=tolerance, atol=tolerance)
    if not sum(one["engine_runs"] for one in stats(optimized).values()):
        against = [r.detail for r in report(optimized).all_reasons() if r.backend == name]
        why = against[0] if against else "no engine of it answered any call"
        raise BackendError(f"on a model of two layers: {why}")


def _render(data: Mapping[str, Any]) -> str:
    backends = plain_table("backend", "status", "version or reason")
    for one in data["backends"]:
        tried = f" ({one['seconds']:.1f} s)" if one["seconds"] is not None else ""
        status = ("works" if tried else "available") + tried if not one["why_not"] else "no"
        told = ", ".join(filter(None, (one["version"], one["note"])))
        add_row(backends, one["name"], status, one["why_not"] or told)
    facts = plain_table("", "")
    facts.show_header = False
    for name, value in _facts(data):
        add_row(facts, name, value)
    return to_text(backends, facts, _verdict(data))


def _verdict(data: Mapping[str, Any]) -> str:
    on_cpu = any(b["name"] == "disc" and b["why_not"] is None for b in data["backends"])
    on_gpu = [g["disc"]["why_not"] is None for g in data["gpus"] if "disc" in g]
    if not data["healthy"]:
        return "DISC does not work here; see above."
    if not on_cpu:
        return "DISC works here on the GPU, and not on the CPU; see above."
    return (
        "DISC works here, but not on every GPU; see above."
        if not all(on_gpu)
        else "DISC works here."
    )


def _facts(data: Mapping[str, Any]) -> Sequence[tuple[str, str]]:
    cpu, cache, runtime, versions = data["cpu"], data["cache"], data["runtime"], data["versions"]
    quota = f", limited to {cpu['quota_cores']} at a time" if cpu["quota_cores"] else ""
    sizes = ", ".join(f"{level} {_size(kib * 1024)}" for level, kib in cpu["caches_kib"].items())
    built = runtime["built_with_torch"] or "an unknown version"
    rows = [
        ("versions", ", ".join(f"{k} {v}" for k, v in versions.items() if v and k != "system")),
        ("system", versions["system"]),
        ("C++ runtime", runtime["why_not"] or f"loaded, built with torch {built}"),
        ("CPU", cpu["name"] or cpu["machine"]),
        (
            "",
            f"{cpu['usable_cores']} of {cpu['logical_cores']} cores usable{quota}, "
            f"{cpu['torch_threads']} threads in torch, {cpu['memory_gib']} GiB",
        ),
        ("", f"{cpu['float_lanes']} floats per vector; {sizes or 'caches unknown'}"),
        ("", " ".join(cpu["features"]) or "no vector features known"),
        *gpu.facts(data["gpus"], data["disc_on_gpus"]),
        *[(f"compiler {name}", text) for name, text in data["compilers"].items()],
    ]
    if not data["compilers"]:
        rows.append(("compiler", "no c++, g++ or clang++ on the path (inductor needs one)"))
    where = cache["folder"] or "none: no home folder; set BLADE_CACHE_DIR"
    used = f"{cache['entries']} entries, {_size(cache['bytes'])} of {_size(cache['limit_bytes'])}"
    readonly = ", not writable" if cache.get("writable") is False else ""
    rows.append(("cache", f"{where}: {used}{readonly}"))
    if cache.get("untrusted"):
        rows.append(("", f"not used: {cache['untrusted']}"))
    for one in data["environment"]:
        rows.append((one["name"], one["value"] + (f" ({one['note']})" if one["note"] else "")))
    return rows


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
