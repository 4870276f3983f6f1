"""A trained policy outside training: load it from a run folder and ask it for actions.

A run folder may come from a stranger, so loading one runs no code of its choosing: weights and spaces are data, and
classes that its ``spaces.json`` names outside sfactory are imported only if the caller names them too, or trusts the
folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from sfactory.config import ModelConfig, given_values
from sfactory.config.devices import resolve_device
from sfactory.config.fields import Checkpoint
from sfactory.envs.interface import EnvSpec, StepBuffers
from sfactory.envs.observations import ObservationWriter, new_step_buffers
from sfactory.errors import CheckpointError, ConfigError, EnvironmentFault, SfactoryError, shown
from sfactory.model import build_uninitialized
from sfactory.model.critic_units import CriticUnits
from sfactory.model.interface import Model
from sfactory.runs.checkpoint import CheckpointStore, Snapshot
from sfactory.runs.run_files import CHECKPOINTS, SPACES
from sfactory.runs.space_codec import check_spaces, load_model_config, load_spec
from sfactory.spaces import ActionSpec, ObservationSpec, Reading

ROLES = ("encoder", "core", "model", "distribution")
"""Fields of a model config that may name a class."""


def load_policy(
    run: str | os.PathLike[str],
    checkpoint: Checkpoint | Snapshot = "latest",
    device: str = "cpu",
    env: Any = None,
    *,
    model: ModelConfig | None = None,
    trust: bool = False,
    seed: int | None = None,
) -> Policy:
    """Load the policy of a run. Makes no environment and starts no process.

    Args:
        run: The run folder; `spaces.json` and `checkpoints/` of it are needed.
        checkpoint: latest, or best: by evaluation where the run had it, else by the return in training. Or one of the
            run that has been loaded.
        device: auto, cpu, cuda or cuda:N.
        env: An environment in which the policy will act; its spaces are compared with the run's.
        model: Fields that take the place of the saved ones: where the run was trained with a class of your own, as in
            ``ModelConfig(encoder=MyEncoder)``.
        trust: Import the classes that the run's model names as ``module:Class``.
        seed: Of sampled actions; None: different every time.

    Raises:
        ConfigError: If there is no such run or checkpoint, if it needs a class that was not passed, or if `env` does
            not fit.
        CheckpointError: If the files are damaged or do not fit together.
    """
    folder = Path(run)
    saved = load_model_config(folder / SPACES)
    snapshot = checkpoint if isinstance(checkpoint, Snapshot) else load_snapshot(folder, checkpoint)
    spec = load_spec(folder / SPACES, saved.squash, reading := Reading.of(saved))
    if env is not None:
        check_spaces(spec, _spec_of(env, saved.squash, reading), f"the run in {folder}", "the environment")
    target = resolve_device(device)
    network = _build(folder, spec, _complete(saved, model, trust), snapshot).to(target)
    return Policy(spec, network, target, seed)


class Policy:
    """Chooses actions with a trained model, in float32.

    The state is what a recurrent model remembers: None at the beginning of an episode, and what the last call returned
    within it. Models without memory always return None.

    Attributes:
        spec: What the policy sees and does.
        model: The actor-critic, in evaluation mode.
    """

    def __init__(self, spec: EnvSpec, model: Model, device: torch.device, seed: int | None = None) -> None:
        self.spec, self.model = spec, model.eval()
        self._device = device
        self._distribution = model.distribution
        self._writer = ObservationWriter(spec, lambda row: f"row {row}", validate=True, compiled=False)
        self._generator = torch.Generator(device)
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(seed)

    def act(
        self, obs: Any, state: Tensor | None = None, deterministic: bool = True, *, action_mask: Any = None
    ) -> tuple[Any, Tensor | None]:
        """Choose the action for one observation.

        Args:
            obs: As the environment gives it: an array or number, or a nested Dict or Tuple.
            state: None at the beginning of an episode, then what the last call returned, ``[1, S]``.
            deterministic: The most probable action; off: a draw from the distribution.
            action_mask: Allowed actions, as in ``info["action_mask"]``; None: those of the observation's
                ``action_mask`` entry.

        Returns:
            An action that the environment takes, and the next state, float32 ``[1, S]`` or None.

        Raises:
            ValueError: If the observation or the mask does not fit the run's spaces, a mask is needed and not there, or
                the state is of another number of observations.
        """
        buffers = new_step_buffers(self.spec, 1)
        self._check(self._writer.write, [obs], buffers.obs)
        self._check(self._writer.check_values, buffers.obs)
        buffers = self._with_mask(buffers, obs, action_mask, lambda mask: self.spec.action.flat_mask(mask)[np.newaxis])
        categorical, continuous, state = self.choose(buffers, state, deterministic)
        return self.spec.action.rows(categorical, continuous)[0], state

    def act_batch(
        self,
        obs: Any,
        state: Tensor | None = None,
        deterministic: bool = True,
        *,
        action_mask: Any = None,
        first: np.ndarray | None = None,
    ) -> tuple[Any, Tensor | None]:
        """Choose actions for N observations at once.

        Args:
            obs: Every leaf with a leading dimension, ``[N, ...]``, as a vector environment gives it.
            state: None at the beginning, then what the last call returned.
            deterministic: As in :meth:`act`.
            action_mask: ``[N, ...]``, or a list or array of objects with a mask for each row; else as in
                :meth:`act`.
            first: bool ``[N]``; rows whose episode begins with this observation, whose state is forgotten.

        Returns:
            Actions with a leading dimension, nested as the action space is, and the next state, float32 ``[N, S]`` or
            None.

        Raises:
            ValueError: As :meth:`act`.
        """
        rows = self._rows(obs)
        buffers = new_step_buffers(self.spec, rows)
        self._check(self._writer.write_batch, obs, buffers.obs)
        self._check(self._writer.check_values, buffers.obs)
        if first is not None:
            buffers.first[:] = first
        every = np.ones(rows, bool)
        buffers = self._with_mask(
            buffers, obs, action_mask, lambda masks: self.spec.action.flat_masks(masks, present=every)
        )
        categorical, continuous, state = self.choose(buffers, state, deterministic)
        return self.spec.action.batch(categorical, continuous), state

    @torch.no_grad()
    def choose(
        self, buffers: StepBuffers, state: Tensor | None, deterministic: bool
    ) -> tuple[np.ndarray, np.ndarray, Tensor | None]:
        """Choose actions for every row; the state of rows that are `first` is forgotten.

        Returns:
            Categorical int32 ``[rows, K]``, continuous float32 ``[rows, D]``, and the next state, float32 ``[rows, S]``
            or None.

        Raises:
            ValueError: If the state is of another number of rows.
        """
        obs = tuple(self._tensor(leaf) for leaf in buffers.obs)
        mask = None if buffers.mask is None else self._tensor(buffers.mask)
        params, _, state = self.model(obs, self._begun(state, buffers.first))
        if deterministic:
            categorical, continuous = self._distribution.mode(params, mask)
        else:
            categorical, continuous, _ = self._distribution.sample(params, mask, self._generator)
        return categorical.cpu().numpy(), continuous.cpu().numpy(), state

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)

    def _begun(self, state: Tensor | None, first: np.ndarray) -> Tensor | None:
        """The state with which a step begins, zero in rows that are `first`."""
        if not self.model.state_size:
            return None
        shape = (len(first), self.model.state_size)
        if state is None:
            return torch.zeros(shape, device=self._device)
        state = torch.as_tensor(state, dtype=torch.float32, device=self._device)
        if state.shape != shape:
            raise ValueError(
                f"the state has shape {tuple(state.shape)}, which for {len(first)} observations is {shape}; pass what "
                "the last call for these environments returned, or None where their episodes begin"
            )
        return state.masked_fill(self._tensor(first).unsqueeze(-1), 0.0)

    def _rows(self, obs: Any) -> int:
        """The number of observations in a batch."""
        try:
            shape = np.shape(next(self.spec.observation.values(obs)))
        except (TypeError, LookupError, ValueError):
            shape = ()
        if len(shape) != 1 + len(self.spec.observation.leaves[0].shape) or not shape[0]:
            raise ValueError(
                f"the batched observation {shown(obs)} has no rows; each entry needs a leading dimension, one row for "
                "each observation (act takes a single one)"
            )
        return shape[0]

    def _with_mask(self, buffers: StepBuffers, obs: Any, mask: Any, flat: Callable[[Any], np.ndarray]) -> StepBuffers:
        """Buffers with the given action mask, or that of the observation, if one is needed.

        Args:
            flat: Makes ``[rows, logits]`` of it.
        """
        if mask is None:
            with contextlib.suppress(LookupError):
                mask = self.spec.observation.mask(obs)
        if mask is None:
            if self.spec.masked:
                raise ValueError(
                    'this policy was trained with action masks; pass action_mask=info["action_mask"], or observations '
                    "with their action_mask entry"
                )
            return buffers
        allowed = np.empty((len(buffers.first), self.spec.action.logits), bool)
        self._check(self._writer.write_masks, flat(mask), allowed)
        return buffers._replace(mask=allowed)

    @staticmethod
    def _check(write: Any, *arguments: Any) -> None:
        try:
            write(*arguments)
        except EnvironmentFault as fault:
            raise ValueError(str(fault)) from None


def load_snapshot(folder: Path, checkpoint: str) -> Snapshot:
    """The latest or the best checkpoint of a run.

    Raises:
        ConfigError: If it has none, or `checkpoint` is another word.
        CheckpointError: If none can be read.
    """
    store = CheckpointStore(folder / CHECKPOINTS)
    if checkpoint not in ("latest", "best"):
        raise ConfigError(f"checkpoint is {checkpoint!r}; use latest or best")
    snapshot = store.load_latest() if checkpoint == "latest" else store.load_best()
    if snapshot is None:
        raise ConfigError(f"{folder} has no checkpoint yet; train it until it has saved one")
    return snapshot


def _spec_of(env: Any, squash: Literal["clip", "tanh"], reading: Reading) -> EnvSpec:
    """The spaces of one environment of whatever kind."""
    from sfactory.envs.factory import is_parallel

    if not any(hasattr(env, name) for name in ("observation_space", "single_observation_space")):
        raise ConfigError(f"env is {shown(env)}; pass an environment, such as gymnasium.make gives")
    if is_parallel(env):
        agent = env.possible_agents[0]
        observation, action = env.observation_space(agent), env.action_space(agent)
    else:
        observation = getattr(env, "single_observation_space", None) or env.observation_space
        action = getattr(env, "single_action_space", None) or env.action_space
    return EnvSpec(ObservationSpec.from_space(observation, reading), ActionSpec.from_space(action, squash))


def is_foreign(name: object) -> bool:
    """Whether a field of a saved model config names a class outside sfactory: as ``module:Class``, or one that was
    passed, of which the name in angle brackets is left."""
    return isinstance(name, str) and (name.startswith("<") or ":" in name)


def check_foreign(name: Any, role: str, trust: bool, *, lost: str, named: str) -> None:
    """Check that a field of a saved config names nothing outside sfactory, or, in a trusted folder, a ``module:Name``.

    Args:
        role: What the field is for.
        lost: How the caller passes an object of which only the name in angle brackets is left.
        named: How the caller allows a ``module:Name``.

    Raises:
        ConfigError: If the caller has to pass or to allow it.
    """
    if not is_foreign(name):
        return
    if name.startswith("<"):
        raise ConfigError(
            f"the run was trained with its own {role}, {name}, which is not in its folder; pass it: {lost}"
        )
    if not trust:
        raise ConfigError(
            f"the run's {role} is {name}, code outside sfactory, which is not imported unasked; if you know it, pass "
            f"{named}"
        )


def _complete(saved: ModelConfig, given: ModelConfig | None, trust: bool) -> ModelConfig:
    """The saved model config with the caller's fields, and with no foreign code that the caller has not asked for."""
    asked = given_values(given)
    for role in ROLES:
        value = getattr(saved, role)
        if role not in asked:
            check_foreign(
                value, f"model.{role}", trust,
                lost=f"model=ModelConfig({role}=...) to load_policy, evaluate, or sfactory.commands.export's export or "
                "export_folder, in Python",
                named=f"model=ModelConfig({role}={value!r}), or trust=True (on the command line --trust)",
            )  # fmt: skip
    return dataclasses.replace(saved, **asked)


def _build(folder: Path, spec: EnvSpec, config: ModelConfig, snapshot: Snapshot) -> Model:
    """The model with the checkpoint's weights.

    Raises:
        CheckpointError: If they do not fit.
    """
    try:
        model = build_uninitialized(spec.observation, spec.action, config)
        model.load_state_dict(snapshot.model)
        if returns := snapshot.trainer.get("returns"):  # weights of an earlier sfactory have no unit of their own
            CriticUnits(model, normalize=True).load_state_dict(returns)
    except (RuntimeError, MemoryError, ValueError, TypeError) as error:
        if isinstance(error, SfactoryError):
            raise
        raise CheckpointError(
            f"the weights in {folder} do not fit the model of its config: {error}; restore the folder"
        ) from error
    return model
