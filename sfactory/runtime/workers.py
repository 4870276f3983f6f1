"""Workers: how each is built from the plan, and what each does in a process of its own.

Serial mode builds the same workers in the runner's process.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from sfactory.config import devices
from sfactory.envs import make_group
from sfactory.envs.interface import EnvRequest
from sfactory.inference import PolicyWorker
from sfactory.kernels import Kernels
from sfactory.model import build_uninitialized
from sfactory.rollout import RolloutWorker
from sfactory.runs.checkpoint import CheckpointStore
from sfactory.runtime.allocator import keep_freed_memory
from sfactory.runtime.device_errors import explaining
from sfactory.runtime.plan import EVALUATOR, Plan
from sfactory.runtime.training import Stopped, make_training
from sfactory.runtime.wires import Wires, inline_wires
from sfactory.telemetry.control_block import ControlBlock
from sfactory.telemetry.events import KernelsChosen

POLL_S = 0.05
"""Longest wait for a message, in seconds, before a worker looks at the stop flag again."""
EVALUATOR_NICE = 10
"""By how much the evaluator's priority is below the learner's."""
EVALUATOR_SILENT_S = 10.0
"""Seconds without a heartbeat after which the end of a run does not wait for the evaluator."""
RECLAIM_POLL_S = 0.005
"""Seconds between two looks at whether the learner has reclaimed all slots."""
_ROLLOUT, _POLICY, _EVALUATOR, _LEARNER = range(4)


def make_rollout_worker(plan: Plan, wires: Wires, index: int, generation: int) -> RolloutWorker:
    """Make a rollout worker with its environments. If some cannot be made, those before are closed.

    Args:
        plan: Plan of the run.
        wires: Wires of the run.
        index: Number of the rollout worker.
        generation: As of :meth:`Plan.seed`.
    """
    config, watch = plan.config, wires.control.stopwatch(f"rollout-{index}")
    runtime = config.runtime
    request = EnvRequest.of(config, plan.env_source, survive_faults=True)
    count, seed = config.envs_per_group, plan.seed(generation)
    indices = range(index * runtime.groups, (index + 1) * runtime.groups)
    with contextlib.ExitStack() as made:
        groups = {}
        for i in indices:
            groups[i] = make_group(request, plan.env, count, i * count, seed)
            made.callback(groups[i].close)
        made.pop_all()
    return RolloutWorker(index, groups, wires, watch)


def make_policy_worker(plan: Plan, wires: Wires, index: int, generation: int) -> PolicyWorker:
    """Make a policy worker.

    Args:
        plan: Plan of the run.
        wires: Wires of the run.
        index: Number of the policy worker.
        generation: As of :meth:`Plan.seed`.
    """
    config, watch = plan.config, wires.control.stopwatch(f"policy-{index}")
    device = devices.inference_device(config, index)
    devices.prepare_device(device, config)
    model = build_uninitialized(plan.env.observation, plan.env.action, config.model).to(device)
    autocast = devices.autocast_dtype(config, plan.env.observation.has_images, device)
    kernels = Kernels(config, model, device, autocast)
    worker = PolicyWorker(index, model, kernels, worker_seeds(plan, generation, _POLICY, index).actions, wires, watch)
    if index == 0:  # all choose alike
        wires.events.put(KernelsChosen("policy", worker.choice.taken, worker.choice.refused))
    return worker


def seed_globals(plan: Plan, generation: int, *worker: int) -> None:
    """Seed the random states of Python, NumPy and torch, which users' environments and models may draw from: all
    processes of a fork server begin with the same ones.

    Args:
        plan: Plan of the run.
        generation: As of :meth:`Plan.seed`.
        worker: Numbers that no other worker of the run has; none in serial mode.
    """
    seeds = worker_seeds(plan, generation, *worker)
    random.seed(seeds.python)
    np.random.seed(seeds.numpy)
    torch.manual_seed(seeds.torch)


class WorkerSeeds(NamedTuple):
    """Seeds of one worker: of three libraries' global random states, and of the actions that it samples."""

    python: int
    numpy: int
    torch: int
    actions: int


