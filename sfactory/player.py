"""Playing a policy: episodes in environments of their own, and what they returned."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import json
import math
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from sfactory.config import Config, ModelConfig, env_name
from sfactory.config.devices import torch_threads
from sfactory.config.fields import Checkpoint
from sfactory.config.importing import is_harmless
from sfactory.envs import make_group, probe
from sfactory.envs.faults import environment_fault
from sfactory.envs.globals import globals_kept
from sfactory.envs.interface import EnvRequest, Group, Outcome, whole_ends
from sfactory.envs.observations import new_step_buffers
from sfactory.errors import ConfigError, EnvironmentFault
from sfactory.files import json_values, move_whole, temporary_folder, write_atomically
from sfactory.policy import Policy, check_foreign, load_policy
from sfactory.runs.checkpoint import Snapshot
from sfactory.runs.run_files import EVALUATION, read_config
from sfactory.runs.space_codec import check_spaces
from sfactory.runs.video import VideoRecorder, prepare_rendering

MOST_PARALLEL = 16
"""Environments at once, unless the caller says otherwise."""
_SEED_BRANCH = 1
"""Spawn key of evaluation's seeds, so that they are not those of training."""


@dataclass(frozen=True)
class Evaluation:
    """What episodes returned. In a multi-agent environment each agent's episode counts as one; where a lost life ends
    an episode for the learner, a whole game does.

    Attributes:
        episodes: How many were played.
        return_std: Standard deviation of the returns (of the episodes played, with divisor n).
        length_mean: In env steps.
        returns, lengths: Of every episode, in the order in which they ended.
        extras: Means of the numeric entries of the environments' last infos, over the episodes that had them.
        protocol: How the environment is played, where figures are of one of several published ways; else empty.
    """

    episodes: int
    return_mean: float
    return_std: float
    return_min: float
    return_max: float
    length_mean: float
    returns: tuple[float, ...]
    lengths: tuple[int, ...]
    extras: dict[str, float]
    protocol: str = ""

    def keep(self, run: Path, checkpoint: Checkpoint, env_steps: int) -> None:
        """Write it into a run folder, whose page shows it from then on. NaN becomes null.

        Args:
            run: The run folder.
            checkpoint: Which of the run's checkpoints has played.
            env_steps: Env steps behind that.
        """
        values = {"checkpoint": checkpoint, "env_steps": env_steps} | dataclasses.asdict(self)
        write_atomically(run / EVALUATION, (json.dumps(json_values(values), indent=2, allow_nan=False) + "\n").encode())


class Viewer(Protocol):
    """Takes the pictures of one environment."""

    def begin_episode(self) -> None:
        """The next picture is the first of an episode."""

    def add(self, image: Any) -> None:
        """Take what the environment's render() has returned."""


