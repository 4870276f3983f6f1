"""What policy lag costs: return at equal env steps when every batch is trained on a number of batches late.

    python -m perf.lag [--tasks hopper ...] [--lags 0 1 2 4 8] [--variants mended ...] [--seeds 21 22 23]
    python -m perf.lag --table                      # from the curves in perf/data/lag
    python -m perf.lag --figure docs/lag.svg

Each cell is a run in one process, where sampling and learning alternate and the lag would be 0; a batch is kept back
until so many younger ones have been sampled. Everything else is the task's preset. Curves are kept as
``TASK.VARIANT.LAG.SEED.csv``; a cell that is there is not run again, so an interrupted command goes on where it was. A
score is the mean training return over the last quarter of the env steps.

``mended`` is the objective as it is; other variants leave out one part each. ``no-tv`` has no limit on the total
variation between the policy and the behaviour policy; nor have the next four. ``stale`` is the objective as it was at
first (clipped around the behaviour policy, V-trace anew at every update, weighted advantages normalised within a
minibatch of whole rows), ``weight-first`` normalises advantages after their weight has multiplied them, ``recomputed``
makes targets anew at every update, ``rows`` draws minibatches from whole rows and normalises within them.
``uncorrected`` takes all of V-trace's weights as 1. Others were tried instead of that limit: ``smaller-steps`` lowers
the rate with the distance between the proximal and the behaviour policy, ``filtered`` leaves out samples that would
push the policy further from the behaviour policy where the proximal policy is beyond the clip range, ``lambda-0.8`` and
``c-bar-0.5`` cut traces sooner. ``tv-0.05`` and ``tv-0.2`` have another limit. With that of the objective, ``c-bar-2``
cuts them later.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import itertools
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from perf.lag_curves import DATA, LAGS, scores
from perf.runs import POLL_S, exit_at_signals
from sfactory import objective as objective_module
from sfactory.config import Config, LogConfig, ModelConfig, merged, resolve
from sfactory.data.batch import Batch, Targets
from sfactory.data.chunks import select_columns
from sfactory.learner import Learner
from sfactory.losses import BatchStats, batch_stats, weighted_advantages
from sfactory.objective import Estimates
from sfactory.runtime import training
from sfactory.runtime.runner import train
from sfactory.telemetry.metrics import Report

SEEDS = (21, 22, 23)
DRAWN = ("mended", "no-tv", "stale")
"""Variants that the figure shows."""
Cell = tuple[str, str, str, str]
"""Task, variant, lag and seed."""


class Task(NamedTuple):
    """An environment, for how many env steps it is trained, and what is set besides its preset."""

    env: str
    steps: int
    core: str = "none"


TASKS = {
    "hopper": Task("Hopper-v5", 300_000),
    "lunarlander": Task("LunarLander-v3", 300_000),
    "acrobot": Task("Acrobot-v1", 100_000),
    "cartpole-lstm": Task("examples.masked_cartpole:MaskedCartPole-v0", 100_000, "lstm"),
}


class LateLearner(Learner):
    """Trains on each batch when so many younger ones have been sampled."""

    lag = 0

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._waiting: deque[Batch] = deque()

    def _learn(self, batch: Batch) -> None:
        if self.lag:
            self._waiting.append(batch.copy())
            if len(self._waiting) <= self.lag:
                return
            batch = self._waiting.popleft()
        self._train_on(batch)

    def _train_on(self, batch: Batch) -> None:
        super()._learn(batch)


class RowsLearner(LateLearner):
    """Minibatches of whole rows, in each of which advantages are normalised."""

    def _train_on(self, batch: Batch) -> None:
        proximal = self._estimates(batch, batch.all_columns)
        self._batch_statistics.append(batch_stats(proximal.log_weights, proximal.valid).stacked())
        columns = batch.first.shape[1]
        for _ in range(self._config.epochs):
            for rows in torch.randperm(columns, generator=self._generator).split(
                columns // self._config.optim.minibatches
            ):
                self._learn_rows(batch, rows, *self._targets_of(batch, rows, proximal))

    def _targets_of(self, batch: Batch, rows: Tensor, proximal: Estimates) -> tuple[Estimates, Tensor]:
        """Of some rows the estimates, and the log-probabilities around which the surrogate is clipped."""
        part = Estimates(*(select_columns(x, rows, 1) for x in proximal))
        return part, part.log_prob

    def _estimates(self, batch: Batch, columns: Tensor | slice) -> Estimates:
        """What the present policy makes of some columns."""
        self._network.refresh()
        with torch.no_grad():
            outputs = self._network.outputs(batch, columns)
        return self._objective.estimate(self._objective.evaluate_actions(outputs, batch, columns), batch, columns)

    def _learn_rows(self, batch: Batch, rows: Tensor, estimates: Estimates, old_log_prob: Tensor) -> None:
        units, valid = self._objective.units, estimates.valid
        units.update(estimates.returns, valid)
        returns, values = units.from_returns(estimates.returns), units.from_returns(estimates.values)
        advantages = self._advantages(estimates.advantages, estimates.log_weights.exp().clamp(max=1.0), valid)
        targets = Targets(advantages, returns, values, old_log_prob, estimates.log_weights, valid)
        samples = batch.select(rows).samples(targets, single=False)
        self._network.refresh()
        self._note_update(self._update(samples, [slice(0, len(rows))]))

    def _advantages(self, advantages: Tensor, weights: Tensor, valid: Tensor) -> Tensor:
        return weighted_advantages(self._config.loss, advantages, weights, valid)


class RecomputedLearner(RowsLearner):
    """Targets anew at every update."""

    def _targets_of(self, batch: Batch, rows: Tensor, proximal: Estimates) -> tuple[Estimates, Tensor]:
        return self._estimates(batch, rows), select_columns(proximal.log_prob, rows, 1)


class StaleLearner(RowsLearner):
    """Targets anew at every update, clipped around the behaviour policy, advantages normalised after their weight."""

    def _targets_of(self, batch: Batch, rows: Tensor, proximal: Estimates) -> tuple[Estimates, Tensor]:
        return self._estimates(batch, rows), select_columns(batch.log_prob, rows, 1)

    def _advantages(self, advantages: Tensor, weights: Tensor, valid: Tensor) -> Tensor:
        return weighted_advantages(self._config.loss, advantages * weights, torch.ones_like(weights), valid)


class WeightFirstLearner(LateLearner):
    """Advantages normalised after their weight has multiplied them."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        objective_module.weighted_advantages = lambda loss, advantages, weights, valid: weighted_advantages(
            loss, advantages * weights, torch.ones_like(weights), valid
        )


