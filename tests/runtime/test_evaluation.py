"""Evaluation beside training: right figures of the right weights, and no harm to the run whatever happens to it."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from faults import Faulty
from gymnasium import spaces
from whole_runs import QUIET, config_for, rows, saved_steps, summary, worker_process

from sfactory import train
from sfactory.config import EvalConfig, LogConfig, ModelConfig, RuntimeConfig, resolve
from sfactory.errors import ConfigError
from sfactory.player import Player
from sfactory.runs.checkpoint import CheckpointStore
from sfactory.runtime import planning, supervisor
from sfactory.runtime.planning import make_plan
from sfactory.runtime.training import Training
from sfactory.runtime.wires import make_wires

pytestmark = [pytest.mark.timeout(150), pytest.mark.usefixtures("nothing_is_left")]
PLAIN = LogConfig(report_every_s=0.05, display="plain", tensorboard=False)
EVERY = EvalConfig(every=512, episodes=4)


class Task(gym.Env):
    """Ten steps, each with a reward of 1 for action 1. The first observation of an episode is its seed, if it has one.

    Args:
        evaluator: What it does in the evaluator's process: play, raise, exit or hang.
        seeds: A file for the seeds of the evaluator's environments.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, evaluator: str = "play", seeds: str = "") -> None:
        self.here = Path("/proc/self/comm").read_text().strip() == "sf-evaluator"
        self.evaluator, self.seeds = evaluator, seeds

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        self.count = 0
        if self.here and self.seeds and seed is not None:
            with Path(self.seeds).open("a") as file:
                file.write(f"{seed}\n")
        return np.zeros(2, np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.count += 1
        time.sleep(0.0002)
        if self.here and self.evaluator == "raise":
            raise RuntimeError("the simulator has lost its licence")
        if self.here and self.evaluator == "exit":
            os._exit(3)
        if self.here and self.evaluator == "hang":
            time.sleep(1000)
        return np.array([0, self.count], np.float32), float(action), self.count == 10, False, {}


class Ids(Task):
    """Its observations are ids of things, in a space that does not say so."""

    observation_space = spaces.Box(0, 255, (2,), np.uint8)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        self.count = 0
        return np.zeros(2, np.uint8), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        return super().step(action)[0].astype(np.uint8), float(action), self.count == 10, False, {}


def evaluations(run: Path) -> list[dict[str, float]]:
    """The evaluations in metrics.csv."""
    found = [row for row in rows(run) if row["eval_return_mean"]]
    return [{name: float(row[name]) for name in row if name.startswith("eval_")} for row in found]


def test_the_evaluator_reads_observations_as_training_does(tmp_path: Path) -> None:
    result = train(config_for(tmp_path, Ids, steps=2048, eval=EVERY, model=ModelConfig(categories=11)))
    assert evaluations(result.run_dir)


def test_evaluations_are_reported_and_the_best_checkpoint_is_theirs(tmp_path: Path) -> None:
    seeds = tmp_path / "seeds"
    kwargs = {"seeds": str(seeds)}
    result = train(config_for(tmp_path, Task, env_kwargs=kwargs, steps=8192, eval=EVERY))
    found = evaluations(result.run_dir)
    steps = [each["eval_env_steps"] for each in found]
    assert result.status == "completed" and len(found) >= 2
    assert steps == sorted(set(steps)) and steps[-1] == result.env_steps, "the last weights are evaluated, too"
    assert all(each["eval_length_mean"] == 10 and 0 <= each["eval_return_mean"] <= 10 for each in found)
    best = CheckpointStore(result.run_dir / "checkpoints").load_best()
    assert best is not None and best.eval_return == max(each["eval_return_mean"] for each in found)
    assert best.env_steps in steps
    played = Counter(seeds.read_text().split())
    assert [count for _, count in played.most_common(4)] == [len(found)] * 4, "new environments with the same seeds"
    assert "evaluator" in summary(result.run_dir)["phases"]


def test_a_killed_evaluator_is_started_anew_and_nothing_else_is(tmp_path: Path) -> None:
    killed: list[int] = []
    back: list[int] = []
    others: set[int] = set()

    def kill(report: Any) -> bool:
        if back:  # processes have ended at the last report
            return False
        if report.env_steps:
            others.update(worker_process(name).pid for name in ("learner", "rollout-0"))
        if not killed and not math.isnan(report.eval_return_mean):
            process = worker_process("evaluator")
            killed.append(process.pid)
            process.kill()
        elif not math.isnan(report.eval_return_mean) and worker_process("evaluator").pid != killed[0]:
            back.append(report.env_steps)
        return not back

    result = train(config_for(tmp_path, Task, steps=10**9, eval=EVERY, log=QUIET), [kill])
    assert result.status == "interrupted" and killed and len(others) == 2
    assert int(rows(result.run_dir)[-1]["restarts"]) == 0


@pytest.mark.parametrize(("way", "says"), [("raise", "lost its licence"), ("exit", "status 3"), ("hang", "no sign of")])
def test_an_evaluator_that_never_gets_through_is_given_up(
    way: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "EVALUATOR_RESTARTS", 1)
    given_up: list[int] = []

    def look(report: Any) -> bool:
        if "goes on without evaluation" in (shown := capsys.readouterr().out):
            given_up.append(report.env_steps)
            assert says in shown
        return not given_up or report.env_steps < given_up[0] + 1024

    config = config_for(
        tmp_path, Task, env_kwargs={"evaluator": way}, steps=10**9, eval=EVERY, log=PLAIN,
        runtime=RuntimeConfig(step_timeout_s=1.5),
    )  # fmt: skip
    result = train(config, [look])
    assert result.status == "interrupted" and given_up
    assert int(rows(result.run_dir)[-1]["restarts"]) == 0 and not evaluations(result.run_dir)


def test_a_serial_run_learns_the_same_with_evaluation_as_without(tmp_path: Path) -> None:
    weights = []
    for name, evaluation in (("with", EVERY), ("without", EvalConfig())):
        config = config_for(tmp_path / name, "CartPole-v1", serial=True, steps=1024, seed=5, eval=evaluation)
        result = train(config)
        snapshot = CheckpointStore(result.run_dir / "checkpoints").load_latest()
        assert snapshot is not None
        weights.append(snapshot.model)
    assert len(evaluations(tmp_path / "with" / "run")) == 2
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


class Endless(Task):
    """Sends its process an interrupt in an evaluation, whose environments are made after 500 steps and never end."""

    steps = 0

    def __init__(self) -> None:
        super().__init__()
        self.evaluates = Endless.steps > 500

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        Endless.steps += 1
        observation, reward, ends, _, info = super().step(action)
        if self.evaluates and self.count == 50:
            os.kill(os.getpid(), signal.SIGINT)
        return observation, reward, ends and not self.evaluates, False, info


def test_an_interrupt_ends_a_serial_run_in_the_middle_of_an_evaluation(tmp_path: Path) -> None:
    config = config_for(tmp_path, Endless, serial=True, steps=10**9, eval=EvalConfig(every=1024, episodes=1))
    result = train(config)
    assert (result.status, result.signal) == ("interrupted", signal.SIGINT)
    assert saved_steps(result.run_dir) == result.env_steps > 0


class Scarce(Faulty):
    """Can be made nine times: for the look at its spaces, and for training."""

    made = 0

    def __init__(self) -> None:
        super().__init__()
        if Scarce.made == 9:
            raise RuntimeError("no licence is left")
        Scarce.made += 1


def test_a_serial_run_goes_on_without_an_evaluator_that_cannot_be_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = train(config_for(tmp_path, Scarce, serial=True, steps=1024, eval=EVERY, log=PLAIN))
    assert (result.status, result.env_steps) == ("completed", 1024)
    assert capsys.readouterr().out.count("the run goes on without evaluation, which has failed: ") == 1


@pytest.mark.parametrize("steps", [1024, 1200], ids=["evaluated at the last step", "between two evaluations"])
def test_the_last_weights_are_saved_and_evaluated_once(steps: int, tmp_path: Path) -> None:
    result = train(config_for(tmp_path, Faulty, serial=True, steps=steps, eval=EVERY))  # all of its returns are alike
    saved = [path.stem.split("_")[1] for path in (result.run_dir / "checkpoints").glob("*.json")]
    assert saved.count(f"{result.env_steps:012d}") == 1
    assert evaluations(result.run_dir)[-1]["eval_env_steps"] == result.env_steps


def trained_until_the_last_evaluation(folder: Path, took_s: float = 0.0) -> CheckpointStore:
    """The checkpoints of a training of 1,100 env steps, of which 600 were evaluated before its end."""
    plan = make_plan(resolve(config_for(folder, "CartPole-v1", serial=True, eval=EVERY)))
    store, wires = CheckpointStore(folder), make_wires(plan, local=True)
    training, board = Training(plan, wires, store), wires.evaluation

    def evaluate() -> bool:
        wires.control.created_s -= took_s
        board.put_result(board.weights.version, 5.0)
        return True

    training.start()
    training.learner.env_steps = 600
    training.poll(0)
    training.learner.env_steps = 1100
    training.evaluate_last(evaluate)
    return store


def test_weights_that_are_due_when_an_evaluation_ends_after_training_are_saved_once(tmp_path: Path) -> None:
    trained_until_the_last_evaluation(tmp_path)
    assert sorted(path.stem for path in tmp_path.glob("*.json")) == [
        "checkpoint_000000000600",
        "checkpoint_000000001100",
    ]


def test_the_wait_for_the_last_evaluation_is_no_part_of_the_runs_time(tmp_path: Path) -> None:
    last = trained_until_the_last_evaluation(tmp_path, took_s=86_400).load_latest()
    assert last is not None and last.env_steps == 1100 and last.wall_s < 86_400


def test_a_resumed_run_keeps_the_best_of_all_its_evaluations(tmp_path: Path) -> None:
    first = train(config_for(tmp_path, "CartPole-v1", serial=True, steps=1024, eval=EVERY))
    store = CheckpointStore(first.run_dir / "checkpoints")
    assert store.best_evaluation() == max(each["eval_return_mean"] for each in evaluations(first.run_dir))
    train(config_for(tmp_path, "CartPole-v1", serial=True, steps=2048, eval=EVERY))
    assert store.best_evaluation() == max(each["eval_return_mean"] for each in evaluations(first.run_dir))


def test_episodes_are_recorded_at_an_interval_and_come_into_the_page(tmp_path: Path) -> None:
    pytest.importorskip("imageio_ffmpeg")
    evaluation = EvalConfig(every=256, episodes=1, video_every=512)
    pytest.importorskip("pygame")
    config = config_for(
        tmp_path, "CartPole-v1", serial=True, steps=1024, eval=evaluation, log=LogConfig(display="none")
    )
    result = train(config)
    recorded = sorted(int(path.stem) for path in (result.run_dir / "videos").glob("*.mp4"))
    assert [steps // 512 for steps in recorded] == [0, 1, 2]
    assert 'src="data:video/mp4' in (result.run_dir / "report.html").read_text()


def test_a_resumed_run_records_no_more_videos_than_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def record(player: Player, path: Path, *how: Any) -> None:
        path.parent.mkdir(exist_ok=True)
        path.touch()

    monkeypatch.setattr(planning, "check_video", lambda: None)
    monkeypatch.setattr(Player, "record", record)
    evaluation = EvalConfig(every=128, episodes=1, video_every=512)
    for steps in (384, 640, 1024):
        result = train(config_for(tmp_path, "CartPole-v1", serial=True, steps=steps, eval=evaluation))
    recorded = sorted(int(path.stem) for path in (result.run_dir / "videos").glob("*.mp4"))
    assert [steps // 512 for steps in recorded] == [0, 1, 2]


def test_an_environment_without_pictures_is_evaluated_without_videos(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("imageio_ffmpeg")
    evaluation = EvalConfig(every=256, episodes=1, video_every=256)
    result = train(config_for(tmp_path, Task, serial=True, steps=1024, eval=evaluation, log=PLAIN))
    assert len(evaluations(result.run_dir)) == 4
    assert capsys.readouterr().out.count("there will be no videos of evaluation") == 1


def test_mistakes_are_told_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"eval.video_every is 100 and eval.every is 0.*--eval.every"):
        train(config_for(tmp_path, Task, eval=EvalConfig(video_every=100)))
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(ConfigError, match=r'pip install -e "\.\[video\]"'):
        train(config_for(tmp_path, Task, eval=EvalConfig(every=100, video_every=100)))
    assert not list(tmp_path.iterdir())
