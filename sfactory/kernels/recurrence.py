"""The scans of :mod:`sfactory.kernels.scans` and the steps of :mod:`sfactory.model.cores` with all elementwise work of
a step in one compiled pass, for float32 on the CPU.

The matrix products stay BLAS's. Of 128 units, products included, a sample of training costs 5.9 us (LSTM) and 4.2 (GRU)
against 6.9 and 5.4; without them a row of a step 0.29 and 0.14 against 1.06 and 0.59 (perf/kernels.py). The tests hold
all of it to the plain versions.
"""

from __future__ import annotations

import numba
import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from sfactory.kernels.tanh import tanh_of

_HALF, _ONE = np.float32(0.5), np.float32(1)


def lstm_step(gates: Tensor, state: Tensor) -> Tensor:
    """:func:`sfactory.model.cores.lstm_step`, without a gradient."""
    after = torch.empty(state.shape)
    _lstm_step(gates.detach().numpy(), state.detach().numpy(), after.numpy())
    return after


def gru_step(projected: Tensor, recurred: Tensor, state: Tensor) -> Tensor:
    """:func:`sfactory.model.cores.gru_step`, without a gradient."""
    after = torch.empty(state.shape)
    _gru_step(projected.detach().numpy(), recurred.detach().numpy(), state.detach().numpy(), after.numpy())
    return after


class CompiledLSTMScan(Function):
    """:class:`sfactory.kernels.scans.LSTMScan`, with the same arguments."""

    @staticmethod
    def forward(ctx, projected: Tensor, weight: Tensor, keep: Tensor, hidden: Tensor, cell: Tensor) -> Tensor:
        steps, rows, size = (*projected.shape[:2], weight.shape[1])
        gates = torch.empty_like(projected)
        before_h, before_c = projected.new_empty(2, steps + 1, rows, size).unbind()
        squashed, out = projected.new_empty(2, steps, rows, size).unbind()
        torch.mul(hidden, keep[0], out=before_h[0])
        torch.mul(cell, keep[0], out=before_c[0])
        arrays = [tensor.numpy() for tensor in (gates, keep, before_h, before_c, squashed, out)]
        recurrent = weight.t()
        for t, (x, h_in, gate) in enumerate(
            zip(projected.unbind(), before_h[:-1].unbind(), gates.unbind(), strict=True)
        ):
            torch.addmm(x, h_in, recurrent, out=gate)
            _lstm_forward(t, *arrays)
        ctx.save_for_backward(weight, keep, gates, before_h[:-1], before_c, squashed)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None, Tensor, Tensor]:
        weight, keep, gates, before_h, before_c, squashed = ctx.saved_tensors
        steps, rows, size = before_h.shape
        d_gates = torch.empty_like(gates)
        dh, dc = torch.zeros(2, rows, size).unbind()
        arrays = [tensor.numpy() for tensor in (grad.contiguous(), keep, gates, before_c, squashed, dh, dc, d_gates)]
        for t in range(steps - 1, -1, -1):
            _lstm_backward(t, *arrays)
            torch.mm(d_gates[t], weight, out=dh)
        d_weight = d_gates.view(-1, 4 * size).t() @ before_h.view(-1, size)
        return d_gates, d_weight, None, dh.mul_(keep[0]), dc.mul_(keep[0])


