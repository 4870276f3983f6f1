"""The runner: starts a run's processes, watches them, reports, and brings everything to an orderly end."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from queue import Empty
from typing import Literal

import numpy as np
import psutil
import torch

from sfactory import compute, workers
from sfactory.arena import FINISHED, FREE, arena_bytes, segment_fields
from sfactory.board import COLUMNS, Episodes, Event, Fault, Finished, Progress, Saved
from sfactory.checkpoint import CheckpointStore
from sfactory.config import Config, default_workers, env_name, max_lag, resolve, slot_count, validate
from sfactory.display import Display
from sfactory.envs import probe, resolve_env
from sfactory.envs.group import EnvRequest
from sfactory.errors import ConfigError, EnvironmentFault, RunFailed, SfactoryError
from sfactory.metrics import EpisodeWindow, MetricsWriter, Report, Speedometer, write_summary
from sfactory.model import build_model
from sfactory.run_folder import RunFolder, open_run

Status = Literal["completed", "interrupted", "failed"]
Callback = Callable[[Report], bool | None]
STOP_DEADLINE_S = 8.0
EVENT_POLL_S = 0.05


@dataclass(frozen=True)
class Result:
    """How a run ended.

    Attributes:
        status: completed, interrupted or failed.
        env_steps: Env steps trained on, over all resumes.
        episode_return_mean: As last reported; NaN if no episode has ended.
        signal: The signal that interrupted it, if one did.
        run_dir: The run folder.
    """

    status: Status
    env_steps: int
    wall_s: float
    fps: float
    episode_return_mean: float
    signal: int | None
    run_dir: Path


def train(config: Config, callbacks: Sequence[Callback] = ()) -> Result:
    """Train an agent, or resume the run in the config's folder.

    Args:
        config: What to train. The family's preset fills the fields that its creator left open.
        callbacks: Called with every :class:`sfactory.metrics.Report`; one that returns False ends the run as interrupted.

    Returns:
        How the run ended. After Ctrl-C or SIGTERM, or a callback's False, the status is interrupted and the run is saved.

    Raises:
        ConfigError: Before anything has started; names every problem.
        EnvironmentFault: An environment raised or broke its API; the run is saved.
        RunFailed: A worker failed or vanished; the run is saved if the learner could.
    """
    return run_resolved(resolve(config), callbacks)


def run_resolved(config: Config, callbacks: Sequence[Callback] = ()) -> Result:
    """:func:`train` with a config whose preset has been applied."""
    plan = make_plan(config)
    with open_run(plan.config) as folder:
        folder.keep_spec(plan.env)
        store = CheckpointStore(folder.checkpoints, config.log.keep, config.log.milestone_every)
        supervisor = _Supervisor(plan, folder, store, callbacks)
        with supervisor.signals():
            return supervisor.run()


def make_plan(config: Config) -> workers.Plan:
    """Check a resolved config against its environment, its model and this machine.

    Raises:
        ConfigError: With every problem.
    """
    validate(config)
    if not config.serial:
        _start_forkserver()
    source = resolve_env(config.env)
    config = dataclasses.replace(config, workers=1 if config.serial and config.workers is None else config.workers or default_workers())
    compute.learner_device(config), compute.inference_device(config)
    request = EnvRequest(source, config.env_kwargs, config.env_backend, config.model.squash, validate=config.runtime.validate_observations)
    env = probe(request)
    validate(config, env.agents)
    plan = workers.Plan(config, env, source)
    state_size = build_model(env.observation, env.action, config.model).state_size
    _check_memory(plan, state_size)
    return plan


def _check_memory(plan: workers.Plan, state_size: int) -> None:
    config = plan.config
    slots = slot_count(config, plan.rows)
    needed = arena_bytes(segment_fields(plan.env, state_size), slots, config.rollout, plan.rows)
    available = psutil.virtual_memory().available
    if needed > 0.8 * available:
        raise ConfigError(
            f"the trajectories need {needed / 2**30:.1f} GiB ({slots} slots of rollout {config.rollout} x {plan.rows} rows), "
            f"and {available / 2**30:.1f} GiB are free; lower envs_per_worker, workers, rollout or batch_size"
        )


def _start_forkserver() -> None:
    """Start the process that all workers are forked from, with the imports they need; it works while this one goes on.

    It inherits a blocked SIGINT and SIGTERM: those are for the runner, and a worker has them blocked from its first instruction.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["sfactory.workers"])
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        with _no_main_module():
            forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _stop_forkserver() -> None:
    stop = getattr(forkserver._forkserver, "_stop", None)
    if stop is not None:
        stop()


