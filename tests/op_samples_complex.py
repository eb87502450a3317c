# SPDX-License-Identifier: Apache-2.0
"""Rows of the table of op samples: complex numbers, which are made and read by real ones."""

import torch
from op_samples import f32, row

aten = torch.ops.aten


def _complex(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.complex(x, y)


row(
    "parts of complex",
    lambda x, y: (_complex(x, y).real * 2, _complex(x, y).imag + 1, _complex(x, y).t().real),
    f32("a b"),
    f32("a b"),
    called=True,
)
row("real of real", lambda x: x.real * 2, f32("a b"))
row(
    "complex as pairs",
    lambda x: torch.view_as_real(torch.view_as_complex(x * 2) * 2) + 1,
    f32("a b 2"),
    called=True,
)
row(
    "conjugate",
    lambda x, y: (
        torch.view_as_real((_complex(x, y).conj() * _complex(y, x)).resolve_conj()),
        torch.view_as_real(aten._conj(_complex(x, y)).resolve_neg().resolve_conj()) * 2,
        aten.conj(x) + 1,
    ),
    f32("a b"),
    f32("a b"),
    called=True,
)
row(
    "complex arithmetic",
    lambda x, y: (
        (_complex(x, y) * _complex(y, x) + 1).abs(),
        torch.cat([_complex(x, y), _complex(y, x)], 1)[:, 1:].t().imag,
        _complex(x, y).reshape(-1).real,
        _complex(x, y)[:, None].expand(-1, 2, -1).permute(2, 0, 1).reshape(x.shape[1], -1).imag,
    ),
    f32("a b"),
    f32("a b"),
    called=True,
)
row(
    "complex copies seen otherwise",
    lambda x, y: (
        aten._unsafe_view(_complex(x, y)[None].expand(3, -1, -1).clone(), [-1, 2]).imag,
        aten.view_copy(_complex(x, y), [-1]).real,
        torch.ravel(_complex(y, x)[:, None].expand(-1, 2, -1)).imag,
        aten.lift_fresh_copy(_complex(x, y)).t().real,
    ),
    f32("a 4"),
    f32("a 4"),
    called=True,
)
row(
    "complex returned",
    lambda x, y: (_complex(x, y), _complex(y, x).t(), torch.zeros_like(_complex(x, y))),
    f32("a b"),
    f32("a b"),
    called=True,
)
row(
    "fourier",
    lambda x: torch.fft.irfft(torch.fft.rfft(torch.relu(x))[..., :3] * 2, n=8) + 1,
    f32("a 8"),
    called=True,
)
