"""The final evaluation: the figures and the video of a run's page, and no harm to the run whatever happens to it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import psutil
import pytest
from commands import Command, wait_until
from gymnasium import spaces
from whole_runs import config_for, summary, worker_process

from sfactory import train
from sfactory.config import Config, EvalConfig, LogConfig
from sfactory.runs.checkpoint import CheckpointStore
from sfactory.runtime import final_evaluation

pytestmark = [pytest.mark.timeout(150), pytest.mark.usefixtures("nothing_is_left")]
PLAIN = LogConfig(report_every_s=0.5, display="plain", tensorboard=False)


class Task(gym.Env):
    """Ten steps, each with a reward of 1.

    Args:
        last: What it does in the process of the final evaluation: play, raise, exit or hang.
        renders: Whether it can be filmed.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, last: str = "play", renders: bool = True, render_mode: str | None = None) -> None:
        self.last = last if Path("/proc/self/comm").read_text().strip() == "sf-evaluator" else "play"
        self.metadata = {"render_modes": ["rgb_array"], "render_fps": 20}
        self.renders, self.render_mode = renders, render_mode

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        self.count = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.count += 1
        if self.last == "raise":
            raise RuntimeError("the simulator has lost its licence")
        if self.last == "exit":
            os._exit(3)
        if self.last == "hang":
            time.sleep(1000)
        return np.array([0, self.count], np.float32), 1.0, self.count == 10, False, {}

    def render(self) -> np.ndarray:
        if not self.renders:
            raise NotImplementedError
        return np.full((32, 32, 3), 20 * self.count, np.uint8)


@pytest.fixture
def after_any_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluate after the shortest run, too, however busy the machine is."""
    monkeypatch.setattr(final_evaluation, "TRAINED_S", 0.0)
    monkeypatch.setattr(final_evaluation, "AT_LEAST_S", 60.0)


def task_config(folder: Path, **changes: Any) -> Config:
    return config_for(folder, Task, **{"steps": 1024, "log": PLAIN, "eval": EvalConfig()} | changes)


def evaluates() -> bool:
    """Whether the process of a final evaluation lives."""
    with contextlib.suppress(StopIteration, psutil.Error):
        return worker_process("evaluator").is_running()
    return False


def kept(run: Path) -> dict[str, Any]:
    """The evaluation in a run folder."""
    return json.loads((run / "evaluation.json").read_text())


@pytest.mark.usefixtures("after_any_run")
def test_the_page_of_a_run_shows_what_its_last_policy_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = train(task_config(tmp_path))
    found, page = kept(result.run_dir), (result.run_dir / "report.html").read_text()
    assert (found["checkpoint"], found["env_steps"], found["episodes"]) == ("latest", result.env_steps, 10)
    assert found["returns"] == [10.0] * 10
    assert (result.run_dir / "videos" / f"{result.env_steps:012d}.mp4").stat().st_size > 0
    assert "<video" in page and "10, deviation 0, from 10 to 10" in page
    assert "final evaluation: return 10 (10 to 10) in 10 episodes" in capsys.readouterr().out


@pytest.mark.usefixtures("after_any_run")
def test_going_on_evaluates_anew(tmp_path: Path) -> None:
    first = train(task_config(tmp_path))
    second = train(task_config(tmp_path, steps=2048))
    assert first.env_steps < second.env_steps == kept(second.run_dir)["env_steps"]


@pytest.mark.usefixtures("after_any_run")
def test_its_time_is_not_the_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(final_evaluation, "AT_LEAST_S", 1.5)
    begin = time.monotonic()
    result = train(task_config(tmp_path, env_kwargs={"last": "hang"}))
    assert result.wall_s == summary(result.run_dir)["wall_s"] < time.monotonic() - begin - 1.5


@pytest.mark.usefixtures("after_any_run")
def test_what_cannot_be_filmed_is_evaluated(tmp_path: Path) -> None:
    result = train(task_config(tmp_path, env_kwargs={"renders": False}))
    assert kept(result.run_dir)["return_mean"] == 10
    assert not (result.run_dir / "videos").exists()


UNFILMED = """
import gymnasium as gym
from environments import Counting
from sfactory import Config, LogConfig, train
from sfactory.runtime import final_evaluation

