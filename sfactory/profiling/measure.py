"""A profile: where the time of a run goes, measured on a real run in a temporary folder."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sfactory.config import EvalConfig, changed
from sfactory.data.arena import FILLING, FINISHED
from sfactory.errors import RunFailed, SfactoryError, counted
from sfactory.files import temporary_folder
from sfactory.runtime.plan import Plan
from sfactory.runtime.processes import fork_server
from sfactory.runtime.runner import run_plan
from sfactory.runtime.wires import Wires
from sfactory.telemetry.metrics import Report
from sfactory.telemetry.stopwatch import Interval
from sfactory.telemetry.trace import write_trace

KINDS = ("rollout", "policy", "learner")
WARM_UP_BATCHES = 3
WARM_UP_S = 1.0
"""Seconds of warm-up after the first batch."""
WAITS = 0.1
"""Share of its time from which the learner waits for samples, and rollout workers for free slots."""
PATIENCE_S = 300.0
SAMPLE_EVERY_S = 0.05
ENDLESS = 10**12
"""Env steps, or seconds, that no profile reaches."""


class Interrupted(SfactoryError):
    """A signal has ended the run.

    Args:
        signal: Its number.
    """

    def __init__(self, signal: int) -> None:
        super().__init__(f"interrupted by signal {signal}")
        self.signal, self.exit_status = signal, 128 + signal


class Level(NamedTuple):
    """Level of a queue or of slots over the measured time: its mean and its maximum."""

    mean: float
    most: float


@dataclass(frozen=True)
class Profile:
    """Measurements of a run, without the warm-up.

    Attributes:
        plan: Plan of the run.
        warm_up_s: Seconds from the creation of the control block to the beginning of the measurement.
        seconds: Measured seconds.
        fps: Env steps per second learned from, or sampled where `plan.sample_only`.
        interval: Statistics of the workers.
        levels: Levels of ``requests`` (of all policy workers together, if they have processes of their own), and of
            slots by state: ``free``, ``filling`` and ``finished``. The rest is with the learner.
        lag_mean, lag_max: Policy lag in learner updates; NaN where nothing was learned.
        episode_length: Mean env steps of the last episodes; infinite where none has ended.
        kernels: Names of the kernels with which each kind of worker ran.
        begin_s: When the measurement began, in monotonic seconds.
        start: Start-up times in seconds: before the run was created (if known), of each kind of worker, and from
            creation to the first batch, which includes the workers'.
    """

    plan: Plan
    warm_up_s: float
    seconds: float
    fps: float
    interval: Interval
    levels: dict[str, Level]
    lag_mean: float
    lag_max: float
    episode_length: float = math.inf
    kernels: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    begin_s: float = math.nan
    start: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def frames_per_s(self) -> float:
        return self.fps * self.plan.env.frameskip

    def busy(self, kind: str) -> float:
        """Share of their time, 0 to 1, that the workers of a kind did not wait."""
        return self.interval.busy(kind)

    def cpu(self, kind: str) -> float:
        """Cores that the workers of a kind kept at work, all together; programs that environments start do not
        count."""
        return float(self.interval.column(kind, "cpu_s").sum()) / self.seconds

    @property
    def cpu_cores(self) -> float:
        """Cores that all workers kept at work."""
        return sum(map(self.cpu, KINDS))

    @property
    def batch_mean(self) -> float:
        """Mean rows of a forward pass of the policy workers."""
        passes = self.interval.column("policy", "batches").sum()
        return float(self.interval.column("policy", "rows").sum() / passes) if passes else math.nan

    @property
    def batch_sizes(self) -> dict[int, int]:
        """Forward passes of the policy workers by their rows: at most the key, more than half of it."""
        return self.interval.batch_sizes("policy")


def profile_run(
    plan: Plan,
    seconds: float,
    trace: Path | None = None,
    patience_s: float = PATIENCE_S,
    tell: Callable[[str], object] = str,
    command_s: float = math.nan,
) -> Profile:
    """Run a plan in a temporary folder and measure it. Nothing is shown, and nothing is kept.

    Args:
        plan: From :func:`sfactory.runtime.planning.make_plan`; its number of steps does not matter.
        seconds: Seconds to measure after the warm-up: the start, the compilation of kernels and a few batches, or half
            as long again. Longer if no batch is trained in them.
        trace: File to write a trace of the measured time to.
        patience_s: Seconds in which the first batch must be trained, and by which a measurement may be longer.
        tell: Is told how far it is.
        command_s: When the command began, in monotonic seconds; NaN: that does not matter.

    Raises:
        Interrupted: After SIGINT, SIGTERM or SIGHUP.
        EnvironmentFault, RunFailed: As :func:`sfactory.train`; RunFailed also if no batch was trained in time.
    """
    with temporary_folder() as folder, contextlib.nullcontext() if plan.config.serial else fork_server():
        log = changed(
            plan.config.log,
            display="none",
            tensorboard=False,
            loggers=(),
            report=False,
            report_every_s=0.5,
            save_every_s=ENDLESS,
            milestone_every=0,
        )
        run, plays = str(folder / "run"), EvalConfig()
        config = changed(plan.config, run=run, overwrite=False, steps=ENDLESS, log=log, eval=plays)
        observer = _Observer(plan, seconds, patience_s, tell, command_s)
        parts = folder / "trace"
        parts.mkdir()
        traced = dataclasses.replace(plan, config=config, trace=None if trace is None else parts)
        result = run_plan(traced, [observer.report], observer)
        if result.signal is not None:
            raise Interrupted(result.signal)
        profile = dataclasses.replace(observer.profile(), kernels=result.kernels)
        if trace is not None:
            write_trace(trace, parts, profile.interval.names, *observer.window, observer.samples)
        return profile


def env_steps_per_s(plan: Plan, interval: Interval) -> float:
    """Speed of a run; NaN if no batch was trained.

    It is the rate of whoever does not wait for the other, as the other works in bursts: the learner, or the rollout
    workers, of whose rows some do not count. While slots fill or drain neither waits, and the slower one counts.
    """
    learned = interval.rate("learner")
    if plan.on_device or plan.config.serial or math.isnan(learned):
        return learned
    rows, batches = (interval.column("learner", name).sum() for name in ("rows", "batches"))
    size = plan.config.rollout * plan.rows if plan.sample_only else plan.config.batch_size
    sampled = interval.rate("rollout") * float(rows / (batches * size))
    waits = interval.phases("learner")["waiting"], interval.phases("rollout").get("blocked", 0.0)
    return min((rate for rate, share in zip((learned, sampled), waits, strict=True) if share < WAITS), default=learned)


class _Observer:
    """Observes a run from its start to the end of the measurement."""

    def __init__(
        self, plan: Plan, seconds: float, patience_s: float, tell: Callable[[str], object], command_s: float
    ) -> None:
        self._plan, self._tell, self._command = plan, tell, command_s
        self._seconds, self._patience_s = seconds, patience_s
        self._made = self._first_batch = self._begin = self._end = self._sampled = math.nan
        self._before = self._after = np.empty(0)
        self._names: list[str] = []
        self._lags: list[tuple[float, float]] = []
        self._episode_length = math.inf
        self.samples: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)

    @property
    def window(self) -> tuple[float, float]:
        """The measured time, in monotonic seconds."""
        return self._begin, self._end

    def report(self, report: Report) -> None:
        """Take a report of the run."""
        if not math.isnan(report.episode_length_mean):
            self._episode_length = report.episode_length_mean
        if not math.isnan(self._begin) and not math.isnan(report.policy_lag_mean):
            self._lags.append((report.policy_lag_mean, report.policy_lag_max))

    def __call__(self, wires: Wires) -> bool:
        """Whether the run shall go on."""
        now = time.monotonic()
        if math.isnan(self._begin):
            return self._warm_up(wires, now)
        if not now - self._sampled < SAMPLE_EVERY_S:
            self._sample(wires, now)
        measured = now - self._begin
        if measured < self._seconds:
            self._tell(f"measuring: {measured:.0f} of {self._seconds:g} s")
            return True
        if math.isnan(self._end):
            after = wires.control.snapshot()
            trained = not math.isnan(env_steps_per_s(self._plan, Interval(self._names, self._before, after)))
            if not trained and measured < self._seconds + self._patience_s:
                self._tell(f"measuring: {measured:.0f} s, until a batch is trained")
                return True
            self._end, self._after = now, after
        return False

    def profile(self) -> Profile:
        """The profile of a run that has ended.

        Raises:
            RunFailed: If no batch was trained in time.
        """
        plan = self._plan
        if math.isnan(self._begin):
            raise RunFailed(
                f"no batch was trained within {self._patience_s:.0f} s; lower batch_size, now {plan.config.batch_size}"
            )
        interval = Interval(self._names, self._before, self._after)
        fps = env_steps_per_s(plan, interval)
        if math.isnan(fps):
            raise RunFailed(
                f"no batch was trained in the {self._end - self._begin:.0f} s that were measured; lower batch_size, "
                f"now {plan.config.batch_size}"
            )
        levels = {
            name: Level(float(np.mean([v for _, v in s])), max(v for _, v in s)) for name, s in self.samples.items()
        }
        lag_mean = float(np.mean([mean for mean, _ in self._lags])) if self._lags else math.nan
        lag_max = max((most for _, most in self._lags), default=math.nan)
        return Profile(
            plan, self._begin - self._made, self._end - self._begin, fps, interval, levels,
            math.nan if plan.sample_only else lag_mean, math.nan if plan.sample_only else lag_max,
            self._episode_length, begin_s=self._begin, start=self._start(),
        )  # fmt: skip

    def _start(self) -> dict[str, float]:
        """As :attr:`Profile.start`."""
        warm_up = Interval(self._names, np.zeros_like(self._before), self._before)
        started = {kind: warm_up.column(kind, "starting") for kind in KINDS}
        return {
            **({} if math.isnan(self._command) else {"before the run": self._made - self._command}),
            **{kind: float(seconds.max()) for kind, seconds in started.items() if len(seconds)},
            "run to first batch": self._first_batch - self._made,
        }

    def _warm_up(self, wires: Wires, now: float) -> bool:
        control = wires.control
        self._made, self._names = control.created_s, control.names
        batches = control.total("learner", "batches")
        if batches and math.isnan(self._first_batch):
            self._first_batch = now
        warm = now - self._first_batch >= max(WARM_UP_S, self._seconds / 2 if batches < WARM_UP_BATCHES else 0.0)
        late = now - self._made > self._patience_s
        if warm or (late and batches):
            self._begin, self._before = now, control.snapshot()
        else:
            self._tell(f"warming up: {counted(int(batches), 'batch', 'batches')}")
        return batches > 0 or not late

    def _sample(self, wires: Wires, now: float) -> None:
        self._sampled = now
        state = wires.arena.state
        values = {
            **({"requests": sum(map(len, wires.requests))} if wires.requests else {}),
            "free": len(wires.free),
            "filling": int(np.count_nonzero(state == FILLING)),
            "finished": int(np.count_nonzero(state == FINISHED)),
        }
        for name, value in values.items():
            self.samples[name].append((now, float(value)))
