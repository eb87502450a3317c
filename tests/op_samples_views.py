# SPDX-License-Identifier: Apache-2.0
"""Rows of the table of op samples: views, and what puts their pieces together again."""

import torch
from op_samples import f32, i64, index, mask, row, spec

aten = torch.ops.aten

row(
    "unfold",
    lambda x: (x.unfold(1, 3, 2), x.unfold(-1, 2, 1) * 2, x.unfold(0, 1, 1), x.unfold(1, 8, 8)),
    f32("a 8 b"),
)
row("unfold dynamic", lambda x: x.unfold(1, 3, 2).mean(-1), f32("a b"), a=4, b=9)
row("unfold of views", lambda x: x.t().unfold(0, 2, 1).sum(-1), f32("a 8"))
row("unfold bool", lambda m: m.unfold(1, 2, 2).any(-1), mask("a 8"))
row(
    "diagonal",
    lambda x: (x.diagonal(), x.diagonal(1), x.diagonal(-1, 1, 2) * 2, x.diagonal(0, -1, 0)),
    f32("a b c"),
    refuses=0,
)
row("diagonal_copy", lambda x: torch.diagonal_copy(x, 1, 1, 2) * 2, f32("a b c"), refuses=0)
row("diagonal far", lambda x: (x.diagonal(3) * 2, x.diagonal(-3) + 1), f32("4 4"))
row("trace by hand", lambda x: (x @ x).diagonal(dim1=-2, dim2=-1).sum(-1), f32("a b b"))
row("linalg.diagonal", lambda x: torch.linalg.diagonal(x, offset=1) * 2, f32("a b b"), refuses=0)
row(
    "as_strided",
    lambda x: (
        (x + 1).as_strided((x.shape[0], 4), (8, 2)),
        (x * 2).as_strided((x.shape[0], 3, 3), (8, 2, 1), 1),
        torch.as_strided_copy(x - 1, (x.shape[0], 5), (8, 1), 3),
    ),
    f32("a 8"),
    refuses=0,
)
row("ravel", lambda x: (x.ravel(), x.t().ravel()), f32("a b"))
row(
    "atleast",
    lambda x, y: (torch.atleast_1d(x), torch.atleast_2d(y), torch.atleast_3d(y)),
    f32(""),
    f32("a"),
)
row(
    "mH",
    lambda x: (
        x.mH,
        x.adjoint(),
        x[0].H,
        x.mT,
        aten.numpy_T(x[0]),
        aten.matrix_H(x[0]),
    ),
    f32("a b 4"),
)
row("lift_fresh", lambda x: aten.lift_fresh(x) * 2, f32("a b"))
row("transpose 0-d", lambda x: x.transpose(0, -1) * 2, f32(""))
row(
    "hsplit",
    lambda x: (*x.hsplit(2), *x.hsplit([2, 5]), *x.mT.vsplit(2), *x[..., None, :].dsplit([3])),
    f32("6 8"),
)
row("vsplit", lambda x: (*x.vsplit([1, 2]), *x[:, :, None].dsplit(1)), f32("3 b"))
row(
    "unsafe_split",
    lambda x: (
        *aten.unsafe_split.Tensor(x, 3, 1),
        *aten.unsafe_split_with_sizes(x, [3, 5], 1),
        *aten.unsafe_chunk(x, 2, -1),
        *aten.split_copy.Tensor(x, 3, 1),
        *aten.split_with_sizes_copy(x, [3, 5], 1),
        *aten.unbind_copy.int(x[:, :2], 1),
        *aten.split(x, 3, 1),
        *x.split([3, 5], 1),
    ),
    f32("a 8"),
)
row("view_copy", lambda x: torch.view_copy(x, [x.shape[0] * 2, 4]), f32("a 8"))
row(
    "meshgrid of one",
    lambda x: (*torch.meshgrid(x, indexing="ij"), *torch.meshgrid(x, indexing="xy")),
    f32("a"),
)
row(
    "meshgrid xy",
    lambda x, y, z: (*torch.meshgrid(x, y, indexing="xy"), *torch.meshgrid(x, y, z, indexing="xy")),
    f32("a"),
    f32("b"),
    f32("c"),
)
row("kron", lambda x, y: torch.kron(x, y), f32("a b"), f32("c 3"))
row("kron ranks", lambda x, y: (torch.kron(x, y), torch.kron(y, x)), f32("a b"), i64("c"))
row(
    "take_along_dim",
    lambda x, i: (torch.take_along_dim(x, i, 1), torch.take_along_dim(x, i, -1)),
    f32("a 8"),
    index("a c", 8),
    called=True,
)
row(
    "take_along_dim broadcast",
    lambda x, i: (torch.take_along_dim(x, i, 1), torch.take_along_dim(x, i[0, :, 0])),
    f32("a 8 b"),
    index("a c 1", 8),
    called=True,
)
row("take", lambda x, i: x.take(i), f32("3 8"), index("a b", 24), called=True)
row(
    "index_put plain",
    lambda x, i, s: (
        x.index_put((i,), s),
        aten.index_put(x, [None, i], s[:, :1].t().expand(8, -1)),
    ),
    f32("8 8"),
    index("a", 1),
    f32("a 8"),
    called=True,
    a=1,
)
row(
    "index_put mask",
    lambda x, m: x.index_put((m,), torch.tensor(2.0)),
    f32("a b"),
    mask("a b"),
    called=True,
)
row(
    "scatter_reduce",
    lambda x, i, s: [
        x.scatter_reduce(1, i, s, kind, include_self=keep)
        for kind in ("sum", "prod", "mean", "amax", "amin")
        for keep in (True, False)
    ],
    f32("a 8", 0.5, 2),
    index("a c", 8),
    f32("a c", 0.5, 2),
    called=True,
)
row(
    "scatter values",
    lambda x, i, h: (
        x.scatter(-1, i, 1.5),
        x.scatter(1, i, 2, reduce="multiply"),
        h.scatter_add(1, i, h[:, :1].expand(-1, i.shape[1])),
    ),
    f32("a 8"),
    index("a c", 8),
    spec("a 8", torch.float64),
    called=True,
)
row(
    "index_copy",
    lambda x, s: (
        x.index_copy(0, torch.tensor([1, 3]), s),
        x.index_fill(0, torch.tensor([0, 2]), 2.5),
        x.index_reduce(0, torch.tensor([1, 1]), s, "amax"),
    ),
    f32("4 b"),
    f32("2 b"),
    called=True,
)
row(
    "diagonal_scatter",
    lambda x, y: (x.diagonal_scatter(y), torch.diag_embed(y), torch.diag(y), torch.diag(x)),
    f32("b b"),
    f32("b"),
    called=True,
)
row("tril_indices", lambda x: x + torch.tril_indices(3, 3).sum(), f32("a"), called=True)
row(
    "trapezoid",
    lambda x: (torch.trapezoid(x), torch.diff(x), torch.cross(x, x * 2, dim=-1)),
    f32("a 3"),
    called=True,
)
row(
    "searchsorted",
    lambda x, y: (torch.searchsorted(x, y), torch.searchsorted(x, y, right=True, out_int32=True)),
    spec("9", torch.float32, 1, 1),
    f32("a b"),
    called=True,
)
row(
    "rot90",
    lambda x: (x.rot90(1, (0, 1)), x.fliplr(), x.flipud(), x.flip(-1)),
    f32("a b"),
    called=True,
)
row(
    "block_diag",
    lambda x, y: (torch.block_diag(x, y), torch.cartesian_prod(x[0], y[0])),
    f32("3 b"),
    f32("2 4"),
    called=True,
)
row("broadcast_tensors", lambda x, y: torch.broadcast_tensors(x, y), f32("a 1"), f32("b"))
row(
    "column_stack",
    lambda x, y: (torch.column_stack([x, y]), torch.dstack([x, y])),
    f32("a"),
    f32("a"),
    called=True,
)
