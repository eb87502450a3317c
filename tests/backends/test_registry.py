# SPDX-License-Identifier: Apache-2.0
"""registry: lazy, case-insensitive, clear about what is missing, and strict about what a backend is."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from typing import Any

import pytest
import torch

from blade.backends import registry
from blade.config import Config
from blade.core.backend import Backend
from blade.core.cluster import Cluster, OpNode
from blade.core.reason import Reason
from blade.errors import BackendError


class Other(Backend):
    """A backend of another package, as far as the registry cares."""

    name = "Other"

    def why_unavailable(self) -> str | None:
        return "other needs a licence file."

    def why_not(self, node: OpNode, config: Config) -> Reason | None:
        return None

    def convert(self, cluster: Cluster, config: Config) -> torch.ScriptObject:
        raise NotImplementedError


class Unfinished(Backend):
    name = "unfinished"

    def why_unavailable(self) -> str | None:
        return None


class Duck:
    """All methods of a backend, and not its class."""

    name = "duck"
    why_unavailable = Other.why_unavailable
    why_not = Other.why_not
    convert = Other.convert


@pytest.fixture
def other() -> Iterator[Other]:
    backend = Other()
    registry.register(backend)
    yield backend
    registry.unregister("OTHER")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entry points of another package."""
    values = {
        "plug": f"{__name__}:Other",
        "gone": "no_such_package.mod:Backend",
        "typo": f"{__name__}:Ohter",
        "duck": f"{__name__}:Duck",
        "unfinished": f"{__name__}:Unfinished",
    }
    points = {name: EntryPoint(name, v, registry.ENTRY_POINTS) for name, v in values.items()}
    monkeypatch.setattr(registry, "_entry_points", lambda: points)


def test_built_in_backends_come_first(other: Other) -> None:
    assert registry.names()[0] == "disc"
    assert registry.names()[-1] == "other"
    assert registry.load("oTHER") is other


def test_unavailable_says_why(other: Other) -> None:
    assert registry.available("other") == "other needs a licence file."


def test_unknown_names_the_nearest_and_all() -> None:
    with pytest.raises(BackendError, match="there is no backend 'dics': did you mean 'disc'"):
        registry.load("dics")
    sentence = registry.available("zzz")
    assert sentence is not None
    assert "Known are: disc" in sentence


@pytest.mark.usefixtures("installed")
def test_an_entry_point_is_imported_when_asked_for() -> None:
    assert registry.load("Plug").why_unavailable() == "other needs a licence file."
    assert registry.load("plug") is registry.load("PLUG")
    for name in ("gone", "typo"):
        with pytest.raises(BackendError, match=f"backend '{name}' cannot be imported from"):
            registry.load(name)
        assert registry.available(name) is not None


def test_a_backend_is_an_instance_of_a_subclass(installed: None) -> None:
    base = f"{Backend.__module__}.{Backend.__qualname__}"
    for given in (Duck(), Other):
        with pytest.raises(BackendError, match=f"is no backend: subclass {base}, and pass"):
            registry.register(given)  # type: ignore[arg-type]
    with pytest.raises(BackendError, match=f"is no backend: subclass {base}"):
        registry.load("duck")
    with pytest.raises(BackendError, match=r"cannot be made by .*abstract methods? '?convert"):
        registry.load("unfinished")
    assert not registry.is_registered("duck")


def test_all_but_the_abstract_methods_has_a_default() -> None:
    backend = Other()
    assert not backend.in_process and not backend.reduced_precision
    assert backend.version is None and backend.summary is None
    assert (*backend.precisions, *backend.reduced_precision_with) == ()
    cluster = Cluster("c", torch.fx.GraphModule({}, torch.fx.Graph()), None, (), ())  # type: ignore[arg-type]
    assert backend.estimate_s(cluster) == 0


@pytest.mark.needs("runtime")
def test_runners_are_those_of_the_rows_and_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    from blade.runtime import runners

    found: dict[str, tuple[Any, bool]] = {}
    monkeypatch.setattr(runners, "register_runner", lambda n, *what: found.update({n: what}))
    # the second is not believed: a built-in backend has its own
    values = {"Plug": f"{__name__}:load", "tvm": f"{__name__}:load"}
    points = [EntryPoint(name, value, "blade.runners") for name, value in values.items()]
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    registry.register_runners()
    rows = {name: row.runner for name, row in registry._BUILT_IN.items() if row.runner is not None}
    rows |= registry._NODE_RUNNERS
    assert set(found) == {"Plug", *rows} and {"disc", "quant"} & set(rows) == set()
    assert {name for name, (_, keeps_inputs) in found.items() if keeps_inputs} == set(rows)
    assert found["Plug"][0]("cluster_0", torch.empty(0), [], "")([]) == ["cluster_0"]
    with pytest.raises(
        (BackendError, ValueError)
    ):  # their own: none of them reads an empty payload
        found["tvm"][0]("cluster_0", torch.empty(0), [], "")
    for path in rows.values():
        assert callable(EntryPoint("", path, "").load())


def load(name: str, *rest: object) -> Callable[[list[torch.Tensor]], Any]:
    return lambda inputs: [name, *inputs]


def test_importing_blade_imports_no_backend_and_no_compiler() -> None:
    code = """
import sys
import torch
finders = list(sys.meta_path)
import blade
from blade.backends import registry
registry.names()
assert sys.meta_path == finders, sys.meta_path
heavy = ("blade.backends.disc.backend", "blade.backends.tvm.run", "blade.api", "torch._dynamo", "sympy")
sys.exit(", ".join(name for name in heavy if name in sys.modules) or None)
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
