"""Training: the learner together with its checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from sfactory.config import devices
from sfactory.data.evaluation import EvaluationBoard
from sfactory.data.feed import Feed, SlotFeed
from sfactory.device_rollout import DeviceRollout
from sfactory.envs import make_tensor_group
from sfactory.envs.interface import EnvRequest
from sfactory.errors import said
from sfactory.kernels import Kernels
from sfactory.learner import Learner
from sfactory.model import build_model
from sfactory.runs.checkpoint import CheckpointStore, Snapshot
from sfactory.runtime.null_training import NullTraining
from sfactory.runtime.plan import Plan
from sfactory.runtime.wires import Wires
from sfactory.telemetry.events import KernelsChosen, Note, TrainingEnded

LAST_EVALUATION_S = 60.0
"""Longest wait for the evaluation of a run's last weights."""
TOLD_S = 3.0
"""Seconds after which the user is told what a run waits for at its end."""


class Stopped(Exception):
    """The run ends in the middle of an evaluation."""


class Training:
    """The learner and its checkpoints. Continues from the newest checkpoint of the store, if it has any.

    Args:
        plan: Plan of the run.
        wires: Wires of the run.
        store: Checkpoints of the run.

    Attributes:
        learner: The learner.
    """

    def __init__(self, plan: Plan, wires: Wires, store: CheckpointStore) -> None:
        config, self._watch = plan.config, wires.control.stopwatch("learner")
        self._watch.queues = {wires.free}
        device = devices.learner_device(config)
        devices.prepare_device(device, config)
        torch.manual_seed(config.seed)
        self._model = build_model(plan.env.observation, plan.env.action, config.model).to(device)
        self._plan, self._control, self._emit, self._store = plan, wires.control, wires.events.put, store
        autocast = devices.autocast_dtype(config, plan.env.observation.has_images, device)
        kernels, snapshot = Kernels(config, self._model, device, autocast), store.load_latest_patiently()
        self._feed: Feed = (
            self._device_rollout(wires, device, 0 if snapshot is None else snapshot.env_steps)
            if plan.on_device
            else SlotFeed(config, wires, device, self._watch)
        )
        self.learner = Learner(config, self._model, kernels, self._feed, wires.events, self._watch)
        self._emit(KernelsChosen("learner", self.learner.choice.taken, self.learner.choice.refused))
        self._saved_steps = 0
        if snapshot is not None:
            self._model.load_state_dict(snapshot.model)
            self.learner.load_state(snapshot.trainer, snapshot.env_steps, snapshot.updates)
            torch.manual_seed(plan.seed(snapshot.env_steps))  # else draws from the global state would begin anew
            self._saved_steps = snapshot.env_steps
        self._saved_at = time.monotonic()
        self._saves_requested = 0
        self._trained_s: float | None = None
        self._next_milestone = next_multiple(self.learner.env_steps, config.log.milestone_every)
        self._board: EvaluationBoard | None = wires.evaluation
        self._candidate: Snapshot | None = None
        self._next_evaluation = next_multiple(self.learner.env_steps, config.eval.every)
        self._best_evaluation = store.best_evaluation() if wires.evaluation is not None else 0.0

    def _device_rollout(self, wires: Wires, device: torch.device, generation: int) -> DeviceRollout:
        plan = self._plan
        request = EnvRequest.of(plan.config, plan.env_source)
        group = make_tensor_group(request, plan.env, plan.rows, device)
        return DeviceRollout(plan.config, group, self._model, plan.seed(generation), wires.events, self._watch)

    @property
    def done(self) -> bool:
        """Whether the run's number of env steps is reached."""
        return self.learner.done

    def start(self) -> None:
        """Let sampling begin."""
        self.learner.start()

    def poll(self, timeout: float) -> None:
        """Train on one batch if one is there within `timeout` seconds; evaluate and save if it is time.

        Slots of sampling processes that have died are reclaimed first.
        """
        self._control.reclaim_slots_if_requested(self.learner.reclaim_slots)
        self.learner.poll(timeout)
        self._evaluate_if_due()
        self._save_if_due()

    def _evaluate_if_due(self) -> None:
        """Hand the weights to the evaluator if it is time and it is free, and save those that it found the best."""
        learner, board, candidate = self.learner, self._board, self._candidate
        if board is None:
            return
        if candidate is not None and board.evaluated == candidate.env_steps:
            self._candidate, result = None, board.result_of(candidate.env_steps)
            if result >= self._best_evaluation:
                self._best_evaluation = result
                self.save(dataclasses.replace(candidate, eval_return=result))
        if self._candidate is None and learner.env_steps >= self._next_evaluation:
            self._hand_out(board)

    def evaluate_last(self, wait: Callable[[], bool]) -> None:
        """At the end of a completed run, have the last weights evaluated, unless that takes longer than
        `LAST_EVALUATION_S`.

        Args:
            wait: Lets a moment pass for the evaluator; whether it is still there.
        """
        if self._board is None:
            return
        self._trained_s = self._control.wall_s
        self.learner.report()
        begin, told = time.monotonic(), False
        while (waited := time.monotonic() - begin) < LAST_EVALUATION_S and not self._control.stopping:
            if waited > TOLD_S and not told:
                told = True
                self._emit(Note(f"waits for the evaluation of the last weights, {LAST_EVALUATION_S:.0f} s at most"))
            self._evaluate_if_due()
            if self._candidate is None:
                if self._board.evaluated == self.learner.env_steps:
                    return
                self._hand_out(self._board)
            if not wait():
                return
            self._watch.lap("waiting")

    def _hand_out(self, board: EvaluationBoard) -> None:
        """Give the present weights to the evaluator, and keep them until their evaluation is known."""
        steps = self.learner.env_steps
        self._next_evaluation = next_multiple(steps, self._plan.config.eval.every)
        self._candidate = self.snapshot().frozen()
        self.learner.publish_to(board.weights, steps)
        self._watch.lap("weights")

    def _save_if_due(self) -> None:
        """Write a checkpoint if it is time for one, or if one was requested."""
        log = self._plan.config.log
        requested = self._control.saves_requested
        due = time.monotonic() - self._saved_at > log.save_every_s or requested != self._saves_requested
        if due or self.learner.env_steps >= self._next_milestone:
            self._saves_requested = requested
            self.save()

    def save(self, snapshot: Snapshot | None = None) -> str | None:
        """Write a checkpoint. If that fails, training goes on and the next save tries again.

        Args:
            snapshot: The current state, or an earlier one that was evaluated; None: the current one is taken here.

        Returns:
            Why the checkpoint could not be written, else None. It is reported to the runner too.
        """
        snapshot, now = self.snapshot() if snapshot is None else snapshot, self.learner.env_steps
        if snapshot.env_steps == now:
            self._saved_at = time.monotonic()
            self._next_milestone = next_multiple(now, self._plan.config.log.milestone_every)
        message = None
        try:
            self._store.save(snapshot, now)
            self._saved_steps = max(self._saved_steps, snapshot.env_steps)
        except OSError as error:
            message = f"checkpoint not written: {error}"
            self._emit(Note(message))
        self._watch.lap("reporting")
        return message

    def snapshot(self) -> Snapshot:
        """Everything that training continues from."""
        learner, episode_return = self.learner, self._control.episode_return
        return Snapshot(
            model={name: tensor.detach().cpu() for name, tensor in self._model.state_dict().items()},
            trainer=learner.state(),
            env_steps=learner.env_steps,
            frames=learner.env_steps * self._plan.env.frameskip,
            updates=learner.updates,
            wall_s=self._control.wall_s if self._trained_s is None else self._trained_s,
            episode_return=None if episode_return != episode_return else episode_return,
        )

    def finish(self) -> None:
        """Report the last statistics, save what is new since the last checkpoint, and report the end."""
        self.learner.report()
        self._evaluate_if_due()
        error = self.save() if self.learner.env_steps > self._saved_steps else None
        self._feed.close()
        self._emit(TrainingEnded(self.learner.env_steps, self.learner.done, error))

    def rescue(self) -> None:
        """After an error, report the last statistics and save what was learned before it, if that is finite. Raises
        nothing, because the original error has to be reported.

        Where the error came in the middle of a batch, weights and optimizer are those after the last completed update,
        since an optimizer step changes both in one operation; env steps are those of completed batches.
        """
        with contextlib.suppress(Exception):
            self.learner.report()
        try:
            if self.learner.env_steps > self._saved_steps:
                snapshot = self.snapshot()
                if names := self._not_finite(snapshot):
                    raise ValueError(
                        f"not all numbers of {', '.join(names)} are finite; the checkpoint before, if there is one, "
                        "stays"
                    )
                self.save(snapshot)
        except Exception as error:
            with contextlib.suppress(Exception):
                self._emit(Note(f"checkpoint not written: {said(error)}"))
        self._feed.close()

    def _not_finite(self, snapshot: Snapshot) -> list[str]:
        """Names of parameters and parts of the trainer's state that are not finite, and of buffers that hold NaN.

        Infinity is valid in a buffer, for example in an attention mask.
        """
        parameters = {name for name, _ in self._model.named_parameters()}
        names = [
            name
            for name, tensor in snapshot.model.items()
            if not (_is_finite(tensor) if name in parameters else _has_no_nan(tensor))
        ]
        return names + [name for name, part in snapshot.trainer.items() if not _is_finite(part)]


def next_multiple(env_steps: int, every: int) -> float:
    """The next multiple of `every`; infinity without any."""
    return (env_steps // every + 1) * every if every else float("inf")


def _is_finite(value: Any) -> bool:
    """Whether a tensor, or every tensor of a nested mapping, is finite."""
    if isinstance(value, Mapping):
        return all(map(_is_finite, value.values()))
    return not isinstance(value, torch.Tensor) or bool(value.isfinite().all())


def _has_no_nan(tensor: torch.Tensor) -> bool:
    return not bool(tensor.isnan().any())


def make_training(plan: Plan, wires: Wires, store: CheckpointStore) -> Training | NullTraining:
    """The training of a plan, which learns unless the plan is `sample_only`."""
    return NullTraining(plan, wires) if plan.sample_only else Training(plan, wires, store)