final_evaluation.TRAINED_S, final_evaluation.AT_LEAST_S = 0.0, 60.0
gym.register("Unfilmed-v0", Counting)
sizes = dict(steps=256, workers=1, envs_per_worker=4, rollout=8, batch_size=32, preset="none")
log = LogConfig(display="none", tensorboard=False)
train(Config(env="Unfilmed-v0", device="cpu", run="FOLDER", log=log, **sizes))
"""


def test_gymnasium_does_not_warn_of_pictures_that_nobody_asked_for(tmp_path: Path) -> None:
    with Command("-", stdin=UNFILMED.replace("FOLDER", str(tmp_path / "run"))) as command:
        assert command.wait() == 0, command.errors
    assert (command.output, command.errors) == ("", "")
    assert kept(tmp_path / "run")["episodes"] == 10


@pytest.mark.usefixtures("after_any_run")
@pytest.mark.parametrize(
    ("last", "said"),
    [
        ("raise", "the simulator has lost its licence"),
        ("exit", "its process has died"),
        ("hang", "it was not done within 1 s"),
    ],
)
def test_a_run_completes_whatever_happens_to_it(
    tmp_path: Path, last: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if last == "hang":
        monkeypatch.setattr(final_evaluation, "AT_LEAST_S", 1.0)
        monkeypatch.setattr(final_evaluation, "TOLD_S", 0.2)
    result = train(task_config(tmp_path, env_kwargs={"last": last}))
    assert result.status == summary(result.run_dir)["status"] == "completed"
    assert (result.run_dir / "report.html").exists() and not (result.run_dir / "evaluation.json").exists()
    shown = capsys.readouterr().out
    (line,) = (line for line in shown.splitlines() if "no final evaluation" in line)
    assert last != "hang" or "waits for the final evaluation, 1 s at most" in shown
    assert said in line and f"sfactory report {result.run_dir} --episodes 10 --video --env module:Name" in line
    assert ("--max-steps" in line) == (last == "hang"), "its episodes may have no end"


@pytest.mark.usefixtures("after_any_run")
def test_an_interrupt_ends_it_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt() -> None:
        assert wait_until(evaluates, 60)
        os.kill(os.getpid(), signal.SIGINT)

    sender = threading.Thread(target=interrupt)
    sender.start()
    result = train(task_config(tmp_path, env_kwargs={"last": "hang"}))
    sender.join()
    assert (result.status, result.signal) == ("completed", None)
    assert "no final evaluation: interrupted" in capsys.readouterr().out
    store = CheckpointStore(result.run_dir / "checkpoints")
    assert (snapshot := store.load_latest()) is not None and snapshot.env_steps == result.env_steps


@pytest.mark.usefixtures("after_any_run")
@pytest.mark.parametrize(
    "changes",
    [
        {"eval": EvalConfig(at_end=False)},
        {"eval": EvalConfig(every=512, episodes=2)},
        {"serial": True},
    ],
)
def test_there_is_none_where_it_is_not_wanted(tmp_path: Path, changes: dict[str, Any]) -> None:
    result = train(task_config(tmp_path, **changes))
    assert result.status == "completed" and not (result.run_dir / "evaluation.json").exists()


@pytest.mark.usefixtures("after_any_run")
def test_an_interrupted_run_has_none(tmp_path: Path) -> None:
    stop: Callable[[Any], bool] = lambda report: False  # noqa: E731
    result = train(task_config(tmp_path, steps=10**7), callbacks=[stop])
    assert result.status == "interrupted" and not (result.run_dir / "evaluation.json").exists()


def test_a_short_run_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(final_evaluation, "TRAINED_S", 1000.0)
    assert not (train(task_config(tmp_path)).run_dir / "evaluation.json").exists()
