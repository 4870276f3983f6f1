"""The learner: turns finished segments into gradient steps and publishes the weights."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from sfactory.adam import Adam
from sfactory.arena import FREE, Arena
from sfactory.batch import Assembler, Batch
from sfactory.board import PROGRESS_EVERY_S, Progress
from sfactory.chunks import ChunkThreads, Columns, chunk_columns, chunk_slices
from sfactory.compute import learner_threads
from sfactory.config import Config
from sfactory.dense_network import DenseNetwork
from sfactory.errors import RunFailed
from sfactory.losses import SUMS, LossStats, Targets, joint_sums, loss_stats
from sfactory.model.normalizer import RunningMeanStd
from sfactory.networks import Network, Outputs, TorchNetwork
from sfactory.objective import OWN_POLICY, Evaluation, Objective, valid_samples
from sfactory.objective_cpu import CompiledObjective
from sfactory.queues import Queue
from sfactory.scheduler import SlotScheduler, take_back_slots
from sfactory.sizes import least_max_lag, max_lag
from sfactory.timing import Stopwatch
from sfactory.weights import FlatWeights, Publisher, WeightBoard

LR_RANGE = (1e-6, 1e-2)


class _Chunk(NamedTuple):
    """Some columns of a minibatch after the forward pass: the network's outputs and what the objective makes of them."""

    outputs: Outputs
    evaluation: Evaluation


