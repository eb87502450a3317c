# SPDX-License-Identifier: Apache-2.0
"""A model or inputs that cannot be used: the error names the argument and says what to do."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from blade.capture.capture import capture
from blade.config import Config
from blade.errors import ConfigError, InputError


def linear() -> nn.Module:
    return nn.Linear(3, 4).eval()


class Two(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return (x + y) * scale


class Spread(nn.Module):
    def forward(self, *xs: torch.Tensor) -> torch.Tensor:
        return sum(xs)  # type: ignore[return-value]


class Returns(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.function = function
        self.eval()

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


X = torch.ones(2, 3)


def nested_training() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout()).eval()
    model[1].train()
    return model


class Memory(nn.Module):
    """Made after ``model.eval()``, as caches of keys are; no code of it reads its mode."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.kept


class Noisy(Memory):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(x), training=self.training)


def with_memory(kind: type[Memory]) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3)).eval().append(kind())


def test_modules_without_a_mode_may_be_in_training_mode() -> None:
    model = with_memory(Memory)
    assert torch.equal(capture(model, X, Config()).module(X), model(X)) and model[1].training
    with pytest.raises(InputError, match=r"training mode \('1'\)"):
        capture(with_memory(Noisy), X, Config())


def mixed_devices() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).eval()
    return model.append(nn.Linear(3, 3, device="meta").eval())


