"""What speed to expect of an environment on this machine, what limits it, and which preset and flags suit it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter

from sfactory.commands.checks.findings import Facts, duration
from sfactory.config import Config, devices
from sfactory.config.declaring import given_names
from sfactory.envs.interface import TENSORS, EnvSpec
from sfactory.errors import counted
from sfactory.profiling.ceiling import Ceiling, measure_ceiling
from sfactory.profiling.measure import Profile, profile_run
from sfactory.runtime.planning import make_plan
from sfactory.spaces import ObservationSpec

REACHED = 0.85
"""Share of the ceiling that a run usually reaches (perf/RESULTS.md)."""
LONG_STEP_S, SHORT_STEP_S = 1e-3, 3e-5
WAITING = 0.5
"""Share of processor time in a step below which it mostly waits."""
LARGE_IMAGE = 100 * 100
"""Pixels from which an image is worth shrinking."""


@dataclass(frozen=True)
class Expectation:
    """The speed that a run may have.

    Attributes:
        env_steps_per_s: Learning included.
        ceiling: What this machine could do at most; None where environments step on the device.
        limit: simulation, inference or training: what takes most of the time.
        shares: Share of the processor time that each of the three takes.
        cores: How many the run may use.
    """

    env_steps_per_s: float
    ceiling: float | None
    limit: str
    shares: dict[str, float]
    cores: int

    def __str__(self) -> str:
        shares = ", ".join(f"{name} {share:.0%}" for name, share in self.shares.items())
        ceiling = "" if self.ceiling is None else f" (ceiling {_rounded(self.ceiling)})"
        speed = _rounded(self.env_steps_per_s)
        return (
            f"about {speed} env steps/s with learning, on {counted(self.cores, 'core')}{ceiling}; the "
            f"limit is {self.limit} ({shares} of the time)"
        )


def _rounded(speed: float) -> str:
    """A speed with three digits, written out."""
    return f"{float(f'{speed:.3g}'):,.10g}"


def expect(config: Config, spec: EnvSpec, seconds: float) -> Expectation:
    """Measure what simulation, inference and training cost, and estimate the speed of a run; where environments step on
    the device, run it for so long.

    Raises:
        ConfigError: If the configuration cannot work.
        RunFailed: If the environment fails while it is measured.
    """
    if spec.family == TENSORS:
        return _of_run(profile_run(make_plan(config), seconds))
    ceiling = measure_ceiling(config, seconds)
    costs = {"simulation": ceiling.simulation_s} | {
        name: cost
        for name, cost, device in (
            ("inference", ceiling.inference_s, ceiling.inference_device),
            ("training", ceiling.training_s, ceiling.learner_device),
        )
        if device == "cpu"
    }
    return _expectation(costs, ceiling)


def _of_run(profile: Profile) -> Expectation:
    """Of environments on the device, which take turns with the learner."""
    phases = profile.interval.phases("learner")
    updates = phases["forward"] + phases["update"]
    shares = {"simulation": phases["environment"], "inference and training": updates}
    limit = max(shares, key=lambda name: shares[name])
    return Expectation(profile.fps, None, limit, shares, devices.cores())


def _expectation(costs: dict[str, float], ceiling: Ceiling) -> Expectation:
    shares = {name: cost / sum(costs.values()) for name, cost in costs.items()}
    limit = max(shares, key=lambda name: shares[name])
    return Expectation(REACHED * ceiling.env_steps_per_s, ceiling.env_steps_per_s, limit, shares, ceiling.cores)


def advise(config: Config, facts: Facts, spec: EnvSpec, expectation: Expectation | None) -> list[str]:
    """Sentences about the preset and flags that suit an environment.

    Args:
        config: The resolved config.
        facts: What was measured.
        spec: What training sees.
        expectation: None if it could not be measured.
    """
    preset = f"preset {config.preset}: {_of_preset(config)}"
    speed = _for_rows(config) if spec.family == TENSORS else _for_workers(config, facts, spec)
    images, learning = _for_images(config, spec.observation), _for_learning(config, facts)
    return [preset, *speed, *_for_time(config, facts, expectation), *images, *learning]


def _of_preset(config: Config) -> str:
    if config.preset == "default":
        return (
            "no preset is known for this name; if the environment is like those of one, --preset classic, box2d, "
            "mujoco, atari, vizdoom or grid has its settings"
        )
    if config.preset == "none":
        return "the fields' own defaults, tuned for nothing; --preset auto takes the settings that suit the environment"
    return "tuned for environments like this one"


def _for_rows(config: Config) -> Iterator[str]:
    yield (
        f"--envs-per-worker above {config.envs_per_worker:,}: a step moves all rows at once, so that more of them cost "
        "little on a GPU, as far as its memory goes"
    )


def _flags(config: Config, values: Mapping[str, float]) -> str:
    """The flags for values of fields, without those that a config has."""
    other = {name: value for name, value in values.items() if attrgetter(name)(config) != value}
    return " ".join(f"--{name.replace('_', '-')} {value:g}" for name, value in other.items())


def _for_workers(config: Config, facts: Facts, spec: EnvSpec) -> Iterator[str]:
    cores, step_s = devices.cores(), facts.env_step_s
    waits, many = facts.cpu_share < WAITING, devices.waiting_processes(config, config.runtime.groups)
    left_open = facts.kind in ("single", "parallel") and not {"workers", "envs_per_worker"} & given_names(config)
    if step_s >= LONG_STEP_S and waits and not config.serial and left_open:
        yield (
            f"a step computes for {facts.cpu_share:.0%} of its time and waits for the rest, so that a run takes many "
            "workers by itself; --workers says how many"
        )
    elif step_s >= LONG_STEP_S and waits and not config.serial and (config.workers or 0) < many:
        yield (
            f"--workers {many}: a step computes for {facts.cpu_share:.0%} of its time and waits for the rest, so many "
            "of them fit onto one core"
        )
    few = _flags(config, {"workers": cores, "envs_per_worker": 4})
    if step_s >= LONG_STEP_S and not waits and not config.serial and few:
        yield (
            f"{few}: steps are slow, so every core should step environments, and few in each worker keep batches young"
        )
    if step_s <= SHORT_STEP_S and config.envs_per_worker < 64 and spec.own_rows is None:
        single = (
            "so that several environments in each worker share the cost of a message; a gymnasium.vector.VectorEnv of "
            "your own saves Python's calls, too"
        )
        reason = single if facts.kind == "single" else "and more environments make their batches larger"
        yield f"--envs-per-worker 64: steps are quick, {reason}"
    resets = 0.0
    if facts.episodes and facts.kind == "single":
        resets = facts.running_share * facts.reset.mean / facts.episode_length / step_s
    if resets > 0.3:
        yield f"resets take {resets:.0%} of the time (each {duration(facts.reset.mean)}); make reset() cheaper"


def _for_time(config: Config, facts: Facts, expectation: Expectation | None) -> Iterator[str]:
    if 10 * facts.step.most > max(100, config.runtime.step_timeout_s):
        yield f"--runtime.step-timeout-s {10 * facts.step.most:.0f}: the longest step took {duration(facts.step.most)}"
    if expectation is not None and expectation.limit == "training":
        yield "training is the limit: --epochs, --model.hidden and --model.features decide what it costs"
    if expectation is not None and (hours := config.steps / expectation.env_steps_per_s / 3600) > 12:
        yield f"{config.steps:,} env steps would take about {hours:.0f} hours here; a shorter step would gain most"


def _for_images(config: Config, observation: ObservationSpec) -> Iterator[str]:
    images = [leaf for leaf in observation.leaves if leaf.is_image]
    if not images:
        return
    largest = max(images, key=lambda leaf: math.prod(leaf.shape))
    pixels = math.prod(sorted(largest.shape)[-2:])
    if pixels > LARGE_IMAGE:
        yield (
            f"images are {' x '.join(map(str, largest.shape))}: gymnasium.wrappers.ResizeObservation to 84 x 84, and "
            "grey where colour does not matter, cost a fraction"
        )
    if config.model.encoder != "impala_resnet":
        yield "images: --model.encoder impala_resnet learns more per env step than nature_cnn, and costs more"


def _for_learning(config: Config, facts: Facts) -> Iterator[str]:
    exploring = {"loss.entropy_coef": max(0.02, config.loss.entropy_coef), "rollout": max(128, config.rollout)}
    if facts.sparse and (flags := _flags(config, exploring)):
        yield (f"{flags}: rewards are sparse, so that exploration matters and a reward must be carried far back")
    horizon = 1 / max(1e-9, 1 - config.loss.gamma)
    if facts.episodes and facts.episode_length > 1.5 * horizon and config.loss.gamma < 0.999:
        yield (
            f"--loss.gamma 0.999: episodes take {facts.episode_length:.0f} env steps, and --loss.gamma "
            f"{config.loss.gamma:g} looks about {horizon:.0f} ahead; where the end is what counts"
        )
    size = max(abs(facts.reward_min), abs(facts.reward_max))
    if not config.loss.normalize_returns and not config.loss.reward_clip and size > 10:
        yield f"--loss.normalize-returns: rewards reach {size:.3g}, and this preset takes them as they are"
    elif size > 1e4 and (flags := _flags(config, {"loss.reward_scale": 10 ** -round(math.log10(size))})):
        yield f"{flags}: rewards reach {size:.3g}"
    if facts.observation_max > 100 and not config.model.normalize_obs:
        yield f"--model.normalize-obs: observations reach {facts.observation_max:.3g}"
