"""Planning: checks a configuration against its environment, its model, this machine and the run that it resumes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

import sfactory
from sfactory.config import (
    Config,
    changed,
    check_types,
    devices,
    env_name,
    fitted,
    given_values,
    numbers_as_text,
    preset_value,
)
from sfactory.config.declaring import given_names
from sfactory.config.fitting import MOST_BATCHES
from sfactory.config.sources import at, working_directory
from sfactory.config.validation import exploration_problem, minibatch_problem, validate
from sfactory.envs import probe, resolve_env
from sfactory.envs.factory import check_rows
from sfactory.envs.interface import TENSORS, TOGETHER, EnvRequest, EnvSpec
from sfactory.errors import ConfigError, counted
from sfactory.files import kernel_folder
from sfactory.model import build_model, build_uninitialized, shares_trunk
from sfactory.model.encoders import KNOWN
from sfactory.objective import ALGOS
from sfactory.runs.checkpoint import Snapshot
from sfactory.runs.run_files import exported
from sfactory.runs.video import check_video
from sfactory.runtime.dry_run import check_extensions, crossed_ends
from sfactory.runtime.idle_settings import notes_on_idle_settings
from sfactory.runtime.limits import check_limits, check_model
from sfactory.runtime.mps import mps_problem
from sfactory.runtime.plan import PickledPlan, Plan
from sfactory.runtime.step_time import LONG_STEP_S, WAITING, measure_step_time

T = TypeVar("T")
FEW_UPDATES = 500
"""Optimizer steps of a whole run below which hardly any task is learned."""
LONGEST_BATCH = 10
"""A batch that was asked for has at most so many times the steps of the run, which makes one at least."""
SLOW_STEP_S = 0.1
"""Seconds of an env step from which a run is told how slow it will be."""
MANY_BATCHES = 2 * MOST_BATCHES
"""Batches of samples under way above which a run is told how old they are."""
MANY_CATEGORIES = 10_000
"""Categories of observations or of actions above which a run is told how slow they are."""


def make_plan(config: Config) -> Plan:
    """Check a resolved config against its environment, its model and this machine.

    Raises:
        ConfigError: If the configuration cannot work; names every problem.
    """
    check_types(config)
    folder, source = working_directory(), resolve_env(config.env)
    config = at(folder, config)
    request = EnvRequest.of(config, source)
    problems: list[str] = []

    def found(check: Callable[[], T]) -> T | None:
        try:
            return check()
        except ConfigError as error:
            problems.extend(error.problems)
            return None

    env = found(lambda: probe(request)) if config.env else None
    agents = env.agents if env is not None else 1
    if env is not None and TENSORS in (env.family, config.env_backend):
        config = found(lambda: _in_one_process(config, env)) or config
    images, together = (env.observation.has_images, env.family in TOGETHER) if env is not None else (False, False)
    own_rows = None if env is None else env.own_rows
    asked, workers = config, devices.rollout_processes(config, images, together, own_rows)
    config = fitted(changed(config, workers=workers), agents, images, own_rows)
    found(lambda: validate(config, agents))
    if config.eval.video_every:
        found(check_video)
    if not problems:
        found(lambda: devices.learner_device(config))
        found(lambda: devices.inference_devices(config))
    if problems or env is None:
        raise ConfigError(*dict.fromkeys(problems))
    check_rows(request, env, config.envs_per_group)
    shared = shares_trunk(env.observation, config.model)
    config = changed(config, model=changed(config.model, shared_critic=shared))
    check_model(Plan(config, env, source))
    config, workers_reason = _with_waiting_workers(Plan(config, env, source), asked)
    choice = devices.suited_device(
        config, env.observation.has_images, _dense_weights(config, env), tensors=env.family == TENSORS
    )
    config = config if choice is None else changed(config, device=choice.name)
    runtime = changed(config.runtime, policy_workers=devices.policy_processes(config))
    config = changed(config, runtime=runtime)
    if (problem := mps_problem(config)) is not None:
        raise ConfigError(problem)
    plan = Plan(config, env, source, "" if choice is None else choice.reason, workers_reason)
    model = build_uninitialized(env.observation, env.action, config.model)
    if (problem := minibatch_problem(config, recurrent=model.state_size > 0)) is not None:
        raise ConfigError(problem)
    if (problem := exploration_problem(config, categorical=bool(env.action.sizes))) is not None:
        raise ConfigError(problem)
    check_extensions(config, model, env.masked)
    check_limits(plan, model)
    _check_batch(config)
    if not config.serial:
        PickledPlan(plan)  # what cannot go to another process is told before one starts
    return plan


def _check_batch(config: Config) -> None:
    """Raise ConfigError if a batch that was asked for is much longer than the run."""
    if config.batch_size > LONGEST_BATCH * config.steps and "batch_size" in given_names(config):
        raise ConfigError(
            f"batch_size {config.batch_size:,} is more than {LONGEST_BATCH} times steps {config.steps:,}: the run is "
            "over long before anything is learned; lower batch_size, or raise steps"
        )


def _in_one_process(config: Config, env: EnvSpec) -> Config:
    """A config for environments on the learner's device, which that one process steps by itself.

    Raises:
        ConfigError: If the environment cannot be there, or other workers are asked for.
    """
    if env.family != TENSORS:
        raise ConfigError(
            f"env_backend is tensors, but {env_name(config.env)} is not made with num_envs and device, as an "
            "environment on the device is; use env_backend auto"
        )
    if "workers" in given_names(config) and config.workers not in (None, 1):
        raise ConfigError(
            f"workers is {config.workers}, but {env_name(config.env)} steps on the learner's device, in the learner's "
            "process; leave workers out and raise envs_per_worker, or use env_backend vector, which steps it on the "
            "host"
        )
    return changed(config, workers=1, sync=True, runtime=changed(config.runtime, groups=1))


def _with_waiting_workers(plan: Plan, asked: Config) -> tuple[Config, str]:
    """A config with one environment in each of many workers, where their number is left open and steps wait.

    Args:
        plan: Plan so far, with as many workers as suit steps that compute.
        asked: Its config before sizes were fitted.

    Returns:
        The config, and why it has its workers; empty where it is the plan's.
    """
    config = plan.config
    if config.serial or config.preset == "none" or {"workers", "envs_per_worker"} & given_names(asked):
        return config, ""
    measured = measure_step_time(plan)
    if measured is None or not measured.waits:
        return config, ""
    groups = asked.runtime.groups if "groups" in given_names(asked.runtime) else 1
    workers = devices.waiting_processes(config, groups, measured.computing)
    if workers <= plan.rollout_workers:
        return config, ""
    many = changed(asked, workers=workers, runtime=changed(asked.runtime, groups=groups), model=config.model)
    many = fitted(many, plan.env.agents, plan.env.observation.has_images)
    try:
        validate(many, plan.env.agents)
    except ConfigError:  # such as a bound on the lag, which holds for fewer workers alone
        return config, ""
    return many, f"steps compute for {measured.computing:.0%} of their {1e3 * measured.seconds:.2g} ms"


def _dense_weights(config: Config, env: EnvSpec) -> int | None:
    """Weights of a model of dense layers alone; None for others."""
    model = config.model
    if model.model != "none" or model.core != "none" or model.encoder not in KNOWN or env.observation.has_images:
        return None
    with torch.device("meta"):  # shapes without memory
        return sum(weights.numel() for weights in build_model(env.observation, env.action, model).parameters())


def notes_on(plan: Plan) -> list[str]:
    """Notes to the user about a run before it begins, one line each."""
    config, notes = plan.config, [f"protocol {plan.env.protocol}"] if plan.env.protocol else []
    if plan.device_reason:
        other = "cpu" if config.device == "cuda" else "cuda"
        notes.append(f"trains on {config.device}, since {plan.device_reason}; --device {other} takes the other")
    if plan.workers_reason:
        notes.append(
            f"takes {config.workers} workers, since {plan.workers_reason} and wait for the rest; --workers says "
            "otherwise"
        )
    if text := plan.env.observation.ignored:
        notes.append(f"the policy does not see {', '.join(text)} of the observation, which is text")
    notes += numbers_as_text(config)
    on_cpu = devices.learner_device(config).type == "cpu"
    if config.runtime.kernels != "off" and on_cpu and not _kernels_are_compiled():
        notes.append(
            "kernels are compiled, once on this machine: there are 0 env steps until then, for half a minute, or for "
            "minutes where the machine is slow or busy"
        )
    usual, segment = preset_value(config, "batch_size"), config.rollout * plan.rows
    if "batch_size" not in given_values(config) and config.batch_size != usual:
        notes.append(
            f"batch_size is {config.batch_size:,}, not the preset's {usual:,}: it is a multiple of rollout "
            f"{config.rollout} x rows {plan.rows} = {segment:,} that has room for {config.optim.minibatches} "
            "minibatches; --envs-per-worker, --rollout and --optim.minibatches allow for others"
        )
    batches = -(-config.steps // config.batch_size)
    if (updates := batches * config.updates_per_batch) < FEW_UPDATES:
        notes.append(
            f"{config.steps:,} steps are only {counted(updates, 'update')} "
            f"({counted(batches, 'batch', 'batches')} of {config.batch_size:,} x {counted(config.epochs, 'epoch')} x "
            f"{counted(config.optim.minibatches, 'minibatch', 'minibatches')}), too few for most tasks; raise "
            "--steps, --epochs or --optim.minibatches, or lower --batch-size"
        )
    notes += _notes_on_lag(plan) + notes_on_idle_settings(plan) + _notes_on_own_code(plan)
    return notes + _notes_on_pictures(plan) + _notes_on_categories(plan)


def _notes_on_lag(plan: Plan) -> list[str]:
    """A note on workers so many that a preset's run has old samples: each fills segments of its own, which no longer
    become shorter, as of a policy with memory or of many agents."""
    config = plan.config
    under_way = plan.groups * plan.rows * config.rollout / config.batch_size
    if config.preset == "none" or config.lag_free or under_way <= MANY_BATCHES:
        return []
    fewer = max(1, int(plan.rollout_workers * MOST_BATCHES / under_way))
    return [
        f"{under_way:.0f} batches of samples are under way at a time, in the segments of {plan.rollout_workers} "
        f"workers, and the older they are, the less is learned from them; --workers {fewer} or a larger --batch-size "
        "makes them younger"
    ]


def _notes_on_own_code(plan: Plan) -> list[str]:
    """Notes on what a model, a batch source or an estimator of one's own does not do by itself."""
    config, notes = plan.config, []
    if ends := crossed_ends(config):
        notes.append(
            f"loss.estimator gives steps before {' and '.join(ends)} what depends on the episodes after them; its "
            "trace must stop there, and no value may be bootstrapped across a termination (docs/extending.md)"
        )
    if config.batch_source != "none" and ALGOS[config.algo].on_policy:
        notes.append(
            f"algo {config.algo} takes every sample for the present policy's, also older ones that batch_source puts "
            "into a batch; appo weighs them"
        )
    if config.model.model == "none":
        return notes
    model = build_uninitialized(plan.env.observation, plan.env.action, config.model)
    if config.model.normalize_obs and model.normalizer is None and plan.env.observation.has_floats:
        notes.append(
            "observations are not normalised, since model.model has no normalizer; give it an ObservationNormalizer of "
            "sfactory.model, or say --model.no-normalize-obs"
        )
    if config.loss.normalize_returns and getattr(model, "rescale_values", None) is None:
        notes.append(
            "values are wrong for a while whenever the moments of returns move, since model.model has no "
            "rescale_values; write it, or say --loss.no-normalize-returns"
        )
    return notes