class SmallerStepsLearner(LateLearner):
    """A rate that is lower the further the proximal policy is from the behaviour policy: halved at a divergence of
    0.005 nats."""

    def _begin(self, batch: Batch, gradients: bool) -> tuple:
        chunks, targets, stats = super()._begin(batch, gradients)
        behaviour_kl = float(BatchStats(*stats).behaviour_kl)
        self._optimizer.lr = self._optimizer.lr / (1 + behaviour_kl / 0.005)
        return chunks, targets, stats


class FilteredLearner(LateLearner):
    """No sample pushes the policy further from the behaviour policy than the clip range where pi_prox is already beyond
    it."""

    def _begin(self, batch: Batch, gradients: bool) -> tuple:
        chunks, targets, stats = super()._begin(batch, gradients)
        excess, clip = (targets.old_log_prob - batch.log_prob).expm1(), self._config.loss.clip
        beyond = ((excess > clip) & (targets.advantages > 0)) | ((excess < -clip) & (targets.advantages < 0))
        return chunks, dataclasses.replace(targets, advantages=targets.advantages.masked_fill(beyond, 0.0)), stats


VARIANTS: dict[str, type[LateLearner]] = {
    "mended": LateLearner,
    "stale": StaleLearner,
    "weight-first": WeightFirstLearner,
    "recomputed": RecomputedLearner,
    "rows": RowsLearner,
    "uncorrected": LateLearner,
    "smaller-steps": SmallerStepsLearner,
    "filtered": FilteredLearner,
    "no-tv": LateLearner,
    "tv-0.05": LateLearner,
    "tv-0.2": LateLearner,
    "lambda-0.8": LateLearner,
    "c-bar-0.5": LateLearner,
    "c-bar-2": LateLearner,
}
_NO_TV = {"loss": {"tv_limit": 0.0}}
CHANGES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("stale", "weight-first", "recomputed", "rows", "smaller-steps", "filtered", "no-tv"), _NO_TV),
    "uncorrected": {"algo": "ppo"},  # which has lag 0 in a product's run, and here only GAE
    "tv-0.05": {"loss": {"tv_limit": 0.05}},
    "tv-0.2": {"loss": {"tv_limit": 0.2}},
    "lambda-0.8": {"loss": {"lam": 0.8, "tv_limit": 0.0}},
    "c-bar-0.5": {"loss": {"c_bar": 0.5, "tv_limit": 0.0}},
    "c-bar-2": {"loss": {"c_bar": 2.0}},
}
"""Fields of the configuration in which variants differ."""


