"""The interface between rollout workers and environments: a group steps all its rows at once and writes into arrays it
is given.

A row is one agent of one environment. A group of E environments with A agents each has ``E * A`` rows,
environment-major. Groups know nothing of workers, slots or queues.

Episode ends are the same for every kind of environment:

- A *terminated* row begins its next episode at once: ``after.obs`` holds the first observation and ``after.first`` is
  set.
- A *truncated* row rests for one step: ``after.obs`` holds the final observation of the episode, so that its value can
  be bootstrapped, and ``after.active`` is cleared, because the next action has no effect; the step after that begins
  the next episode.
- Environments that reset themselves in the step after an end (``NEXT_STEP``) rest after both kinds of end.
- Vector environments that reset themselves in the same step (``SAME_STEP``), or that must be reset before their next
  step (``DISABLED``), cannot rest: ``after.obs`` is the next episode's first observation, and the final observations of
  truncated rows are handed over in :attr:`Group.finals`.
- A dead agent of a living multi-agent environment is not active; when it comes back ``first`` is set.
- A termination may end the learner's episode alone, as the loss of a life does whose game goes on
  (:attr:`Group.goes_on`): nothing is bootstrapped and the next observation is ``first``, but reports and evaluation
  count the return and the length of the whole game. An environment says so by a true ``info["goes_on"]`` beside a
  termination; its next ``reset()`` then begins the next episode within the same game.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from sfactory.config import Config
from sfactory.config.env_source import EnvSource
from sfactory.spaces import AS_DECLARED, ActionSpec, ObservationSpec, Reading

GOES_ON_KEY = "goes_on"
"""Entry of an info: the episode that terminates is a part of one that goes on."""
FINAL_OBS = ("final_obs", "final_observation")
"""Entries of an info that hold the last observations of episodes whose environments have been reset since."""


TENSORS = "tensors"
"""Family of environments that a run steps on its learner's device."""
TOGETHER = ("vector", "native", "envpool", "classic_control")
"""Families whose environments step together, so that many in one worker cost less than a few in each of several."""


@dataclass(frozen=True)
class EnvSpec:
    """Spaces and properties of an environment, known before any worker starts.

    Attributes:
        observation: Leaves of the observation space.
        action: Components of the action space.
        agents: Rows of one environment.
        frameskip: Simulator frames per env step.
        masked: Whether actions may be masked.
        family: Name of the environment family (atari, vizdoom, gymnasium, ...).
        render_fps: Env steps per second at which a video of it looks natural.
        protocol: How the environment is played, where figures are of one of several published ways; else empty.
        source: Code the environment comes from. A resumed run compares it; None where the id identifies it.
        own_rows: Environments of a vector environment that has so many unless it is told otherwise, or always; None
            where a run tells it.
    """

    observation: ObservationSpec
    action: ActionSpec
    agents: int = 1
    frameskip: int = 1
    masked: bool = False
    family: str = "gymnasium"
    render_fps: float = 30.0
    protocol: str = ""
    source: EnvSource | None = None
    own_rows: int | None = None


ArrayT = TypeVar("ArrayT")
"""NumPy arrays, or tensors where environments are on the device."""


class StepBuffers(NamedTuple, Generic[ArrayT]):
    """Arrays of one time step from which the policy chooses actions; views into a slot, written in place.

    Attributes:
        obs: One array ``[rows, *leaf.shape]`` per leaf, in the order of the spec's leaves, of the leaf's dtype.
        mask: bool ``[rows, logits]`` of allowed actions; None where the environment has no masks.
        first: bool ``[rows]``; the observation is the first of its episode.
        active: bool ``[rows]``; the action chosen from this observation will have an effect.
    """

    obs: tuple[ArrayT, ...]
    mask: ArrayT | None
    first: ArrayT
    active: ArrayT


class Outcome(NamedTuple):
    """Arrays of one time step for the results of its actions; views into a slot, written in place.

    Attributes:
        reward: float32 ``[rows]``, unscaled.
        terminated: bool ``[rows]``.
        truncated: bool ``[rows]``; never set together with `terminated`.
    """

    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray


def whole_ends(outcome: Any, goes_on: Any) -> Any:
    """bool ``[rows]``, of arrays or of tensors: an episode ended and its game with it (:attr:`Group.goes_on`)."""
    ended = outcome.terminated | outcome.truncated
    return ended if goes_on is None else ended & ~goes_on


class Finals(NamedTuple):
    """Final observations of rows that were truncated in an environment that has already been reset.

    Attributes:
        rows: int ``[n]``, indices of the rows in their group.
        obs: One array ``[n, *leaf.shape]`` per leaf.
    """

    rows: np.ndarray
    obs: tuple[np.ndarray, ...]


