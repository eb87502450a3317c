# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers with what torch's own lack: lengths, peepholes, clipping, other activations."""

import torch
from torch import Tensor


def reordered(w: Tensor, order: list[int]) -> Tensor:
    """The blocks of rows of ``w`` in another order."""
    parts = torch.chunk(w, len(order), 0)
    return torch.cat([parts[k] for k in order], 0)


def activate(x: Tensor, name: str, alpha: float, beta: float) -> Tensor:
    if name == "Sigmoid":
        return torch.sigmoid(x)
    if name == "Tanh":
        return torch.tanh(x)
    if name == "Relu":
        return torch.relu(x)
    if name == "Affine":
        return alpha * x + beta
    if name == "LeakyRelu":
        return torch.where(x >= 0, x, alpha * x)
    if name == "ThresholdedRelu":
        return torch.where(x >= alpha, x, torch.zeros_like(x))
    if name == "ScaledTanh":
        return alpha * torch.tanh(beta * x)
    if name == "HardSigmoid":
        return torch.clamp(alpha * x + beta, min=0, max=1)
    if name == "Elu":
        return torch.where(x >= 0, x, alpha * (torch.exp(x) - 1))
    if name == "Softsign":
        return x / (1 + torch.abs(x))
    return torch.log(1 + torch.exp(x))


def clipped(x: Tensor, limit: float) -> Tensor:
    return torch.clamp(x, min=-limit, max=limit) if limit > 0 else x


def recurrent(
    kind: str,
    x: Tensor,
    w: Tensor,
    r: Tensor,
    b: Tensor,
    h: Tensor,
    c: Tensor,
    peephole: Tensor,
    lengths: Tensor | None,
    back: bool,
    names: list[str],
    alphas: list[float],
    betas: list[float],
    limit: float,
    reset_after: bool,
    couples: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """One direction of an RNN, a GRU or an LSTM over x [time, batch, in]: all states, the last one, the last cell.

    ``couples``: the forget gate is 1 minus the input gate.
    """
    size = h.size(-1)
    half = b.size(0) // 2
    wb, rb = b[:half], b[half:]
    steps: list[Tensor] = []
    for k in range(x.size(0)):
        t = x.size(0) - 1 - k if back else k
        given = torch.matmul(x[t], w.t()) + wb
        new, cell = h, c
        if kind == "RNN":
            total = given + torch.matmul(h, r.t()) + rb
            new = activate(clipped(total, limit), names[0], alphas[0], betas[0])
        elif kind == "GRU":
            gates = given[:, : 2 * size] + torch.matmul(h, r[: 2 * size].t()) + rb[: 2 * size]
            gates = activate(clipped(gates, limit), names[0], alphas[0], betas[0])
            z, reset = gates[:, :size], gates[:, size:]
            if reset_after:
                inner = reset * (torch.matmul(h, r[2 * size :].t()) + rb[2 * size :])
            else:
                inner = torch.matmul(reset * h, r[2 * size :].t()) + rb[2 * size :]
            hidden = clipped(given[:, 2 * size :] + inner, limit)
            hidden = activate(hidden, names[1], alphas[1], betas[1])
            new = (1 - z) * hidden + z * h
        else:
            total = given + torch.matmul(h, r.t()) + rb
            i = total[:, :size] + peephole[:size] * c
            f = total[:, 2 * size : 3 * size] + peephole[2 * size :] * c
            i = activate(clipped(i, limit), names[0], alphas[0], betas[0])
            f = activate(clipped(f, limit), names[0], alphas[0], betas[0])
            if couples:
                f = 1 - i
            g = activate(clipped(total[:, 3 * size :], limit), names[1], alphas[1], betas[1])
            cell = f * c + i * g
            o = total[:, size : 2 * size] + peephole[size : 2 * size] * cell
            o = activate(clipped(o, limit), names[0], alphas[0], betas[0])
            new = o * activate(cell, names[2], alphas[2], betas[2])
        if lengths is not None:
            going = (t < lengths).unsqueeze(1)
            steps.append(torch.where(going, new, torch.zeros_like(new)))
            h, c = torch.where(going, new, h), torch.where(going, cell, c)
        else:
            steps.append(new)
            h, c = new, cell
    if back:
        steps.reverse()
    return torch.stack(steps), h, c