def run(task: Task, variant: str, lag: int, seed: int, curve: Path) -> None:
    """Train one cell and write its curve: env steps and mean training return."""
    LateLearner.lag = lag
    training.Learner = VARIANTS[variant]
    model = ModelConfig(core=task.core) if task.core != "none" else ModelConfig()
    log = LogConfig(report_every_s=1.0, display="none", tensorboard=False, episode_window=20)
    with tempfile.TemporaryDirectory() as folder:
        config = resolve(
            Config(
                env=task.env, steps=task.steps, seed=seed, run=folder, serial=True, device="cpu", model=model, log=log
            )
        )
        config = merged(config, CHANGES.get(variant, {}))
        points: list[tuple[int, float]] = []

        def keep(report: Report) -> None:
            points.append((report.env_steps, report.episode_return_mean))

        result = train(config, [keep])
    if result.status != "completed":  # by a signal; its curve ends early
        raise SystemExit(128 + (result.signal or signal.SIGINT))
    part = curve.with_suffix(".part")
    curve.parent.mkdir(parents=True, exist_ok=True)
    with part.open("w", newline="") as file:
        csv.writer(file).writerows([("env_steps", "episode_return_mean"), *points])
    part.rename(curve)


def run_all(cells: Iterable[Cell], data: Path, processes: int) -> list[Cell]:
    """Run those cells that have no curve yet, each in a process of its own; gives those that have failed."""
    waiting = [cell for cell in cells if not (data / f"{'.'.join(cell)}.csv").exists()]
    running: dict[Cell, subprocess.Popen[bytes]] = {}
    failed: list[Cell] = []
    try:
        while waiting or running:
            while waiting and len(running) < processes:
                cell = waiting.pop(0)
                print(*cell, flush=True)
                command = [sys.executable, "-m", "perf.lag", "--data", str(data), "--cell", *cell]
                running[cell] = subprocess.Popen(command)
            time.sleep(POLL_S)
            ended = [cell for cell, process in running.items() if process.poll() is not None]
            failed += [cell for cell in ended if running.pop(cell).returncode]
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()
    return failed


def show(data: Path) -> None:
    """Print the mean score of every cell, with those of its seeds, as a Markdown table."""
    found = scores(data, TASKS, VARIANTS)
    print("| task | variant |", *(f"lag {lag} |" for lag in LAGS))
    print("|---|---|" + "---|" * len(LAGS))
    for task, variant in dict.fromkeys((task, variant) for task, variant, _ in found):
        cells = (found.get((task, variant, lag)) for lag in LAGS)
        texts = (
            "" if cell is None else f"**{statistics.fmean(cell):.0f}** ({', '.join(f'{x:.0f}' for x in cell)})"
            for cell in cells
        )
        print(f"| {task} | {variant} |", *(f"{text} |" for text in texts))


def draw(data: Path, path: Path) -> None:
    """Scores over lags, one panel a task, with a line from the lowest to the highest seed."""
    from matplotlib.figure import Figure

    found = scores(data, TASKS, VARIANTS)
    figure = Figure(figsize=(3.2 * len(TASKS), 3.0), layout="constrained")
    for axes, task in zip(figure.subplots(1, len(TASKS)), TASKS, strict=True):
        for number, variant in enumerate(DRAWN):
            lags = [lag for lag in LAGS if (task, variant, lag) in found]
            if lags:
                cells = [found[task, variant, lag] for lag in lags]
                means = [statistics.fmean(cell) for cell in cells]
                spread = [
                    [m - min(c) for m, c in zip(means, cells, strict=True)],
                    [max(c) - m for m, c in zip(means, cells, strict=True)],
                ]
                places = [LAGS.index(lag) + 0.06 * number for lag in lags]
                axes.errorbar(places, means, spread, label=variant, marker="o", markersize=3, capsize=2, linewidth=1)
        axes.set_xticks(range(len(LAGS)), LAGS)
        axes.set(title=task, xlabel="lag in batches")
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("training return, last quarter")
    figure.axes[0].legend(frameon=False, fontsize=7)
    figure.savefig(path)


def main() -> int:
    """Exit status 1 if a cell has failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["mended"])
    parser.add_argument("--lags", nargs="+", type=int, default=LAGS)
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument(
        "--cell", nargs=4, metavar=("TASK", "VARIANT", "LAG", "SEED"), help="run one cell in this process"
    )
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--figure", type=Path)
    args = parser.parse_args()
    if args.cell:
        task, variant, lag, seed = args.cell
        torch.set_num_threads(1)
        run(TASKS[task], variant, int(lag), int(seed), args.data / f"{'.'.join(args.cell)}.csv")
    elif args.table:
        show(args.data)
    elif args.figure:
        draw(args.data, args.figure)
    else:
        exit_at_signals()
        cells = itertools.product(args.seeds, args.variants, args.lags, args.tasks)
        named = ((task, variant, str(lag), str(seed)) for seed, variant, lag, task in cells)
        failed = run_all(named, args.data, args.processes)
        show(args.data)
        for cell in failed:
            print("failed:", *cell, file=sys.stderr)
        return int(bool(failed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
