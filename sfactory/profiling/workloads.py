"""What the ceiling measures: simulation, inference and training, each alone, by the code that a run has of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import cycle
from typing import Literal, NamedTuple

import numpy as np
import torch
from gymnasium.vector import AutoresetMode

from sfactory.config import changed, devices
from sfactory.config.lag import segments_per_batch, slot_count
from sfactory.data.arena import FINISHED, Arena
from sfactory.data.feed import SlotFeed
from sfactory.data.weights import FlatWeights
from sfactory.envs import make_group
from sfactory.envs.families.gymnasium import SingleGroup
from sfactory.envs.families.vector import VectorGroup
from sfactory.envs.interface import EnvRequest, EnvSpec
from sfactory.envs.observations import new_step_buffers
from sfactory.envs.random_play import ACTIONS, random_actions, random_steps
from sfactory.kernels import Kernels, lower_weights
from sfactory.learner import Learner
from sfactory.model import build_model, build_uninitialized
from sfactory.model.precision import mixed_precision
from sfactory.runtime import workers
from sfactory.runtime.plan import Plan
from sfactory.runtime.wires import LocalEvents, Wires, make_wires
from sfactory.spaces import Leaf

Repetition = Callable[[], int]
"""Runs a workload once; returns its number of env steps."""
ENDS = 0.01
"""Share of env steps that terminate an episode in random segments."""
FROZEN_LR = 1e-9
"""Learning rate so small that repeated training on the same batch hardly changes the weights."""
SINGLE_STEPS = 32
"""Most env steps between two readings of the clock where environments are stepped one by one."""
QUICK_S = 0.01
"""Time of some env steps up to which twice as many may pass before the clock is read again."""


class Workload(NamedTuple):
    """A workload that a process repeats while it is measured.

    Attributes:
        kind: simulation (of one group), forward (the model alone), answer (a policy worker) or training.
        size: Rows of a forward pass, or groups that the policy worker answers at once.
        episode_length: Env steps after which simulation resets a single environment whose episode goes on, so that
            resets count for as much as in a run with episodes of this length.
    """

    kind: Literal["simulation", "forward", "answer", "training"]
    size: int = 0
    episode_length: float = math.inf


SIMULATION, TRAINING = Workload("simulation"), Workload("training")
FORWARD_ROWS = (256, 1024)
"""Batch sizes of forward passes to try besides those of the run's requests."""
MOST_GROUPS = 4
"""Most groups that the policy worker answers at once: every process allocates segments for them."""


def inference_workloads(plan: Plan) -> list[Workload]:
    """The ways of inference among which the cheapest is looked for: the model and the policy worker, at a request's
    size and at others."""
    most = min(plan.groups, slot_count(plan.config, plan.rows), MOST_GROUPS)
    return [
        *(Workload("forward", rows) for rows in sorted({*FORWARD_ROWS, plan.rows, 4 * plan.rows})),
        *(Workload("answer", n) for n in sorted({1, most})),
    ]


def rows_of(plan: Plan, workload: Workload) -> int:
    """Rows that a work of inference computes at once."""
    return workload.size if workload.kind == "forward" else workload.size * plan.rows


def torch_threads(plan: Plan, workload: Workload) -> int:
    """torch threads of a workload, as in its own kind of worker."""
    if workload == TRAINING:
        return devices.learner_torch_threads(plan.config)
    return devices.inference_threads(plan.config)


def device_of(plan: Plan, workload: Workload) -> torch.device:
    """Where a work is done."""
    if workload.kind == "simulation":
        return torch.device("cpu")
    return devices.learner_device(plan.config) if workload == TRAINING else devices.inference_device(plan.config)


def prepare(plan: Plan, workload: Workload, process: int = 0) -> AbstractContextManager[Repetition]:
    """Prepare a workload in this process; gives the function that runs it once.

    Args:
        plan: Plan of the run.
        workload: The workload.
        process: Number of this process. Environments of different processes get different seeds.
    """
    devices.prepare_device(device_of(plan, workload), plan.config)
    match workload.kind:
        case "simulation":
            return _simulation(plan, process, workload.episode_length)
        case "forward":
            return nullcontext(_forward(plan, workload.size))
        case "answer":
            return nullcontext(_answer(plan, workload.size))
        case "training":
            return nullcontext(_training(plan))


# Simulation


@contextmanager
def _simulation(plan: Plan, process: int, episode_length: float) -> Iterator[Repetition]:
    """Random actions in a group's environments: as directly as they allow, because what sfactory adds to them is no
    part of the limit."""
    config, env = plan.config, plan.env
    request = EnvRequest.of(config, plan.env_source, threads=1, validate=False)
    group = make_group(request, env, config.envs_per_group, process * config.envs_per_group, config.seed)
    rng = np.random.default_rng(process)
    try:
        match group:
            case SingleGroup() if not env.masked:
                yield _step_singles(group, env, rng, episode_length)
            case VectorGroup() if not env.masked and group.mode is not AutoresetMode.DISABLED:
                yield _step_vector(group, env, rng)
            case _:
                yield random_steps(group, env, rng)  # compiled ones, several agents, action masks
    finally:
        group.close()


