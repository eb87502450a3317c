# SPDX-License-Identifier: Apache-2.0
"""Run a module as in a first call: on copies of the inputs, from one random seed, with its state restored.

original = ReferenceModel(private_copy, call, flatten=True)
original(*sample)          # the reference: tensors in the order of the captured graph
"""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils import _pytree as pytree

from blade.capture.attributes import attributes_of, may_write
from blade.capture.held_state import HeldState
from blade.capture.inputs import CallSignature, Sample
from blade.capture.model import device_of, hooks_of, private_copy
from blade.capture.outputs import tensors_of
from blade.core.attempt import attempt
from blade.core.reason import Reason, Stage
from blade.process.torch_state import seeded_generators
from blade.timing.free_cpus import on_free_cpus
from blade.verification.attention_semantics import rows_with_keys
from blade.verification.compare import is_same
from blade.verification.wide_at_use import NARROW, WideAtUse

# Exceptions of a model at inputs it does not accept (torch.jit.Error is a RuntimeError).
MODEL_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    BufferError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


WIDENED_AT_USE = 1 << 16
"""Elements of a large parameter, at least."""

T = TypeVar("T")
Answer = tuple[Any, Any]  # the output, and the arguments as the call left them


class ModelState:
    """The present buffers and attributes of ``modules``, to be restored after a run."""

    def __init__(self, *modules: nn.Module) -> None:
        parts = [part for module in modules for part in module.modules()]
        python = [part for part in parts if not isinstance(part, torch.jit.ScriptModule)]
        held = [
            d for part in python for d in (part._buffers, vars(part), *hooks_of(part))
        ]  # some models register hooks in their first call
        self._dicts = [(d, dict(d)) for d in held]
        self._attributes: list[tuple[Any, Any]] = []
        unique: dict[int, torch.Tensor] = {}
        for module in modules:
            own: list[tuple[Any, Any]] = []
            if isinstance(module, torch.jit.ScriptModule):
                own = [(a, a.get()) for a in attributes_of(module)]
                self._attributes += own
                if not may_write(module):
                    continue  # in an optimized module the buffers are the weights, for the fallback
            kept = [value for _, value in own if isinstance(value, torch.Tensor)]
            unique |= {id(tensor): tensor for tensor in (*module.buffers(), *kept)}
        self._tensors = [(tensor, tensor.detach().clone()) for tensor in unique.values()]
        self._versions = [tensor._version for tensor, _ in self._tensors]

    def restore(self) -> bool:
        """Restore everything; return whether it had changed."""
        changed = self._rebind()
        for index, (tensor, saved) in enumerate(self._tensors):
            if tensor._version != self._versions[index]:
                changed = True
                with torch.no_grad():
                    tensor.copy_(saved)
                self._versions[index] = tensor._version
        return changed

    def _rebind(self) -> bool:
        changed = False
        for live, saved in self._dicts:
            if live.keys() != saved.keys() or any(live[key] is not saved[key] for key in saved):
                changed = True
                live.clear()
                live.update(saved)
        for attribute, value in self._attributes:
            if not _is_same(attribute.get(), value):
                changed = True
                attribute.set(value)
        return changed


def _is_same(a: Any, b: Any) -> bool:
    """Whether two attribute values hold the same tensors and otherwise equal values."""
    (leaves_a, spec_a), (leaves_b, spec_b) = pytree.tree_flatten(a), pytree.tree_flatten(b)
    return spec_a == spec_b and all(map(_is_same_leaf, leaves_a, leaves_b))


def _is_same_leaf(a: Any, b: Any) -> bool:
    if a is b or isinstance(a, torch.ScriptObject):  # not comparable; no forward rebinds one
        return True
    return not isinstance(a, torch.Tensor) and not isinstance(b, torch.Tensor) and bool(a == b)


class CopiedSample:
    """A copy of ``sample`` for calls that may write to it; ``restore`` makes it anew if one did."""

    def __init__(self, sample: Sample) -> None:
        self._sample = sample
        self.entries: list[Any] = []
        self._renew()

    def _renew(self) -> None:
        self.entries[:] = copy_of(list(self._sample))
        self._leaves, self._structure = pytree.tree_flatten(self.entries)
        self._versions = [_version(leaf) for leaf in self._leaves]

    def restore(self) -> bool:
        """Put a fresh copy into ``entries`` if a call wrote to a tensor or changed a container in them."""
        leaves, structure = pytree.tree_flatten(self.entries)
        if (
            structure == self._structure
            and all(a is b for a, b in zip(leaves, self._leaves, strict=True))
            and self._versions == [_version(leaf) for leaf in leaves]
        ):
            return False
        self._renew()
        return True


def _version(leaf: Any) -> int:
    return leaf._version if isinstance(leaf, torch.Tensor) else 0


