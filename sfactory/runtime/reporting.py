"""Reports of a run on the terminal and in the run folder, and its summary."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sfactory.config import env_name
from sfactory.config.lag import max_lag
from sfactory.errors import said
from sfactory.runs.checkpoint import Snapshot
from sfactory.runs.machine import describe_machine
from sfactory.runs.report_page import write_page
from sfactory.runs.run_files import PAGE, read_json
from sfactory.runs.run_folder import RunFolder
from sfactory.runtime.plan import Plan
from sfactory.telemetry.display import Display
from sfactory.telemetry.events import TERM, Episodes, Evaluated, KernelsChosen, Progress
from sfactory.telemetry.loggers import Loggers
from sfactory.telemetry.metrics import Report
from sfactory.telemetry.metrics_file import MetricsWriter
from sfactory.telemetry.recent import BlindCritic, EpisodeWindow, ProgressWindow, Speedometer
from sfactory.telemetry.summary import Summary

Status = Literal["completed", "interrupted", "failed"]
FIGURES = (
    "wall_s", "env_steps", "fps", "episode_return_mean", "learner_updates", "skipped_updates", "policy_lag_max",
    "restarts", "env_faults", "eval_return_mean",
)  # fmt: skip
CURVE_POINTS = 60
"""Most points of the curve of returns that a run's status has."""
BLIND_CRITIC = (
    "the critic has the same value for all that it observes: unless observations are all alike, a layer is saturated, "
    "and nothing will be learned; begin anew with --model.normalize-obs, or with a lower --optim.lr"
)


@dataclass(frozen=True)
class Result:
    """Result of a run.

    Attributes:
        status: completed, interrupted or failed.
        env_steps: Env steps trained on, over all resumes.
        wall_s: Seconds that the run has taken, over all resumes, until its last batch.
        fps: Env steps per second over the whole run, without the time before this command's first batch.
        episode_return_mean: Mean return of recent episodes, as last reported; NaN if no episode has ended.
        signal: The signal that interrupted the run, else None.
        run_dir: The run folder.
        kernels: Names of the kernels with which each kind of worker ran.
    """

    status: Status
    env_steps: int
    wall_s: float
    fps: float
    episode_return_mean: float
    signal: int | None
    run_dir: Path
    kernels: dict[str, list[str]] = dataclasses.field(default_factory=dict)


