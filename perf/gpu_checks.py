"""Whether a device computes what the CPU computes: answers of policy workers, and targets, losses, gradients and steps
of the learner.

Every check gives its largest differences by name, and whether they keep their limits. What the CPU computes for
comparison, in float32 and with its own kernels, is computed once for all precisions. On the CPU the checks run too,
with the code that CUDA takes; there they say whether this file works.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from perf.learner_numbers import backward, outputs_of
from sfactory.config import Config, LossConfig, ModelConfig, OptimConfig, RuntimeConfig, devices
from sfactory.data.arena import Arena, segment_fields
from sfactory.data.batch import Assembler
from sfactory.data.cuda_graphs import WARM_UPS, PlainSteps
from sfactory.data.feed import SlotFeed
from sfactory.data.plane import DataPlane
from sfactory.data.queues import LocalQueue
from sfactory.data.weights import FlatWeights, PublishedWeights
from sfactory.engines.cpu import Engine, Request, TorchEngine
from sfactory.engines.graphed import GraphedEngine
from sfactory.envs.interface import EnvSpec
from sfactory.kernels import Kernels
from sfactory.kernels.fused_loss import triton_is_there
from sfactory.learner import Learner
from sfactory.model import build_model
from sfactory.objective import Objective
from sfactory.profiling.workloads import invent_experience
from sfactory.runtime.wires import LocalEvents
from sfactory.spaces import ActionSpec, ObservationSpec
from sfactory.telemetry.stopwatch import COLUMNS, Stopwatch

GROUPS = 6
PUBLISH_EVERY = 5
"""Batches of answers between two versions of the weights."""
CPU = torch.device("cpu")
PRECISIONS = {"float32": None, "bfloat16": torch.bfloat16}
ANSWER_LIMITS = {"float32": 2e-4, "bfloat16": 5e-2}
"""Largest difference of parameters and values from the CPU's in float32, in units of the largest of them (at least
1)."""
RECORDED_LIMITS = {"float32": 1e-5, "bfloat16": 1e-2}
"""The same between recorded and single launches on one device."""
LOSS_LIMITS = {"float32": 1e-3, "bfloat16": 2e-2}
GRADIENT_LIMITS = {"float32": 1e-3, "bfloat16": 1e-1}
"""Norm of the difference of the gradients, in units of the norm."""
CHANGE_LIMITS = {"float32": 2e-2, "bfloat16": 0.25}
"""Norm of the difference of how far some updates have moved the parameters, in units of how far that is: 1 where one of
the two learners does not move."""
RATE_LIMIT = 1e-6
BATCHES = 2
"""Trained before parameters are compared, so that what follows from one batch matters to the next."""
RECORDED_AFTER = WARM_UPS + 2
"""Batches after which the updates on both staging buffers are recorded."""
REPLAYED = 3
"""Further batches over which parameters are compared once more, each an update that is replayed."""
DRIFT = 2.0
"""How much further apart these may end than the first ones, since the learners begin them slightly apart."""
SLOTS = ((0, 1), (2, 3), (1, 2))
"""The slots of the batches, by turn: not as many as staging buffers, so that what a buffer held before is noticed."""
HOST_US = 150.0
"""Time of the host for a recorded update that is aimed at (``quick``)."""
STEPS = 16


class Problem(NamedTuple):
    """Spaces and a model for them."""

    env: EnvSpec
    model: ModelConfig


def _problem(observation: spaces.Space, action: spaces.Space, masked: bool = False, **model: object) -> Problem:
    env = EnvSpec(ObservationSpec.from_space(observation), ActionSpec.from_space(action), masked=masked)
    return Problem(env, ModelConfig(**model))


_VECTOR, _PIXELS = spaces.Box(-np.inf, np.inf, (17,)), spaces.Box(0, 255, (4, 84, 84), np.uint8)
_MIXED = spaces.Dict({"image": spaces.Box(0, 255, (36, 64, 3), np.uint8), "inner": _VECTOR, "kind": spaces.Discrete(5)})
PROBLEMS = {
    "mlp": _problem(_VECTOR, spaces.Box(-1, 1, (6,)), normalize_obs=True, shared_critic=False),
    "cnn": _problem(_PIXELS, spaces.Discrete(6)),
    "cnn lstm": _problem(_PIXELS, spaces.Discrete(6), core="lstm"),
    "mixed gru": _problem(
        _MIXED, spaces.Tuple((spaces.Discrete(3), spaces.Box(-1, 1, (2,)))), core="gru", core_layers=2
    ),
    "masked": _problem(_VECTOR, spaces.MultiDiscrete([4, 3]), masked=True, hidden=(64, 64)),
}
_STEP = OptimConfig(lr=1e-3, eps=1e-3, max_grad_norm=0.05)
"""An epsilon that makes a step follow the gradient also where that is near 0, and differs by rounding."""


class Case(NamedTuple):
    """A problem, and the fields of a config with which it is learned."""

    problem: str
    config: dict[str, Any]


CASES = {
    "mlp": Case("mlp", {}),
    "mlp, minibatches, rates on the device, normalised returns": Case(
        "mlp",
        {
            "epochs": 2,
            "optim": dataclasses.replace(_STEP, minibatches=4, schedule="adaptive_kl", target_kl=1e-7),
            "loss": LossConfig(normalize_returns=True),
        },
    ),
    "masked, ppo, clipped values": Case(
        "masked",
        {"algo": "ppo", "epochs": 3, "optim": _STEP, "loss": LossConfig(value_clip=1e-3, entropy_coef=0.05)},
    ),
    "masked, impala": Case(
        "masked", {"algo": "impala", "loss": LossConfig(reward_clip=1.0, exploration="kl", entropy_coef=0.05)}
    ),
    "cnn": Case("cnn", {}),
    "cnn lstm, minibatches": Case("cnn lstm", {"optim": dataclasses.replace(_STEP, minibatches=2)}),
    "mixed gru": Case("mixed gru", {}),
}
"""Each part of the objective and of a step is in at least one of them."""


def _difference(value: Tensor, expected: Tensor) -> float:
    """Largest absolute difference, in units of the largest expected number, at least 1; very large where one is not
    finite."""
    scale = expected.abs().max().clamp(min=1.0)
    return float(((value.cpu() - expected).abs().max() / scale).nan_to_num(1e9, posinf=1e9))


def _watch() -> Stopwatch:
    return Stopwatch(np.zeros(len(COLUMNS)))


def _model_of(problem: Problem) -> torch.nn.Module:
    torch.manual_seed(0)
    model = build_model(problem.env.observation, problem.env.action, problem.model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.1 * torch.randn_like(parameter)).add_(0.01 * torch.randn_like(parameter))
    return model


def _arena_of(problem: Problem, state_size: int, slots: int, rollout: int, rows: int) -> Arena:
    """Made-up experience in every slot, with episodes that begin often."""
    arena, rng = Arena(segment_fields(problem.env, state_size), slots, rollout, rows), np.random.default_rng(0)
    for slot in range(slots):
        invent_experience(arena, problem.env, slot)
    arena.first[:] = rng.random(arena.first.shape) < 0.1
    arena.active[:] = rng.random(arena.active.shape) < 0.9
    arena.truncated[:] = (rng.random(arena.truncated.shape) < 0.1) & ~arena.terminated
    known = arena.truncated & (rng.random(arena.truncated.shape) < 0.5)
    arena.final_change[:] = np.where(known, rng.standard_normal(known.shape), np.nan)
    for i, size in enumerate(problem.env.action.sizes):
        arena.categorical[..., i] = rng.integers(0, size, arena.categorical.shape[:-1])
    arena.continuous[:] = rng.standard_normal(arena.continuous.shape)
    usual = -sum(map(np.log, problem.env.action.sizes)) - 1.42 * problem.env.action.continuous  # weights near 1
    arena.log_prob[:] = rng.normal(usual, 0.3, arena.log_prob.shape)
    arena.value[:] = rng.standard_normal(arena.value.shape)
    arena.rnn_state[:] = 0.1 * rng.standard_normal(arena.rnn_state.shape)
    if arena.mask is not None:
        arena.mask[:] = rng.random(arena.mask.shape) < 0.6
        begins = np.cumsum((0, *problem.env.action.sizes))[:-1]
        np.put_along_axis(arena.mask[:, :-1], arena.categorical + begins, True, -1)
    return arena


def answer_checks(device: torch.device, rows: int = 16, batches: int = 30) -> Iterator[tuple[str, dict]]:
    """Recorded and single launches of policy workers on a device against the plain engine in float32 on the CPU, over
    random requests. Gives the name and the result of each check when it is done."""
    devices.prepare_device(device, Config(env="made up"))
    for name, problem in PROBLEMS.items():
        requests = _script(batches)
        expected = _played(
            problem, requests, rows, lambda model, *args: TorchEngine(model, FlatWeights(model), *args, None, _watch())
        )[0]
        for precision in PRECISIONS:
            yield f"{name}, {precision}", _caught(_check_answers, problem, precision, device, rows, requests, expected)


def _check_answers(
    problem: Problem, precision: str, device: torch.device, rows: int, script: list, expected: list
) -> dict[str, float | bool]:
    """Differences, whether forward passes were recorded, microseconds of a batch of all groups either way, and
    ``ok``."""
    autocast = PRECISIONS[precision]

    def engine(model: torch.nn.Module, arena: Arena, groups: int, graphs: bool) -> GraphedEngine:
        return GraphedEngine(model.to(device), arena, range(groups), autocast, _watch(), graphs)

    found, recorded = _played(problem, script, rows, lambda *args: engine(*args, True))
    others, single = _played(problem, script, rows, lambda *args: engine(*args, False))
    worst = {
        "answer": max(_difference(own, wanted) for (own, _), (wanted, _) in zip(found, expected, strict=True)),
        "state": max(_difference(own, wanted) for (_, own), (_, wanted) in zip(found, expected, strict=True)),
        "recorded": max(_difference(own, other) for (own, _), (other, _) in zip(found, others, strict=True)),
    }
    near = max(worst["answer"], worst["state"]) <= ANSWER_LIMITS[precision]
    graphs = device.type == "cuda" and recorded.recorder.enabled
    ok = near and worst["recorded"] <= RECORDED_LIMITS[precision] and graphs == (device.type == "cuda")
    return {"ok": ok, "graphs": graphs, **worst, "recorded_us": _time_of(recorded), "single_us": _time_of(single)}


def _script(batches: int, rollout: int = 8) -> list[list[Request]]:
    """Batches of requests: some groups, each at its next step, now and then for values alone."""
    rng, steps = np.random.default_rng(0), [0] * GROUPS
    return [_random_requests(rng, steps, rollout) for _ in range(batches)]


def _played(problem: Problem, script: list[list[Request]], rows: int, make: Callable[..., Engine]) -> tuple[list, Any]:
    """What an engine answers to a script, answers and states as copies, and the engine itself."""
    model = _model_of(problem).eval()
    arena = _arena_of(problem, model.state_size, 2 * GROUPS, 8, rows)
    weights = FlatWeights(copy.deepcopy(model)).vector.clone()
    published, answers = PublishedWeights(weights.numel()), []
    engine = make(model, arena, GROUPS)
    for batch, requests in enumerate(script):
        if batch % PUBLISH_EVERY == 0:
            published.publish(weights * (1 + 0.02 * batch), batch)
            engine.refresh(published)
        answers.append(_answers(engine, arena, requests))
    return answers, engine


def _random_requests(rng: np.random.Generator, steps: list[int], rollout: int) -> list[Request]:
    """Some groups, each at its next step, now and then for values alone."""
    requests = []
    for group in rng.permutation(GROUPS)[: rng.integers(1, GROUPS + 1)].tolist():
        t = steps[group] % rollout
        value_only = bool(t and rng.random() < 0.1)
        requests.append((group + GROUPS * (steps[group] // rollout % 2), group, t, value_only))
        steps[group] += not value_only
    return requests


def _answers(engine: Engine, arena: Arena, requests: list[Request]) -> tuple[Tensor, Tensor]:
    """All parameters and values, and the states with which segments begin."""
    arena.rnn_state[:] = 0.0
    parts = [np.concatenate((params.ravel(), value)) for params, value in engine.answers(requests)]
    return torch.from_numpy(np.concatenate(parts)), torch.from_numpy(np.append(arena.rnn_state, np.float32(0)))


def _time_of(engine: GraphedEngine, seconds: float = 0.2) -> float:
    """Microseconds of a batch of all groups."""
    requests = [(group, group, 1, False) for group in range(GROUPS)]
    count, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < seconds:
        list(engine.answers(requests))
        count += 1
    return 1e6 * (time.perf_counter() - begin) / count


def learner_checks(device: torch.device, rows: int = 8) -> Iterator[tuple[str, dict]]:
    """The learner on a device against one in float32 on the CPU, with the same weights and segments. Gives the name and
    the result of each check when it is done."""
    for name, case in CASES.items():
        config = _config(case, rows)
        expected = _learned(reference_learner(config, PROBLEMS[case.problem], rows))
        for precision in PRECISIONS:
            yield f"{name}, {precision}", _caught(_check_learner, case, precision, device, rows, expected)


def _check_learner(
    case: Case, precision: str, device: torch.device, rows: int, expected: dict[str, Tensor]
) -> dict[str, Any]:
    """Differences, what the host waited for during a step (``sync``), how many steps are recorded, microseconds of an
    update with and without that, and ``ok``."""
    learner = device_learner(_config(case, rows), PROBLEMS[case.problem], device, PRECISIONS[precision], rows)
    found = _learned(learner)
    result: dict[str, Any] = {
        name: _difference(found[name], expected[name]) for name in ("loss", "advantages", "returns", "moments")
    }
    near = max(result.values()) <= LOSS_LIMITS[precision]
    result["rate"] = _difference(found["rate"], expected["rate"])
    near &= result["rate"] <= RATE_LIMIT
    change = CHANGE_LIMITS[precision]
    for name, limit in (("gradient", GRADIENT_LIMITS[precision]), ("change", change), ("replayed", DRIFT * change)):
        result[name] = float((found[name] - expected[name]).norm() / expected[name].norm())
        near &= result[name] <= limit
    steps, taken = learner._recorder, learner.choice.taken
    result |= {"kernels": [*taken, *map(": ".join, learner.choice.refused.items())]}
    fused = "fused loss" in taken or device.type != "cuda" or not triton_is_there()
    result["graphs"] = graphs = len(steps._recordings)
    result["sync"] = _synchronisation(lambda: _train(learner, 0), device)
    result |= {f"recorded_{name}": value for name, value in _update_times(learner).items()}
    result["quick"] = result["recorded_host_us"] <= HOST_US
    learner._recorder = PlainSteps()
    _train(learner, 0)  # without recordings, work takes memory of its own
    result |= {f"single_{name}": value for name, value in _update_times(learner).items()}
    return {"ok": near and fused and not result["sync"] and steps.enabled and graphs > 1, **result}


def _train(learner: Learner, batch: int) -> None:
    """Train on a batch by its number."""
    learner._train(learner._feed.fresh(list(SLOTS[batch % len(SLOTS)]), learner.updates))


def _update_times(learner: Learner, batches: int = 3) -> dict[str, float]:
    """Microseconds of an update, a share of its batch's targets included: of the host, which gives the device its work,
    and until that is done."""
    module, batch = torch.get_device_module(learner._device), learner._feed.assemble([0, 1])
    module.synchronize()
    before, begin = learner.updates, time.perf_counter()
    for _ in range(batches):
        learner._learn(batch)
    given = time.perf_counter()
    module.synchronize()
    updates = learner.updates - before
    return {"host_us": 1e6 * (given - begin) / updates, "us": 1e6 * (time.perf_counter() - begin) / updates}


def _config(case: Case, rows: int) -> Config:
    values = {"optim": _STEP} | case.config
    return Config(
        env="made up", workers=1, envs_per_worker=2 * rows, rollout=STEPS, batch_size=2 * STEPS * rows, **values
    )


def reference_learner(config: Config, problem: Problem, rows: int) -> Learner:
    """On the CPU, as users have it there: in float32, with kernels."""
    return _learner(config, problem, CPU, None, rows)


def device_learner(
    config: Config, problem: Problem, device: torch.device, autocast: torch.dtype | None, rows: int
) -> Learner:
    """With the code that CUDA takes, whatever the device."""
    if device.type != "cpu":
        return _learner(config, problem, device, autocast, rows)
    plain = dataclasses.replace(config, runtime=RuntimeConfig(kernels="off"))
    learner = _learner(plain, problem, device, autocast, rows)
    if isinstance(learner._recorder, PlainSteps):
        learner._feed.assemble = Assembler(learner._feed._arena, learner._feed.per_batch, device, staged=True)
        learner._recorder = learner._recorded_steps()
    return learner


def _learner(
    config: Config, problem: Problem, device: torch.device, autocast: torch.dtype | None, rows: int
) -> Learner:
    devices.prepare_device(device, config)
    model = _model_of(problem).to(device)
    arena = _arena_of(problem, model.state_size, 1 + max(map(max, SLOTS)), config.rollout, rows)
    published = PublishedWeights(FlatWeights(copy.deepcopy(model)).vector.numel())
    plane = DataPlane(arena, published, [], [], LocalQueue(), LocalQueue(), LocalEvents(), (), ())
    watch, kernels = _watch(), Kernels(config, model, device, autocast)
    learner = Learner(config, model, kernels, SlotFeed(config, plane, device, watch), plane.events, watch)
    learner.start()
    return learner


def _learned(learner: Learner) -> dict[str, Tensor]:
    """Loss, targets and gradient of the first weights; how far some batches then move the parameters, the running
    moments after that, and the rate in units of the first one; how far batches whose updates are recorded by then move
    the parameters. All copied to the CPU."""
    batch, numbers = learner._feed.assemble(list(SLOTS[0])), itertools.count()
    objective, columns = Objective(learner._config, learner._model.distribution, learner._units), batch.all_columns
    outputs = outputs_of(learner, batch)
    targets, _ = objective.targets(
        [objective.estimate(objective.evaluate_actions(outputs, batch, columns), batch, columns)]
    )
    named = {"advantages": targets.advantages, "returns": targets.returns}
    named |= {"loss": backward(learner, batch)[0].loss, "gradient": learner._flat.parameters.grad}
    found = {name: tensor.detach().cpu().clone() for name, tensor in named.items()}

    def weights_after(batches: int) -> Tensor:
        for _ in range(batches):
            _train(learner, next(numbers))
        return learner._flat.vector.detach().cpu().clone()

    begin, after, count = weights_after(0), weights_after(BATCHES), learner._flat.parameters.numel()
    rate = torch.as_tensor(learner._optimizer.lr).double().cpu() / learner._config.optim.lr
    recorded, end = weights_after(RECORDED_AFTER - BATCHES), weights_after(REPLAYED)
    return found | {
        "change": (after - begin)[:count],
        "moments": torch.cat((after[count:], torch.zeros(1))),
        "rate": rate,
        "replayed": (end - recorded)[:count],
    }


def _synchronisation(work: Callable[[], object], device: torch.device) -> str:
    """What the host waited for while it gave the device work; empty if for nothing."""
    if device.type != "cuda":
        return ""
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            work()
    except RuntimeError as error:
        return str(error) or repr(error)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return ""


def _caught(check: Callable[..., dict], *args: Any) -> dict:
    """The result of a check; one that fails with an error is not ok and says why."""
    try:
        return check(*args)
    except Exception as error:
        return {"ok": False, "error": repr(error)}
