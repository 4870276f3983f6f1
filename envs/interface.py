"""What a rollout worker needs of environments: a group that steps all its rows at once and writes into arrays it is
given.

A row is one agent of one environment. A group of E environments with A agents each has ``E * A`` rows,
environment-major. Groups know nothing of workers, slots or queues.

Episode ends, the same for every kind of environment:

- A *terminated* row begins its next episode at once: ``after.obs`` holds the first observation and ``after.first`` is
  set.
- A *truncated* row rests for one step: ``after.obs`` holds the final observation of the episode, so that its value can
  be bootstrapped, and ``after.active`` is cleared, because the next action has no effect; the step after that begins
  the next episode.
- Environments that reset themselves in the step after an end (``NEXT_STEP``) rest after both kinds of end.
- Vector environments that reset themselves in the same step (``SAME_STEP``), or that must be reset before their next
  step (``DISABLED``),
  cannot rest: ``after.obs`` is the next episode's first observation, and the final observations of truncated rows are
  handed over in :attr:`Group.finals`.
- A dead agent of a living multi-agent environment is not active; when it comes back ``first`` is set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from sfactory.config.env_source import EnvSource
from sfactory.spaces import ActionSpec, ObservationSpec


@dataclass(frozen=True)
class EnvSpec:
    """What is known of an environment before any worker starts.

    Attributes:
        agents: Rows of one environment.
        frameskip: Simulator frames per env step.
        masked: Whether actions may be masked.
        family: Name of the environment family (atari, vizdoom, gymnasium, ...).
        render_fps: Env steps per second at which a video of it looks natural.
        source: Where it comes from, by which a resumed run knows it again; None where its id says all.
    """

    observation: ObservationSpec
    action: ActionSpec
    agents: int = 1
    frameskip: int = 1
    masked: bool = False
    family: str = "gymnasium"
    render_fps: float = 30.0
    source: EnvSource | None = None


class Frame(NamedTuple):
    """The arrays of one time step that the policy reads; views into a slot, written in place.

    Attributes:
        obs: One array ``[rows, *leaf.shape]`` per leaf, in the order of the spec's leaves.
        mask: bool ``[rows, logits]`` of allowed actions; None where the environment has no masks.
        first: bool ``[rows]``; the observation is the first of its episode.
        active: bool ``[rows]``; the action chosen from this observation will have an effect.
    """

    obs: tuple[np.ndarray, ...]
    mask: np.ndarray | None
    first: np.ndarray
    active: np.ndarray


class Outcome(NamedTuple):
    """The arrays of one time step that say what the actions led to; views into a slot, written in place.

    Attributes:
        reward: float32 ``[rows]``, as the environment gave it.
        terminated: bool ``[rows]``.
        truncated: bool ``[rows]``; never set together with `terminated`.
    """

    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray


class Finals(NamedTuple):
    """Final observations of rows that were truncated in an environment that has already been reset.

    Attributes:
        rows: int ``[n]``.
        obs: One array ``[n, *leaf.shape]`` per leaf.
    """

    rows: np.ndarray
    obs: tuple[np.ndarray, ...]


class Breakage(NamedTuple):
    """A fault that a group has survived.

    Attributes:
        rows: Whose present fragment must not be trained on.
        environment: Its name, for example ``environment 3 (CartPole-v1)``.
        message: What went wrong, with the environment's traceback.
        count: How many environments are affected: all of a vector environment that was made anew.
    """

    rows: Sequence[int]
    environment: str
    message: str
    count: int = 1  # type: ignore[assignment]  # it hides the method of tuples, which nobody calls


class Group(Protocol):
    """Environments that step together.

    With :attr:`EnvRequest.replace`, faults are survived and told in `broken`. A single or multi-agent environment that
    raises, breaks the
    API or gives NaN or infinity is closed and made anew, and so is a whole vector environment that raises or breaks the
    API: in `outcome` its rows get reward 0 and a termination, and `after` holds the first observation of a new episode.
    In a vector environment that gives NaN or infinity, 0 takes its place; a row with such an observation is not active,
    and its episode goes on.

    Attributes:
        rows: Number of agent rows.
        finals: Set by `step` where rows were truncated and could not rest, else None.
        extras: Numeric entries of ``info`` at episode ends since the last reader emptied it: dicts of floats, one per
            episode.
        broken: Faults survived since the last reader emptied it.
    """

    rows: int
    finals: Finals | None
    extras: list[dict[str, float]]
    broken: list[Breakage]

    def reset(self, frame: Frame) -> None:
        """Begin the first episode of every environment and write all of `frame`. Raises as `step` does."""

    def step(self, categorical: np.ndarray, continuous: np.ndarray, outcome: Outcome, after: Frame) -> None:
        """Step every environment once and write all of `outcome` and `after`.

        Rows whose previous frame was not active ignore their action, get reward 0 and no end.

        Args:
            categorical: int32 ``[rows, K]``.
            continuous: float32 ``[rows, D]``, before squashing.

        Raises:
            EnvironmentFault: If an environment raises or breaks the API; names the environment's index in the run.
                Where faults are survived, if one environment does so ten times without a single good step in between.
        """

    def render(self) -> list[Any]:
        """One RGB frame ``uint8 [H, W, 3]`` per environment. Needs a group made with a render mode."""

    def close(self) -> None:
        """Close all environments, whatever they raise. May be called twice."""


@dataclass(frozen=True)
class EnvRequest:
    """Everything that is needed to make environments.

    Attributes:
        env: Gymnasium id, ``module:Id``, ``sfactory/Name``, or a callable returning an environment.
        kwargs: Keyword arguments for it.
        backend: auto, gymnasium, vector or envpool.
        squash: How continuous actions get into bounded boxes.
        threads: Threads of a vector environment that has its own.
        validate: Check every observation for finite values and shape.
        render_mode: Passed on to the environment when a video is wanted.
        replace: Survive faults, as training does; else they are raised, as an evaluation with other environments would
            be no measurement.
    """

    env: Any
    kwargs: dict[str, Any]
    backend: str = "auto"
    squash: Any = "clip"
    threads: int = 1
    validate: bool = True
    render_mode: str | None = None
    replace: bool = False
