"""What each process of a run is made of, and what it does from its start to its end.

The three kinds of worker are built here from one :class:`Plan`, for processes of their own and for serial mode alike.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import connection, parent_process
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any

import cloudpickle
import gymnasium
import numpy as np
import torch

from sfactory.config import Config, devices
from sfactory.config.lag import slot_count
from sfactory.data.arena import Arena, segment_fields
from sfactory.data.queues import IndexQueue, LocalQueue, PipeQueue, Queue
from sfactory.data.weights import FlatWeights, WeightBoard
from sfactory.envs import make_group
from sfactory.envs.interface import EnvRequest, EnvSpec
from sfactory.errors import EnvironmentFault, SfactoryError, said
from sfactory.inference import PolicyWorker
from sfactory.learner import Learner
from sfactory.model import build_model
from sfactory.rollout import RolloutWorker
from sfactory.runs.checkpoint import CheckpointStore, Snapshot
from sfactory.runtime.allocator import keep_freed_memory
from sfactory.runtime.null_learner import Drain
from sfactory.runtime.processes import RUNNER_SIGNALS, Outbox, kill_tree
from sfactory.runtime.stacks import keep_stacks
from sfactory.telemetry.control_block import Board, Event, Fault, Finished, Saved

POLL_S = 0.05
SETTLING_S = 0.005


@dataclass(frozen=True)
class Plan:
    """What is to be run; all workers are made from it.

    Attributes:
        config: Resolved and valid, with `workers` and `runtime.policy_workers` set.
        env: What is known of the environment.
        env_source: The environment itself: an id or a callable.
        sample_only: Nothing is learned; finished segments are given straight back.
        trace: Folder in which every process leaves its trace, or None.
    """

    config: Config
    env: EnvSpec
    env_source: Any
    sample_only: bool = False
    trace: Path | None = None

    @property
    def rows(self) -> int:
        """Agent rows of a group."""
        return self.config.envs_per_group * self.env.agents

    @property
    def groups(self) -> int:
        """Groups of the whole run."""
        return self.config.workers * self.config.runtime.groups

    @property
    def inline_inference(self) -> bool:
        """Whether every rollout worker has a policy worker of its own in its process."""
        return self.config.runtime.policy_workers == 0

    @property
    def policies(self) -> int:
        """Policy workers, in whatever process."""
        return self.config.runtime.policy_workers or self.config.workers

    def policy_of(self, group: int) -> int:
        """Number of the policy worker that answers a group."""
        return group // self.config.runtime.groups if self.inline_inference else group % self.policies


class SharedPlan:
    """A plan on its way to a process: pickled by value, so that lambdas and classes of ``__main__`` or a notebook
    arrive whole.

    Environments that the user's program has registered with Gymnasium by their class or a function travel with it.
    """

    def __init__(self, plan: Plan) -> None:
        registered = [
            spec
            for spec in gymnasium.registry.values()
            if callable(spec.entry_point) or callable(spec.vector_entry_point)
        ]
        self._data = cloudpickle.dumps((plan, registered))

    def open(self) -> Plan:
        plan, registered = cloudpickle.loads(self._data)
        for spec in registered:
            gymnasium.registry.setdefault(spec.id, spec)
        return plan


@dataclass(frozen=True)
class Wires:
    """Everything that the processes of a run share.

    Attributes:
        requests: One queue per policy worker.
        ready: One queue per rollout worker. With inline inference every rollout worker has its own of both, which
            nobody else sees.
        events: Whatever takes an event for the runner.
    """

    arena: Arena
    weights: WeightBoard
    board: Board
    requests: list[Queue]
    ready: list[Queue]
    free: Queue
    finished: Queue
    events: Outbox | LocalEvents


def worker_names(plan: Plan) -> list[str]:
    """Names of all workers, as on the board."""
    policies, rollouts = (
        (f"policy-{i}" for i in range(plan.policies)),
        (f"rollout-{i}" for i in range(plan.config.workers)),
    )
    return ["learner", *policies, *rollouts]


def make_wires(plan: Plan, local: bool) -> Wires:
    """Allocate the arena, the weights' board and all queues.

    Args:
        local: For one process instead of several. Every process of several brings its own `events`.
    """
    config = plan.config
    model = build_model(plan.env.observation, plan.env.action, config.model)
    slots = slot_count(config, plan.rows)
    fields = segment_fields(plan.env, model.state_size)

    return Wires(
        Arena(fields, slots, config.rollout, plan.rows),
        WeightBoard(FlatWeights(model).vector.numel()),
        Board(worker_names(plan), plan.trace),
        *_sampling_queues(plan, local),
        LocalQueue() if local else PipeQueue(slots),
        LocalQueue() if local else PipeQueue(slots),
        LocalEvents(),
    )


def _sampling_queues(plan: Plan, local: bool) -> tuple[list[Queue], list[Queue]]:
    """The queues of requests and of groups that are ready; none are shared where each rollout worker infers for
    itself."""
    if plan.inline_inference and not local:
        return [], []

    def queue(capacity: int) -> Queue:
        return LocalQueue() if local else IndexQueue(capacity)

    requests = [queue(plan.groups) for _ in range(plan.policies)]
    return requests, [queue(plan.config.runtime.groups) for _ in range(plan.config.workers)]


def renew_sampling(plan: Plan, wires: Wires) -> Wires:
    """Wires for new sampling processes, after all the old ones are dead: their queues are thrown away, the learner's
    side lives on."""
    wires.board.begin_sampling()
    requests, ready = _sampling_queues(plan, local=False)
    return dataclasses.replace(wires, requests=requests, ready=ready)


class LocalEvents:
    """The events of a run in one process."""

    def __init__(self) -> None:
        self._events: list[Event] = []

    def put(self, event: Event) -> None:
        self._events.append(event)

    def take(self) -> list[Event]:
        events, self._events = self._events, []
        return events


def make_rollout_worker(plan: Plan, wires: Wires, index: int, generation: int) -> RolloutWorker:
    """Rollout worker number `index`, with its environments.

    Args:
        generation: How many env steps the run had when it was last resumed; new environments do not repeat old
            episodes.
    """
    config, watch = plan.config, wires.board.stopwatch(f"rollout-{index}")
    runtime = config.runtime
    request = EnvRequest(
        plan.env_source, config.env_kwargs, config.env_backend, config.model.squash, runtime.env_threads,
        runtime.validate_observations,
        survive_faults=True,
    )  # fmt: skip
    count, seed = config.envs_per_group, derived_seed(config.seed, generation)
    indices = range(index * runtime.groups, (index + 1) * runtime.groups)
    made = [(g, make_group(request, plan.env, count, g * count, seed)) for g in indices]
    requests = [wires.requests[plan.policy_of(g)] for g in indices]
    free, finished, emit = wires.free, wires.finished, wires.events.put
    return RolloutWorker(made, wires.arena, wires.weights, requests, wires.ready[index], free, finished, emit, watch)


def make_policy_worker(plan: Plan, wires: Wires, index: int, generation: int) -> PolicyWorker:
    """Policy worker number `index`."""
    config, watch = plan.config, wires.board.stopwatch(f"policy-{index}")
    device = devices.inference_device(config, index)
    devices.prepare_device(device, config)
    model = build_model(plan.env.observation, plan.env.action, config.model).to(device)
    ready = [wires.ready[g // config.runtime.groups] for g in range(plan.groups)]
    seed = derived_seed(config.seed, generation) + 1 + index
    autocast = devices.autocast_dtype(config, plan.env, device)
    return PolicyWorker(
        model,
        wires.arena,
        wires.weights,
        wires.requests[index],
        ready,
        device,
        seed,
        autocast,
        watch,
        config.runtime.cuda_graphs,
    )


def derived_seed(seed: int, generation: int) -> int:
    """The seed of a run's part that began at `generation` env steps; the run's own seed from its start."""
    return seed if generation == 0 else int(np.random.SeedSequence((seed, generation)).generate_state(1)[0])


class Training:
    """The learner and the keeping of its checkpoints; continues from the newest checkpoint of the store, if it has
    any."""

    def __init__(self, plan: Plan, wires: Wires, store: CheckpointStore) -> None:
        config, self._watch = plan.config, wires.board.stopwatch("learner")
        device = devices.learner_device(config)
        devices.prepare_device(device, config)
        torch.manual_seed(config.seed)
        self._model = build_model(plan.env.observation, plan.env.action, config.model).to(device)
        self._plan, self._board, self._emit, self._store = plan, wires.board, wires.events.put, store
        self.learner = Learner(
            config, self._model, wires.arena, wires.weights, wires.finished, wires.free, wires.events.put, device,
            devices.autocast_dtype(config, plan.env, device), self._watch,
        )  # fmt: skip
        self._wall_before, self._saved_steps = 0.0, 0
        if (snapshot := store.load_again()) is not None:
            self._model.load_state_dict(snapshot.model)
            self.learner.load_state(snapshot.trainer, snapshot.env_steps, snapshot.updates)
            self._wall_before, self._saved_steps = snapshot.wall_s, snapshot.env_steps
        self._saved = time.monotonic()
        self._saves_requested = 0
        self._next_milestone = self._milestone_after(self.learner.env_steps)

    def save_if_due(self) -> None:
        """Write a checkpoint if it is time, or if one was asked for."""
        log = self._plan.config.log
        requested = self._board.saves_requested
        due = time.monotonic() - self._saved > log.save_every_s or requested != self._saves_requested
        if due or self.learner.env_steps >= self._next_milestone:
            self._saves_requested = requested
            self.save()

    def save(self, snapshot: Snapshot | None = None) -> str | None:
        """Write a checkpoint. A failure is reported and returned, and training goes on; the next save tries again.

        Args:
            snapshot: Of this moment; None: it is taken here.
        """
        self._saved = time.monotonic()
        self._next_milestone = self._milestone_after(self.learner.env_steps)
        error = None
        try:
            self._store.save(self.snapshot() if snapshot is None else snapshot)
            self._saved_steps = self.learner.env_steps
        except OSError as problem:
            error = f"checkpoint not written: {problem}"
        self._emit(Saved(self.learner.env_steps, error))
        self._watch.lap("reporting")
        return error

    def snapshot(self) -> Snapshot:
        """All that training continues from."""
        learner, episode_return = self.learner, self._board.episode_return
        return Snapshot(
            model={name: tensor.detach().cpu() for name, tensor in self._model.state_dict().items()},
            trainer=learner.state(),
            env_steps=learner.env_steps,
            frames=learner.env_steps * self._plan.env.frameskip,
            updates=learner.updates,
            wall_s=self._wall_before + time.monotonic() - self._board.made,
            episode_return=None if episode_return != episode_return else episode_return,
        )

    def finish(self) -> None:
        """Send the last statistics, save if there is anything new, and say so."""
        self.learner.report()
        error = self.save() if self.learner.env_steps > self._saved_steps else None
        self._emit(Finished(self.learner.env_steps, self.learner.done, error))

    def rescue(self) -> None:
        """After an error, send the last statistics and save what was learned before it, if that is sound. Raises
        nothing: it is the error that has to be told.

        Where the error came in the middle of a batch, weights and optimizer are those after the last finished update,
        for a step is one operation on both; env steps are those of finished batches.
        """
        with contextlib.suppress(Exception):
            self.learner.report()
        try:
            if self.learner.env_steps > self._saved_steps:
                snapshot = self.snapshot()
                if unsound := self._unsound(snapshot):
                    raise ValueError(
                        f"not all numbers of {', '.join(unsound)} are finite; the checkpoint before, if there is one, "
                        "stays"
                    )
                self.save(snapshot)
        except Exception as problem:
            self._emit(Saved(self.learner.env_steps, f"checkpoint not written: {said(problem)}"))

    def _unsound(self, snapshot: Snapshot) -> list[str]:
        """Names of what training cannot go on from: parameters and trainer state that are not finite, and buffers that
        hold NaN.

        Infinity is in order in a buffer, for example in a mask of attention.
        """
        parameters = {name for name, _ in self._model.named_parameters()}
        unsound = [
            name
            for name, tensor in snapshot.model.items()
            if not (_is_finite(tensor) if name in parameters else _has_no_nan(tensor))
        ]
        return unsound + [name for name, part in snapshot.trainer.items() if not _is_finite(part)]

    def _milestone_after(self, env_steps: int) -> float:
        every = self._plan.config.log.milestone_every
        return (env_steps // every + 1) * every if every else float("inf")


def _is_finite(value: Any) -> bool:
    """Whether a tensor, and every tensor of a mapping, holds finite numbers only."""
    if isinstance(value, Mapping):
        return all(map(_is_finite, value.values()))
    return not isinstance(value, torch.Tensor) or bool(value.isfinite().all())


def _has_no_nan(tensor: torch.Tensor) -> bool:
    return not bool(tensor.isnan().any())


class DryTraining:
    """What takes training's place where only sampling is looked at: the policy stays as it was made, and nothing is
    kept."""

    def __init__(self, plan: Plan, wires: Wires) -> None:
        watch, self._emit = wires.board.stopwatch("learner"), wires.events.put
        torch.manual_seed(plan.config.seed)
        model = build_model(plan.env.observation, plan.env.action, plan.config.model)
        self.learner = Drain(
            model, wires.arena, wires.weights, wires.finished, wires.free, self._emit, plan.config.steps, watch
        )

    def save_if_due(self) -> None:
        """There is nothing to save."""

    def finish(self) -> None:
        """Send the last statistics, and say so."""
        self.learner.report()
        self._emit(Finished(self.learner.env_steps, self.learner.done))

    def rescue(self) -> None:
        """There is nothing to save."""


def make_training(plan: Plan, wires: Wires, store: CheckpointStore) -> Training | DryTraining:
    return DryTraining(plan, wires) if plan.sample_only else Training(plan, wires, store)


def learner_main(plan: Plan, wires: Wires, store: CheckpointStore) -> None:
    torch.set_num_threads(devices.learner_torch_threads(plan.config))
    keep_freed_memory()
    training = make_training(plan, wires, store)
    training.learner.start()
    try:
        while not wires.board.stopping and not training.learner.done:
            wires.board.settle(training.learner.take_back_slots)
            training.learner.poll(POLL_S)
            training.save_if_due()
    except BaseException:
        training.rescue()
        raise
    training.finish()


def policy_main(plan: Plan, wires: Wires, index: int, generation: int) -> None:
    _schedule_as_batch()
    torch.set_num_threads(devices.inference_threads(plan.config))
    keep_freed_memory()
    worker = make_policy_worker(plan, wires, index, generation)
    while not wires.board.stopping:
        worker.poll(POLL_S)


def rollout_main(plan: Plan, wires: Wires, index: int, generation: int) -> None:
    """A rollout worker's process. With inline inference its policy worker lives here too, and the two take turns."""
    os.nice(plan.config.runtime.rollout_nice)
    _schedule_as_batch()
    torch.set_num_threads(devices.inference_threads(plan.config) if plan.inline_inference else 1)
    policies = []
    if plan.inline_inference:
        requests, ready = _sampling_queues(plan, local=True)
        wires = dataclasses.replace(wires, requests=requests, ready=ready)
        keep_freed_memory()
        policies = [make_policy_worker(plan, wires, index, generation)]
    worker = make_rollout_worker(plan, wires, index, generation)
    try:
        while not wires.board.settled and not wires.board.stopping:
            time.sleep(SETTLING_S)
        worker.start()
        while not wires.board.stopping:
            for policy in policies:
                policy.poll(0)
            worker.poll(POLL_S)
    finally:
        with contextlib.suppress(Exception):  # the run is at its end, or another error has to be told
            worker.report()
            worker.close()


