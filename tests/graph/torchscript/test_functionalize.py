# SPDX-License-Identifier: Apache-2.0
"""Writes to a graph's own tensors go, where nobody can tell; all others stay."""

import re
from collections.abc import Callable

import pytest
import torch

import blade
from blade.graph.torchscript.functionalize import functionalize

Model = Callable[[torch.Tensor], object]


def _relu(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.relu_()
    return y + 1


def _chain(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    y += x
    y *= 3
    return y.sigmoid_()


def _residual_blocks(x: torch.Tensor) -> torch.Tensor:
    """As torchvision's ResNets write them: what a block added to is written to and added to in the next."""
    y = x * 2
    y += x
    y.relu_()
    z = y * 3
    z += y
    z.relu_()
    u = z * 4
    u += z
    return u.relu_()


def _smaller_operand(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y += x[0]
    return y


def _view_made_after(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.neg_()
    return y[0] * y[1]


def _view_read_before(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    z = y[0] + 1
    y.neg_()
    return y + z


def _returned_twice(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x * 2
    z = y.relu_()
    return y, z


def _filled(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.masked_fill_(x[0] > 0, -1.0)
    y.index_put_((torch.tensor([1]),), torch.tensor(7.0))
    return y.clamp_(-3, 3)


def _ints(x: torch.Tensor) -> torch.Tensor:
    y = (x > 0).long()
    y += (x > 1).long() * 16
    return y


def _answers(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Written to floats, what is true is 1.0; written to a mask it stays one."""
    y = x * 2
    y.gt_(0.5)
    z = (x + 1).logical_not_()
    return y, z, (x > 0).logical_xor_(x > 1)


def _through_view(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y[0].neg_()
    return y


def _view_read_after(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    z = y[0]
    y.neg_()
    return z + y


def _view_returned(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x * 2
    z = y.t()
    y.neg_()
    return y, z


def _other_dtype(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y += x.double()  # stays float32
    return y


def _by_a_scalar(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A 0-d operand of a higher dtype does not make the product more exact."""
    y, z = x * 2, x.sum() * 1
    y[:, 1:] *= torch.pi * x.double().sum()
    z += x.double().mean()
    return y, z


def _in_a_loop(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    for _ in range(x.size(0)):
        y.add_(1)
    return y


def _slices(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each write is seen by every other view, made before or after it."""
    out = torch.zeros(x.size(0), 6)
    left = out[:, :4]
    out[:, 1:5] = x
    out[..., 3:] += x[:, :3]
    out.select(1, 0).copy_(x[:, 0])
    out[:, -1:].fill_(1.0)
    out[:, ::2] *= 0.5
    left[0].zero_()
    return out, left + 1


def _mask(x: torch.Tensor) -> torch.Tensor:
    """As torchvision's Swin V2 makes it."""
    mask = x.new_zeros((4, 6))
    count = 0
    for h in ((0, -3), (-3, -1), (-1, 4)):
        for w in ((0, -2), (-2, 6)):
            mask[h[0] : h[1], w[0] : w[1]] = count
            count += 1
    return x.sum() * mask.view(2, 2, 3, 2).permute(0, 2, 1, 3).reshape(4, 6)


def _views_of_all(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.t().add_(1)
    y.view(-1)[::2] = 0.0
    y.unsqueeze(0).permute(2, 0, 1).mul_(3)
    y.view(-1, 2, 2).transpose(1, 2).select(1, 0).neg_()
    y.diagonal().fill_(7)
    y.narrow(1, 1, 2).clamp_(-1, 1)
    y.squeeze(0).detach().add_(1)
    return y


def _pieces(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    a, b = y.chunk(2, 1)
    b.mul_(3)
    c, d = y.split([1, 3], 1)
    c += b[:, :1]
    return y + a.sum() + d.sum()


def _scattered(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    column = torch.zeros(1, 4, dtype=torch.int64)
    y[:1].scatter_add_(0, column, x[:1])
    y[:, torch.tensor([0, 2])] = 1.5
    y[0][x[0] > 0] = -1.0
    y.index_add_(0, torch.tensor([0]), x[:1])
    return y.view(-1)


def _layout_kept(x: torch.Tensor) -> torch.Tensor:
    """`scatter` returns a row-major tensor, of which ``t().view`` would not be a view."""
    y = x.t() * 2
    y.scatter_(0, torch.zeros(1, 2, dtype=torch.int64), 1.0)
    return y.t().view(-1)


def _buffer_of_a_loop(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.zeros(x.size(0), 4)
    first = out[0]
    state = torch.zeros(4)
    for t in range(x.size(0)):
        state = torch.tanh(x[t] + state)
        out[t] = state
        if t > 0:
            out[t, 1:3] += first[1:3]
        else:
            state += 1
    return out, first


def _carried(x: torch.Tensor) -> torch.Tensor:
    """What a loop carries is another tensor in each iteration, and is written."""
    h = x * 2
    for _ in range(x.size(0)):
        h[:, 0] = 1.0
        h = h * 0.5
    h += 1
    return h


def _branches(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    row = y[0]
    if float(x.sum()) > 0:
        y.neg_()
        y[:, 0] = 5.0
    else:
        row += 1
    row.mul_(2)
    return y


def _appended(x: torch.Tensor) -> torch.Tensor:
    rows = [x[0] * 2]
    for t in range(x.size(0)):
        row = x[t] * 2
        row += 1
        rows.append(row)
    return torch.stack(rows)


def _copied_if_need_be(x: torch.Tensor) -> torch.Tensor:
    """Nothing reads ``y`` once its reshaped form is written, whether that is a view of it or not."""
    y = x * 2
    z = y.reshape(-1)
    z[1:3] = 0.0
    return z


def _no_dropout(x: torch.Tensor) -> torch.Tensor:
    y = torch.nn.functional.dropout(x * 2, 0.5, False, True)
    y.relu_()
    return y


def _shifted(x: torch.Tensor) -> torch.Tensor:
    """A product of two tensors is new memory, as in Funnel; that of one may be a view."""
    z = torch.einsum("ij,kj->ik", [x, x])[:, 1:]
    z *= 2
    return z.relu()


REPLACED = (
    _shifted,
    _relu,
    _chain,
    _residual_blocks,
    _smaller_operand,
    _view_made_after,
    _view_read_before,
    _returned_twice,
    _filled,
    _ints,
    _answers,
    _through_view,
    _view_read_after,
    _view_returned,
    _other_dtype,
    _by_a_scalar,
    _in_a_loop,
    _slices,
    _mask,
    _views_of_all,
    _pieces,
    _scattered,
    _layout_kept,
    _buffer_of_a_loop,
    _carried,
    _branches,
    _appended,
    _copied_if_need_be,
    _no_dropout,
)


def _of_caller(x: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    return x + 1


def _view_of_caller(x: torch.Tensor) -> torch.Tensor:
    x.view(-1).mul_(2)
    return x + 1


def _in_a_list(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    kept = [y, x]
    y.neg_()
    return torch.cat(kept) + y.sum()


def _random(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    return y.bernoulli_(1.0)


def _may_be_itself(x: torch.Tensor) -> torch.Tensor:
    return (
        x.clone().conj_physical_()
    )  # of a real tensor it is that tensor: without the copy, the caller's


def _read_elsewhere(x: torch.Tensor) -> torch.Tensor:
    """Whether ``z`` is a view of ``y`` depends on how that lies in memory."""
    y = x * 2
    z = y.reshape(-1)
    z.neg_()
    return y + z.sum()


def _view_of_another(x: torch.Tensor) -> torch.Tensor:
    """One branch writes what the caller gave."""
    y = x
    if x.size(0) > 2:
        y = x * 2
    y[0] = 1.0
    return y


def _returned_by_an_op(x: torch.Tensor) -> torch.Tensor:
    y = torch.einsum("ij->ji", x)  # a view, although its schema promises none
    y[0] = 1.0
    return y + x.sum()


def _kept_in_a_list(x: torch.Tensor) -> torch.Tensor:
    rows = [x[0] * 2]
    for t in range(x.size(0)):
        row = x[t] * 2
        rows.append(row)
        row += 1
    return torch.stack(rows)


def _squeezed(x: torch.Tensor) -> torch.Tensor:
    y = (x * 2)[:1]
    y.squeeze_(0)
    y.relu_()
    return y


KEPT = (
    _of_caller,
    _view_of_caller,
    _in_a_list,
    _random,
    _may_be_itself,
    _read_elsewhere,
    _view_of_another,
    _returned_by_an_op,
    _kept_in_a_list,
    _squeezed,
)


def _script(model: Model) -> torch.jit.ScriptModule:
    class Holder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.function = torch.jit.script(model)

        def forward(self, x: torch.Tensor):  # type: ignore[no-untyped-def]
            return self.function(x)

    scripted = torch.jit.freeze(torch.jit.script(Holder().eval()), optimize_numerics=False)
    torch._C._jit_pass_inline(scripted.graph)
    return scripted


def _trace(model: Model) -> torch.jit.ScriptModule:
    class Holder(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> object:
            return model(x)

    return torch.jit.freeze(torch.jit.trace(Holder().eval(), (_sample(),)))


def _sample(rows: int = 3, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed))


def _writes(module: torch.jit.ScriptModule) -> int:
    return len(re.findall(r"aten::[a-z_]+_\(", str(module.graph)))


def _storages(returned: object) -> list[int]:
    """For each returned tensor, the first one that shares its memory."""
    tensors = returned if isinstance(returned, tuple) else (returned,)
    places = [t.untyped_storage().data_ptr() for t in tensors]
    return [places.index(p) for p in places]


def _check_same(model: Model, module: torch.jit.ScriptModule) -> None:
    for rows in (3, 2, 5):
        ours, theirs = _sample(rows, seed=rows), _sample(rows, seed=rows)
        got, want = module(ours), model(theirs)
        torch.testing.assert_close(got, want, rtol=0, atol=0)
        assert torch.equal(ours, theirs)
        assert _storages(got) == _storages(want)


@pytest.mark.parametrize("model", REPLACED)
def test_is_replaced(model: Model) -> None:
    module = _script(model)
    assert _writes(module)
    functionalize(module, [(_sample(),)])
    assert not _writes(module), module.graph
    torch._C._jit_pass_lint(module.graph)
    _check_same(model, module)


@pytest.mark.parametrize("model", KEPT)
def test_is_kept(model: Model) -> None:
    module = _script(model)
    before = _writes(module)
    functionalize(module, [(_sample(),)])
    assert _writes(module) == before > 0, module.graph
    _check_same(model, module)


def test_still_raises_where_the_operand_is_larger() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        y = x[:1] * 2
        y += x
        return y

    module = _script(model)
    functionalize(module, [(_sample(rows=1),)])
    assert not _writes(module)
    with pytest.raises(RuntimeError, match="expand"):
        module(_sample(rows=3))


def test_a_number_that_was_traced() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y[:, :2] *= 0.1
        y += 3
        return y

    module = _trace(model)
    assert _writes(module)
    functionalize(module, [(_sample(),)])
    assert not _writes(module)
    _check_same(model, module)


def test_a_branch_that_only_a_probe_reaches() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        if x.size(0) > 4:
            z = y.sum(0)
            z += x[0].double()
            return z
        return y

    module = _script(model)
    functionalize(module, [(_sample(rows=3),)])
    assert _writes(module)
    functionalize(module, [(_sample(rows=3),)], [(_sample(rows=5),)])
    assert not _writes(module)
    for rows in (3, 6):
        torch.testing.assert_close(module(_sample(rows=rows)), model(_sample(rows=rows)))


def test_returned_tensors_are_still_one() -> None:
    module = _script(_returned_twice)
    functionalize(module, [(_sample(),)])
    first, second = module(_sample())
    assert first.data_ptr() == second.data_ptr()


@pytest.mark.needs("runtime", "torch_mlir")
def test_a_block_with_writes_is_one_cluster() -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)
            self.act = torch.nn.ReLU(inplace=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.second(self.act(self.first(x)))
            y += x
            return torch.sigmoid_(y)

    torch.manual_seed(0)
    optimized = blade.optimize(Block().eval(), _sample(), blade.Config(timing=False))
    report = blade.report(optimized)
    assert [c.backend for c in report.clusters] == ["disc"]
    assert not report.outside