@pytest.mark.parametrize(
    ("model", "inputs", "message"),
    [
        (
            lambda x: x,
            X,
            r"model: expected a torch.nn.Module or ScriptModule, got function; call it in the forward",
        ),
        (nn.Linear, X, r"give an instance of the class"),
        (nn.Linear(3, 4), X, r"training mode.*call model\.eval\(\)"),
        (nested_training(), X, r"training mode \('1'\)"),
        (mixed_devices(), X, r"'2.weight' is on the meta device"),
        (linear(), [], r"inputs: an empty list"),
        (linear(), 3.0, r"sample 0 is of type float"),
        (linear(), [[X]], r"sample 0 is of type list.*goes into a tuple"),
        (linear(), X.numpy(), r"sample 0 is of type ndarray.*torch\.from_numpy"),
        (linear(), (x for x in [X]), r"sample 0 is of type generator.*make a list"),
        (linear(), X.to_sparse(), r"'input' of sample 0 .* layout torch.sparse_coo.*dense"),
        (linear(), X.to_mkldnn(), r"'input' of sample 0 .* layout torch._mkldnn"),
        (Returns(lambda x: x.to_sparse()), X, r"forward returns has the layout torch.sparse_coo"),
        (Returns(lambda x: torch.nested.as_nested_tensor([x])), X, r"forward returns is nested"),
        (Returns(lambda x: x.chalf()), X, r"forward returns is complex32"),
        (linear(), FakeTensorMode().from_tensor(X), r"'input' of sample 0 is a FakeTensor"),
        ("model.pt", X, r"got str; load the file first"),
        (linear().state_dict(), X, r"got OrderedDict; load a state dict into"),
        (linear(), {"y": X}, r"sample 0 does not fit forward\(input.*missing a required"),
        (Two().eval(), [X, X], r"missing a required argument: 'y'.*a list is a list of samples"),
        (
            linear(),
            torch.ones(2, 5),
            r"does not run on sample 0 \(input: float32\[2, 5\]\): Runtime",
        ),
        (
            torch.jit.script(nn.Sequential(linear()).eval()),
            torch.ones(2, 5),
            r"float32\[2, 5\]\): RuntimeError: mat1 and mat2 .* \(linear\.py:\d+, in forward\)$",
        ),
        (linear(), [X, X.double()], r"'input' differs in dtype .*float64\[2, 3\]"),
        (linear(), [X, X[0]], r"'input' differs in rank"),
        (Two().eval(), [(X, X), (X, (X, X))], r"'y' differs in structure"),
        (Two().eval(), [(X, X, 1.0), (X, X, 2)], r"'scale' differs in type"),
        (Two().eval(), [(X, X, [1.0]), (X, X, [2.0])], r"'scale' differs in value"),
        (Spread().eval(), [(X, X), (X,)], r"gives the arguments"),
        (Two().eval(), (1.0, 2.0), r"the output of forward is a float"),
    ],
)
def test_bad_model_or_inputs(model: Any, inputs: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        capture(model, inputs, Config())


class OwnTensor(torch.Tensor):
    """A class of the user's own: an ordinary tensor by another name."""


@pytest.mark.parametrize(
    "inputs",
    [X.clone().requires_grad_(), X.clone().requires_grad_() * 2, X.as_subclass(OwnTensor)],
    ids=["leaf", "result", "subclass"],
)
def test_samples_that_cannot_be_copied_as_they_are(inputs: torch.Tensor) -> None:
    captured = capture(linear(), inputs, Config())
    [[sample]] = captured.samples
    assert type(sample) is torch.Tensor and not sample.requires_grad
    assert torch.equal(sample, inputs.detach().as_subclass(torch.Tensor))


def test_the_models_own_error_is_chained() -> None:
    with pytest.raises(InputError) as caught:
        capture(linear(), torch.ones(2, 5), Config())
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_parameters_on_two_devices() -> None:
    model = linear()
    with FakeTensorMode():
        elsewhere = torch.empty(1, device="cuda:0")
    model.register_buffer("elsewhere", elsewhere)
    with pytest.raises(InputError, match=r"'weight' on cpu, 'elsewhere' on cuda:0"):
        capture(model, X, Config())


def test_inputs_on_another_device() -> None:
    with pytest.raises(InputError, match=r"argument 'input' is on meta.*model is on cpu"):
        capture(linear(), torch.ones(2, 3, device="meta"), Config())


def test_an_output_that_no_graph_returns() -> None:
    class Strange(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return {"x": x, "cache": object()}

    with pytest.raises(InputError, match=r"the output\['cache'\] of forward is a object"):
        capture(Strange().eval(), X, Config())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Config(dynamic_shapes={"z": {0: 1}}), r"no input 'z'; the inputs are x, y"),
        (Config(dynamic_shapes={5: {0: 1}}), r"no input 5"),
        (Config(dynamic_shapes={"x": {2: 1}}), r"'x' has 2 dimension\(s\), so there is no axis 2"),
        (
            Config(dynamic_shapes={"x": {0: (3, 9)}}),
            r"axis 0 of 'x'.*3\.\.9.*sample 0 has the size 2",
        ),
        (
            Config(dynamic_tuning_shapes={"min": [[1, 3]], "opts": [], "max": [[4, 3]]}),
            r"gives 1 shape\(s\), the model has 2 input tensor\(s\) \(x, y\)",
        ),
        (
            Config(dynamic_tuning_shapes={"min": [[1], [1]], "opts": [], "max": [[4], [4]]}),
            r"\(1,\) has 1 dimension\(s\), the input 'x' has 2",
        ),
        (
            Config(
                dynamic_tuning_shapes={
                    "min": [[2, 3], [2, 3]],
                    "opts": [],
                    "max": [[4, 3], [5, 3]],
                }
            ),
            r"the model does not run at a shape",
        ),
    ],
)
def test_declared_sizes_that_do_not_fit(config: Config, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        capture(Two().eval(), (X, X), config)


def test_declared_sizes_bound_the_probes() -> None:
    config = Config(dynamic_shapes={"x": {0: (1, 4), 1: 3}, "y": {0: (1, 4), 1: 3}})
    captured = capture(Two().eval(), (X, X), config)
    assert captured.probes
    for x, y in captured.probes:
        assert 2 <= x.shape[0] <= 4
        assert x.shape[1] == y.shape[1] == 3


def test_tuning_shapes_become_samples() -> None:
    shapes = {
        "min": [[1, 3], [1, 3]],
        "opts": [[[4, 3], [4, 3]]],
        "max": [[9, 3], [9, 3]],
    }
    captured = capture(Two().eval(), (X, X), Config(dynamic_tuning_shapes=shapes))
    assert [sample[0].shape[0] for sample in captured.samples] == [2, 1, 4, 9]
    assert all(2 <= x.shape[0] <= 9 and x.shape[1] == 3 for x, _ in captured.probes)
