# SPDX-License-Identifier: Apache-2.0
"""``blade.accelerate``: a module that is the model to everybody who asks, and answers by optimized modules.

    model = blade.accelerate(model)             # records its first calls, and optimizes in the background
    model = blade.accelerate(model, samples)    # optimizes now
    pipe = blade.accelerate(pipe)               # the modules of a pipeline that take its time

The drop-in has the model's class as its base, and its attributes, methods, hooks and signature. It shares the
memory of the model's weights.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from blade.capture.reference_model import MODEL_ERRORS
from blade.config import Config
from blade.dropin.drop_in import drop_in, state_of
from blade.dropin.part_finder import PartFinder
from blade.dropin.prepare import Prepared
from blade.dropin.program import (
    COPY_ERRORS,
    ProgramState,
    accelerated_program,
    modules_of,
    swap_now,
)
from blade.dropin.recording import Calls, calls_of, record
from blade.dropin.sharing_copy import sharing_copy
from blade.dropin.swap_parts import PartSwapper
from blade.dropin.watched import obstacle
from blade.errors import InputError
from blade.report import DROP_IN, drop_in_state


def accelerate(
    model: Any,
    samples: Any = None,
    config: Config | None = None,
    *,
    parts: Sequence[str] = (),
) -> Any:
    """Return what is used like ``model``, and faster where that was measured.

    ``model`` is a module, or a program that has modules as attributes, such as a pipeline of diffusers or
    transformers; of a program the modules that take its time are accelerated, in a shallow copy.
    ``samples`` are calls as ``blade.optimize`` takes them, or what ``blade.record`` recorded; they are optimized for
    before this returns. Without ``samples`` each kind of call is the model's at first, and is optimized in the
    background after three calls. Where the calls of a module cannot be optimized, its layers are that take most of its
    time. ``parts`` names submodules to accelerate in place of the whole model, such as "encoder.layers.0" or, of a
    pipeline, "vae.decoder"; ``samples`` then maps these names to samples. Calls with other arguments than tensors,
    constants, and containers and caches of them are the model's, as are calls while it is in training mode, and all
    calls after the weights, layers or hooks have changed, until these were optimized again (three times at most).

    ``model`` stays as it is; both share the memory of the weights. The outputs have no gradients.
    ``config`` defaults to the innermost active ``with Config(...)``.

    Raises ``InputError`` for what has no modules, or cannot be copied.
    """
    config = Config.current() if config is None else config
    if drop_in_state(model) is not None:
        raise InputError("model: it is a drop-in already, or has parts that are.")
    if not isinstance(model, nn.Module) and modules_of(model):
        return accelerated_program(model, samples, config, parts)
    _check(model, parts)
    try:
        own = sharing_copy(model)
    except COPY_ERRORS as error:
        raise InputError(
            f"model: {type(model).__name__} cannot be deep-copied ({error}); accelerate works on a copy of its layers."
        ) from error
    if parts:
        return _with_parts(own, samples, config, parts)
    made = drop_in(own, config, in_background=samples is None)
    swapper = PartSwapper({"": made}, config)
    state = state_of(made)
    state.parts = swapper
    if samples is None:
        state.on_refused = partial(swapper.split, "")
        swapper.start()
    else:
        calls = calls_of(samples)
        state.optimize(calls)
        _split_refused(made, calls, swapper, "")
    return made


def drop_in_of(model: nn.Module, prepared: Sequence[Prepared], config: Config | None) -> Any:
    """A drop-in for ``model`` whose calls are answered by what was ``prepared`` elsewhere."""
    _check(model)
    config = Config.current() if config is None else config
    made = drop_in(sharing_copy(model), config)
    state_of(made).have(prepared)
    return made


def _with_parts(own: nn.Module, samples: Any, config: Config, parts: Sequence[str]) -> Any:
    swapper = PartSwapper({"": own}, config)
    for name in parts:
        swap_now(swapper, name, None if samples is None else samples[name])
    vars(own)[DROP_IN] = ProgramState(type(own).__name__, swapper)
    return own


def _split_refused(made: Any, calls: Calls, parts: PartSwapper, name: str) -> None:
    """If no call of ``made``, the module ``name``, can be optimized, optimize the parts that take its time."""
    state = state_of(made)
    if not state.is_refused:
        return
    trial = sharing_copy(state.model)  # its buffers may be written
    with PartFinder({name: trial}) as finder:
        worth = finder.below(name) if _played(trial, [*calls, *calls]) else []
    if not worth:
        return
    own = [one.removeprefix(f"{name}.") for one in worth]
    inner_calls = _calls_inside(trial, calls, own)
    for full, inner in zip(worth, own):
        if parts.swap(full):
            state.is_split = True
            made = parts.drop_ins[full]
            state_of(made).optimize(inner_calls[inner])
            _split_refused(made, inner_calls[inner], parts, full)


def _calls_inside(model: nn.Module, calls: Calls, parts: Sequence[str]) -> dict[str, Calls]:
    """The calls of ``parts`` that ``calls`` of ``model`` make, by part."""
    found: dict[str, Calls] = {part: [] for part in parts}
    for call, count in calls:
        with record(model, *parts) as recorded:
            _played(model, [(call, count)])
        for part in parts:
            found[part] += [(inner, count * own) for inner, own in calls_of(recorded[part])]
    return found


def _played(model: nn.Module, calls: Calls) -> bool:
    """Make each of ``calls`` of ``model`` once; return whether it took them."""
    with torch.no_grad():
        try:
            for (args, kwargs), _ in calls:
                model(*args, **kwargs)
        except MODEL_ERRORS:
            return False
    return True


def _check(model: Any, parts: Sequence[str] = ()) -> None:
    if not isinstance(model, nn.Module):
        raise InputError(
            f"model: a torch.nn.Module is expected, or a pipeline that holds modules, got {type(model).__name__}."
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise InputError("model: it is TorchScript; use blade.optimize, which returns TorchScript.")
    if hasattr(model, "_orig_mod"):
        raise InputError(
            "model: it is wrapped by torch.compile; give the module that was compiled."
        )
    if not parts and (found := obstacle(model)) is not None:
        raise InputError(
            f"model: {found}; remove them (accelerate.hooks.remove_hook_from_module(model, recurse=True)), or name "
            "parts of the model without them: blade.accelerate(model, parts=[...])."
        )
