"""The unit of the critic, as the learner moves it."""

from __future__ import annotations

import torch
from torch import Tensor

from sfactory.model.interface import Model
from sfactory.model.normalizer import RunningMeanStd


class CriticUnits:
    """The unit in which the critic predicts returns: in it their running mean is 0 and their standard deviation 1.

    When the moments move, the critic's last layer is corrected so that it predicts the same returns as before (PopArt:
    van Hasselt et al. 2016, "Learning values across many orders of magnitude", algorithm 1). Without that every move
    would be an error in all its values, which is largest at the start of a run, where episodes are short and the first
    returns tell little.

    Args:
        model: Whose ``unit`` follows, and whose last layer is corrected by ``rescale_values(scale, shift)``, if it has
            such a method.
        normalize: Off: the unit is that of returns themselves, whatever they are.

    Attributes:
        moments: Of the returns so far.
    """

    def __init__(self, model: Model, normalize: bool) -> None:
        self._model, self._normalize = model, normalize
        self.moments = RunningMeanStd().to(model.unit.mean.device)

    def to_returns(self, values: Tensor) -> Tensor:
        """The critic's values in units of return."""
        return values * self.moments.std + self.moments.mean if self._normalize else values

    def from_returns(self, returns: Tensor) -> Tensor:
        """Returns in the critic's units."""
        return (returns - self.moments.mean) / self.moments.std if self._normalize else returns

    def begin_at(self, returns: Tensor) -> None:
        """Let an untrained critic predict these returns, a number ``[]``, before it learns of any."""
        if self._normalize:
            self.moments.mean.copy_(returns)
            self._tell_model()

    @torch.no_grad()
    def update(self, returns: Tensor, valid: Tensor) -> None:
        """Learn of returns ``[...]`` where bool ``valid [...]``, and keep the critic's predictions as they are."""
        if not self._normalize:
            return
        mean, std = self.moments.mean.clone(), self.moments.std
        self.moments.update(returns, valid)
        if (rescale := getattr(self._model, "rescale_values", None)) is not None:
            rescale(std / self.moments.std, (mean - self.moments.mean) / self.moments.std)
        self._tell_model()

    def state_dict(self) -> dict[str, Tensor]:
        """The moments; empty where returns are not normalised."""
        return dict(self.moments.state_dict()) if self._normalize else {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on with saved moments; the model has been saved in their unit."""
        if self._normalize and state:
            self.moments.load_state_dict(state)
            self._tell_model()

    def _tell_model(self) -> None:
        self._model.unit.mean.copy_(self.moments.mean)
        self._model.unit.std.copy_(self.moments.std)
