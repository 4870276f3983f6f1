"""Single steps and masked scans over time for LSTM and GRU; the scans have their gradients written out.

Each scan takes the input's share of the gate pre-activations for all T steps (one matrix product, made by the caller)
and adds the recurrent share step by step. The state is multiplied by ``keep[t]`` before step t, so that an episode may
begin anywhere: no padding, no packing.

The backward pass first computes, for a block of steps at once, the factors by which the state's gradient is multiplied.
Each step is then one matrix product and a few elementwise operations. One matrix product at the end gives the gradient
of the recurrent weights.

Gate order and formulas are those of ``torch.nn.LSTM`` and ``torch.nn.GRU``. The same code runs on every device and
never waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

_BLOCK = 1 << 16
"""Elements of a state over the steps of a block: a few such arrays fit into a core's second-level cache."""


def _blocks_backward(steps: int, like: Tensor) -> Iterator[tuple[int, int]]:
    """Ranges of steps, the last first: on the CPU with about `_BLOCK` elements each, elsewhere all steps at once, since
    there each operation costs a launch.

    Args:
        like: A state of one step.
    """
    span = max(1, _BLOCK // like.numel()) if like.device.type == "cpu" else steps
    for end in range(steps, 0, -span):
        yield max(0, end - span), end


def lstm_step(gates: Tensor, state: Tensor) -> Tensor:
    """The state ``[N, 2 H]``, hidden and cell, after pre-activations ``[N, 4 H]`` and the state before."""
    i, f, g, o = gates.chunk(4, -1)
    cell = f.sigmoid() * state.chunk(2, -1)[1] + i.sigmoid() * g.tanh()
    return torch.cat((o.sigmoid() * cell.tanh(), cell), -1)


def gru_step(projected: Tensor, recurred: Tensor, state: Tensor) -> Tensor:
    """The state ``[N, H]`` after the input's and the state's shares ``[N, 3 H]`` of the pre-activations and the state
    before."""
    size = state.shape[1]
    r, z = (projected[:, : 2 * size] + recurred[:, : 2 * size]).sigmoid().chunk(2, -1)
    n = torch.addcmul(projected[:, 2 * size :], r, recurred[:, 2 * size :]).tanh()
    return torch.lerp(n, state, z)


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
        weight, keep, gates, before_h, before_c, squashed = ctx.saved_tensors
        steps, rows, _, size = gates.shape
        d_gates = torch.empty_like(gates)
        dh, dc = grad[-1], torch.zeros_like(grad[-1])
        for begin, end in _blocks_backward(steps, dh):
            i, f, g, o = gates[begin:end].unbind(2)
            # Factors of dc for i, f, g and of dh for o, then the gradients.
            tanh_c, factors = (
                squashed[begin:end],
                d_gates[begin:end],
            )
            torch.mul(g * i, 1 - i, out=factors[:, :, 0])
            torch.mul(before_c[begin:end] * f, 1 - f, out=factors[:, :, 1])
            torch.mul(i, 1 - g * g, out=factors[:, :, 2])
            torch.mul(tanh_c * o, 1 - o, out=factors[:, :, 3])
            to_cell, carried = o * (1 - tanh_c * tanh_c), f * keep[begin:end]
            for t in range(end - 1, begin - 1, -1):
                dc.addcmul_(dh, to_cell[t - begin])
                d_gates[t, :, :3].mul_(dc.unsqueeze(1))
                d_gates[t, :, 3].mul_(dh)
                dh = torch.mm(d_gates[t].view(rows, 4 * size), weight).mul_(keep[t])
                dc.mul_(carried[t - begin])
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
        for begin, end in _blocks_backward(steps, dh):
            r, z, n = gates[begin:end].view(-1, rows, 3, size).unbind(2)
            # Of dh, for the recurrent share of each pre-activation, then the gradients.
            factors = d_recurrent[begin:end]
            to_new = torch.mul(1 - z, 1 - n * n, out=d_new[begin:end])
            torch.mul(to_new * from_state_n[begin:end], r * (1 - r), out=factors[:, :, 0])
            torch.mul(before[begin:end] - n, z * (1 - z), out=factors[:, :, 1])
            torch.mul(to_new, r, out=factors[:, :, 2])
            for t in range(end - 1, begin - 1, -1):
                d_recurrent[t].mul_(dh.unsqueeze(1))
                d_new[t].mul_(dh)
                dh = torch.addmm(dh * z[t - begin], d_recurrent[t].view(rows, 3 * size), weight).mul_(keep[t])
                if t:
                    dh.add_(grad[t - 1])
        flat = d_recurrent.view(steps * rows, 3 * size)
        d_weight, d_bias = flat.t() @ before.view(steps * rows, size), flat.sum(0)
        d_recurrent[:, :, 2] = d_new
        return d_recurrent.view(steps, rows, 3 * size), d_weight, d_bias, None, dh