class Reporter:
    """Collects events about progress, and makes reports of them.

    Args:
        plan: Plan of the run.
        folder: Run folder.

    Attributes:
        last: The newest report, with the last known figures where it has none.
        news: Whether anything new has arrived since the newest report.
    """

    def __init__(self, plan: Plan, folder: RunFolder) -> None:
        config = plan.config
        self._plan, self._folder = plan, folder
        self._display = Display(
            config.log.display,
            title=env_name(config.env),
            steps=config.steps,
            slots=plan.slots,
            max_lag=max_lag(config, plan.rows),
        )
        self._loggers = Loggers(config, folder.path, self.note)
        self._episodes = EpisodeWindow(config.log.episode_window)
        self._critic = BlindCritic()
        self._kernels: dict[str, list[str]] = {}
        self._evaluation: Evaluated | None = None
        self._unwritten = False
        self.last: Report | None = None

    def begin(self, snapshot: Snapshot | None, wall_s: float) -> None:
        """Begin training, or continue from a checkpoint.

        Args:
            snapshot: The checkpoint, or None.
            wall_s: Seconds that the run has taken so far.
        """
        config, steps, updates, skipped = self._plan.config, 0, 0, 0
        if snapshot is not None:
            steps, updates, skipped = snapshot.env_steps, snapshot.updates, snapshot.trainer.get("skipped", 0)
        self._speed = Speedometer(wall_s, steps, steps * self._plan.env.frameskip)
        self._writer = MetricsWriter(self._folder.path, config, steps)
        # the rate is not known until the learner has begun
        self._progress = ProgressWindow(Progress(steps, updates, math.nan, math.nan, {}, math.nan, skipped))
        self.news = False
        if self._evaluation is not None and self._evaluation.env_steps > steps:
            self._evaluation = None  # of weights that the run has fallen back from

    @property
    def live(self) -> bool:
        """Whether a live display is shown, which other output would cover."""
        return self._display.mode == "live"

    @property
    def wall_s(self) -> float:
        """Seconds that the run has taken so far."""
        return self._speed.wall_s

    @property
    def progress(self) -> Progress:
        """The newest progress event of the learner."""
        return self._progress.newest

    def add_episodes(self, episodes: Episodes) -> None:
        """Add episodes that ended."""
        self._episodes.add(episodes)
        self.news = True

    def add_evaluation(self, evaluated: Evaluated) -> None:
        """Add an evaluation to the next report, which has room for one."""
        self._evaluation = evaluated
        self.news = True

    @property
    def settled_return(self) -> float:
        """Mean return of recent episodes, once a whole window of them has ended since the command; NaN before."""
        return self._episodes.settled_return

    @property
    def has_evaluation(self) -> bool:
        """Whether the next report has an evaluation already."""
        return self._evaluation is not None

    def add_progress(self, new: Progress) -> None:
        """Add a progress event of the learner."""
        if new.env_steps > self.progress.env_steps:
            self.news = True
            self._speed.trained(new.env_steps)
        if new.env_steps >= self._plan.config.steps:
            self.end_training()
        self._progress.add(new)

    def end_training(self) -> None:
        """Stop the run's clock at the last training that was told of: what is still waited for is no part of it."""
        self._speed.stop()

    def add_kernels(self, chosen: KernelsChosen) -> None:
        """Say with which kernels a kind of worker runs, once."""
        if self._kernels.get(chosen.worker) == chosen.taken:
            return
        self._kernels[chosen.worker] = chosen.taken
        self.note(f"{chosen.worker}: {'kernels ' + ', '.join(chosen.taken) if chosen.taken else 'no kernels'}")
        for name, reason in chosen.refused.items():
            self.note(f"{chosen.worker}: the kernel for {name} is not taken: {reason}")

    def report(self, load: dict[str, float]) -> Report:
        """Make a report of everything that has arrived, write it and show it.

        Args:
            load: The metrics whose source is the load of the workers.
        """
        progress = self._progress.report()
        frames = progress.env_steps * self._plan.env.frameskip
        speed = self._speed.report(progress.env_steps, frames)
        episodes = self._episodes.report()
        terms = {name: value for name, value in progress.losses.items() if name.startswith(TERM)}
        report = Report.gathered(
            {**episodes.extras, **terms},
            speed=speed,
            totals={"frames": frames},
            progress=progress,
            episodes=episodes,
            evaluation=self._evaluation or {},
            losses=progress.losses,
            load=load,
        )
        self.last, self.news, self._evaluation = report.after(self.last), False, None
        if self._critic.noticed(progress.updates, report.explained_variance):
            self.note(BLIND_CRITIC)
        self._write(report)
        self._loggers.write(report)
        self._display.update(self.last)
        return report

    def note(self, text: str) -> None:
        """Show a line of text."""
        self._display.note(text)

    def figures(self) -> dict[str, float]:
        """Selected figures as last known; empty before the first report."""
        figures = {} if self.last is None else {name: getattr(self.last, name) for name in FIGURES}
        return {name: value for name, value in figures.items() if not math.isnan(value)}

    def returns(self) -> list[float]:
        """Mean returns of the reports so far, thinned out."""
        return self._display.returns.means(CURVE_POINTS)

    def summarize(
        self,
        status: Status,
        env_steps: int,
        error: str | None,
        signal: int | None,
        phases: Mapping[str, Mapping[str, float]],
    ) -> Result:
        """Write the summary, and close the loggers.

        Args:
            status: How the run ended.
            env_steps: Env steps trained on.
            error: Why the run failed, else None.
            signal: The signal that interrupted the run, else None.
            phases: Share of every phase in the time of each kind of worker, 0 to 1.
        """
        wall_s, fps = self.wall_s, self._speed.overall_fps(env_steps)
        returns = self.last.episode_return_mean if self.last else self._episodes.report().return_mean
        result = Result(status, env_steps, wall_s, fps, returns, signal, self._folder.path, self._kernels)
        self._write_summary(result, self.last.extras if self.last else {}, error, phases)
        self._loggers.close(status)
        return result

    def close(self) -> None:
        """Write the run's page, and close the display."""
        if self._plan.config.log.report:
            self._write_page()
        self._display.close()

    def nothing_to_do(self, snapshot: Snapshot) -> Result:
        """Tell the user that the checkpoint already has the requested number of env steps, and the run's files if they
        do not say that it is completed: its process may have been killed just before."""
        steps, returns = snapshot.env_steps, math.nan if snapshot.episode_return is None else snapshot.episode_return
        config = self._plan.config
        self.note(
            f"nothing to do: {config.run_dir} has {steps} of {config.steps} env steps; raise --steps, or begin anew "
            "with --overwrite"
        )
        self._display.close()
        fps = steps / max(snapshot.wall_s, 1e-9)
        result = Result("completed", steps, snapshot.wall_s, fps, returns, None, self._folder.path)
        if read_json(self._folder.summary).get("status") != "completed":
            self._write_summary(result, extras={}, error=None, phases={})
        return result

    def _write_summary(
        self,
        result: Result,
        extras: Mapping[str, float],
        error: str | None,
        phases: Mapping[str, Mapping[str, float]],
    ) -> None:
        config, env = self._plan.config, self._plan.env
        try:
            Summary(
                status=result.status, env=env_name(config.env), seed=config.seed, env_steps=result.env_steps,
                frames=result.env_steps * env.frameskip, wall_s=result.wall_s, fps=result.fps,
                episode_return_mean=result.episode_return_mean, protocol=env.protocol, extras=extras, error=error,
                phases=phases, machine=describe_machine(),
            ).write(self._folder.summary)  # fmt: skip
        except OSError as cause:
            self.note(f"summary not written: {cause}")

    def _write_page(self) -> None:
        """Write report.html. Whatever goes wrong with it, the run has ended as it has."""
        try:
            write_page(self._folder.path, ended=True)
        except Exception as error:
            self.note(f"{PAGE} not written: {said(error)}")

    def _write(self, report: Report) -> None:
        """Write a report to the run folder. Training goes on without it; rows that could not be written are written
        with the next report."""
        try:
            self._folder.restore()
            self._writer.write(report)
            if self._unwritten:
                self.note("metrics are written again")
            self._unwritten = False
        except OSError as error:
            if not self._unwritten:
                self.note(f"metrics not written: {error}; trying again with each report")
            self._unwritten = True