class CompiledGRUScan(Function):
    """:class:`sfactory.kernels.scans.GRUScan`, with the same arguments."""

    @staticmethod
    def forward(ctx, projected: Tensor, weight: Tensor, bias: Tensor, keep: Tensor, hidden: Tensor) -> Tensor:
        steps, rows, size = (*projected.shape[:2], weight.shape[1])
        gates = torch.empty_like(projected)
        before = projected.new_empty(steps + 1, rows, size)
        from_state_n, out = projected.new_empty(2, steps, rows, size).unbind()
        recurred = projected.new_empty(rows, 3 * size)
        torch.mul(hidden, keep[0], out=before[0])
        arrays = [tensor.detach().numpy() for tensor in (projected, recurred, gates, keep, from_state_n, before, out)]
        recurrent = weight.t()
        for t, h_in in enumerate(before[:-1].unbind()):
            torch.addmm(bias, h_in, recurrent, out=recurred)
            _gru_forward(t, *arrays)
        ctx.save_for_backward(weight, keep, gates, from_state_n, before[:-1])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, Tensor]:
        weight, keep, gates, from_state_n, before = ctx.saved_tensors
        steps, rows, size = before.shape
        d_recurrent, d_new = torch.empty_like(gates), torch.empty_like(before)
        dh, carried = torch.zeros(2, rows, size).unbind()
        arrays = [
            tensor.numpy()
            for tensor in (grad.contiguous(), keep, gates, from_state_n, before, dh, carried, d_recurrent, d_new)
        ]
        for t in range(steps - 1, -1, -1):
            _gru_backward(t, *arrays)
            torch.addmm(carried, d_recurrent[t], weight, out=dh)
        flat = d_recurrent.view(-1, 3 * size)
        d_weight, d_bias = flat.t() @ before.view(-1, size), flat.sum(0)
        d_recurrent[:, :, 2 * size :] = d_new
        return d_recurrent, d_weight, d_bias, None, dh.mul_(keep[0])


@numba.njit(cache=True, nogil=True, fastmath={"contract"}, error_model="numpy", inline="always")
def _sigmoid_of(x):
    return _HALF * tanh_of(_HALF * x) + _HALF


# Below, a loop writes to few arrays, because the compiler does sixteen units at once only where it can tell that no two
# arrays overlap. Where it cannot, by their addresses, it does one after another. Both give the same bits as long as no
# loop adds two products: either one may be rounded before the other is added to it.


@numba.njit(cache=True, nogil=True, fastmath={"contract"}, error_model="numpy")
def _lstm_step(gates, state, after):
    size = state.shape[1] // 2
    for row in range(state.shape[0]):
        gate, cell, h = gates[row], after[row, size:], after[row, :size]
        for j in range(size):
            cell[j] = _sigmoid_of(gate[j]) * tanh_of(gate[2 * size + j])
        for j in range(size):
            cell[j] += _sigmoid_of(gate[size + j]) * state[row, size + j]
        for j in range(size):
            h[j] = _sigmoid_of(gate[3 * size + j]) * tanh_of(cell[j])


@numba.njit(cache=True, nogil=True, fastmath={"contract"}, error_model="numpy")
def _gru_step(projected, recurred, state, after):
    size = state.shape[1]
    for row in range(state.shape[0]):
        for j in range(size):
            r = _sigmoid_of(projected[row, j] + recurred[row, j])
            z = _sigmoid_of(projected[row, size + j] + recurred[row, size + j])
            n = tanh_of(projected[row, 2 * size + j] + r * recurred[row, 2 * size + j])
            after[row, j] = n + z * (state[row, j] - n)


@numba.njit(cache=True, nogil=True, fastmath={"contract"}, error_model="numpy")
def _lstm_forward(t, gates, keep, before_h, before_c, squashed, out):
    """Activate the gates of step t, fill its outputs, and what step t + 1 begins with."""
    steps, rows, size = out.shape
    for row in range(rows):
        kept = keep[min(t + 1, steps - 1), row, 0]
        gate, c_in, tanh_c, h = gates[t, row], before_c[t, row], squashed[t, row], out[t, row]
        next_h, next_c = before_h[t + 1, row], before_c[t + 1, row]
        for j in range(2 * size):
            gate[j] = _sigmoid_of(gate[j])
        for j in range(2 * size, 3 * size):
            gate[j] = tanh_of(gate[j])
        for j in range(3 * size, 4 * size):
            gate[j] = _sigmoid_of(gate[j])
        for j in range(size):
            next_c[j] = gate[j] * gate[2 * size + j]
        for j in range(size):
            next_c[j] += gate[size + j] * c_in[j]
        for j in range(size):
            tanh_c[j] = tanh_of(next_c[j])
            next_c[j] *= kept
        for j in range(size):
            h[j] = gate[3 * size + j] * tanh_c[j]
            next_h[j] = h[j] * kept