class ReferenceModel:
    """The user's own code on the private copy: positional tensors in, the reference tensors out.

    Runs without gradients and from the module's state at capture, which is restored after each call: every
    call answers as a first call would. Inputs are not changed.
    """

    def __init__(self, model: nn.Module, call: CallSignature, flatten: bool) -> None:
        self._model, self._call, self._flatten = model, call, flatten
        self._state = ModelState(model)
        self.device = device_of(model)
        self.is_stateful = False
        self.forgotten: frozenset[str] = (
            frozenset()
        )  # attributes that calls change, which shows nowhere

    def __call__(self, *sample: Any) -> Any:
        return self.run(sample, times=1)[0][0]

    @property
    def name(self) -> str:
        """The name of the model's class."""
        if isinstance(self._model, torch.jit.ScriptModule):
            return str(self._model.original_name)
        return type(self._model).__name__

    @property
    def module(self) -> nn.Module:
        """The private copy of the model."""
        return self._model

    def bind(self, sample: Sample) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the user's call on ``sample``, by position and by keyword."""
        return self._call.bind(sample)

    def eager(self, sample: Sample) -> Callable[..., Any] | None:
        """Return a bare call of the user's code on ``sample``, to be timed; ``reset`` restores the state.

        Return ``None`` for a model that is TorchScript itself. The call ignores its arguments.
        """
        if isinstance(self._model, torch.jit.ScriptModule):
            return None
        args, kwargs = self._call.bind(sample)
        return lambda *_: self._model(*args, **kwargs)

    def tensors(self) -> list[torch.Tensor]:
        """Parameters and buffers."""
        return [*self._model.parameters(), *self._model.buffers()]

    def in_fp64(self, at_use: bool = False) -> "ReferenceModel":
        """Return a copy of the model with all floating-point parameters and buffers in float64.

        ``at_use``: large parameters are those of this model, each widened when an op uses it.
        """
        wide = _with_wide_parameters(self._model) if at_use else private_copy(self._model)
        return ReferenceModel(wide.double(), self._call, self._flatten)

    def sharing_weights(self) -> "ReferenceModel":
        """Return a copy of the model as it is now, with parameters in common and a state of its own."""
        shared = {id(tensor): tensor for tensor in self._model.parameters()}
        made = ReferenceModel(private_copy(self._model, shared), self._call, self._flatten)
        made.is_stateful, made.forgotten = self.is_stateful, self.forgotten
        return made

    def leaves(self, sample: Sample) -> list[torch.Tensor]:
        """Call the model as the user would on ``sample``; return the tensors of its output, in order."""
        return pytree.tree_leaves(self._tensors(sample))

    def of(self, call: CallSignature) -> "ReferenceModel":
        """The same model, called in another way."""
        made = ReferenceModel(self._model, call, self._flatten)
        made.is_stateful, made.forgotten = self.is_stateful, self.forgotten
        return made

    def run(self, sample: Sample, times: int) -> list[Answer]:
        """Return the answers of ``times`` calls in a row from the state at capture."""
        self.reset()
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return [answer_of(self._tensors, sample) for _ in range(times)]
        finally:
            self.is_stateful |= self._state.restore()

    def reset(self) -> bool:
        """Restore the module's state, after runs from elsewhere such as tracing; return whether it had changed."""
        return self._state.restore()

    def first(self, sample: Sample) -> tuple[Any, Answer]:
        """Return the output as the user's model returns it, and the answer made from it."""
        arguments = copy_of(sample)
        args, kwargs = self._call.bind(arguments)
        try:
            with torch.no_grad(), rows_with_keys(sample), on_free_cpus():
                output = self._model(*args, **kwargs)
            flat = tensors_of(output) if self._flatten else output
            return output, (copy_of(flat), arguments)
        finally:
            self.is_stateful |= self._state.restore()

    def forgets(self, samples: Sequence[Sample]) -> bool:
        """Whether every call answers as a first one would, and writes to no parameter or buffer: what calls at
        ``samples`` leave behind shows nowhere.

        Such a model keeps sizes or masks of its last call, say, and makes them anew in the next.
        """

        def in_a_row() -> list[Any] | None:
            self.reset()
            before = HeldState(self._model)
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                answers = [
                    seeded(partial(answer_of, self._tensors, one))[0]
                    for one in (*samples, *samples)
                ]
            changes = before.changes()
            if changes is None:
                return answers
            self.forgotten = changes.attributes
            return None if changes.weights else answers

        first = [seeded(partial(self.run, one, times=1))[0][0] for one in samples]
        later = attempt(Stage.CAPTURE, None, self.name, in_a_row)
        self.reset()
        if later is None or isinstance(later, Reason):
            return False
        return all(map(_is_equal, [*first, *first], later))

    def _tensors(self, sample: Sample) -> Any:
        args, kwargs = self._call.bind(sample)
        output = self._model(*args, **kwargs)
        return tensors_of(output) if self._flatten else output


def _with_wide_parameters(model: nn.Module) -> nn.Module:
    large = (p for p in model.parameters() if p.dtype in NARROW and p.numel() >= WIDENED_AT_USE)
    return private_copy(
        model, {id(p): nn.Parameter(WideAtUse(p.detach()), requires_grad=False) for p in large}
    )


def answer_of(function: Callable[[Sample], Any], sample: Sample) -> Answer:
    """Return the output of ``function`` on a copy of ``sample``, and that copy after the call."""
    arguments = copy_of(sample)
    # A copy: the output may be a buffer, or an argument, that the next call overwrites.
    with rows_with_keys(sample), on_free_cpus():
        return copy_of(function(arguments)), arguments


def _is_equal(a: Any, b: Any) -> bool:
    """Whether two outputs have equal tensors, NaNs at the same places, and otherwise equal values."""
    (leaves, spec), (others, other_spec) = pytree.tree_flatten(a), pytree.tree_flatten(b)
    return spec == other_spec and all(map(_is_equal_leaf, leaves, others))


def _is_equal_leaf(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return type(a) is type(b) and bool(a == b)
    return a.shape == b.shape and a.dtype == b.dtype and is_same(a, b)


def copy_of(value: Any) -> Any:
    """Return ``value`` with every tensor in it cloned (strides kept), so that in-place ops stay private."""
    made: dict[int, torch.Tensor] = {}  # one tensor that is given twice stays one

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return made.setdefault(id(leaf), leaf.detach().clone())

    return pytree.tree_map(copy, value)


def seeded(function: Callable[[], T]) -> T:
    """Run ``function()`` from a fixed random seed, and restore the generators' states."""
    with seeded_generators(0):
        return function()