class Learner:
    """Trains the model on segments as they finish.

    Args:
        config: Of the run, resolved and valid.
        model: The actor-critic, on `device`.
        arena: Where the segments lie.
        weights: Where the weights are published.
        finished: Slots that are full.
        free: Slots given back.
        emit: Takes a :class:`Progress` now and then.
        autocast: torch dtype to compute in, or None for float32.
        watch: This worker's stopwatch.
    """

    def __init__(
        self,
        config: Config,
        model: nn.Module,
        arena: Arena,
        weights: WeightBoard,
        finished: Queue,
        free: Queue,
        emit: Callable[[Progress], None],
        device: torch.device,
        autocast: torch.dtype | None,
        watch: Stopwatch,
    ) -> None:
        self._config, self._model, self._arena, self._free = config, model.train(), arena, free
        self._finished, self._emit, self._device, self._watch = finished, emit, device, watch
        self._per_batch = config.batch_size // (config.rollout * arena.rows)
        self._limit = max_lag(config, arena.rows)
        # Slots that are given back before the last weights are out begin one batch older: the bound must leave room for that.
        self._tight = self._limit < least_max_lag(config, arena.rows) + config.updates_per_batch
        self._scheduler = SlotScheduler(arena, self._per_batch, config.updates_per_batch, self._limit)
        self._assemble = Assembler(arena, self._per_batch, device)
        self._flat = FlatWeights(model, gradients=True)
        dense = DenseNetwork.fits(model, autocast) and not config.optim.compile
        self._network: Network = DenseNetwork(model) if dense else TorchNetwork(model, device, autocast, config.optim.compile)
        self._publisher = Publisher(weights, self._flat.vector)
        optim = config.optim
        self._optimizer = Adam(self._flat.parameters, optim.lr, optim.betas, optim.eps)
        threads = learner_threads(config) if device.type == "cpu" else 1
        columns = config.batch_size // config.rollout // config.optim.minibatches
        kind = "dense" if dense else "image" if any(leaf.is_image for leaf in model.observation.leaves) else "flat"
        self._chunk_columns = chunk_columns(columns, config.rollout, threads, kind) if device.type == "cpu" else columns
        self._threads = ChunkThreads(threads)
        self._returns = RunningMeanStd().to(device) if config.loss.normalize_returns else None
        objective = CompiledObjective if device.type == "cpu" else Objective
        self._objective = objective(config, model.action, self._returns, device)
        self._generator = torch.Generator().manual_seed(config.seed)
        self.env_steps = self.updates = 0
        self._skipped, self._skipped_in_a_row = (torch.zeros((), dtype=torch.int64, device=device) for _ in range(2))
        self._statistics: list[Tensor] = []
        self._lags: list[tuple[float, int]] = []
        self._reported = time.monotonic()

    def start(self) -> None:
        """Publish the first weights and hand out all slots."""
        self._publisher.publish(self.updates)
        self._publisher.finish()
        self.take_back_slots()
        self._watch.lap("starting")

    def take_back_slots(self) -> None:
        """Free all slots but the finished ones. All sampling processes must be dead or have yet to begin."""
        self._scheduler.add(self._finished.get_many(0))
        take_back_slots(self._arena, self._free, self._scheduler.finished)

    @property
    def done(self) -> bool:
        """Whether the run's number of env steps is reached."""
        return self.env_steps >= self._config.steps

    def poll(self, timeout: float) -> None:
        """Train on one batch if one is there, waiting up to `timeout` seconds for finished segments."""
        slots = self._scheduler.take(self.updates)
        if slots is None:
            self._publisher.finish()
            self._watch.lap("weights")
            self._scheduler.add(self._finished.get_many(timeout))
            slots = self._scheduler.take(self.updates)
        self._watch.lap("waiting")
        if slots is not None:
            self._train(slots)
        if time.monotonic() - self._reported > PROGRESS_EVERY_S:
            self.report()
            self._check_updates()
            self._watch.lap("reporting")

    def _check_updates(self) -> None:
        """Raise RunFailed if nothing can be learned any more; the weights are those before the first skipped update."""
        if (skipped := int(self._skipped_in_a_row)) >= self._config.optim.max_skipped:
            raise RunFailed(
                f"the loss or its gradient was not finite in {skipped} updates in a row (optim.max_skipped); none of them was applied. "
                "Look at the sizes of rewards and observations, lower optim.lr, or use loss.normalize_returns and model.normalize_obs"
            )

    def report(self) -> None:
        """Send the statistics since the last time."""
        self._reported = time.monotonic()
        losses: dict[str, float] = {}
        if self._statistics:
            rows = torch.stack(self._statistics)
            rows = rows[rows[:, -1].isfinite()]
            stats = self._stats(rows)
            means = torch.cat((stats.stacked(), rows[:, -1:]), 1).mean(0).tolist()
            losses = dict(zip((*vars(stats), "grad_norm"), means, strict=True))
        lag_mean = float(np.mean([mean for mean, _ in self._lags])) if self._lags else float("nan")
        lag_max = float(max(high for _, high in self._lags)) if self._lags else float("nan")
        lr = float(self._optimizer.lr)
        self._statistics, self._lags = [], []
        self._emit(Progress(self.env_steps, self.updates, lag_mean, lag_max, losses, lr, int(self._skipped)))

    def _stats(self, rows: Tensor) -> LossStats:
        """Of updates, from what was kept of them: sums and moments of the loss, norm of the gradient."""
        return loss_stats(self._config.loss, rows[:, :SUMS], rows[:, SUMS:-1])

    def state(self) -> dict:
        """Everything besides the model's weights that training continues from: tensors, numbers and strings only."""
        return {
            "optimizer": self._optimizer.state_dict(),
            "returns": {} if self._returns is None else dict(self._returns.state_dict()),
            "generator": self._generator.get_state(),
            "lr": float(self._optimizer.lr),
        }

    def load_state(self, state: dict, env_steps: int, updates: int) -> None:
        """Continue from what :meth:`state` gave; the model's weights have been loaded by the caller, in place."""
        self._optimizer.load_state_dict(state["optimizer"])
        if self._config.optim.schedule != "constant":
            self._optimizer.lr = state["lr"]
        if self._returns is not None and state["returns"]:
            self._returns.load_state_dict(state["returns"])
        self._generator.set_state(state["generator"])
        self.env_steps, self.updates = env_steps, updates

    def _train(self, slots: list[int]) -> None:
        """All epochs over one batch, then publish."""
        config, arena = self._config, self._arena
        valid = arena.active[slots, :-1] & (arena.owner[slots] == OWN_POLICY)[:, None]
        samples = int(valid.sum())
        if not samples:  # faults of environments have spoiled all of them
            self._give_back(slots)
            return
        lags = self.updates - arena.version[slots]
        self._lags.append((float(lags.mean()), int(lags.max()) + config.updates_per_batch - 1))
        batch = self._assemble(slots)
        self._watch.lap("copying")
        self._publisher.finish(wait=self._tight)
        hold = config.lag_free or self._assemble.is_view
        if not hold:
            self._give_back(slots)
            self._watch.lap("queue")
        fixed = self._objective.gae_targets(batch, self.outputs(batch).value) if config.algo == "ppo" else None
        self._set_learning_rate()
        first_update = len(self._statistics)
        for _ in range(config.epochs):
            for columns in self._minibatches(batch):
                self._update(batch, fixed, columns)
        if self._model.normalizer is not None:
            self._model.normalizer.update(tuple(leaf[:-1] for leaf in batch.obs), valid_samples(batch))
            self._watch.lap("optimizer")
        if config.optim.schedule == "adaptive_kl":
            self._adapt_learning_rate(self._stats(torch.stack(self._statistics[first_update:])).kl.mean())
        self.env_steps += samples
        self._publisher.publish(self.updates)
        if hold:
            self._publisher.finish()
        self._watch.lap("weights")
        if hold:
            self._give_back(slots)
            self._watch.lap("queue")
        self._watch.count(samples)

    def _give_back(self, slots: list[int]) -> None:
        self._arena.state[slots] = FREE
        self._free.put_many(slots)

    def _minibatches(self, batch: Batch) -> list[list[Columns]]:
        """Random equal parts of a batch's columns, each by chunks."""
        columns = batch.first.shape[1]
        if self._config.optim.minibatches == 1:
            return [chunk_slices(columns, self._chunk_columns)]
        order = torch.randperm(columns, generator=self._generator)
        if self._device.type == "cuda":  # from other memory a copy would make the host wait for all that the device has to do
            order = order.pin_memory()
        minibatches = order.to(self._device, non_blocking=True).split(columns // self._config.optim.minibatches)
        return [list(minibatch.split(self._chunk_columns)) for minibatch in minibatches]

    def _update(self, batch: Batch, fixed: Targets | None, columns: list[Columns]) -> None:
        """One optimizer step on some columns of a batch, given by chunks; `fixed` are the targets where they do not change."""
        sums_and_moments = self._gradient(batch, fixed, columns)
        norm = self._step()
        self._statistics.append(torch.cat((sums_and_moments, norm.double().reshape(1))))
        self.updates += 1
        self._watch.lap("optimizer")

    def _gradient(self, batch: Batch, fixed: Targets | None, columns: list[Columns]) -> Tensor:
        """Fill the parameters' ``grad``; gives the sums and moments of the loss."""
        self._network.refresh()
        chunks = self._threads.map(lambda part: self._forward(batch, fixed, part), columns)
        moments = self._objective.joint([chunk.evaluation for chunk in chunks], fixed is not None)
        self._flat.parameters.grad.zero_()
        self._watch.lap("forward")
        sums = joint_sums(self._threads.map(lambda chunk: self._backward(chunk, moments), chunks))
        self._watch.lap("backward")
        return torch.cat((sums, moments))

    def _forward(self, batch: Batch, fixed: Targets | None, columns: Columns) -> _Chunk:
        """All of a chunk that comes before the gradients."""
        outputs = self._network.outputs(batch, columns)
        return _Chunk(outputs, self._objective.evaluate(outputs.params, outputs.value, batch, columns, fixed))

    def _backward(self, chunk: _Chunk, moments: Tensor) -> Tensor:
        """Add a chunk's share to the gradient; its sums for the statistics."""
        gradients = self._objective.gradients(chunk.evaluation, moments)
        self._network.backward(chunk.outputs, gradients.params, gradients.value)
        return gradients.sums

    def _step(self) -> Tensor:
        """Clip the gradient and step, without a sync: the optimizer divides by the scale, and skips where the norm is not finite."""
        gradient, limit = self._flat.parameters.grad, self._config.optim.max_grad_norm
        norm = torch.linalg.vector_norm(gradient)
        divisor = (norm / limit).clamp(min=1.0) if limit > 0 else torch.ones_like(norm)
        skip = ~norm.isfinite()
        self._optimizer.step(divisor, skip.float())
        self._skipped += skip
        self._skipped_in_a_row = (self._skipped_in_a_row + 1) * skip
        return norm

    def evaluate(self, batch: Batch) -> LossStats:
        """The loss of the present weights on a whole batch, with V-trace's targets; its gradient goes into the parameters' ``grad``."""
        found = self._gradient(batch, None, [batch.all_columns])
        return loss_stats(self._config.loss, found[:SUMS], found[SUMS:])

    def outputs(self, batch: Batch) -> Outputs:
        """What the present weights make of a whole batch, without gradients."""
        self._network.refresh()
        with torch.no_grad():
            return self._network.outputs(batch, batch.all_columns)

    def _set_learning_rate(self) -> None:
        if self._config.optim.schedule == "linear":
            left = max(0.0, 1.0 - self.env_steps / self._config.steps)
            self._optimizer.lr = self._config.optim.lr * left

    def _adapt_learning_rate(self, kl: Tensor) -> None:
        """Halve or double, roughly, what misses the target KL divergence by a factor of two (as in Schulman et al. 2017, section 4).

        The rate stays on the device, which nobody waits for.
        """
        target, kl = self._config.optim.target_kl, kl.double()
        lr = torch.as_tensor(self._optimizer.lr, dtype=torch.float64, device=self._device)
        lower, higher = (lr / 1.5).clamp(min=LR_RANGE[0]), (lr * 1.5).clamp(max=LR_RANGE[1])
        self._optimizer.lr = torch.where(kl > 2 * target, lower, torch.where(kl < target / 2, higher, lr))