def _notes_on_pictures(plan: Plan) -> list[str]:
    """Notes on bytes that look like pictures, and have too few or too many dimensions to be taken for such."""
    model = plan.config.model
    if model.model != "none" or model.encoder != "auto":
        return []
    return [
        f"the observation {leaf.name} {leaf.shape} enters dense layers: images have three dimensions, height, width "
        "and channels; add one of a single channel, or join a stack's frames and their colours to one"
        for leaf in plan.env.observation.leaves
        if leaf.is_flat_picture
    ]


def _notes_on_categories(plan: Plan) -> list[str]:
    """Notes on observations and actions of so many categories that they make a run slow."""
    notes, model = [], plan.config.model
    entering = sum(sum(leaf.sizes) for leaf in plan.env.observation.leaves if not leaf.is_image)
    if entering > MANY_CATEGORIES and model.model == "none" and model.encoder in KNOWN:
        notes.append(
            f"observations have {entering:,} categories, which enter the network one-hot and make it slow; an encoder "
            "of your own with nn.Embedding, or a MultiDiscrete of their digits, is faster"
        )
    if (logits := plan.env.action.logits) > MANY_CATEGORIES:
        notes.append(
            f"actions have {logits:,} categories, for each of which the policy computes a logit at every env step; a "
            "MultiDiscrete of several small choices, or a Box, is faster"
        )
    return notes