def process_main(
    name: str, outbox: Outbox, folder: str, target: Callable[..., None], plan: SharedPlan, wires: Wires, *args: Any
) -> None:
    """The life of a worker process: signals are the runner's business, faults are reported, and nothing of it outlives
    the runner.

    Args:
        folder: Where this process and what it starts put their temporary files.
    """
    Path("/proc/self/comm").write_text(f"sf-{name}")  # its name in top and ps
    os.setpgid(0, 0)  # Ctrl-C does not reach this group, and the runner finds by it what environments have started
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: None)  # programs that environments start shall still end at a SIGTERM
    # And so shall their forks.
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    keep_stacks(folder)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, RUNNER_SIGNALS)
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    try:
        target(plan.open(), dataclasses.replace(wires, events=outbox), *args)
    except SfactoryError as error:
        outbox.put(Fault(name, str(error), "", isinstance(error, EnvironmentFault)))
    except BaseException as error:
        outbox.put(Fault(name, str(error) or repr(error), traceback.format_exc()))
    finally:
        wires.board.close()


def _schedule_as_batch() -> None:
    """Let this process, when a message wakes it up, wait until the one on its core has had its turn: fewer switches,
    fuller batches.

    The learner, for which all others wait, is left as it is.
    """
    with contextlib.suppress(OSError):  # a container may forbid it
        if os.sched_getscheduler(0) == os.SCHED_OTHER:  # else the user has chosen one
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _end_with_parent(folder: str) -> None:
    connection.wait([parent_process().sentinel])
    kill_tree(os.getpid(), spare_root=True)
    for left in (
        Path(folder).parent,
        get_temp_dir(),
    ):  # all workers' and the fork server's, which the runner has had no time to remove
        shutil.rmtree(left, ignore_errors=True)
    os._exit(1)
