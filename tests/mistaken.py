"""A model with a mistake, as users make them."""

from __future__ import annotations

import resource
from pathlib import Path

import torch

from sfactory.model import ActorCritic


class Mistaken(ActorCritic):
    """Raises in the learner in the middle of a batch, for as long as a file is there that says what it does before
    that."""

    def __init__(self, observation, action, config, mistake):
        super().__init__(observation, action, config)
        self.mistake, self.calls = Path(mistake), 0
        self.register_buffer("attended", torch.tensor([0.0, -torch.inf]))

    def unroll(self, *inputs):
        self.calls += self.training
        if self.training and self.calls > 100 and self.calls % 4 == 3 and self.mistake.exists():
            before = self.mistake.read_text()
            if before == "spoil the weights":
                with torch.no_grad():
                    next(self.parameters()).fill_(torch.nan)
            elif before == "fill the disk":
                resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
            raise KeyError("mistake in my model")
        return super().unroll(*inputs)