def _kernels_are_compiled() -> bool:
    """Whether numba has kept kernels of this installation: beside their source, or for the user where that cannot be
    written."""
    kept = kernel_folder(Path(sfactory.__file__).parent / "kernels")
    # of small networks of dense layers the one, of all others the other
    return any(next(kept.rglob(learner), None) for learner in ("dense.*.nbi", "objective.*.nbi"))


def note_on_slow_steps(plan: Plan, step_s: float, computing: float) -> str | None:
    """A note to the user of an environment whose steps are so slow that nothing seems to happen, or that wait so much
    that more of them could be under way at once.

    Args:
        step_s: Seconds of a rollout worker per env step.
        computing: Share of them, 0 to 1, in which the worker computes, or waits for a core to compute on.
    """
    config, workers, advice = plan.config, max(1, plan.rollout_workers), []
    many = devices.waiting_processes(config, config.runtime.groups)
    if step_s >= LONG_STEP_S and computing < WAITING and workers < many and not plan.workers_reason:
        how = "leave --serial out and raise" if config.serial else "raise"
        advice.append(
            f"steps compute for {computing:.0%} of their time and wait for the rest; {how} --workers to {many}, and "
            "more of them are under way at once"
        )
    if step_s >= SLOW_STEP_S:
        advice.append("a smaller --batch-size and --envs-per-worker 2 bring updates sooner")
    if not advice:
        return None
    minutes = config.batch_size * step_s / workers / 60
    return (
        f"an env step takes {step_s:.2g} s, so that the {config.batch_size:,} of a batch take about {minutes:,.2g} "
        f"minutes on {counted(workers, 'worker')}; {'; '.join(advice)}; sfactory check says more"
    )