class Player:
    """Plays a policy.

    Args:
        policy: The policy.
        request: Environments to play it in.
        seed: Seed of the environments.
        source: Where the policy comes from, for error messages.

    Attributes:
        agents: Agents of an environment.
        render_fps: Env steps per second at which an environment looks natural.
        stopped: Whether :meth:`stop` has been called.
        counts_unfinished: Whether it was stopped so early that episodes count which had not ended.

    Raises:
        ConfigError: If the environments have other spaces than the policy.
    """

    def __init__(self, policy: Policy, request: EnvRequest, seed: int, source: str) -> None:
        self._policy, self._request, self._seed, self._spec = policy, request, seed, probe(request)
        check_spaces(policy.spec, self._spec, source, env_name(request.env))
        self.agents, self.render_fps = self._spec.agents, self._spec.render_fps
        self.stopped = self.counts_unfinished = False

    @classmethod
    def of_run(
        cls,
        run: str | os.PathLike[str],
        *,
        env: Any = None,
        env_kwargs: dict[str, Any] | None = None,
        seed: int | None = None,
        checkpoint: Checkpoint | Snapshot = "latest",
        device: str = "cpu",
        model: ModelConfig | None = None,
        trust: bool = False,
        render_mode: str | None = None,
    ) -> Player:
        """For the policy of a run; the arguments are those of :func:`sfactory.evaluate`.

        Args:
            checkpoint: Or one of the run that has been loaded.
            render_mode: That of the environments; None: they are not rendered.
        """
        config = read_config(run)
        seed = _evaluation_seed(config.seed if seed is None else seed)
        policy = load_policy(run, checkpoint, device, model=model, trust=trust, seed=seed)
        request = request_of(config, env, env_kwargs, trust)
        return cls(policy, rendering(request, render_mode) if render_mode else request, seed, f"the run in {run}")

    def recorder(self, video: str | os.PathLike[str] | None) -> AbstractContextManager[VideoRecorder | None]:
        """What writes MP4 files into a folder while it is open; None without one."""
        if video is None:
            return contextlib.nullcontext()
        return contextlib.closing(VideoRecorder(Path(video), self.render_fps))

    def record(self, path: Path, deterministic: bool, max_steps: int | None) -> None:
        """Record one episode as an MP4 file, which is there once it is whole.

        Raises:
            ConfigError: If something that a video needs is not there.
            EnvironmentFault: If an environment raises, breaks its API or does not render.
            OSError: If the file cannot be written.
        """
        with temporary_folder() as folder:
            with self.recorder(folder) as recorder:
                self.play(1, deterministic, None, max_steps, recorder)
            (recorded,) = Path(folder).glob("*.mp4")
            path.parent.mkdir(parents=True, exist_ok=True)
            move_whole(recorded, path)

    def stop(self) -> None:
        """Let :meth:`play` end after the present env step, or if it is called later, before the first."""
        self.stopped = True

    def play(
        self,
        episodes: int,
        deterministic: bool,
        parallel: int | None,
        max_steps: int | None,
        viewer: Viewer | None = None,
    ) -> Evaluation:
        """Play episodes in environments that begin with the same seeds each time; one at a time with a viewer.

        Plays whole games: first as many as give `episodes` if all agents live, then more until there are enough. No
        game is cut short for that, which would favour short episodes.

        Where it is stopped, the episodes that have ended count; if none has, those that go on count as they stand. It
        gives no episodes, and NaN, where nothing has been played.
        """
        spec, tally = self._spec, _Tally()
        games, played, first_index = -(-episodes // spec.agents), 0, 0
        # for a few numbers several threads only wait for each other
        with globals_kept(), contextlib.nullcontext() if spec.observation.has_images else torch_threads(1):
            while games > 0 and not self.stopped:
                together = 1 if viewer is not None else parallel
                rounds = _rounds(games, together, max_steps is not None, spec.own_rows)
                for shares in itertools.takewhile(lambda _: not self.stopped, rounds):
                    idle = max(0, (spec.own_rows or 0) - len(shares))
                    group = make_group(self._request, spec, len(shares) + idle, first_index, self._seed)
                    with contextlib.closing(group), self._expecting_faults():
                        self._play(group, np.pad(shares, (0, idle)), deterministic, max_steps, tally, viewer)
                    del group
                    if viewer is not None:  # MuJoCo's pictures turn black if those of an earlier simulation go later
                        gc.collect()
                    first_index += len(shares)
                played += games
                games = -(-(episodes - tally.episodes) * played // tally.episodes) if tally.episodes else 0
        if self.stopped and not tally.episodes:
            tally.cut()
            self.counts_unfinished = tally.episodes > 0
        return tally.evaluation(spec.protocol)

    @contextlib.contextmanager
    def _expecting_faults(self) -> Iterator[None]:
        """Ignore what environments raise once this is stopped: Ctrl-C in a terminal reaches their processes, too. A
        second one may end a step that hangs."""
        try:
            yield
        except (EnvironmentFault, KeyboardInterrupt):
            if not self.stopped:
                raise

    def _play(
        self,
        group: Group,
        shares: np.ndarray,
        deterministic: bool,
        max_steps: int | None,
        tally: _Tally,
        viewer: Viewer | None,
    ) -> None:
        """Let every environment of a group play its share of episodes, or `max_steps` env steps."""
        spec = self._spec
        buffers, after = new_step_buffers(spec, group.rows), new_step_buffers(spec, group.rows)
        outcome = Outcome(np.zeros(group.rows, np.float32), np.zeros(group.rows, bool), np.zeros(group.rows, bool))
        group.reset(buffers)
        begun, goes_on = np.zeros(len(shares), int), np.zeros(group.rows, bool)
        tally.begin(group.rows)
        state = None
        for _ in itertools.count() if max_steps is None else range(max_steps):
            begins = buffers.first & buffers.active & ~goes_on if group.new_games is None else group.new_games
            goes_on &= ~(buffers.first & buffers.active)
            begun += begins
            counts = begun <= shares
            if self.stopped or not counts.any():
                break
            if viewer is not None:
                if begins[0]:
                    viewer.begin_episode()
                viewer.add(_render(group))
            categorical, continuous, state = self._policy.choose(buffers, state, deterministic)
            group.step(categorical, continuous, outcome, after)
            if viewer is not None and (last := group.last_picture) is not None:
                viewer.add(last)
            whole = whole_ends(outcome, group.goes_on)
            tally.add(outcome.reward, whole, buffers.active & np.repeat(counts, spec.agents), group.extras)
            goes_on |= (outcome.terminated | outcome.truncated) & ~whole
            group.extras.clear()
            buffers, after = after, buffers
        else:
            tally.cut()


def rendering(request: EnvRequest, mode: str = "rgb_array") -> EnvRequest:
    """The same environments, rendered in a mode of Gymnasium's; ``rgb_array`` gives pictures for videos."""
    prepare_rendering()
    # few vector environments can render
    backend = "gymnasium" if mode == "human" else request.backend.replace("vector", "auto")
    return dataclasses.replace(request, render_mode=mode, backend=backend)


def _evaluation_seed(seed: int) -> int:
    if seed < 0:
        raise ConfigError(f"seed is {seed}; it must be 0 or more")
    return int(np.random.SeedSequence(seed, spawn_key=(_SEED_BRANCH,)).generate_state(1)[0])


def request_of(config: Config, env: Any, env_kwargs: dict[str, Any] | None, trust: bool) -> EnvRequest:
    """The environments to make: the caller's, or the run's if that needs neither foreign code nor foreign files."""
    if env is None:
        check_foreign(
            config.env, "environment", trust,
            lost="evaluate(run, env=...), or --env module:Name on the command line",
            named=f"env={config.env!r} or trust=True (on the command line --env {config.env} or --trust)",
        )  # fmt: skip
    if env_kwargs is None and not is_harmless(config.env_kwargs) and not trust:
        raise ConfigError(
            f"the run's env_kwargs are {config.env_kwargs}, which may name files or code, and are not used unasked; if "
            "you know them, "
            "pass env_kwargs={...} or trust=True (on the command line --env-kwargs '{...}' or --trust)"
        )
    request = EnvRequest.of(config, env)
    kwargs = request.kwargs if env_kwargs is None else env_kwargs
    return dataclasses.replace(request, kwargs=kwargs, backend=request.backend if env is None else "auto")


def _rounds(episodes: int, parallel: int | None, one_each: bool, own_rows: int | None) -> Iterator[np.ndarray]:
    """How many episodes each environment plays, int ``[environments]``; new environments are made for each of the
    rounds.

    Args:
        one_each: No environment plays a second episode: for episodes that are cut off, after which no next one begins.
        own_rows: Environments that a vector environment has by itself, which are the most.
    """
    if parallel is None:
        parallel = -(-episodes // -(-episodes // (own_rows or MOST_PARALLEL)))
    parallel = min(parallel, episodes, own_rows or parallel)
    if one_each:
        for begin in range(0, episodes, parallel):
            yield np.ones(min(parallel, episodes - begin), int)
    else:
        yield episodes // parallel + (np.arange(parallel) < episodes % parallel)


def _render(group: Group) -> Any:
    """A picture of the first environment."""
    try:
        return group.render()[0]
    except BaseException as error:
        raise environment_fault("the environment", "render()", error) from error


class _Tally:
    """Returns, lengths and extras of episodes."""

    def __init__(self) -> None:
        self._returns: list[float] = []
        self._lengths: list[int] = []
        self._extras: defaultdict[str, list[float]] = defaultdict(list)
        self.begin(0)

    @property
    def episodes(self) -> int:
        """How many have been counted."""
        return len(self._returns)

    def begin(self, rows: int) -> None:
        """Begin to count a new group."""
        self._return, self._length = np.zeros(rows), np.zeros(rows, int)

    def add(
        self, reward: np.ndarray, ended: np.ndarray, counts: np.ndarray, extras: Sequence[dict[str, float]]
    ) -> None:
        """Account for one step.

        Args:
            reward: float ``[rows]``.
            ended: bool ``[rows]``; a whole episode has ended.
            counts: bool ``[rows]``; the row acted, in an episode that counts.
            extras: Of the episodes that have ended in this step, in the order of their rows; those without extras may
                be missing.
        """
        self._return += np.where(counts, reward, 0)
        self._length += counts
        self._end(ended & counts)
        if len(extras) == np.count_nonzero(ended):
            extras = list(itertools.compress(extras, counts[ended]))
        elif not counts[ended].all():  # nobody knows whose they are
            return
        for entry in extras:
            for name, value in entry.items():
                self._extras[name].append(value)

    def cut(self) -> None:
        """Count the episodes that go on as they stand."""
        self._end(self._length > 0)

    def evaluation(self, protocol: str) -> Evaluation:
        """The statistics of all episodes, which were played by `protocol`; NaN without any."""
        returns = np.array(self._returns or [math.nan])
        return Evaluation(
            episodes=len(self._returns),
            return_mean=float(returns.mean()),
            return_std=float(returns.std()),
            return_min=float(returns.min()),
            return_max=float(returns.max()),
            length_mean=float(np.mean(self._lengths)) if self._lengths else math.nan,
            returns=tuple(self._returns),
            lengths=tuple(self._lengths),
            extras={name: float(np.mean(values)) for name, values in self._extras.items()},
            protocol=protocol,
        )

    def _end(self, ended: np.ndarray) -> None:
        self._returns += self._return[ended].tolist()
        self._lengths += self._length[ended].tolist()
        self._return[ended] = 0
        self._length[ended] = 0