class SurvivedFault(NamedTuple):
    """A fault of an environment after which its group goes on.

    Attributes:
        rows: Rows whose current episode must be excluded from training up to this step.
        environment: Name of the environment, for example ``environment 3 (CartPole-v1)``.
        message: Description of the fault, with the environment's traceback.
        count: Number of environments affected: all of a vector environment that was remade.
    """

    rows: Sequence[int]
    environment: str
    message: str
    count: int = 1  # type: ignore[assignment]  # it hides the method of tuples, which nobody calls


class Group(Protocol):
    """Environments that step together. What a kind of group never has, it inherits as None.

    With :attr:`EnvRequest.survive_faults`, faults are recorded in `faults` instead of raised. A single or multi-agent
    environment that raises, breaks the API or returns NaN or infinity is closed and remade. So is a whole vector
    environment that raises or breaks the API. In `outcome` the rows of a remade environment get reward 0 and a
    termination, and `after` holds the first observation of a new episode. In a vector environment that returns NaN or
    infinity, 0 takes its place; a row with such an observation is not active, and its episode goes on.

    Attributes:
        rows: Number of agent rows.
        finals: Final observations of rows that were truncated in the last step and could not rest, else None.
        goes_on: bool ``[rows]``, the rows whose termination in the last step was not the end of their game; None if
            there are none.
        new_games: bool ``[environments]`` where agents share one, those that were reset in the last step; an agent that
            comes back begins an episode alone. None where each row is an environment.
        last_picture: What the first environment rendered at its termination in the last step, before it was reset;
            None if it did not terminate, or only what follows can be rendered.
        extras: Numeric entries of ``info`` at the ends of whole episodes, one dict of floats each. The reader empties
            the list.
        faults: Faults survived. The reader empties the list.
    """

    rows: int
    extras: list[dict[str, float]]
    faults: list[SurvivedFault]
    finals: Finals | None = None
    goes_on: np.ndarray | None = None
    new_games: np.ndarray | None = None
    last_picture: Any = None

    def reset(self, buffers: StepBuffers) -> None:
        """Begin the first episode of every environment and write all of `buffers`. Raises as `step` does."""

    def step(self, categorical: np.ndarray, continuous: np.ndarray, outcome: Outcome, after: StepBuffers) -> None:
        """Step every environment once and write all of `outcome` and `after`.

        Rows that were not active before this step ignore their action, get reward 0 and no episode end.

        Args:
            categorical: int32 ``[rows, K]``.
            continuous: float32 ``[rows, D]``, before squashing.
            outcome: Results of the actions.
            after: Observations after the actions.

        Raises:
            EnvironmentFault: If an environment raises or breaks the API; the message names the environment's index in
                the run. Where faults are survived, only if one environment has ten of them without a good step in
                between.
        """

    def render(self) -> list[Any]:
        """One RGB image uint8 ``[H, W, 3]`` per environment. Needs :attr:`EnvRequest.render_mode`."""

    def close(self) -> None:
        """Close all environments, whatever they raise. May be called twice."""


@dataclass(frozen=True)
class EnvRequest:
    """Everything that is needed to make environments.

    Attributes:
        env: Gymnasium id, ``module:Id``, ``sfactory/Name``, or a callable that returns an environment.
        kwargs: Keyword arguments of the environment.
        backend: auto, gymnasium, vector, envpool or tensors.
        squash: How continuous actions are mapped into bounded boxes: clip or tanh.
        threads: Threads of a vector environment that has its own thread pool.
        validate: Check every observation for finite values and the right shape.
        render_mode: Gymnasium's ``render_mode``, for videos.
        survive_faults: Survive faults of environments, as training does. Evaluation raises them, since a measurement
            must not replace environments.
        reading: What the model makes of observations whose space does not say it.
        compiled: Whether observations are checked in compiled passes; these take 0.4 s to begin.
    """

    env: Any
    kwargs: dict[str, Any]
    backend: str = "auto"
    squash: Any = "clip"
    threads: int = 1
    validate: bool = True
    render_mode: str | None = None
    survive_faults: bool = False
    reading: Reading = AS_DECLARED
    compiled: bool = True

    @classmethod
    def of(cls, config: Config, env: Any = None, **changes: Any) -> EnvRequest:
        """The environments of a run.

        Args:
            env: Id or callable; None: that of the configuration.
            changes: Other attributes that differ from the run's.
        """
        asked = cls(
            config.env if env is None else env, config.env_kwargs, config.env_backend, config.model.squash,
            config.runtime.env_threads, config.runtime.validate_observations, reading=Reading.of(config.model),
        )  # fmt: skip
        return dataclasses.replace(asked, **changes)
