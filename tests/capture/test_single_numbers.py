# SPDX-License-Identifier: Apache-2.0
"""Numbers that torch takes for lists, sizes of 0, and what the recorder leaves behind."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import blade
from blade.capture.capture import capture

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Calls(nn.Module):
    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self.function(*args) + 1


def captured(function: Callable[..., torch.Tensor], *args: torch.Tensor) -> Any:
    found = capture(Calls(function).eval(), args, blade.Config(allow_tracing=True))
    assert found.how == "trace"
    return found


BY_SIZE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "roll": lambda x: torch.roll(x, x.shape[2] // 2, 2),
    "roll of a tensor": lambda x: x.roll(x.shape[2] // 2, 2),
    "avg_pool2d": lambda x: functional.avg_pool2d(x, x.shape[2]),
    "max_pool2d": lambda x: functional.max_pool2d(x, kernel_size=x.shape[2] // 2),
    "adaptive_avg_pool2d": lambda x: functional.adaptive_avg_pool2d(x, x.shape[2] // 2),
    "unfold": lambda x: functional.unfold(x, x.shape[2] // 2),
    "split": lambda x: x.split(x.shape[2] // 2, 2)[0],
    "divmod": lambda x: x * divmod(x.shape[2], 3)[1],
    "sizes of data": lambda x: x.view(*x.data.shape[:2], -1).transpose(-1, -2),
    "values of data": lambda x: x.relu().data.sum((0, 1)),
    "a write to data": lambda x: written_to_data(x.relu()),
}


def written_to_data(x: torch.Tensor) -> torch.Tensor:
    x.data[:, 0] *= 2
    return x


@pytest.mark.parametrize("name", BY_SIZE)
def test_a_size_where_a_list_is_taken_stays_a_size(name: str) -> None:
    function = BY_SIZE[name]
    found = captured(function, X)
    assert len(found.paths) <= 1
    for height, width in ((8, 8), (4, 16), (12, 12)):
        x = torch.randn(2, 3, height, width)
        torch.testing.assert_close(found.module(x), function(x) + 1)


def test_an_element_where_a_list_is_taken_stays_an_element() -> None:
    def rolled(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return torch.roll(torch.tanh(x), int(at), 0)

    found = captured(rolled, X[0, 0], torch.tensor(3))
    for at in range(5):
        given = X[0, 0], torch.tensor(at)
        torch.testing.assert_close(found.module(*given), rolled(*given) + 1)


def test_a_decision_on_emptiness_is_checked() -> None:
    def total(x: torch.Tensor) -> torch.Tensor:
        return x.new_ones(8) * 5 if x.numel() == 0 else torch.tanh(x).sum(0)

    found = captured(total, X[0, 0])
    [path] = found.paths
    assert any("0" in condition for condition in path.conditions), path
    torch.testing.assert_close(found.module(X[0, 0, :3]), total(X[0, 0, :3]) + 1)
    with pytest.raises(torch.jit.Error, match=r"x\.numel\(\) == 0"):
        found.module(X[0, 0, :0])


def test_parts_whose_length_is_0_are_another_path() -> None:
    def halves(x: torch.Tensor) -> torch.Tensor:
        half = x.shape[0] // 2
        return torch.stack([torch.tanh(part).sum(0) for part in x[: half * 2].split(half)])

    found = captured(halves, X[0, 0])
    assert found.limits == ()
    for rows in (2, 5, 6):
        torch.testing.assert_close(found.module(X[0, 0, :rows]), halves(X[0, 0, :rows]) + 1)
    with pytest.raises(torch.jit.Error, match=r"No captured path .*half \* 2"):
        found.module(X[0, 0, :1])


def test_sizes_beside_one_that_elements_decide_are_known() -> None:
    def read(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        kept = x[:, : int(lengths.max())]
        if kept.shape[-1] != x.shape[-1]:
            raise ValueError("not reached")
        return torch.tanh(kept).sum(1)

    found = captured(read, X[0], torch.tensor([2, 5, 3]))
    assert all("read" not in text for path in found.paths for text in path.conditions)
    for longest in (1, 4, 8):
        given = X[0], torch.tensor([1, longest, 1])
        torch.testing.assert_close(found.module(*given), read(*given) + 1)


def test_a_sign_of_an_element_is_still_a_decision() -> None:
    def signed(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        n = int(at)
        return x * 2 if n < 0 else x[:n].sum(0) - x

    found = captured(signed, X[0, 0], torch.tensor(3))
    for at in (2, -1):
        given = X[0, 0], torch.tensor(at)
        try:
            got = found.module(*given)
        except torch.jit.Error as error:
            assert "No captured path" in str(error)
        else:
            torch.testing.assert_close(got, signed(*given) + 1)


def test_nothing_is_left_in_torch() -> None:
    table: dict[int, str] = torch.jit._builtins._get_builtin_table()

    def seen() -> list[Any]:
        return [
            torch.roll,
            torch.split,
            functional.max_pool2d,
            functional.conv2d,
            torch.Tensor.roll,
        ]

    before, functions = dict(table), seen()
    captured(BY_SIZE["max_pool2d"], X)
    assert table == before
    assert all(now is then for now, then in zip(seen(), functions, strict=True))
    assert "roll" not in vars(torch.Tensor)


@torch.jit._script_if_tracing
def scripted_while_traced(x: torch.Tensor, by: float) -> torch.Tensor:
    return x * float(x.shape[0]) if x.shape[1] > 3 else x * by


def test_functions_that_are_scripted_while_a_model_is_traced() -> None:
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return scripted_while_traced(torch.tanh(x), 0.5)

    found = captured(scaled, X[0, 0])
    for x in (X[0, 0], X[0, 0, :, :2], X[0, 0, :3]):
        torch.testing.assert_close(found.module(x), scaled(x) + 1)
    assert "float" not in globals()


def scripts_if_tracing(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator such as libraries have of their own."""

    def call(*args: Any) -> Any:
        made = torch.jit.script(function) if torch.jit.is_tracing() else function
        return made(*args)

    return call


