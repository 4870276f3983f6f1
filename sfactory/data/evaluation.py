"""What learner and evaluator share without a lock: weights to be evaluated, and what came of them."""

from __future__ import annotations

import math

import numpy as np

from sfactory.data.memory_order import barrier
from sfactory.data.shared_memory import SharedArray
from sfactory.data.weights import PublishedWeights

_ENV_STEPS, _RETURN = 0, 1


class EvaluationBoard:
    """Weights on their way from the learner to the evaluator, and the result on its way back.

    Args:
        size: Length of the flat vector of weights.

    Attributes:
        weights: The newest weights to evaluate; their version is the number of env steps behind them.
    """

    def __init__(self, size: int) -> None:
        self.weights = PublishedWeights(size)
        self._result = SharedArray((2,), np.float64)

    def put_result(self, env_steps: int, return_mean: float) -> None:
        """Tell the mean return of the weights of so many env steps. Only the evaluator calls this."""
        self._result.array[_RETURN] = return_mean
        barrier()
        self._result.array[_ENV_STEPS] = env_steps  # last: whoever sees it finds its return

    @property
    def evaluated(self) -> int:
        """Env steps of the weights that were evaluated last; 0 before."""
        return int(self._result.array[_ENV_STEPS])

    def result_of(self, env_steps: int) -> float:
        """Mean return of the weights of so many env steps; NaN where others were evaluated last."""
        if self.evaluated != env_steps:
            return math.nan
        barrier()
        return float(self._result.array[_RETURN])
