"""The learner: turns finished segments into gradient steps and publishes the weights."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from sfactory.adam import Adam
from sfactory.arena import FREE, Arena
from sfactory.batch import Assembler, Batch
from sfactory.board import PROGRESS_EVERY_S, Progress
from sfactory.chunks import ChunkThreads, chunk_columns
from sfactory.compute import learner_threads
from sfactory.config import Config
from sfactory.distributions import ActionDistribution
from sfactory.errors import RunFailed
from sfactory.gae import gae_for
from sfactory.losses import LossStats, Targets, total_loss
from sfactory.model.normalizer import RunningMeanStd
from sfactory.model.precision import mixed_precision
from sfactory.queues import Queue
from sfactory.scheduler import SlotScheduler, take_back_slots
from sfactory.sizes import least_max_lag, max_lag
from sfactory.timing import Stopwatch
from sfactory.vtrace import vtrace_for
from sfactory.weights import FlatWeights, Publisher, WeightBoard

OWN_POLICY = 0
LR_RANGE = (1e-6, 1e-2)
STATISTICS = (*(f.name for f in dataclasses.fields(LossStats)), "grad_norm")


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
        self._finished, self._emit, self._device, self._autocast, self._watch = finished, emit, device, autocast, watch
        self._per_batch = config.batch_size // (config.rollout * arena.rows)
        self._limit = max_lag(config, arena.rows)
        # Slots that are given back before the last weights are out begin one batch older: the bound must leave room for that.
        self._tight = self._limit < least_max_lag(config, arena.rows) + config.updates_per_batch
        self._scheduler = SlotScheduler(arena, self._per_batch, config.updates_per_batch, self._limit)
        self._assemble = Assembler(arena, self._per_batch, device)
        self._flat = FlatWeights(model, gradients=True)
        self._network = torch.compile(model.unroll) if config.optim.compile else model.unroll
        self._publisher = Publisher(weights, self._flat.vector)
        optim = config.optim
        self._optimizer = Adam(self._flat.parameters, optim.lr, optim.betas, optim.eps)
        self._distribution = ActionDistribution(model.action)
        threads = learner_threads(config) if device.type == "cpu" else 1
        columns = config.batch_size // config.rollout // config.optim.minibatches
        images = any(leaf.is_image for leaf in model.observation.leaves)
        self._chunk_columns = chunk_columns(columns, config.rollout, threads, images) if device.type == "cpu" else columns
        self._threads = ChunkThreads(threads)
        self._vtrace, self._gae = vtrace_for(device), gae_for(device)
        self._returns = RunningMeanStd().to(device) if config.loss.normalize_returns else None
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
            losses = dict(zip(STATISTICS, rows[rows[:, -1].isfinite()].mean(0).tolist(), strict=True))
        lag_mean = float(np.mean([mean for mean, _ in self._lags])) if self._lags else float("nan")
        lag_max = float(max(high for _, high in self._lags)) if self._lags else float("nan")
        lr = float(self._optimizer.lr)
        self._statistics, self._lags = [], []
        self._emit(Progress(self.env_steps, self.updates, lag_mean, lag_max, losses, lr, int(self._skipped)))

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
        fixed = self._gae_targets(batch) if config.algo == "ppo" else None
        self._set_learning_rate()
        first_update = len(self._statistics)
        for _ in range(config.epochs):
            for columns in self._minibatches(batch.first.shape[1]):
                part = batch if columns is None else batch.columns(columns)
                targets = fixed if columns is None or fixed is None else _target_columns(fixed, columns)
                self._update(part, targets)
        if self._model.normalizer is not None:
            self._model.normalizer.update(tuple(leaf[:-1] for leaf in batch.obs), self._valid(batch))
            self._watch.lap("optimizer")
        if config.optim.schedule == "adaptive_kl":
            self._adapt_learning_rate(torch.stack(self._statistics[first_update:]).mean(0)[STATISTICS.index("kl")])
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

    def _minibatches(self, columns: int) -> list[Tensor | None]:
        """Random equal parts of a batch's columns; None stands for all of them."""
        if self._config.optim.minibatches == 1:
            return [None]
        order = torch.randperm(columns, generator=self._generator)
        if self._device.type == "cuda":  # from other memory a copy would make the host wait for all that the device has to do
            order = order.pin_memory()
        return list(order.to(self._device, non_blocking=True).split(columns // self._config.optim.minibatches))

    def _update(self, batch: Batch, targets: Targets | None) -> None:
        """One optimizer step.

        Chunks of the batch are evaluated apart; the loss, which needs all of them, is differentiated with respect to what came out,
        and then each chunk's network with respect to the weights.
        """
        chunks = self._threads.map(self._evaluate, batch.split(self._chunk_columns))
        whole = tuple(torch.cat(outputs, 1).detach().requires_grad_() for outputs in zip(*chunks, strict=True))
        loss, stats = self._loss_of(batch, *whole, targets)
        self._flat.parameters.grad.zero_()
        self._watch.lap("forward")
        loss.backward()
        gradients = zip(*(output.grad.split(self._chunk_columns, 1) for output in whole), strict=True)
        self._threads.map(_backward, chunks, gradients)
        self._watch.lap("backward")
        norm = self._step()
        self._statistics.append(torch.cat((stats.stacked(), norm.reshape(1))))
        self.updates += 1
        self._watch.lap("optimizer")

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

    def loss(self, batch: Batch, targets: Targets | None = None) -> tuple[Tensor, LossStats]:
        """The loss of the present weights on a batch.

        Args:
            batch: ``[T(+1), B]``.
            targets: Advantages and returns if they are fixed over the epochs (GAE); computed by V-trace from the present weights otherwise.
        """
        return self._loss_of(batch, *self._evaluate(batch), targets)

    def _evaluate(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Of the present weights: log-probabilities of the actions ``[T, B]``, values ``[T+1, B]`` and the exploration bonus ``[T, B]``."""
        params, value = self._unroll(batch)
        mask = None if batch.mask is None else batch.mask[:-1]
        if self._config.loss.exploration == "entropy":
            log_prob, exploration = self._distribution.log_prob_and_entropy(params[:-1], batch.categorical, batch.continuous, mask)
        else:
            log_prob = self._distribution.log_prob(params[:-1], batch.categorical, batch.continuous, mask)
            exploration = self._distribution.kl_from_uniform(params[:-1], mask)
        return log_prob, value, exploration

    def _loss_of(
        self, batch: Batch, log_prob: Tensor, value: Tensor, exploration: Tensor, targets: Targets | None
    ) -> tuple[Tensor, LossStats]:
        if targets is None:
            targets = self._vtrace_targets(batch, log_prob.detach(), value.detach())
        return total_loss(self._config.loss, self._config.algo, log_prob, value[:-1], exploration, targets)

    def _unroll(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Policy parameters ``[T+1, B, P]`` and values ``[T+1, B]`` of the present weights."""
        with mixed_precision(self._device.type, self._autocast):
            params, value = self._network(batch.obs, batch.first, batch.rnn_state)
        return params.float(), value.float()

    def _valid(self, batch: Batch) -> Tensor:
        return batch.active[:-1] & (batch.owner == OWN_POLICY)

    def _rewards(self, batch: Batch) -> Tensor:
        loss = self._config.loss
        reward = batch.reward if loss.reward_scale == 1.0 else batch.reward * loss.reward_scale
        return reward.clamp(-loss.reward_clip, loss.reward_clip) if loss.reward_clip > 0 else reward

    def _true_values(self, value: Tensor) -> Tensor:
        """The critic's output in units of return."""
        return value if self._returns is None else value * self._returns.std + self._returns.mean

    def _final_values(self, batch: Batch, values: Tensor) -> Tensor:
        """V(final_obs) where an episode was truncated: of the row that rests at t+1, or as stored where the environment could not rest."""
        stored = self._true_values(batch.final_value)
        return torch.where(stored.isnan(), values[1:], stored)

    def _vtrace_targets(self, batch: Batch, log_prob: Tensor, value: Tensor) -> Targets:
        loss, values = self._config.loss, self._true_values(value)
        vs, advantages = self._vtrace(
            log_prob - batch.log_prob, self._rewards(batch), values[:-1], values[-1], batch.terminated, batch.truncated,
            self._final_values(batch, values), loss.gamma, loss.lam, loss.rho_bar, loss.c_bar, loss.rho_bar_pg,
        )  # fmt: skip
        return self._targets(batch, advantages, vs)

    def _gae_targets(self, batch: Batch) -> Targets:
        loss = self._config.loss
        with torch.no_grad():
            values = self._true_values(self._unroll(batch)[1])
        advantages, returns = self._gae(
            self._rewards(batch),
            values[:-1],
            values[-1],
            batch.terminated,
            batch.truncated,
            self._final_values(batch, values),
            loss.gamma,
            loss.lam,
        )
        return self._targets(batch, advantages, returns)

    def _targets(self, batch: Batch, advantages: Tensor, returns: Tensor) -> Targets:
        valid = self._valid(batch)
        if self._returns is not None:
            self._returns.update(returns, valid)
            returns = (returns - self._returns.mean) / self._returns.std
        return Targets(advantages, returns, batch.value[:-1], batch.log_prob, valid)

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


def _backward(outputs: tuple[Tensor, ...], gradients: tuple[Tensor, ...]) -> None:
    """Add to the weights' gradients what follows from those of a chunk's outputs."""
    pairs = [pair for pair in zip(outputs, gradients, strict=True) if pair[0].requires_grad]
    torch.autograd.backward(*zip(*pairs, strict=True))


def _target_columns(targets: Targets, index: Tensor) -> Targets:
    return Targets(**{f.name: getattr(targets, f.name).index_select(1, index) for f in dataclasses.fields(Targets)})
