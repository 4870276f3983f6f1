"""Masked scans over time for LSTM and GRU in torch's operations, with their gradients written out: for GPUs, where each
operation of a loop under autograd is a launch. On the CPU :mod:`sfactory.kernels.recurrence` takes their place.

Each scan takes the input's share of the gate pre-activations for all T steps (one matrix product, made by the caller)
and adds the recurrent share step by step. The state is multiplied by ``keep[t]`` before step t, so that an episode may
begin anywhere: no padding, no packing.

The backward pass first computes, for all steps at once, the factors by which the state's gradient is multiplied. Each
step is then one matrix product and a few elementwise operations. One matrix product at the end gives the gradient of
the recurrent weights.

Gate order and formulas are those of :mod:`sfactory.model.cores`. The scans never wait for their device.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


class LSTMScan(Function):
    """Hidden states of an LSTM layer over T steps."""

    @staticmethod
    def forward(ctx, projected: Tensor, weight: Tensor, keep: Tensor, hidden: Tensor, cell: Tensor) -> Tensor:
        """
        Args:
            projected: ``[T, B, 4 H]``, input's share of the pre-activations with both biases.
            weight: ``[4 H, H]``, recurrent weights.
            keep: ``[T, B, 1]``, 0 where an episode begins, else 1, in the dtype of `projected`.
            hidden: ``[B, H]``, hidden state before step 0.
            cell: ``[B, H]``, cell state before step 0.

        Returns:
            ``[T, B, H]``.
        """
        steps, rows, size = (*projected.shape[:2], weight.shape[1])
        gates = torch.empty_like(projected)
        before_h, before_c, squashed, out = projected.new_empty(4, steps, rows, size).unbind()
        recurrent = weight.t()
        split = gates.view(steps, rows, 4, size)
        i_f, g, o = split.split((2, 1, 1), 2)
        views = (projected, gates, i_f, g.squeeze(2), o.squeeze(2), keep, before_h, before_c, squashed, out)
        for x, gate, i_f, g, o, kept, h_in, c_in, tanh_c, h in zip(*(view.unbind() for view in views), strict=True):
            torch.mul(hidden, kept, out=h_in)
            torch.mul(cell, kept, out=c_in)
            torch.addmm(x, h_in, recurrent, out=gate)
            i_f.sigmoid_()
            g.tanh_()
            o.sigmoid_()
            cell = torch.mul(c_in, i_f[:, 1]).addcmul_(i_f[:, 0], g)
            torch.tanh(cell, out=tanh_c)
            hidden = torch.mul(o, tanh_c, out=h)
        ctx.save_for_backward(weight, keep, split, before_h, before_c, squashed)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None, Tensor, Tensor]:
        weight, keep, gates, before_h, before_c, tanh_c = ctx.saved_tensors
        steps, rows, _, size = gates.shape
        d_gates = torch.empty_like(gates)
        dh, dc = grad[-1], torch.zeros_like(grad[-1])
        # Factors of dc for i, f, g and of dh for o, then the gradients.
        i, f, g, o = gates.unbind(2)
        torch.mul(g * i, 1 - i, out=d_gates[:, :, 0])
        torch.mul(before_c * f, 1 - f, out=d_gates[:, :, 1])
        torch.mul(i, 1 - g * g, out=d_gates[:, :, 2])
        torch.mul(tanh_c * o, 1 - o, out=d_gates[:, :, 3])
        to_cell, carried = o * (1 - tanh_c * tanh_c), f * keep
        for t in range(steps - 1, -1, -1):
            dc.addcmul_(dh, to_cell[t])
            d_gates[t, :, :3].mul_(dc.unsqueeze(1))
            d_gates[t, :, 3].mul_(dh)
            dh = torch.mm(d_gates[t].view(rows, 4 * size), weight).mul_(keep[t])
            dc.mul_(carried[t])
            if t:
                dh.add_(grad[t - 1])
        flat = d_gates.view(steps * rows, 4 * size)
        d_weight = flat.t() @ before_h.view(steps * rows, size)
        return d_gates.view(steps, rows, 4 * size), d_weight, None, dh, dc


class GRUScan(Function):
    """Hidden states of a GRU layer over T steps."""

    @staticmethod
    def forward(ctx, projected: Tensor, weight: Tensor, bias: Tensor, keep: Tensor, hidden: Tensor) -> Tensor:
        """
        Args:
            projected: ``[T, B, 3 H]``, input's share of the pre-activations with the input bias.
            weight: ``[3 H, H]``, recurrent weights.
            bias: ``[3 H]``, recurrent bias.
            keep: ``[T, B, 1]``, 0 where an episode begins, else 1, in the dtype of `projected`.
            hidden: ``[B, H]``, hidden state before step 0.

        Returns:
            ``[T, B, H]``.
        """
        steps, rows, size = (*projected.shape[:2], weight.shape[1])
        gates, from_state = torch.empty_like(projected), torch.empty_like(projected)
        before, out = projected.new_empty(2, steps, rows, size).unbind()
        recurrent = weight.t()
        x_rz, x_n = projected.split((2 * size, size), -1)
        s_rz, s_n = from_state.split((2 * size, size), -1)
        rz, n = gates.split((2 * size, size), -1)
        views = (x_rz, x_n, from_state, s_rz, s_n, rz, n, keep, before, out)
        for x1, x2, recurred, s1, s2, r_z, n, kept, h_in, h in zip(*(view.unbind() for view in views), strict=True):
            torch.mul(hidden, kept, out=h_in)
            torch.addmm(bias, h_in, recurrent, out=recurred)
            torch.add(x1, s1, out=r_z).sigmoid_()
            torch.addcmul(x2, r_z[:, :size], s2, out=n).tanh_()
            hidden = torch.lerp(n, h_in, r_z[:, size:], out=h)
        ctx.save_for_backward(weight, keep, gates, s_n, before)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, Tensor]:
        weight, keep, gates, from_state_n, before = ctx.saved_tensors
        steps, rows, size = before.shape
        d_recurrent = gates.new_empty(steps, rows, 3, size)
        d_new = torch.empty_like(before)
        dh = grad[-1]
        # Factors of dh for the recurrent share of each pre-activation, then the gradients.
        r, z, n = gates.view(-1, rows, 3, size).unbind(2)
        torch.mul(1 - z, 1 - n * n, out=d_new)
        torch.mul(d_new * from_state_n, r * (1 - r), out=d_recurrent[:, :, 0])
        torch.mul(before - n, z * (1 - z), out=d_recurrent[:, :, 1])
        torch.mul(d_new, r, out=d_recurrent[:, :, 2])
        for t in range(steps - 1, -1, -1):
            d_recurrent[t].mul_(dh.unsqueeze(1))
            d_new[t].mul_(dh)
            dh = torch.addmm(dh * z[t], d_recurrent[t].view(rows, 3 * size), weight).mul_(keep[t])
            if t:
                dh.add_(grad[t - 1])
        flat = d_recurrent.view(steps * rows, 3 * size)
        d_weight, d_bias = flat.t() @ before.view(steps * rows, size), flat.sum(0)
        d_recurrent[:, :, 2] = d_new
        return d_recurrent.view(steps, rows, 3 * size), d_weight, d_bias, None, dh