def check_fit(plan: Plan, snapshot: Snapshot, folder: Path) -> None:
    """Check that the weights of a checkpoint fit the model of a plan, whose code the user may have changed.

    Args:
        plan: Plan of the run.
        snapshot: The checkpoint.
        folder: Run folder.

    Raises:
        ConfigError: If shapes differ; names them. Or if it holds a policy and nothing to train it with.
    """
    if exported(folder):
        raise ConfigError(
            f"{folder} holds an exported policy, without the optimizer's state that a run goes on with; name another "
            "folder with --run"
        )
    model = build_uninitialized(plan.env.observation, plan.env.action, plan.config.model)
    asked = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    unit = {"unit.mean": (), "unit.std": ()}  # which checkpoints of an earlier sfactory lack
    saved = unit | {name: tuple(tensor.shape) for name, tensor in snapshot.model.items()}
    differing = [name for name in (*saved, *(asked.keys() - saved.keys())) if saved.get(name) != asked.get(name)]
    if differing:
        raise ConfigError(
            f"{folder} holds weights of another model (saved -> asked); ask for the saved one, start anew with "
            "--overwrite, or name another folder with --run:",
            *(f"  {name}: {saved.get(name, 'missing')} -> {asked.get(name, 'missing')}" for name in differing),
        )