@numba.njit(cache=True, nogil=True, fastmath={"contract"}, error_model="numpy")
def _lstm_backward(t, grad, keep, gates, before_c, squashed, dh, dc, d_gates):
    """Fill the gradients of step t's pre-activations; `dh` and `dc` come from step t + 1, and `dc` becomes what goes to
    step t - 1."""
    steps, rows, size = grad.shape
    for row in range(rows):
        kept = keep[min(t + 1, steps - 1), row, 0]
        c_in, tanh_c, above, d_h, d_c = before_c[t, row], squashed[t, row], grad[t, row], dh[row], dc[row]
        gate, d_gate = gates[t, row], d_gates[t, row]
        i, f, g, o = gate[:size], gate[size : 2 * size], gate[2 * size : 3 * size], gate[3 * size :]
        d_i, d_f, d_g, d_o = d_gate[:size], d_gate[size : 2 * size], d_gate[2 * size : 3 * size], d_gate[3 * size :]
        for j in range(size):
            d_h[j] = d_h[j] * kept + above[j]
        for j in range(size):
            d_c[j] *= kept
        for j in range(size):
            d_c[j] += d_h[j] * o[j] * (_ONE - tanh_c[j] * tanh_c[j])
        for j in range(size):
            d_o[j] = d_h[j] * tanh_c[j] * o[j] * (_ONE - o[j])
        for j in range(size):
            d_i[j] = d_c[j] * g[j] * i[j] * (_ONE - i[j])
        for j in range(size):
            d_g[j] = d_c[j] * i[j] * (_ONE - g[j] * g[j])
        for j in range(size):
            d_f[j] = d_c[j] * c_in[j] * f[j] * (_ONE - f[j])
        for j in range(size):
            d_c[j] *= f[j]


@numba.njit(cache=True, nogil=True, fastmath={"contract"}, error_model="numpy")
def _gru_forward(t, projected, recurred, gates, keep, from_state_n, before, out):
    """Fill the gates and outputs of step t, and what step t + 1 begins with."""
    steps, rows, size = out.shape
    for row in range(rows):
        kept = keep[min(t + 1, steps - 1), row, 0]
        x, s, gate, s_n = projected[t, row], recurred[row], gates[t, row], from_state_n[t, row]
        h_in, h, next_h = before[t, row], out[t, row], before[t + 1, row]
        for j in range(2 * size):
            gate[j] = _sigmoid_of(x[j] + s[j])
        for j in range(size):
            s_n[j] = s[2 * size + j]
        for j in range(size):
            gate[2 * size + j] = tanh_of(x[2 * size + j] + gate[j] * s_n[j])
        for j in range(size):
            n = gate[2 * size + j]
            h[j] = n + gate[size + j] * (h_in[j] - n)
        for j in range(size):
            next_h[j] = h[j] * kept


@numba.njit(cache=True, nogil=True, fastmath={"contract"}, error_model="numpy")
def _gru_backward(t, grad, keep, gates, from_state_n, before, dh, carried, d_recurrent, d_new):
    """Fill the gradients of the state's shares of step t's pre-activations, and in `d_new` of the new state's
    pre-activation.

    `dh` comes from step t + 1, `carried` passes by the gates to step t - 1.
    """
    steps, rows, size = grad.shape
    for row in range(rows):
        kept = keep[min(t + 1, steps - 1), row, 0]
        s_n, h_in, above, d_h, past = from_state_n[t, row], before[t, row], grad[t, row], dh[row], carried[row]
        gate, d_gate, d_n = gates[t, row], d_recurrent[t, row], d_new[t, row]
        r, z, n = gate[:size], gate[size : 2 * size], gate[2 * size :]
        d_r, d_z, d_s = d_gate[:size], d_gate[size : 2 * size], d_gate[2 * size :]
        for j in range(size):
            d_h[j] = d_h[j] * kept + above[j]
        for j in range(size):
            d_n[j] = d_h[j] * (_ONE - z[j]) * (_ONE - n[j] * n[j])
        for j in range(size):
            d_r[j] = d_n[j] * s_n[j] * r[j] * (_ONE - r[j])
        for j in range(size):
            d_z[j] = d_h[j] * (h_in[j] - n[j]) * z[j] * (_ONE - z[j])
        for j in range(size):
            past[j] = d_h[j] * z[j]
        for j in range(size):
            d_s[j] = d_n[j] * r[j]
