"""The evaluator: plays episodes with the learner's weights while training goes on, in environments of its own."""

from __future__ import annotations

import contextlib
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sfactory.data.weights import FlatWeights
from sfactory.envs.interface import EnvRequest
from sfactory.errors import SfactoryError, said
from sfactory.model import build_uninitialized
from sfactory.model.interface import Model
from sfactory.player import Player, rendering
from sfactory.policy import Policy
from sfactory.runs.checkpoint import CheckpointStore
from sfactory.runs.run_files import VIDEOS
from sfactory.runs.video import prepare_rendering
from sfactory.runtime.plan import EVALUATOR, Plan
from sfactory.runtime.training import Stopped
from sfactory.runtime.wires import Wires
from sfactory.telemetry.events import Evaluated, Note

LONGEST = 100_000
"""Env steps after which an episode that still goes on counts as it stands: a policy may never end one."""
LAST_VIDEO = 300
"""Env steps of an episode in the video at the end of a run, which waits for it: 6 s of CartPole, 20 s of Atari."""
_SEED_BRANCH = 2
"""Spawn key of these seeds: neither those of training nor those of ``sfactory eval``."""


class Evaluator:
    """Evaluates the weights that the learner hands out, as soon as they are there and the ones before are done.

    The model holds a copy of all weights and running statistics, which no learner changes while it plays. Environments
    are made anew for each evaluation and begin with the same seeds, so that the points of a curve compare.

    Args:
        plan: Plan of the run.
        wires: Wires of the run.
        videos: Folder for videos.
    """

    def __init__(self, plan: Plan, wires: Wires, videos: Path) -> None:
        assert wires.evaluation is not None
        self._plan, self._board, self._videos = plan, wires.evaluation, videos
        self._control, self._emit = wires.control, wires.events.put
        self._watch = wires.control.stopwatch(EVALUATOR)
        model = build_uninitialized(plan.env.observation, plan.env.action, plan.config.model)
        self._flat = FlatWeights(model)
        self._seed = _seed_of(plan)
        self._policy = _WatchedPolicy(self, plan, model, self._seed)
        self._request = EnvRequest.of(plan.config, plan.env_source, threads=1)
        self._records = plan.config.eval.video_every > 0
        if self._records:
            prepare_rendering()
        self._player = self._make_player(self._request)
        self._watch.lap("starting")

    def poll(self, timeout: float) -> None:
        """Evaluate the newest weights, or wait up to `timeout` seconds for some.

        Raises:
            EnvironmentFault: If an environment raises or breaks its API.
            Stopped: If the run ends meanwhile.
        """
        if self._board.weights.version == self._board.evaluated:
            time.sleep(timeout)
            self._watch.lap("waiting")
            return
        evaluation = self._plan.config.eval
        env_steps = self._board.weights.read(self._flat.vector)
        self._watch.lap("weights")
        result = self._player.play(evaluation.episodes, not evaluation.sampled, None, LONGEST)
        evaluated = Evaluated(
            env_steps=env_steps, return_mean=result.return_mean, return_std=result.return_std,
            return_min=result.return_min, return_max=result.return_max, length_mean=result.length_mean,
        )  # fmt: skip
        try:
            self._record(env_steps)  # before the result, which is all that a run waits for at its end
        finally:
            self._board.put_result(env_steps, result.return_mean)
            self._watch.count(sum(result.lengths))
            self._emit(evaluated)
        self._watch.lap("reporting")

    def step_done(self) -> None:
        """Account for the environments' step before a forward pass."""
        self._watch.lap("environment")
        if self._control.stopping:
            raise Stopped

    def forward_done(self) -> None:
        """Account for a forward pass."""
        self._watch.lap("forward")

    def _make_player(self, request: EnvRequest) -> Player:
        return Player(self._policy, request, self._seed, "the run")

    def _record(self, env_steps: int) -> None:
        """Record one episode if there is no video yet of these `eval.video_every` env steps, also of a command before.
        Where that fails it is not tried again."""
        if not self._records:
            return
        begin = env_steps - env_steps % self._plan.config.eval.video_every
        videos = (int(path.stem) for path in self._videos.glob("*.mp4") if path.stem.isdecimal())
        if any(begin <= recorded <= env_steps for recorded in videos):
            return
        try:
            player = self._make_player(rendering(self._request))
            player.record(_video_path(self._videos, env_steps), not self._plan.config.eval.sampled, LONGEST)
        except (SfactoryError, OSError, ValueError) as error:
            self._records = False
            self._emit(Note(f"there will be no videos of evaluation: {said(error)}"))


def play_last(plan: Plan, run: Path, store: CheckpointStore) -> None:
    """Play episodes with the newest checkpoint, and keep in the run folder what they returned, and then a video of
    the first :data:`LAST_VIDEO` env steps of another one, where there can be one.

    Raises:
        EnvironmentFault: If an environment raises or breaks its API while it is evaluated.
    """
    prepare_rendering()
    snapshot, seed, sampled = store.load_latest(), _seed_of(plan), plan.config.eval.sampled
    assert snapshot is not None  # of the run that has just ended
    model = build_uninitialized(plan.env.observation, plan.env.action, plan.config.model)
    model.load_state_dict(snapshot.model)
    policy = Policy(plan.env, model, torch.device("cpu"), seed)
    request = EnvRequest.of(plan.config, plan.env_source, threads=1)
    played = Player(policy, request, seed, "the run").play(plan.config.eval.episodes, not sampled, None, LONGEST)
    played.keep(run, "latest", snapshot.env_steps)
    # nobody has asked for the video, so nobody is told that there can be none
    with contextlib.suppress(SfactoryError, OSError, ValueError), warnings.catch_warnings(action="ignore"):
        player = Player(policy, rendering(request), seed, "the run")
        player.record(_video_path(run / VIDEOS, snapshot.env_steps), not sampled, LAST_VIDEO)


def _seed_of(plan: Plan) -> int:
    return int(np.random.SeedSequence(plan.config.seed, spawn_key=(_SEED_BRANCH,)).generate_state(1)[0])


def _video_path(videos: Path, env_steps: int) -> Path:
    """Where the video of the policy after so many env steps belongs."""
    return videos / f"{env_steps:012d}.mp4"


class _WatchedPolicy(Policy):
    """The evaluator's policy, which shows that the evaluator lives whenever it is asked for actions."""

    def __init__(self, evaluator: Evaluator, plan: Plan, model: Model, seed: int) -> None:
        super().__init__(plan.env, model, torch.device("cpu"), seed)
        self._evaluator = evaluator

    def choose(self, *args: Any, **kwargs: Any) -> Any:
        """As :meth:`Policy.choose`."""
        self._evaluator.step_done()
        chosen = super().choose(*args, **kwargs)
        self._evaluator.forward_done()
        return chosen