def _step_singles(group: SingleGroup, env: EnvSpec, rng: np.random.Generator, episode_length: float) -> Repetition:
    group.reset(new_step_buffers(env, group.rows))
    actions = env.action.rows(*random_actions(env, ACTIONS * SINGLE_STEPS, rng))
    turns = zip(cycle(range(group.rows)), cycle(actions), strict=False)
    envs, lengths = group.envs, [0.0] * group.rows
    steps = 1

    def repeat() -> int:
        nonlocal steps
        done, begin = steps, time.perf_counter()
        for _ in range(done):
            row, action = next(turns)
            _, _, terminated, truncated, _ = envs[row].step(action)
            lengths[row] += 1
            if terminated or truncated:
                envs[row].reset()
                lengths[row] = 0.0
            elif lengths[row] >= episode_length:
                envs[row].reset()
                lengths[row] -= episode_length  # so that they are right on average
        if time.perf_counter() - begin < QUICK_S:
            steps = min(2 * done, SINGLE_STEPS)
        return done

    return repeat


def _step_vector(group: VectorGroup, env: EnvSpec, rng: np.random.Generator) -> Repetition:
    group.reset(new_step_buffers(env, group.rows))
    actions = cycle([env.action.batch(*random_actions(env, group.rows, rng)) for _ in range(ACTIONS)])
    rests = group.mode is AutoresetMode.NEXT_STEP
    resting = 0

    def repeat() -> int:
        nonlocal resting
        _, _, terminated, truncated, _ = group.env.step(next(actions))
        steps = group.rows - resting
        resting = int(np.count_nonzero(terminated | truncated)) if rests else 0
        return steps

    return repeat


# Inference


def _random_values(leaf: Leaf, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Observations ``[*shape, *leaf.shape]`` of a leaf: any categories, any pixels, standard normal floats."""
    shape = (*shape, *leaf.shape)
    if leaf.sizes:
        return rng.integers(0, np.reshape(leaf.sizes, leaf.shape), shape, leaf.dtype)
    if leaf.dtype == np.uint8:
        return rng.integers(0, leaf.high, shape, leaf.dtype, endpoint=True)
    return rng.standard_normal(shape, leaf.dtype)


def _forward(plan: Plan, rows: int) -> Repetition:
    config, env, rng = plan.config, plan.env, np.random.default_rng(0)
    device = devices.inference_device(config)
    autocast = devices.autocast_dtype(config, env.observation.has_images, device)
    model = build_uninitialized(env.observation, env.action, config.model).to(device).eval()
    Kernels(config, model, device, autocast).optimize()
    lower_weights(model, autocast)
    obs = tuple(torch.from_numpy(_random_values(leaf, (rows,), rng)).to(device) for leaf in env.observation.leaves)
    state = torch.zeros(rows, model.state_size, device=device) if model.state_size else None

    def repeat() -> int:
        with torch.inference_mode(), mixed_precision(device.type, autocast):
            model(obs, state)
        return rows

    return repeat


def _answer(plan: Plan, groups: int) -> Repetition:
    wires = make_wires(plan, local=True)
    _publish_first_weights(plan, wires)
    policy = workers.make_policy_worker(plan, wires, 0, 0)
    for slot in range(groups):
        invent_experience(wires.arena, plan.env, slot)
    steps = cycle(range(plan.config.rollout))

    def repeat() -> int:
        t = next(steps)
        policy.serve([(group, group, t, False) for group in range(groups)])
        for queue in wires.ready:
            queue.get_many(0)
        return groups * plan.rows

    return repeat


def _publish_first_weights(plan: Plan, wires: Wires) -> None:
    model = build_uninitialized(plan.env.observation, plan.env.action, plan.config.model)
    wires.weights.publish(FlatWeights(model).vector, 0)


# Training


def invent_experience(arena: Arena, env: EnvSpec, slot: int) -> None:
    """Write what an environment would have written into a slot."""
    rng = np.random.default_rng(slot)
    for leaf, array in zip(env.observation.leaves, arena.obs, strict=True):
        array[slot] = _random_values(leaf, array.shape[1:3], rng)
    if arena.mask is not None:
        arena.mask[slot] = True
    arena.active[slot] = True
    arena.reward[slot] = rng.standard_normal(arena.reward.shape[1:], np.float32)
    arena.terminated[slot] = rng.random(arena.terminated.shape[1:]) < ENDS
    arena.first[slot, 1:] = arena.terminated[slot]
    arena.final_change[slot] = np.nan


def _training(plan: Plan) -> Repetition:
    """The real learner on one invented segment, which makes up the whole batch as often as it takes."""
    config, env = plan.config, plan.env
    config = changed(config, steps=10**15, optim=changed(config.optim, lr=FROZEN_LR))
    wires, device = make_wires(plan, local=True), devices.learner_device(config)
    model = build_model(env.observation, env.action, config.model).to(device)
    watch = wires.control.stopwatch("learner")
    kernels = Kernels(config, model, device, devices.autocast_dtype(config, env.observation.has_images, device))
    events = LocalEvents()
    learner = Learner(config, model, kernels, SlotFeed(config, wires, device, watch), events, watch)
    learner.start()
    invent_experience(wires.arena, env, 0)
    policy = workers.make_policy_worker(plan, wires, 0, 0)
    for t in range(config.rollout):
        policy.serve([(0, 0, t, False)])
    slots = list(range(segments_per_batch(config, plan.rows)))
    _repeat_first(wires.arena, len(slots))

    def repeat() -> int:
        before = learner.env_steps
        wires.free.get_many(0)
        wires.arena.version[slots] = wires.arena.begun[slots] = learner.updates
        wires.arena.state[slots] = FINISHED
        wires.finished.put_many(slots)
        learner.poll(0)
        events.take()
        return learner.env_steps - before

    return repeat


def _repeat_first(arena: Arena, slots: int) -> None:
    """Copy the first slot into the others."""
    for array in arena.arrays.values():
        array[1:slots] = array[0]
