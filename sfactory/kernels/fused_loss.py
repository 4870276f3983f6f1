"""The loss of :mod:`sfactory.losses` with its gradients and sums in one Triton kernel, for GPUs.

A hundred small tensor operations cost a GPU as many launches, two to three microseconds each even within a CUDA graph.
The gradients are written out as in :mod:`sfactory.kernels.losses`, which does the same on the CPU. With
``TRITON_INTERPRET=1`` the kernel runs on the CPU too, which is how the tests hold it to the plain loss.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from sfactory.data.batch import Batch, Samples, Targets
from sfactory.data.chunks import Columns
from sfactory.losses import SUMS, exploration_coef
from sfactory.objective import ActionDensities, Gradients, Objective

BLOCK = 256
"""Samples of a program of the kernel."""


def triton_is_there() -> bool:
    return importlib.util.find_spec("triton") is not None


class FusedObjective(Objective):
    """The objective with the loss of a chunk, and the way back to log-probabilities, values and entropies, in one
    kernel. The densities themselves stay tensor operations."""

    def gradients(
        self, densities: ActionDensities, samples: Batch | Samples, targets: Targets, columns: Columns, totals: Tensor
    ) -> Gradients:
        own, part = densities, targets.select(columns)
        value = own.value[: len(own.log_prob)]
        of_log_prob, of_value, of_exploration, sums = self._loss(own.log_prob, value, own.exploration, part, totals)
        pairs = (own.log_prob, of_log_prob), (value, of_value), (own.exploration, of_exploration)
        outputs, gradients = zip(*((x, of_x) for x, of_x in pairs if x.requires_grad), strict=True)
        inputs = own.params, own.value
        of_params, of_value = torch.autograd.grad(outputs, inputs, gradients, materialize_grads=True)
        return Gradients(of_params, of_value, sums)

    def _loss(
        self, log_prob: Tensor, value: Tensor, exploration: Tensor, targets: Targets, totals: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Gradients with respect to the first three, and the sums of :func:`sfactory.losses.chunk_loss`."""
        from sfactory.kernels.triton_loss import loss_and_gradients  # makes its kernel when it is imported

        inputs = [x.detach().contiguous() for x in (log_prob, value, exploration, *vars(targets).values())]
        inputs[-1] = inputs[-1].view(torch.uint8)
        gradients = (torch.empty_like(inputs[0]), torch.empty_like(inputs[0]), torch.empty_like(inputs[0]))
        count = log_prob.numel()
        programs = -(-count // BLOCK)
        partial = torch.empty(programs, SUMS, dtype=torch.float64, device=log_prob.device)
        loss = self.config.loss
        weights = loss.clip, loss.value_clip, loss.value_coef, exploration_coef(loss), loss.tv_limit
        with torch.cuda.device_of(log_prob):  # Triton launches on the current device, wherever its tensors are
            loss_and_gradients[(programs,)](
                *inputs, totals, *gradients, partial, count,
                *map(float, weights),  # an integer 1 would be a constant of the kernel
                self.algo.surrogate, self.bounds_shift, loss.value_clip > 0, SUMS, BLOCK,
            )  # fmt: skip
        return *gradients, partial.sum(0)