@contextlib.contextmanager
def _no_main_module() -> Iterator[None]:
    """Keep worker processes from importing the user's main script again: what they need of it comes pickled by value."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


class _Supervisor:
    """One run from its first process to its summary."""

    def __init__(self, plan: workers.Plan, folder: RunFolder, store: CheckpointStore, callbacks: Sequence[Callback]) -> None:
        self._plan, self._folder, self._store, self._callbacks = plan, folder, store, callbacks
        snapshot = store.load_latest()
        self._generation = 0 if snapshot is None else snapshot.env_steps
        steps = self._generation
        self._speed = Speedometer(0.0 if snapshot is None else snapshot.wall_s, steps, steps * plan.env.frameskip)
        self._progress = Progress(steps, 0 if snapshot is None else snapshot.updates, float("nan"), float("nan"), {}, plan.config.optim.lr)
        self._reached = steps
        self._episodes = EpisodeWindow(plan.config.log.episode_window)
        self._wires = workers.make_wires(plan, local=plan.config.serial)
        self._writer = MetricsWriter(folder, plan.config, steps)
        config = plan.config
        self._display = Display(
            config.log.display, title=env_name(config.env), steps=config.steps, slots=self._wires.arena.slots, max_lag=max_lag(config, plan.rows)
        )
        self._fault: Fault | None = None
        self._finished: Finished | None = None
        self._signal: int | None = None
        self._cancelled = False
        self._last_report: Report | None = None
        self._last_board = (time.monotonic(), self._wires.board.snapshot())
        self._processes: dict[str, multiprocessing.process.BaseProcess] = {}

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM end the run in an orderly way, the second one at once; SIGUSR1 saves and goes on."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def interrupt(number: int, frame: types.FrameType | None) -> None:
            if self._signal is not None:
                self._kill()
                os._exit(128 + number)
            self._signal = number

        handlers = {signal.SIGINT: interrupt, signal.SIGTERM: interrupt, signal.SIGUSR1: lambda *_: self._wires.board.request_save()}
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def run(self) -> Result:
        """Run to the end, whatever it is.

        Raises:
            EnvironmentFault, RunFailed: After saving and writing the summary.
        """
        try:
            if self._generation >= self._plan.config.steps:
                self._display.note(f"nothing to do: {self._folder.path} has {self._generation} of {self._plan.config.steps} env steps; raise --steps")
                self._finished = Finished(self._generation, True)
            elif self._plan.config.serial:
                self._run_serial()
            else:
                self._run_processes()
        except SfactoryError as error:
            self._fault = self._fault or Fault("runner", str(error), "", isinstance(error, EnvironmentFault))
        finally:
            self._kill()
            self._display.close()
            self._writer.close()
        result = self._summarise()
        if self._fault is not None:
            raise (EnvironmentFault if self._fault.bad_environment else RunFailed)(_describe(self._fault))
        return result

    # One process

    def _run_serial(self) -> None:
        """All workers in turn, in this process."""
        torch.manual_seed(self._plan.config.seed)
        threads = torch.get_num_threads()
        torch.set_num_threads(compute.learner_threads(self._plan.config))
        training = workers.Training(self._plan, self._wires, self._store)
        policies = [workers.make_policy_worker(self._plan, self._wires, i, self._generation) for i in range(len(self._wires.requests))]
        rollouts = [workers.make_rollout_worker(self._plan, self._wires, i, self._generation) for i in range(self._plan.config.workers)]
        try:
            training.learner.start()
            for rollout in rollouts:
                rollout.start()
            while not training.learner.done and not self._ending():
                for worker in (*policies, *rollouts, training.learner):
                    worker.poll(0)
                training.save_if_due()
                self._watch(self._wires.events.take())
        except EnvironmentFault as error:
            self._fault = Fault("serial", str(error), "", True)
        finally:
            for rollout in rollouts:
                rollout.report()
                rollout.close()
            torch.set_num_threads(threads)
        training.finish()
        self._watch(self._wires.events.take())

    # Several processes

    def _run_processes(self) -> None:
        self._start_processes()
        while self._finished is None and not self._ending():
            self._watch(self._take_events())
            self._check_processes()
        self._wires.board.stop()
        self._await_end()

    def _start_processes(self) -> None:
        context = multiprocessing.get_context("forkserver")
        plan, count = workers.SharedPlan(self._plan), self._plan.config
        jobs = {"learner": (workers.learner_main, (self._store,))}
        jobs |= {f"policy-{i}": (workers.policy_main, (i, self._generation)) for i in range(count.runtime.policy_workers)}
        jobs |= {f"rollout-{i}": (workers.rollout_main, (i, self._generation)) for i in range(count.workers)}
        with _no_main_module():
            for name, (target, args) in jobs.items():
                process = context.Process(target=workers.process_main, name=f"sfactory-{name}", args=(target, name, plan, self._wires, *args))
                process.start()
                self._processes[name] = process

    def _check_processes(self) -> None:
        """Notice processes that ended or that show no sign of life."""
        ended = [name for name, process in self._processes.items() if process.exitcode is not None]
        if ended and self._fault is None and self._finished is None:
            self._watch(self._take_events())
        if ended and self._fault is None and self._finished is None:
            codes = ", ".join(f"{name} (exit code {self._processes[name].exitcode})" for name in ended)
            self._fault = Fault(ended[0], f"worker process ended by itself: {codes}", "")
        limit = self._plan.config.runtime.step_timeout_s
        silent = time.monotonic() - self._wires.board.snapshot()[:, COLUMNS.index("heartbeat")]
        if self._fault is None and (silent > limit).any():
            name = self._wires.board.names[int(silent.argmax())]
            self._fault = Fault(name, f"no sign of life for {limit:g} s; an environment may hang (runtime.step_timeout_s sets the limit)", "")

    def _await_end(self) -> None:
        """Let the learner save and all processes end; go on taking events, or a full queue would hold them up."""
        deadline = time.monotonic() + STOP_DEADLINE_S
        while time.monotonic() < deadline and any(process.exitcode is None for process in self._processes.values()):
            self._watch(self._take_events(), report=False)
        self._watch(self._take_events(), report=False)

    def _take_events(self) -> list[Event]:
        try:
            return self._wires.events.get_many(timeout=EVENT_POLL_S)
        except Empty:
            return []

    def _kill(self) -> None:
        """End every process that is still there, and free what they hold."""
        for process in self._processes.values():
            if process.exitcode is None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    for child in psutil.Process(process.pid).children(recursive=True):
                        child.kill()
                process.kill()
        for process in self._processes.values():
            process.join()
            process.close()
        if self._processes:
            _stop_forkserver()
        self._processes = {}

    # Watching

    def _ending(self) -> bool:
        """Whether something other than the number of steps ends the run."""
        return self._signal is not None or self._fault is not None or self._cancelled

    def _watch(self, events: list[Event], report: bool = True) -> None:
        for event in events:
            match event:
                case Episodes():
                    self._episodes.add(event.returns, event.lengths, event.extras)
                case Progress():
                    self._progress = self._merge(event)
                case Saved(error=str() as error):
                    self._display.note(error)
                case Finished():
                    self._finished = event
                case Fault() if not self._ending():
                    self._fault = event
        due = time.monotonic() - self._last_board[0] >= self._plan.config.log.report_every_s
        if (report and due) or (self._finished is not None and self._last_report_is_old()):
            self._report()

    def _last_report_is_old(self) -> bool:
        return self._last_report is None or self._last_report.env_steps < self._finished.env_steps

    def _merge(self, new: Progress) -> Progress:
        """The learner's newest message; statistics that it lacks (nothing was trained in between) stay."""
        old = self._progress
        if new.losses:
            return new
        return dataclasses.replace(new, losses=old.losses, lag_mean=old.lag_mean, lag_max=old.lag_max)

    def _report(self) -> None:
        """Write one row, show it, and ask the callbacks."""
        progress, frameskip = self._progress, self._plan.env.frameskip
        frames = progress.env_steps * frameskip
        speed = self._speed.report(progress.env_steps, frames)
        episodes = self._episodes.report()
        self._wires.board.episode_return = episodes.return_mean
        names = {f.name for f in dataclasses.fields(Report)}
        report = Report(
            wall_s=speed.wall_s, env_steps=progress.env_steps, frames=frames, fps=speed.fps, frames_per_s=speed.frames_per_s,
            episodes=episodes.episodes, episode_return_mean=episodes.return_mean, episode_return_min=episodes.return_min,
            episode_return_max=episodes.return_max, episode_length_mean=episodes.length_mean, policy_lag_mean=progress.lag_mean,
            policy_lag_max=progress.lag_max, learner_updates=progress.updates, lr=progress.lr, extras=episodes.extras,
            **{name: value for name, value in progress.losses.items() if name in names}, **self._load(),
        )  # fmt: skip
        self._last_report = report
        self._writer.write(report)
        self._display.update(report)
        if any([callback(report) is False for callback in self._callbacks]):
            self._cancelled = True

    def _load(self) -> dict[str, float]:
        """What the workers did since the last report, from the board, and where the slots are."""
        now, table = time.monotonic(), self._wires.board.snapshot()
        before, old = self._last_board
        self._last_board = (now, table)
        change = (table - old) / max(now - before, 1e-9)
        kinds = [name.split("-")[0] for name in self._wires.board.names]
        column = {name: change[:, i] for i, name in enumerate(COLUMNS)}

        def of(kind: str, values: np.ndarray) -> np.ndarray:
            return values[[k == kind for k in kinds]]

        batches = of("policy", column["batches"]).sum()
        state = self._wires.arena.state
        return {
            **{f"{kind}_busy": float(of(kind, column["busy_s"]).mean()) for kind in ("rollout", "policy", "learner")},
            "batch_fill": float(of("policy", column["rows"]).sum() / batches) if batches else float("nan"),
            "free_slots": int((state == FREE).sum()),
            "finished_slots": int((state == FINISHED).sum()),
            "queue_full_waits": int(table[:, COLUMNS.index("full_waits")].sum()),
            "rss_mb": self._memory() / 2**20,
        }

    def _memory(self) -> float:
        """Resident bytes of all processes; pages of the arena count once, in each process that touched them, at most."""
        total = psutil.Process().memory_info().rss
        for process in self._processes.values():
            with contextlib.suppress(psutil.Error):
                total += psutil.Process(process.pid).memory_info().rss
        return total

    def _summarise(self) -> Result:
        status: Status = "completed" if self._finished is not None and self._finished.completed else "interrupted"
        if self._fault is not None:
            status = "failed"
        env_steps = self._finished.env_steps if self._finished else self._progress.env_steps
        returns = self._last_report.episode_return_mean if self._last_report else self._episodes.report().return_mean
        config = self._plan.config
        result = Result(status, env_steps, self._speed.wall_s, self._speed.overall_fps(env_steps), returns, self._signal, self._folder.path)
        write_summary(
            self._folder.summary, status, env=env_name(config.env), seed=config.seed, env_steps=env_steps,
            frames=env_steps * self._plan.env.frameskip, wall_s=result.wall_s, fps=result.fps, episode_return_mean=returns,
            extras=self._last_report.extras if self._last_report else None, error=_describe(self._fault) if self._fault else None,
        )  # fmt: skip
        return result


def _describe(fault: Fault) -> str:
    """A fault for the user: an environment's message holds its own traceback already."""
    if fault.bad_environment or not fault.traceback:
        return f"{fault.process}: {fault.message}"
    return f"{fault.process}: {fault.message}\n{fault.traceback}"
