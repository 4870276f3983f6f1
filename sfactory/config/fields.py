"""What a run is: nested frozen dataclasses, the same fields as CLI flags, YAML keys and Python arguments.

A later source wins: defaults < the environment family's preset < YAML file < flags. :func:`resolve` applies the preset
to a ``Config`` made in Python, :func:`from_command_line` does the whole chain for the commands.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import functools
import math
import numbers
import os
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro
import yaml
from tyro.constructors import PrimitiveConstructorSpec

from sfactory.config.env_source import folder_name
from sfactory.config.presets import preset_for
from sfactory.errors import ConfigError, shown

T = TypeVar("T")
LARGEST = 2**53
"""No whole number of a configuration is larger."""
_PRESET_DEPENDS_ON = ("env", "preset", "algo")
"""Fields that say what the defaults of the others are."""
MOST_YAML_NODES = 100_000
"""Entries of a YAML file, aliases written out."""


def _remembers_arguments(cls: type[T]) -> type[T]:
    """Let a dataclass remember which fields its caller gave, so that a preset fills only the others."""
    init = cls.__init__
    names = [f.name for f in dataclasses.fields(cls)]

    @functools.wraps(init)
    def __init__(self, *args, **kwargs):
        init(self, *args, **kwargs)
        object.__setattr__(self, "_given", frozenset(names[: len(args)]) | frozenset(kwargs))

    cls.__init__ = __init__
    return cls


def _flag(metavar: str, parse: Callable[[str], Any], show: Callable[[Any], str] = str) -> PrimitiveConstructorSpec:
    """How tyro reads and shows a field that is one word on the command line and any object in Python."""
    return PrimitiveConstructorSpec(
        1, metavar, lambda words: parse(words[0]), lambda value: True, lambda value: [show(value)]
    )


def _yaml_mapping(text: str) -> dict[str, Any]:
    try:
        value = _plain_yaml(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"{text!r} is not a mapping; write for example '{{max_episode_steps: 100}}'")
    return value


def _plain_yaml(text: str) -> Any:
    """What a YAML text says: numbers, texts, lists and mappings only.

    Raises:
        ValueError: If it is not YAML, or aliases blow it up.
    """
    try:
        value = yaml.safe_load(text)
    except (
        yaml.YAMLError,
        ValueError,
        OverflowError,
        RecursionError,
    ) as error:  # also of numbers and dates that there are not
        raise ValueError(str(error) or type(error).__name__) from None
    nodes, waiting = 0, [value]
    while waiting:
        nodes, node = nodes + 1, waiting.pop()
        if nodes > MOST_YAML_NODES:
            raise ValueError(f"it has more than {MOST_YAML_NODES} entries")
        waiting += [*node, *node.values()] if isinstance(node, dict) else node if isinstance(node, list) else ()
    return value


Name = Annotated[Any, _flag("NAME", str)]
"""A name on the command line and in YAML; in Python also the object itself."""
Mapped = Annotated[dict[str, Any], _flag("{KEY: VALUE}", _yaml_mapping)]


@_remembers_arguments
@dataclass(frozen=True)
class ModelConfig:
    """The actor-critic network."""

    encoder: Name = "auto"
    """auto (by the observation's shape), mlp, nature_cnn, impala_resnet, or a callable / module:Class taking an
    observation leaf."""
    hidden: tuple[int, ...] = (64, 64)
    """Widths of the fully connected layers of an MLP encoder."""
    features: int = 512
    """Width of the last layer of an image encoder, and of the layer that merges several observation leaves if one is an
    image; else that layer is as wide as the last of `hidden`."""
    activation: Literal["tanh", "relu", "elu", "silu"] = "tanh"
    """Nonlinearity of MLP encoders; image encoders use relu."""
    core: Name = "none"
    """none, gru, lstm, or a callable / module:Class."""
    core_size: int = 128
    """Units of each recurrent layer."""
    core_layers: int = 1
    """Recurrent layers."""
    shared_critic: bool | None = None
    """One encoder and core for policy and value, or one for each. Unset: shared where observations are images or there
    is a core."""
    adaptive_std: bool = False
    """Standard deviation of continuous actions depends on the state; off: one learned vector."""
    initial_log_std: float = 0.0
    """Logarithm of the initial standard deviation of continuous actions."""
    squash: Literal["clip", "tanh"] = "clip"
    """How a Gaussian sample gets into a bounded Box: clip(u) or tanh(u), each scaled to the bounds."""
    model: Name = "none"
    """none, or a whole model instead of encoder, core and heads: a callable / module:Class."""
    kwargs: Mapped = field(default_factory=dict)
    """Keyword arguments for a user's own encoder, core or model."""
    normalize_obs: bool = False
    """Normalise float observations by their running mean and variance."""


@_remembers_arguments
@dataclass(frozen=True)
class OptimConfig:
    """The optimizer and how a batch is cut up for it."""

    lr: float = 3e-4
    """Learning rate of Adam."""
    schedule: Literal["constant", "linear", "adaptive_kl"] = "constant"
    """linear: falls to zero at `steps`; adaptive_kl: follows `target_kl`."""
    target_kl: float = 0.01
    """KL divergence of the new policy from the one with which a batch was begun that adaptive_kl aims at."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Adam's moment decays."""
    eps: float = 1e-5
    """Adam's epsilon."""
    max_grad_norm: float = 0.5
    """Gradients are scaled down to this norm; 0: off."""
    max_skipped: int = 100
    """Updates are skipped while the loss or its gradient is not finite; after so many in a row the run stops, saved."""
    minibatches: int = 1
    """Optimizer steps per epoch. Without a recurrent core they draw from all single samples of a batch, with one from
    its rows."""
    compile: bool = False
    """The learner's network goes through torch.compile, which delays the first update by up to a minute."""


@_remembers_arguments
@dataclass(frozen=True)
class LossConfig:
    """Returns, advantages and the loss (design: V-trace with the PPO clip, or GAE for algo ppo)."""

    gamma: float = 0.99
    """Discount per env step."""
    lam: float = 0.95
    """Lambda of V-trace and GAE."""
    rho_bar: float = 1.0
    """Truncation of the importance weight in V-trace's temporal difference."""
    c_bar: float = 1.0
    """Truncation of the trace-cutting importance weight."""
    rho_bar_pg: float = 1.0
    """Truncation of the importance weight in the policy gradient's advantage."""
    clip: float = 0.2
    """PPO clip range of the probability ratio to the policy with which a batch was begun (appo, ppo)."""
    tv_limit: float = 0.1
    """Where the total variation between the policy and the behaviour policy, averaged over a minibatch, is above this,
    samples that would push the policy further from the behaviour policy have no policy gradient (appo); 0: off."""
    value_clip: float = 0.0
    """Clip range of the value against the one with which a batch was begun, in units of the (normalised) value; 0:
    off."""
    value_coef: float = 0.5
    """Weight of the value loss."""
    entropy_coef: float = 0.0
    """Weight of the exploration bonus."""
    exploration: Literal["entropy", "kl"] = "entropy"
    """The bonus: the policy's entropy, or minus the KL divergence from the uniform policy (categorical actions
    only)."""
    normalize_advantage: bool = True
    """Advantages of a batch get mean 0 and standard deviation 1, before importance weights multiply them."""
    normalize_returns: bool = False
    """The critic predicts returns normalised by their running mean and variance; its last layer follows as they move
    (PopArt)."""
    reward_scale: float = 1.0
    """Rewards are multiplied by this before learning (reports keep the environment's own)."""
    reward_clip: float = 0.0
    """Then clipped to plus or minus this; 0: off."""
    max_lag: int | None = None
    """Highest policy lag, in learner updates, that a sample may have when it is trained on; it holds by construction.
    Unset: the smallest that lets every worker stay busy."""


@_remembers_arguments
@dataclass(frozen=True)
class RuntimeConfig:
    """Processes, threads and queues."""

    groups: int = 2
    """Groups of each rollout worker; with two, one steps while the other waits for its actions."""
    policy_workers: int | None = None
    """Processes that do batched inference for all rollout workers. 0: inline, each rollout worker infers for its own
    groups. Unset: 0 where several rollout workers share a CPU with it, else 1."""
    inference_device: str | None = None
    """Device of the policy workers, or several that they take in turn, as cuda:0,cuda:1; unset: as `device`."""
    kernels: Literal["auto", "off"] = "auto"
    """Kernels on the CPU stand for built-in parts of the model, the loss and the sampling, wherever they give the same
    numbers. off: everything is computed by the plain code (the environment variable SFACTORY_KERNELS=off does the same
    for auto)."""
    cuda_graphs: bool = True
    """Policy workers on a GPU record the forward pass once and launch it as a whole; a model that cannot be recorded
    runs without."""
    learner_threads: int | None = None
    """Threads of the learner; unset: from the number of cores."""
    inference_threads: int | None = None
    """torch threads of each policy worker; unset: from the number of cores."""
    rollout_nice: int = 0
    """By how much the priority of rollout workers is below the learner's, 0 to 19. Where they share cores and the
    learner limits, 5 and a rollout worker for each core leave to sampling what the learner has no use for; where
    environments take most of the time, 0 is best."""
    env_threads: int = 1
    """Threads inside one vector environment that has its own (ALE, EnvPool)."""
    spare_batches: int = 1
    """Training batches' worth of slots beyond those being filled: more keeps workers busier and raises the lag."""
    spin: bool = False
    """Poll queues without sleeping; only with cores to spare."""
    step_timeout_s: float = 300.0
    """A rollout worker that has shown no sign of life for this long, as when an environment hangs, is replaced."""
    restarts: int = 10
    """How often in a row processes that died or hung are started anew without any progress in between; then the run
    fails, saved."""
    validate_observations: bool = True
    """Check that observations and rewards are finite."""
    env_fault_rate: float = 0.01
    """Faults of environments (they raise, or give NaN or something else than they promise) per env step that a run
    survives: they are made anew and their samples left out. With more, and more than 100, it ends as failed; 1: survive
        as many as there are."""


@_remembers_arguments
@dataclass(frozen=True)
class LogConfig:
    """Reports and checkpoints."""

    report_every_s: float = 5.0
    """Seconds between rows of metrics.csv."""
    episode_window: int = 100
    """Reported returns and lengths are means over at least this many of the last episodes."""
    tensorboard: bool = True
    """Write TensorBoard files."""
    display: Literal["auto", "live", "plain", "none"] = "auto"
    """auto: live on a terminal, plain lines elsewhere."""
    save_every_s: float = 120.0
    """Seconds between checkpoints."""
    keep: int = 3
    """Latest checkpoints kept; the best by return is kept besides."""
    milestone_every: int = 0
    """Keep a checkpoint for good every so many env steps; 0: none."""


@_remembers_arguments
@dataclass(frozen=True)
class Config:
    """A training run. `steps` and every other count of steps are env steps: one decision of one agent."""

    env: Annotated[Any, _flag("ID", str)] = ""
    """A Gymnasium id, module:Id, sfactory/Name for a native one; in Python also a callable returning an environment."""
    env_kwargs: Mapped = field(default_factory=dict)
    """Keyword arguments of the environment."""
    env_backend: Literal["auto", "gymnasium", "vector", "envpool"] = "auto"
    """auto: what is fastest for the id; gymnasium: single environments; vector: the vector environment that comes with
    it, or an error."""
    steps: int = 1_000_000
    """Env steps to train for."""
    seed: int = 0
    """Seed of the run; the seeds of all environments and workers derive from it."""
    run: str = ""
    """Run folder; unset: runs/ENV-SEED, where a callable has its module and name, and a hash where these do not tell it
    from others."""
    overwrite: bool = False
    """Start anew where the run folder already holds a run."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N, for learner and policy workers."""
    algo: Literal["appo", "impala", "ppo"] = "appo"
    """appo: V-trace with PPO's clip; impala: V-trace policy gradient; ppo: synchronous, with GAE."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 for image encoders where the device computes in it, else float32."""
    workers: int | None = None
    """Rollout worker processes; unset: one for each core where environments with images share the cores with inference,
    else fewer."""
    envs_per_worker: int = 32
    """Environments of each rollout worker, over all its groups. Unset: fewer where each has several agents, which are
    rows of the batch."""
    rollout: int = 32
    """Env steps per row in a segment."""
    batch_size: int = 1024
    """Samples per training batch: a multiple of rollout x rows of a group. Where it is left to the preset, the nearest
    such multiple."""
    epochs: int = 1
    """Passes over each batch."""
    sync: bool = False
    """Sampling and learning alternate, so that the lag is 0; the processes are the same."""
    serial: bool = False
    """Everything in one process, reproducible bit for bit from the seed; implies sync."""
    preset: str = "auto"
    """Family of defaults: auto (by the environment), none, or a family's name."""
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    log: LogConfig = field(default_factory=LogConfig)

    @property
    def run_dir(self) -> Path:
        """The run folder; named after environment and seed where `run` is unset."""
        if self.run:
            return Path(self.run)
        return Path("runs") / f"{folder_name(self.env)}-{self.seed}"

    @property
    def takes_kernels(self) -> bool:
        """Whether kernels may stand for plain code."""
        return self.runtime.kernels == "auto" and os.environ.get("SFACTORY_KERNELS") != "off"

    @property
    def lag_free(self) -> bool:
        """Whether sampling waits for the learner, so that every sample has lag 0."""
        return self.sync or self.serial or self.algo == "ppo"

    @property
    def envs_per_group(self) -> int:
        return self.envs_per_worker // self.runtime.groups

    @property
    def updates_per_batch(self) -> int:
        return self.epochs * self.optim.minibatches


def env_name(env: Any) -> str:
    """The name under which an environment is reported: the id, or a callable's qualified name."""
    return (
        env
        if isinstance(env, str)
        else getattr(env, "__qualname__", type(env).__qualname__).replace("<", "").replace(">", "")
    )


def merged(config: T, values: Mapping[str, Any], *, only_unset: bool = False, path: str = "") -> T:
    """A copy of a config dataclass with the values of a nested mapping.

    Args:
        values: Keys are field names; a nested group is a mapping.
        only_unset: Keep the fields that the config's creator gave.

    Raises:
        ConfigError: With every unknown key and its nearest known one.
    """
    names = {f.name: f for f in dataclasses.fields(config)}
    given = getattr(config, "_given", frozenset())
    problems: list[str] = []
    changes: dict[str, Any] = {}
    for key, value in values.items():
        if key not in names:
            near = difflib.get_close_matches(str(key), names, 1)
            hint = f"; did you mean {path}{near[0]}?" if near else f"; known: {', '.join(names)}"
            problems.append(f"unknown key {path}{key}{hint}")
            continue
        current = getattr(config, key)
        if dataclasses.is_dataclass(current) and not isinstance(current, type):
            if not isinstance(value, Mapping):
                problems.append(f"{path}{key} is a group and takes a mapping, not {value!r}")
                continue
            try:
                changes[key] = merged(current, value, only_unset=only_unset, path=f"{path}{key}.")
            except ConfigError as error:
                problems.extend(error.problems)
        elif not (only_unset and key in given):
            value = _number_in(value, _hints(type(config))[key])
            changes[key] = tuple(value) if isinstance(current, tuple) and isinstance(value, list) else value
    if problems:
        raise ConfigError(*problems)
    result = dataclasses.replace(config, **changes)
    object.__setattr__(result, "_given", given | (frozenset() if only_unset else frozenset(changes)))
    return result


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    """The annotations of a dataclass's fields, resolved."""
    return typing.get_type_hints(cls)


def _number_in(value: Any, hint: Any) -> Any:
    """The number that a string means where a number is wanted: YAML reads 1e-3, without a point, as a string."""
    kinds = (hint, *typing.get_args(hint))
    if isinstance(value, str) and (int in kinds or float in kinds):
        with contextlib.suppress(ValueError):
            number = float(value)
            return int(number) if int in kinds and number.is_integer() else number
    return value


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value has an annotated type; lists pass for tuples, ints for floats."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if origin is Literal:
        return value in args
    if origin is types.UnionType:
        return any(_fits(value, arg) for arg in args)
    if origin is tuple:
        wanted = args[:1] * len(value) if Ellipsis in args and isinstance(value, list | tuple) else args
        return isinstance(value, list | tuple) and len(value) == len(wanted) and all(map(_fits, value, wanted))
    if origin is dict:
        return isinstance(value, dict) and all(isinstance(key, str) for key in value)
    if hint in (int, float):
        return isinstance(value, numbers.Integral if hint is int else numbers.Real) and not isinstance(value, bool)
    return isinstance(value, origin or hint)


def check_types(config: Config) -> None:
    """Check that every field has its annotated type.

    Raises:
        ConfigError: With every field that has not.
    """
    if problems := _type_problems(config):
        raise ConfigError(*problems)


def _type_problems(config: Any, path: str = "") -> list[str]:
    problems = []
    for name, hint in _hints(type(config)).items():
        value = getattr(config, name)
        if dataclasses.is_dataclass(hint) and isinstance(value, hint):
            problems += _type_problems(value, f"{path}{name}.")
        elif not _fits(value, hint):
            problems.append(f"{path}{name} is {shown(value)}; it must be {_described(hint)}")
        elif any(map(_is_no_number, value if isinstance(value, list | tuple) else (value,))):
            problems.append(f"{path}{name} is {shown(value)}; it must be a number, and a whole number at most 2**53")
    return problems


def _is_no_number(value: Any) -> bool:
    """Whether it is a NaN, or a whole number that is not exact as a floating-point number."""
    return value != value or (isinstance(value, numbers.Integral) and abs(value) > LARGEST)


def _described(hint: Any) -> str:
    """An annotation in words."""
    if typing.get_origin(hint) is Literal:
        return f"one of {', '.join(map(str, typing.get_args(hint)))}"
    if typing.get_origin(hint) is types.UnionType:
        return " or ".join("unset" if arg is type(None) else _described(arg) for arg in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return (
            f"a list of {'numbers' if Ellipsis in typing.get_args(hint) else f'{len(typing.get_args(hint))} numbers'}"
        )
    if typing.get_origin(hint) is dict:
        return "a mapping of names"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    return words.get(hint) or (
        f"a {hint.__name__}" if isinstance(hint, type) and not typing.get_args(hint) else str(hint)
    )


def given_values(config: Any) -> dict[str, Any]:
    """The fields that the creator of a config dataclass gave, with their values."""
    return {name: getattr(config, name) for name in getattr(config, "_given", ())}


def resolve(config: Config) -> Config:
    """Fill what the creator of a config left open from the preset of its environment's family.

    Raises:
        ConfigError: If `preset` names no family.
    """
    name, values = preset_for(config.preset, config.env, config.algo)
    return changed(merged(config, values, only_unset=True), preset=name, run=os.fspath(config.run))


def preset_value(config: Config, name: str) -> Any:
    """What a field at the top of a resolved config is by default: the preset's value, or the field's own."""
    return preset_for(config.preset, config.env, config.algo)[1].get(name, getattr(Config(), name))


def changed(config: Config, **changes: Any) -> Config:
    """A changed copy that remembers what the creator of the original gave."""
    result = dataclasses.replace(config, **changes)
    object.__setattr__(result, "_given", config._given)
    return result


def fitted(config: Config, rows_per_env: int) -> Config:
    """A resolved config whose sizes, unless its creator gave them, fit an environment of so many agents.

    Agents are rows. So there are fewer environments where each has several agents: as many as keep a group near the
    rows that the preset means, and the batch near its size. Then batch_size becomes the nearest that consists of whole
    segments and minibatches. What was asked for is left to :func:`sfactory.config.validation.validate`.
    """
    groups = config.runtime.groups
    if min(rows_per_env, groups, config.rollout, config.batch_size, config.optim.minibatches) < 1:
        return config
    if rows_per_env > 1 and "envs_per_worker" not in config._given:
        meant = max(1, preset_value(config, "envs_per_worker") // groups)

        def misfit(envs: int) -> float:
            rows = envs * rows_per_env
            return abs(_fitting_batch(config, rows) / config.batch_size - 1) + abs(rows / meant - 1)

        config = changed(config, envs_per_worker=min(range(1, meant + 1), key=misfit) * groups)
    rows = config.envs_per_group * rows_per_env
    if "batch_size" in config._given or rows < 1:
        return config
    return changed(config, batch_size=_fitting_batch(config, rows))


def _fitting_batch(config: Config, rows: int) -> int:
    """The batch size nearest to a config's that consists of whole segments of groups of so many rows, and of whole
    minibatches.

    Minibatches draw from rows where the policy has, or may have, a memory, and else from single samples.
    """
    segment, minibatches = config.rollout * rows, config.optim.minibatches
    drawn = rows if config.model.core != "none" or config.model.model != "none" else segment
    unit = segment * (minibatches // math.gcd(drawn, minibatches))
    return max(1, round(config.batch_size / unit)) * unit


def fitted_anew(config: Config, rows_per_env: int) -> Config:
    """:func:`fitted`, also where batch_size was given: the nearest that fits."""
    opened = dataclasses.replace(config)
    object.__setattr__(opened, "_given", config._given - {"batch_size"})
    return fitted(opened, rows_per_env)


def to_dict(config: Any) -> dict[str, Any]:
    """A config as nested plain values for YAML and JSON; callables become their qualified names."""

    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return to_dict(value)
        if isinstance(value, dict):
            return {str(k): plain(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [plain(v) for v in value]
        if value is None or isinstance(value, bool | str):
            return value
        if isinstance(value, numbers.Real):
            return int(value) if isinstance(value, numbers.Integral) else float(value)
        return f"<{env_name(value)}>"

    return {f.name: plain(getattr(config, f.name)) for f in dataclasses.fields(config)}


def from_dict(values: Mapping[str, Any]) -> Config:
    """The config that :func:`to_dict` described.

    Raises:
        ConfigError: On unknown keys.
    """
    return merged(Config(), values)


def load_yaml(path: str | Path) -> dict[str, Any]:
    """Read a YAML file of config keys.

    Raises:
        ConfigError: If the file cannot be read, is not YAML, or is not a mapping.
    """
    try:
        values = _plain_yaml(Path(path).read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise ConfigError(f"cannot read the config file {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"the config file {path} is not YAML: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"the config file {path} must hold a mapping of config keys, not {type(values).__name__}")
    return values


def from_command_line(args: Sequence[str], prog: str, description: str = "") -> Config:
    """The config that a command line asks for: defaults < preset < the YAML file of `--config` < flags.

    Exits with status 2 and a message on unknown or malformed flags, with 0 on `--help`.

    Raises:
        ConfigError: On a bad YAML file or preset.
    """
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("config", *_PRESET_DEPENDS_ON):
        first.add_argument(f"--{name}", choices=typing.get_args(_hints(Config)["algo"]) if name == "algo" else None)
    early, rest = first.parse_known_args(list(args))
    base = load_yaml(early.config) if early.config else {}
    base.update({k: v for k in _PRESET_DEPENDS_ON if (v := getattr(early, k)) is not None})
    asked = merged(Config(), base)
    default = resolve(asked)
    if not asked.env:  # of which the preset is one
        default = changed(default, preset=asked.preset)
    check_types(default)
    for name in _PRESET_DEPENDS_ON:
        if getattr(early, name) is not None:
            rest += [f"--{name}", getattr(early, name)]
    config = tyro.cli(Config, args=rest, default=default, prog=prog, description=description)
    flags = {word.partition("=")[0].removeprefix("--").replace("-", "_") for word in args if word.startswith("--")}
    given = {
        f.name
        for f in dataclasses.fields(Config)
        if f.name in flags or getattr(config, f.name) != getattr(default, f.name)
    }
    object.__setattr__(config, "_given", default._given | given)
    return config
