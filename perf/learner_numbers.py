"""What a learner makes of one batch, without training on it: its outputs, statistics and gradient."""

from __future__ import annotations

import torch

from sfactory.data.batch import Batch, Samples
from sfactory.learner import Learner
from sfactory.losses import BatchStats, LossStats, loss_stats
from sfactory.model.networks import Outputs


def outputs_of(learner: Learner, batch: Batch) -> Outputs:
    """What the present weights make of a whole batch, without gradients."""
    learner._network.refresh()
    with torch.no_grad():
        return learner._network.outputs(batch, batch.all_columns)


def backward(learner: Learner, batch: Batch) -> tuple[LossStats, BatchStats]:
    """Statistics of a whole batch and of its loss at the present weights, whose gradient goes into the parameters'
    ``grad``; by the passes that the learner itself makes."""
    chunks, targets, stats = learner._begin(batch, learner._one_pass)
    samples: Batch | Samples = batch
    if not learner._one_pass:
        samples = batch.samples(targets, single=False)
        chunks = learner._update.forward(samples, [chunk.columns for chunk in chunks])
    sums = learner._update.gradient(chunks, samples, targets)
    return loss_stats(learner._config.loss, sums), BatchStats(*stats)
