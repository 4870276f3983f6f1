"""The learner: turns batches into gradient steps, and hands on the weights."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import fields

import numpy as np
import torch
from torch import Tensor

from sfactory.config import Config
from sfactory.config.devices import learner_threads
from sfactory.config.importing import load_object
from sfactory.data.batch import Batch, BatchSource, FreshOnly, Samples, Targets
from sfactory.data.chunks import ChunkThreads, Columns, chunk_columns, chunk_slices
from sfactory.data.cuda_graphs import PlainSteps, RecordedSteps
from sfactory.data.feed import Feed, Fresh
from sfactory.data.plane import EventSink
from sfactory.data.weights import FlatWeights, PublishedWeights
from sfactory.errors import RunFailed
from sfactory.kernels import Kernels
from sfactory.losses import COUNT, SUMS, BatchStats, loss_stats
from sfactory.model.critic_units import CriticUnits
from sfactory.model.heads import PolicyHead
from sfactory.model.interface import Model
from sfactory.objective import Estimates, valid_samples
from sfactory.telemetry.events import PROGRESS_EVERY_S, TERM, Progress
from sfactory.telemetry.stopwatch import Stopwatch
from sfactory.update import Chunk

LR_RANGE = (1e-6, 1e-2)


def batch_source(config: Config) -> BatchSource:
    """What a configuration makes batches of."""
    columns = config.batch_size // config.rollout
    if config.batch_source == "none":
        return FreshOnly(columns)
    return load_object(config.batch_source, "batch_source")(columns, config)


def has_one_pass(config: Config) -> bool:
    """Whether the only update of a batch goes back through the pass that its targets come from. It does not where the
    critic's unit moves in between."""
    return config.updates_per_batch == 1 and not config.loss.normalize_returns