def worker_seeds(plan: Plan, generation: int, *worker: int) -> WorkerSeeds:
    """Seeds that no other worker has, nor any of a run with another seed. Arguments as of :func:`seed_globals`."""
    sequence = np.random.SeedSequence(plan.seed(generation), spawn_key=worker)
    return WorkerSeeds(*sequence.generate_state(len(WorkerSeeds._fields)).tolist())


def learner_main(plan: Plan, wires: Wires, generation: int, store: CheckpointStore) -> None:
    """Main function of the learner's process."""
    seed_globals(plan, generation, _LEARNER)
    torch.set_num_threads(devices.learner_torch_threads(plan.config))
    keep_freed_memory()
    with explaining(plan.config):
        _train(plan, wires, store)


def _train(plan: Plan, wires: Wires, store: CheckpointStore) -> None:
    """Train until the end of training or of the run, and save, after an error too."""
    training = make_training(plan, wires, store)
    training.start()
    try:
        while not wires.control.stopping and not training.done:
            training.poll(POLL_S)
        training.evaluate_last(lambda: _wait_for_evaluator(wires.control))
    except BaseException:
        training.rescue()
        raise
    training.finish()


def policy_main(plan: Plan, wires: Wires, index: int, generation: int) -> None:
    """Main function of a policy worker's process."""
    _schedule_as_batch()
    seed_globals(plan, generation, _POLICY, index)
    torch.set_num_threads(devices.inference_threads(plan.config))
    keep_freed_memory()
    worker = make_policy_worker(plan, wires, index, generation)
    while not wires.control.stopping:
        worker.poll(POLL_S)


def rollout_main(plan: Plan, wires: Wires, index: int, generation: int) -> None:
    """Main function of a rollout worker's process. With inline inference a policy worker takes turns with it here."""
    os.nice(plan.config.runtime.rollout_nice)
    _schedule_as_batch()
    seed_globals(plan, generation, _ROLLOUT, index)
    torch.set_num_threads(devices.inference_threads(plan.config) if plan.inline_inference else 1)
    policies = []
    if plan.inline_inference:
        wires = inline_wires(plan, wires)
        keep_freed_memory()
        policies = [make_policy_worker(plan, wires, index, generation)]
    worker = make_rollout_worker(plan, wires, index, generation)
    try:
        while not wires.control.slots_reclaimed and not wires.control.stopping:
            time.sleep(RECLAIM_POLL_S)
            wires.control.rest()
        worker.start()
        while not wires.control.stopping:
            for policy in policies:
                policy.poll(0)
            worker.poll(POLL_S)
    finally:
        for end in (worker.report, worker.close):
            with contextlib.suppress(Exception):  # at the end of the run, or while another error is raised
                end()


def evaluator_main(plan: Plan, wires: Wires, videos: Path) -> None:
    """Main function of the evaluator's process, which takes what is left of one core."""
    from sfactory.runtime.evaluator import Evaluator  # brings the command's libraries, which no other needs

    os.nice(EVALUATOR_NICE)
    _schedule_as_batch()
    seed_globals(plan, 0, _EVALUATOR)
    torch.set_num_threads(1)
    evaluator = Evaluator(plan, wires, videos)
    with contextlib.suppress(Stopped):
        while not wires.control.stopping:
            evaluator.poll(POLL_S)


def final_evaluation_main(plan: Plan, wires: Wires, run: Path, store: CheckpointStore) -> None:
    """Main function of the process that plays for a run's page once all others have ended."""
    from sfactory.runtime.evaluator import play_last

    seed_globals(plan, 0, _EVALUATOR)
    play_last(plan, run, store)


def _schedule_as_batch() -> None:
    """Use the SCHED_BATCH policy: a process woken by a message does not preempt the running one. There are fewer
    context switches and fuller inference batches.

    The learner keeps its policy, because all others wait for it.
    """
    with contextlib.suppress(OSError):  # a container may forbid it
        if os.sched_getscheduler(0) == os.SCHED_OTHER:  # else the user has chosen a policy
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _wait_for_evaluator(control: ControlBlock) -> bool:
    """Wait a moment, and tell whether the evaluator has shown a sign of life."""
    time.sleep(POLL_S)
    return time.monotonic() - control.total(EVALUATOR, "heartbeat") < EVALUATOR_SILENT_S
