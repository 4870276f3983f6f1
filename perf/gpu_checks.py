"""Whether a device computes what the CPU computes: answers of policy workers, and loss, gradients, targets and steps of
the learner.

Every check gives its largest differences by name and the limits that they must keep. On the CPU the checks run too,
with the code that CUDA takes; there they say whether this file works.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from sfactory.config import Config, ModelConfig, devices
from sfactory.config.lag import slot_count
from sfactory.data.arena import Arena, segment_fields
from sfactory.data.plane import DataPlane
from sfactory.data.queues import LocalQueue
from sfactory.data.weights import FlatWeights, PublishedWeights
from sfactory.engines.cpu import Engine, Request, TorchEngine
from sfactory.engines.graphed import GraphedEngine
from sfactory.envs.interface import EnvSpec
from sfactory.learner import Learner
from sfactory.model import build_model
from sfactory.objective import Objective
from sfactory.profiling.ceiling import invent_experience
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
LOSS_LIMITS = {"float32": 1e-3, "bfloat16": 5e-2}
GRADIENT_LIMITS = {"float32": 1e-3, "bfloat16": 1e-1}
"""Norm of the difference of the gradients, in units of the norm."""


class Problem(NamedTuple):
    """Spaces and a model for them."""

    env: EnvSpec
    model: ModelConfig


def _problem(observation: spaces.Space, action: spaces.Space, **model: object) -> Problem:
    return Problem(
        EnvSpec(ObservationSpec.from_space(observation), ActionSpec.from_space(action)), ModelConfig(**model)
    )


_VECTOR, _PIXELS = spaces.Box(-np.inf, np.inf, (17,)), spaces.Box(0, 255, (4, 84, 84), np.uint8)
_MIXED = spaces.Dict({"image": spaces.Box(0, 255, (36, 64, 3), np.uint8), "inner": _VECTOR, "kind": spaces.Discrete(5)})
PROBLEMS = {
    "mlp": _problem(_VECTOR, spaces.Box(-1, 1, (6,)), normalize_obs=True, shared_critic=False),
    "cnn": _problem(_PIXELS, spaces.Discrete(6)),
    "cnn lstm": _problem(_PIXELS, spaces.Discrete(6), core="lstm"),
    "mixed gru": _problem(
        _MIXED, spaces.Tuple((spaces.Discrete(3), spaces.Box(-1, 1, (2,)))), core="gru", core_layers=2
    ),
}


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
    for i, size in enumerate(problem.env.action.sizes):
        arena.categorical[..., i] = rng.integers(0, size, arena.categorical.shape[:-1])
    arena.continuous[:] = rng.standard_normal(arena.continuous.shape)
    arena.log_prob[:] = rng.normal(-1.5, 0.3, arena.log_prob.shape)
    arena.value[:] = rng.standard_normal(arena.value.shape)
    arena.rnn_state[:] = 0.1 * rng.standard_normal(arena.rnn_state.shape)
    return arena


def check_answers(
    problem: Problem, precision: str, device: torch.device, rows: int = 16, batches: int = 30
) -> dict[str, float | bool]:
    """Recorded and single launches on a device against the plain engine in float32 on the CPU, over random requests.

    Returns:
        Differences, whether forward passes were recorded, microseconds of a batch of all groups either way, and ``ok``.
    """
    autocast, model = PRECISIONS[precision], _model_of(problem).eval()
    rollout, rng = 8, np.random.default_rng(0)
    arena = _arena_of(problem, model.state_size, 2 * GROUPS, rollout, rows)
    published = PublishedWeights(FlatWeights(copy.deepcopy(model)).vector.numel())
    plain = TorchEngine(copy.deepcopy(model), arena, GROUPS, None, _watch())
    recorded, single = (
        GraphedEngine(copy.deepcopy(model).to(device), arena, GROUPS, autocast, _watch(), graphs)
        for graphs in (True, False)
    )
    weights, steps, worst = (
        FlatWeights(model).vector.clone(),
        [0] * GROUPS,
        {"answer": 0.0, "state": 0.0, "recorded": 0.0},
    )
    for batch in range(batches):
        if batch % PUBLISH_EVERY == 0:
            published.publish(weights * (1 + 0.02 * batch), batch)
            for engine in (plain, recorded, single):
                engine.refresh(published)
        requests = _random_requests(rng, steps, rollout)
        (expected, state), (answer, own_state), (other, _) = (
            _answers(engine, arena, requests) for engine in (plain, recorded, single)
        )
        worst["answer"] = max(worst["answer"], _difference(answer, expected))
        worst["state"] = max(worst["state"], _difference(own_state, state))
        worst["recorded"] = max(worst["recorded"], _difference(answer, other))
    limit = ANSWER_LIMITS[precision]
    ok = worst["answer"] <= limit and worst["state"] <= limit and worst["recorded"] <= RECORDED_LIMITS[precision]
    graphs = device.type == "cuda" and recorded.recorder.enabled
    times = {"recorded_us": _time_of(recorded, device), "single_us": _time_of(single, device)}
    return {"ok": ok and graphs == (device.type == "cuda"), "graphs": graphs, **worst, **times}


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


def _time_of(engine: GraphedEngine, device: torch.device, seconds: float = 0.2) -> float:
    """Microseconds of a batch of all groups."""
    requests = [(group, group, 1, False) for group in range(GROUPS)]
    count, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < seconds:
        list(engine.answers(requests))
        count += 1
    return 1e6 * (time.perf_counter() - begin) / count


def check_learner(
    problem: Problem, precision: str, device: torch.device, rows: int = 16
) -> dict[str, float | bool | str]:
    """The learner on a device against one in float32 on the CPU: same weights, same segments.

    Returns:
        Differences, whether the host waited for the device during a step (``sync``: what for), and ``ok``.
    """
    config = Config(
        env="made up", workers=1, envs_per_worker=2 * rows, rollout=16, batch_size=2 * 16 * rows, precision=precision
    )
    plain, own = (
        _learner(config, problem, CPU, None, rows),
        _learner(config, problem, device, PRECISIONS[precision], rows),
    )
    slots = [0, 1]
    before = plain._flat.vector.detach().clone()
    result: dict[str, float | bool | str] = {}
    batches = [learner._assemble(slots) for learner in (plain, own)]
    values = [_evaluated(learner, batch) for learner, batch in zip((plain, own), batches, strict=True)]
    for name in ("loss", "advantages", "returns"):
        result[name] = _difference(values[1][name], values[0][name])
    result["gradient"] = float(
        (values[1]["gradient"].cpu() - values[0]["gradient"]).norm() / values[0]["gradient"].norm()
    )
    for learner in (plain, own):
        for _ in range(3):
            learner._train(slots)
    moved = plain._flat.vector.detach() - before
    result["weights"] = float((own._flat.vector.detach().cpu() - before - moved).norm() / moved.norm())
    result["sync"] = _synchronisation(lambda: own._train(slots), device)
    near = max(result[name] for name in ("loss", "advantages", "returns")) <= LOSS_LIMITS[precision]
    return {"ok": near and result["gradient"] <= GRADIENT_LIMITS[precision] and not result["sync"], **result}


def _learner(
    config: Config, problem: Problem, device: torch.device, autocast: torch.dtype | None, rows: int
) -> Learner:
    model = _model_of(problem).to(device)
    arena = _arena_of(problem, model.state_size, slot_count(config, rows), config.rollout, rows)
    devices.prepare_device(device, config)
    published = PublishedWeights(FlatWeights(copy.deepcopy(model)).vector.numel())
    plane = DataPlane(arena, published, [], [], LocalQueue(), LocalQueue(), LocalEvents(), (), ())
    return Learner(config, model, plane, device, autocast, _watch())


def _evaluated(learner: Learner, batch: object) -> dict[str, Tensor]:
    """Loss, targets and gradient of the present weights, copied to the CPU."""
    objective, columns = Objective(learner._config, learner._model.distribution, learner._units), batch.all_columns
    outputs = learner.outputs(batch)
    targets, _ = objective.targets([objective.estimate(objective.evaluate(outputs, batch, columns), batch, columns)])
    loss = learner.evaluate(batch)[0].loss
    named = {
        "loss": loss,
        "advantages": targets.advantages,
        "returns": targets.returns,
        "gradient": learner._flat.parameters.grad,
    }
    return {name: tensor.detach().cpu().clone() for name, tensor in named.items()}


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


def check_all(check: Callable[..., dict], device: torch.device, **sizes: int) -> dict[str, dict]:
    """A check of every problem in every precision; one that fails with an error is not ok and says why."""
    results = {}
    for name, problem in PROBLEMS.items():
        for precision in PRECISIONS:
            try:
                results[f"{name}, {precision}"] = check(problem, precision, device, **sizes)
            except Exception as error:
                results[f"{name}, {precision}"] = {"ok": False, "error": repr(error)}
    return results
