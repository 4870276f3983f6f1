"""What learner and evaluator tell one another."""

from __future__ import annotations

import math

import torch

from sfactory.data.evaluation import EvaluationBoard


def test_weights_and_their_return_go_by_their_env_steps() -> None:
    board = EvaluationBoard(3)
    assert board.weights.version == board.evaluated == 0
    board.weights.publish(torch.tensor([1.0, 2.0, 3.0]), 5_000_000_000)
    vector = torch.zeros(3)
    assert board.weights.read(vector) == 5_000_000_000 and vector.tolist() == [1, 2, 3]
    board.put_result(5_000_000_000, -12.5)
    assert board.evaluated == 5_000_000_000 and board.result_of(5_000_000_000) == -12.5
    assert math.isnan(board.result_of(7))