@scripts_if_tracing
def widened(x: torch.Tensor, by: int, factor: float) -> torch.Tensor:
    return x.repeat(1, by) * factor if x.shape[1] > 3 else x + by


def test_functions_that_a_library_scripts_while_a_model_is_traced() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return widened(torch.tanh(x), 2, 0.5)

    found = captured(model, X[0, 0])
    for x in (X[0, 0], X[0, 0, :, :2], X[0, 0, :3]):
        torch.testing.assert_close(found.module(x), model(x) + 1)
    assert torch.jit.script.__module__ == "torch.jit._script"


@torch.jit._script_if_tracing
def resized_while_traced(x: torch.Tensor, size: int) -> torch.Tensor:
    if x.shape[-1] == size:
        return x
    return functional.interpolate(x, size=[size, size], mode="area")


def test_a_scripted_function_calls_one_that_is_patched() -> None:
    def resized(x: torch.Tensor) -> torch.Tensor:
        return resized_while_traced(torch.tanh(x), 2 * x.shape[1])

    found = captured(resized, X)
    for x in (X, X[:1], X[:, :, :4, :4]):
        torch.testing.assert_close(found.module(x), resized(x) + 1)


def test_strides_of_dense_tensors_are_products_of_sizes() -> None:
    def windows(x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x)
        first, second = y.stride()
        size = y.shape[0] - 1, 2, y.shape[1]
        return y.as_strided(size, (first, first, second)).sum(1) * y.stride(0)

    found = captured(windows, X[0, 0])
    for x in (X[0, 0], torch.randn(5, 3), torch.randn(2, 1)):
        torch.testing.assert_close(found.module(x), windows(x) + 1)
    with pytest.raises(torch.jit.Error, match="dense"):
        found.module(torch.randn(6, 4).t())


def test_assignment_to_a_size_makes_another_number() -> None:
    def counted(x: torch.Tensor) -> torch.Tensor:
        n = x.shape[0]
        before = n
        n += x.shape[1]
        n *= 2
        n -= 1
        return x * before + n

    found = captured(counted, X[0, 0])
    for shape in ((8, 8), (5, 7), (1, 2)):
        x = torch.rand(shape)
        torch.testing.assert_close(found.module(x), counted(x) + 1)


def test_assignment_to_a_tensor_writes() -> None:
    def counted(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        before = n
        n += x.shape[0]
        return x * before

    found = captured(counted, X[0, 0], torch.tensor(2))
    n = torch.tensor(5)
    assert torch.equal(found.module(torch.ones(4, 2), n), torch.full((4, 2), 10.0)) and n == 9


def test_a_type_of_python_is_a_dtype() -> None:
    def last(x: torch.Tensor) -> torch.Tensor:
        return x[:, torch.tensor([-1], dtype=int, device=x.device)]  # type: ignore[arg-type]

    found = captured(last, X[0, 0])
    torch.testing.assert_close(found.module(X[1, 1]), last(X[1, 1]) + 1)