class Learner:
    """Trains the model on batches as they come.

    Args:
        config: Configuration of the run, resolved and valid.
        model: The actor-critic.
        kernels: Chooses the kernels of the model.
        feed: Where batches come from.
        events: Destination of events for the runner.
        watch: Stopwatch of this worker.

    Attributes:
        choice: The kernels that it runs with, and those that were refused.
    """

    @torch.enable_grad()  # whatever an environment has set in this process; so in _train
    def __init__(
        self,
        config: Config,
        model: Model,
        kernels: Kernels,
        feed: Feed,
        events: EventSink,
        watch: Stopwatch,
    ) -> None:
        self._config, self._model, self._feed, self._emit, self._watch = config, model.train(), feed, events.put, watch
        self._device = device = kernels.device
        self._flat = FlatWeights(model, gradients=True)
        self._heads = [part for part in model.modules() if isinstance(part, PolicyHead)]
        self._network = kernels.network()
        threads = learner_threads(config) if device.type == "cpu" else 1
        self._threads = ChunkThreads(threads)
        kind = self._network.chunk_kind
        # Without a memory no sample needs the one before it, once the targets are known.
        self._single = model.state_size == 0
        self._source = batch_source(config)
        columns, steps = self._source.columns, 1 if self._single else config.rollout
        of_minibatch = columns * config.rollout // steps // config.optim.minibatches
        whole = device.type != "cpu"
        self._batch_chunk = columns if whole else chunk_columns(columns, config.rollout, threads, kind)
        self._minibatch_chunk = of_minibatch if whole else chunk_columns(of_minibatch, steps, threads, kind)
        self._units = CriticUnits(model, config.loss.normalize_returns)
        self._one_pass = has_one_pass(config)
        self._objective = kernels.objective(self._units)
        self._update = kernels.update(self._network, self._objective, self._flat, self._threads, watch)
        self._optimizer = self._update.optimizer
        self.choice = kernels.choice
        self._generator = torch.Generator().manual_seed(config.seed)
        self.env_steps = self.updates = 0
        # A batch source's batches lie in ever new places, and recordings read where they were made.
        records = device.type == "cuda" and config.runtime.cuda_graphs and config.batch_source == "none"
        self._recorder = self._recorded_steps() if records else PlainSteps()
        self._statistics: list[Tensor] = []
        self._batch_statistics: list[Tensor] = []
        self._lags: list[tuple[float, int]] = []
        self._reported = time.monotonic()

    def start(self) -> None:
        """Let sampling begin."""
        self._feed.start(self._flat.vector, self.updates)
        self._watch.lap("starting")

    def reclaim_slots(self) -> None:
        """Begin anew with sampling, whose processes must be dead."""
        self._feed.reclaim()

    @property
    def done(self) -> bool:
        """Whether the run's number of env steps is reached."""
        return self.env_steps >= self._config.steps

    def poll(self, timeout: float) -> None:
        """Train on one batch if one is there within `timeout` seconds."""
        self._watch.lap("waiting")
        fresh = self._feed.next(self.updates, timeout)
        if fresh is not None:
            self._train(fresh)
        if time.monotonic() - self._reported > PROGRESS_EVERY_S:
            self.report()
            self._check_updates()
            self._watch.lap("reporting")

    def _check_updates(self) -> None:
        """Raise RunFailed if nothing can be learned any more; the weights are those before the first skipped update."""
        if (skipped := int(self._update.skipped_in_a_row)) >= self._config.optim.max_skipped:
            raise RunFailed(
                f"the loss or its gradient was not finite in {skipped} updates in a row (optim.max_skipped); none of "
                "them was applied. Look at the sizes of rewards and observations, lower optim.lr, or use "
                "loss.normalize_returns and model.normalize_obs"
            )

    def report(self) -> None:
        """Send the statistics since the last time."""
        self._reported = time.monotonic()
        losses: dict[str, float] = {}
        if self._statistics:
            rows = torch.stack(self._statistics)
            rows = rows[rows[:, -1].isfinite() & (rows[:, COUNT] > 0)]
            updates, batches = loss_stats(self._config.loss, rows), torch.stack(self._batch_statistics)
            terms = rows[:, SUMS:-1] / rows[:, COUNT, None].clamp(min=1)
            parts = (updates.stacked(), rows[:, -1:], batches, terms)
            means = torch.cat([part.mean(0) for part in parts]).tolist()
            names = (*vars(updates), "grad_norm", *(f.name for f in fields(BatchStats)))
            losses = dict(zip((*names, *(TERM + name for name in self._objective.term_names)), means, strict=True))
            for name in self._objective.term_names:
                losses["loss"] += self._config.loss.term_coefs.get(name, 1.0) * losses[TERM + name]
        lag_mean = float(np.mean([mean for mean, _ in self._lags])) if self._lags else float("nan")
        lag_max = float(max(high for _, high in self._lags)) if self._lags else float("nan")
        lr = float(self._optimizer.lr)
        self._statistics, self._batch_statistics, self._lags = [], [], []
        self._emit(Progress(self.env_steps, self.updates, lag_mean, lag_max, losses, lr, int(self._update.skipped)))

    def publish_to(self, published: PublishedWeights, version: int) -> None:
        """Publish the present weights elsewhere, under a version of the caller's."""
        published.publish(self._flat.vector, version)

    def state(self) -> dict:
        """Everything besides the model's weights that training continues from: tensors, numbers and strings only."""
        return {
            "optimizer": self._optimizer.state_dict(),
            "returns": self._units.state_dict(),
            "generator": self._generator.get_state(),
            "lr": float(self._optimizer.lr),
            "schedule": self._config.optim.schedule,
            "skipped": int(self._update.skipped),
        }

    def load_state(self, state: dict, env_steps: int, updates: int) -> None:
        """Continue from what :meth:`state` gave; the model's weights have been loaded by the caller, in place."""
        self._optimizer.load_state_dict(state["optimizer"])
        if state.get("schedule", schedule := self._config.optim.schedule) == schedule != "constant":
            self._optimizer.lr = state["lr"]
        self._units.load_state_dict(state["returns"])
        self._generator.set_state(state["generator"])
        self._update.skipped.fill_(state.get("skipped", 0))  # which checkpoints of an earlier sfactory lack
        self.env_steps, self.updates = env_steps, updates

    @torch.enable_grad()
    def _train(self, fresh: Fresh) -> None:
        """All epochs over one batch, whose targets are made first. Env steps, lag and normalisation of observations
        are those of the fresh samples."""
        config = self._config
        self._lags.append((fresh.lag_mean, fresh.lag_max + config.updates_per_batch - 1))
        batch = self._source(fresh.batch)
        self._watch.lap("copying")
        self._set_learning_rate()
        first_update = len(self._statistics)
        if begins := self.updates == 0:  # the first batch would else be trained on as it is
            self._normalize_by(fresh.batch)
            self._objective.begin_critic(fresh.batch)
        self._learn(batch)
        for head in self._heads:
            head.restrain()
        if not begins:
            self._normalize_by(fresh.batch)
        if config.optim.schedule == "adaptive_kl":
            whole = torch.stack(self._statistics[first_update:]).sum(0)  # minibatches may have few valid samples
            self._adapt_learning_rate(loss_stats(config.loss, whole).kl)
        self.env_steps += fresh.samples
        self._feed.batch_done(self.updates)
        self._watch.count(fresh.samples)

    def _normalize_by(self, batch: Batch) -> None:
        """Let the normaliser of observations learn of a batch."""
        if self._model.normalizer is not None:
            self._model.normalizer.update(tuple(leaf[:-1] for leaf in batch.obs), valid_samples(batch))
            self._watch.lap("update")

    def _learn(self, batch: Batch) -> None:
        """The targets of a batch, from the weights as they are, and all updates."""
        if self._one_pass:
            self._only_update(batch)
            return
        samples = batch.samples(self._targets(batch), self._single)
        for epoch in range(self._config.epochs):
            if epoch:
                self._feed.epoch_done(self.updates)
            for columns in self._minibatches(samples):
                self._feed.between_updates()
                self._update_on(samples, columns)

    def _only_update(self, batch: Batch) -> None:
        """The only update of a batch, back through the pass that its targets come from."""

        def begin_and_update() -> Iterator[Tensor]:
            chunks, targets, stats = self._begin(batch, gradients=True)
            yield stats
            yield self._update.after(chunks, batch, targets)

        stats, row = self._recorder("batch", batch.reward, begin_and_update)
        self._batch_statistics.append(stats.clone())
        self._note_update(row)

    def _targets(self, batch: Batch) -> Targets:
        """The targets of a batch, from the weights as they are."""

        def begin() -> Iterator[Tensor]:
            _, targets, stats = self._begin(batch, gradients=False)
            yield from (stats, *vars(targets).values())

        stats, *targets = self._recorder("targets", batch.reward, begin)
        self._batch_statistics.append(stats.clone())
        self._watch.lap("forward")
        return Targets(*targets)

    def _update_on(self, samples: Samples, columns: list[Columns]) -> None:
        """An update on the columns of a minibatch."""
        columns = [
            part if isinstance(part, slice) else self._recorder.keep(("columns", i), part)
            for i, part in enumerate(columns)
        ]
        (row,) = self._recorder("update", samples.reward, lambda: [self._update(samples, columns)])
        self._note_update(row)

    def _begin(self, batch: Batch, gradients: bool) -> tuple[list[Chunk], Targets, Tensor]:
        """One pass of the proximal policy, the present weights, over a batch; its targets, and their statistics.

        Args:
            gradients: Whether there will be a way back through this pass.
        """
        self._network.refresh()

        def estimate(columns: Columns) -> tuple[Chunk, Estimates]:
            with torch.set_grad_enabled(gradients):
                outputs = self._network.outputs(batch, columns)
            densities = self._objective.evaluate_actions(outputs, batch, columns)
            return Chunk(columns, outputs, densities), self._objective.estimate(densities, batch, columns)

        pairs = self._threads.map(estimate, chunk_slices(batch.first.shape[1], self._batch_chunk))
        targets, stats = self._objective.targets([estimates for _, estimates in pairs])
        self._watch.lap("forward")
        return [chunk for chunk, _ in pairs], targets, stats.stacked()

    def _minibatches(self, samples: Samples) -> list[list[Columns]]:
        """Random equal parts of the columns, each by chunks."""
        columns = samples.first.shape[1]
        if self._config.optim.minibatches == 1:
            return [[*chunk_slices(columns, self._minibatch_chunk)]]
        order = torch.randperm(columns, generator=self._generator)
        if (
            self._device.type == "cuda"
        ):  # from other memory a copy would make the host wait for all that the device has to do
            order = order.pin_memory()
        minibatches = order.to(self._device, non_blocking=True).split(columns // self._config.optim.minibatches)
        return [list(minibatch.split(self._minibatch_chunk)) for minibatch in minibatches]

    def _note_update(self, row: Tensor) -> None:
        """Keep account of an update: of the sums of its loss, and the norm of the gradient."""
        self._statistics.append(row.clone())
        self.updates += 1
        self._watch.lap("update")

    def _recorded_steps(self) -> RecordedSteps:
        """Steps that are recorded: all that differs between two batches or minibatches is kept where it is."""
        self._optimizer.update_rate()
        moments = self._units.moments.state_dict().values()
        counts = self._update.skipped, self._update.skipped_in_a_row
        buffers = [x for x in self._model.buffers() if not x.is_floating_point()]
        optimizer = self._optimizer.state_dict().values()
        return RecordedSteps(self._device, [self._flat.vector, *optimizer, *moments, *counts, *buffers])

    def _set_learning_rate(self) -> None:
        if self._config.optim.schedule == "linear":
            left = (1.0 - self.env_steps / self._config.steps) / (1.0 - self._config.optim.hold)
            self._optimizer.lr = self._config.optim.lr * min(max(left, 0.0), 1.0)
        if self._optimizer.rate is not None:  # which recorded steps read
            self._optimizer.update_rate()

    def _adapt_learning_rate(self, kl: Tensor) -> None:
        """Halve or double, roughly, what misses the target KL divergence by a factor of two (as in Schulman et al.
        2017, section 4).

        The rate stays on the device, which nobody waits for.
        """
        target, kl = self._config.optim.target_kl, kl.double()
        lr = torch.as_tensor(self._optimizer.lr, dtype=torch.float64, device=self._device)
        lower, higher = (lr / 1.5).clamp(min=LR_RANGE[0]).minimum(lr), (lr * 1.5).clamp(max=LR_RANGE[1]).maximum(lr)
        self._optimizer.lr = torch.where(kl > 2 * target, lower, torch.where(kl < target / 2, higher, lr))
