"""Serial mode: all workers of a run take turns in this process."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, cast

from sfactory.config import devices
from sfactory.errors import EnvironmentFault, SfactoryError, said
from sfactory.rollout import RolloutWorker
from sfactory.runs.checkpoint import CheckpointStore
from sfactory.runs.run_files import VIDEOS
from sfactory.runs.run_folder import RunFolder
from sfactory.runtime import workers
from sfactory.runtime.device_errors import explained, explaining
from sfactory.runtime.monitor import Monitor
from sfactory.runtime.plan import Plan
from sfactory.runtime.training import Stopped, make_training
from sfactory.runtime.wires import LocalEvents, Wires
from sfactory.telemetry.events import Failure

if TYPE_CHECKING:
    from sfactory.runtime.evaluator import Evaluator


def run_serial(plan: Plan, folder: RunFolder, store: CheckpointStore, monitor: Monitor) -> None:
    """Run all workers in turn until the end of training, or until the monitor says that the run ends."""
    with devices.torch_threads(devices.learner_torch_threads(plan.config)):
        _run(plan, folder, store, monitor)


def _run(plan: Plan, folder: RunFolder, store: CheckpointStore, monitor: Monitor) -> None:
    wires, generation = monitor.wires, monitor.reporter.progress.env_steps
    events = cast(LocalEvents, wires.events)
    workers.seed_globals(plan, generation)
    with explaining(plan.config):
        training = make_training(plan, wires, store)
    policies = [workers.make_policy_worker(plan, wires, i, generation) for i in range(len(wires.requests))]
    rollouts = _make_rollout_workers(plan, wires, generation)
    evaluation = _Evaluation(plan, folder.path / VIDEOS, monitor)
    end = training.rescue
    try:
        training.start()
        for rollout in rollouts:
            rollout.start()
        while not training.done and not monitor.ending:
            for worker in (*policies, *rollouts, training):
                worker.poll(0)
            evaluation.poll()
            monitor.watch(events.take())
        if not monitor.ending:
            training.evaluate_last(evaluation.poll)
        end = training.finish
    except SfactoryError as error:
        monitor.fail(Failure("serial", str(error), "", isinstance(error, EnvironmentFault)))
    except BaseException as error:
        monitor.fail_with(explained(error, plan.config))
    finally:
        for rollout in rollouts:
            rollout.report()
            rollout.close()
        monitor.watch(events.take(), report=False)  # the last episodes, whose return the checkpoint tells
        end()
        wires.control.close()
        monitor.watch(events.take(), report=False)


def _make_rollout_workers(plan: Plan, wires: Wires, generation: int) -> list[RolloutWorker]:
    """All rollout workers. If one cannot be made, those before it are closed."""
    with contextlib.ExitStack() as made:
        rollouts = []
        for index in range(plan.rollout_workers):
            rollouts.append(workers.make_rollout_worker(plan, wires, index, generation))
            made.callback(rollouts[-1].close)
        made.pop_all()
    return rollouts


class _Evaluation:
    """The evaluator's turns, if the run has one. Where its environments fail, the run goes on without it."""

    def __init__(self, plan: Plan, videos: Path, monitor: Monitor) -> None:
        self._monitor = monitor
        self._evaluator: Evaluator | None = None
        if plan.evaluates:
            from sfactory.runtime.evaluator import Evaluator

            try:
                self._evaluator = Evaluator(plan, monitor.wires, videos)
            except Exception as error:
                self._give_up(error)

    def poll(self) -> bool:
        """Let the evaluator take its turn, and tell whether it is still there."""
        try:
            if self._evaluator is not None:
                self._evaluator.poll(0)
        except Stopped:
            pass
        except Exception as error:
            self._give_up(error)
        return self._evaluator is not None

    def _give_up(self, error: Exception) -> None:
        self._monitor.note(f"the run goes on without evaluation, which has failed: {said(error)}")
        self._evaluator = None
