# SPDX-License-Identifier: Apache-2.0
"""Modules read from archives of ``torch.export`` and packages of AOTInductor.

loaded = load_exported("model.pt2")
loaded(input_ids=ids, attention_mask=mask)      # called like the optimized module
blade.stats(loaded), blade.report(loaded), blade.rearm(loaded)
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.utils import _pytree as pytree

from blade.errors import InputError
from blade.report import DROP_IN, Report, rearm, report, stats
from blade.runtime.model import NAMES, PYTREES, Model, models_read, script_in


class LoadedModel(nn.Module):
    """Answers as the optimized module that was saved. Results have no gradients."""

    def __init__(self, run: Callable[..., Any], model: Model, origin: str) -> None:
        super().__init__()
        self._run = run
        self._origin = origin
        script = script_in(model)
        self._names: list[str] = getattr(script, NAMES)
        self._places: list[str] = getattr(
            script, "places", []
        )  # of a drop-in: the model's parameters
        self._named: list[str] = getattr(script, "named", [])
        vars(self)[DROP_IN] = _State(script)
        self.training = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._named:
            args, kwargs = (), self._by_name(args, kwargs)
        elif kwargs and not self._places:
            args, kwargs = self._in_order(args, kwargs), {}
        with torch.no_grad():
            return self._run(*args, **kwargs)

    def _in_order(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        left = self._names[len(args) :]
        if set(left) != set(kwargs):
            raise TypeError(
                f"forward takes {', '.join(self._names)}; {len(args)} positional argument(s) and {', '.join(kwargs)} "
                "were given."
            )
        return (*args, *(kwargs[name] for name in left))

    def _by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        given = {**dict(zip(self._places, args)), **kwargs}
        left = {name: value for name, value in given.items() if name not in self._named}
        if any(value is not None for value in left.values()) or not set(self._named) <= set(given):
            raise TypeError(
                f"the file answers calls with {', '.join(self._named)}, and this one has {', '.join(given)}."
            )
        return {name: given[name] for name in self._named}

    def extra_repr(self) -> str:
        return f"{self._origin}: {', '.join(self._names)}"


class _State:
    """What ``blade.report``, ``stats``, ``wait`` and ``rearm`` ask."""

    parts = None

    def __init__(self, script: torch.jit.ScriptModule) -> None:
        self._module: Any = script.model

    def report(self) -> Report:
        return report(self._module)

    def stats(self) -> dict[str, dict[str, int]]:
        return stats(self._module)

    def rearm(self) -> None:
        rearm(self._module)

    def wait(self, timeout: float | None) -> bool:
        return True


def load_exported(path: str | os.PathLike[str]) -> LoadedModel:
    """Read an archive of ``torch.export``; raises ``InputError`` if it is not blade's.

    Where the program is one op and nothing else, as most are, the op's model is called without it: torch needs
    seconds to import what reads programs.
    """
    model = _model_in(path)
    pytrees = getattr(script_in(model), PYTREES, [])
    if pytrees:
        return LoadedModel(_direct(model, *pytrees), model, "torch.export")
    try:
        program = torch.export.load(path)
    except (RuntimeError, NotImplementedError) as error:
        raise InputError(
            f"path: torch.export.load of torch {torch.__version__} cannot read {os.fspath(path)} (see its warning). "
            "The classes of a model's outputs have to be imported before (a ModelOutput's is in transformers)."
        ) from error
    [kept] = [one for one in program.constants.values() if isinstance(one, torch.ScriptObject)]
    return LoadedModel(program.module(), cast(Model, kept), "torch.export")


def load_package(path: str | os.PathLike[str]) -> LoadedModel:
    """Read a package of AOTInductor; raises ``InputError`` if it is not blade's."""
    before = {one.number() for one in models_read()}
    # what torch._inductor.aoti_load_package does, without importing Inductor
    loader = torch._C._aoti.AOTIModelPackageLoader(os.fspath(path), "model", False, 1, -1)
    models = [one for one in models_read() if one.number() not in before]
    if not models:
        raise InputError(
            _NOT_OURS.format(path=os.fspath(path), how="torch._inductor.aoti_load_package")
        )
    _, returned = loader.get_call_spec()
    out = pytree.treespec_loads(returned)

    def run(*args: Any, **kwargs: Any) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        found = loader.boxed_run([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])
        return pytree.tree_unflatten(found, out)

    return LoadedModel(run, models[0], "AOTInductor")


def _model_in(path: str | os.PathLike[str]) -> Model:
    try:
        reader = torch._C.PyTorchFileReader(os.fspath(path))
        found = torch._C._pickle_load_obj(reader.get_record("data/constants/custom_obj_0"))
        is_ours = str(found._type()).endswith("blade.Model")
    except (RuntimeError, AttributeError):
        is_ours = False
    if not is_ours:
        raise InputError(_NOT_OURS.format(path=os.fspath(path), how="torch.export.load"))
    return cast(Model, found)


def _direct(model: Model, given: str, returned: str) -> Callable[..., Any]:
    takes, out = pytree.treespec_loads(given), pytree.treespec_loads(returned)

    def run(*args: Any) -> Any:
        leaves, structure = pytree.tree_flatten(args)
        if structure != takes:
            raise TypeError(f"the arguments are {structure}, and {takes} is expected.")
        return pytree.tree_unflatten(model.run("forward", leaves), out)

    return run


_NOT_OURS = "path: {path} holds no module of blade.save; {how} loads it."
