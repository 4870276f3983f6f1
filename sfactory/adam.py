"""Adam in one fused pass over one flat parameter vector, without what ``torch.optim`` brings along.

``torch.optim.Adam`` imports torch's compiler when it is made: a second of start-up and 150 MB in every learner that
never compiles.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Adam:
    """Adam (Kingma & Ba 2015, algorithm 1), the fused kernel of torch.

    Args:
        parameter: float32 ``[size]`` with a gradient that stays in place.
        lr: Learning rate; may be changed between steps, also to a float64 tensor ``[]`` on the parameter's device.
        betas: Decays of the first and second moment; may be changed, as may `eps`.
        eps: Added to the root of the second moment.

    Attributes:
        rate: Unset, or a float32 tensor ``[]`` on the parameter's device that steps read in place of `lr`, so that
            recorded steps follow it; :meth:`update_rate` sets it.
    """

    def __init__(self, parameter: Tensor, lr: float, betas: tuple[float, float], eps: float) -> None:
        self.lr: float | Tensor = lr
        self.rate: Tensor | None = None
        self.betas, self.eps = betas, eps
        self._parameter = parameter
        self._first, self._second = (
            torch.zeros_like(parameter, requires_grad=False),
            torch.zeros_like(parameter, requires_grad=False),
        )
        self._steps = torch.zeros((), dtype=torch.float32, device=parameter.device)

    @torch.no_grad()
    def update_rate(self) -> None:
        """Let `rate` be what `lr` is, without waiting for the device."""
        if self.rate is None:
            self.rate = torch.empty((), dtype=torch.float32, device=self._parameter.device)
        if isinstance(self.lr, Tensor):
            self.rate.copy_(self.lr)
        else:
            self.rate.fill_(self.lr)

    @torch.no_grad()
    def step(self, gradient_divisor: Tensor, skip: Tensor) -> None:
        """One step along the parameter's gradient.

        Args:
            gradient_divisor: float32 ``[]``; the gradient is divided by it.
            skip: float32 ``[]``; 1: nothing changes, 0: the step is made.
        """
        self._steps += 1 - skip
        lr = self.lr if self.rate is None else self.rate
        lr = lr.float() if isinstance(lr, Tensor) and lr.is_cuda else lr  # what the kernels take
        torch._fused_adam_(
            [self._parameter], [self._parameter.grad], [self._first], [self._second], [], [self._steps],
            lr=lr, beta1=self.betas[0], beta2=self.betas[1], weight_decay=0.0, eps=self.eps, amsgrad=False,
            maximize=False,
            grad_scale=gradient_divisor, found_inf=skip,
        )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """Moments and number of steps; the settings are not part of it."""
        return {"first": self._first, "second": self._second, "steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, tensor in self.state_dict().items():
            tensor.copy_(state[name])
