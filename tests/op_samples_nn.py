# SPDX-License-Identifier: Apache-2.0
"""Rows of the table of op samples: layers with weights, pooling, resampling, quantization."""

import torch
from op_samples import f32, row

aten = torch.ops.aten

# Recurrent layers


row(
    "lstm",
    lambda x, h, w, u, b: torch.lstm(x, (h, h), [w, u, b, b], True, 1, 0.0, False, False, False),
    f32("a b 4"),
    f32("1 b 5"),
    f32("20 4"),
    f32("20 5"),
    f32("20"),
    called=True,
)
row(
    "lstm both ways",
    lambda x, h, w, u, b, v: torch.lstm(
        x, (h, h), [w, u, b, b] * 2 + [v, u, b, b] * 2, True, 2, 0.0, False, True, True
    ),
    f32("a b 4"),
    f32("4 a 5"),
    f32("20 4"),
    f32("20 5"),
    f32("20"),
    f32("20 10"),
    called=True,
)
row(
    "lstm projected",
    lambda x, h, c, w, u, v: torch.lstm(x, (h, c), [w, u, v], False, 1, 0.0, False, False, False),
    f32("a b 4"),
    f32("1 b 3"),
    f32("1 b 5"),
    f32("20 4"),
    f32("20 3"),
    f32("3 5"),
    called=True,
)
for _name, _op in (("gru", torch.gru), ("rnn_tanh", torch.rnn_tanh), ("rnn_relu", torch.rnn_relu)):
    _rows = 15 if _name == "gru" else 5
    row(
        _name,
        lambda x, h, w, u, b, op=_op: op(x, h, [w, u, b, b], True, 1, 0.0, False, False, True),
        f32("a b 4"),
        f32("1 a 5"),
        f32(f"{_rows} 4"),
        f32(f"{_rows} 5"),
        f32(f"{_rows}"),
        called=True,
    )
row(
    "rnn cells",
    lambda x, h, w, u, b: (torch.rnn_tanh_cell(x, h, w, u, b, b), torch.rnn_relu_cell(x, h, w, u)),
    f32("a 4"),
    f32("a 5"),
    f32("5 4"),
    f32("5 5"),
    f32("5"),
    called=True,
)
