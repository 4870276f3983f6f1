"""What reports tell the rest of a run."""

from __future__ import annotations

import dataclasses
import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from environments import Counting
from short_runs import begun_run
from torch import Tensor, nn
from whole_runs import QUIET, config_for, rows

from sfactory import Config, LossConfig, ModelConfig, learner, train
from sfactory.config import resolve
from sfactory.losses import TermSamples
from sfactory.runs.checkpoint import CheckpointStore, Snapshot
from sfactory.runtime import reporting
from sfactory.runtime.planning import make_plan
from sfactory.telemetry import recent
from sfactory.telemetry.events import Evaluated
from sfactory.telemetry.recent import BLIND_REPORTS, BlindCritic


def test_only_a_whole_window_of_episodes_makes_a_checkpoint_the_best(tmp_path: Path) -> None:
    """Also after resuming, when the window begins anew."""
    config = config_for(
        tmp_path, env=Counting, serial=True, steps=32_768, log=dataclasses.replace(QUIET, episode_window=5)
    )
    result = train(config)
    assert result.status == "completed"
    store = CheckpointStore(config.run_dir / "checkpoints")
    settled = store.load_latest()
    assert settled.episode_return == result.episode_return_mean > 0, "that of the last episodes"
    longer = dataclasses.replace(config, steps=40_960, log=dataclasses.replace(QUIET, episode_window=10_000))
    assert train(longer).episode_return_mean > 0, "which reports tell all the same"
    assert store.load_latest().episode_return is None
    assert store.load_best().env_steps == settled.env_steps < store.load_latest().env_steps


def test_a_resumed_run_goes_on_counting_skipped_updates_and_knows_no_rate_before_its_learner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, begin = [], reporting.Reporter.begin

    def noting(reporter: reporting.Reporter, *of_run: Any) -> None:
        begin(reporter, *of_run)
        begun.append(reporter.progress)

    monkeypatch.setattr(reporting.Reporter, "begin", noting)
    config = config_for(tmp_path, "CartPole-v1", serial=True, steps=256)
    train(config)
    store = CheckpointStore(config.run_dir / "checkpoints")
    saved = store.load_latest()
    store.save(dataclasses.replace(saved, trainer=saved.trainer | {"skipped": 7}))
    train(dataclasses.replace(config, steps=512))
    assert [progress.skipped for progress in begun] == [0, 7]
    assert all(math.isnan(progress.lr) for progress in begun)


@pytest.mark.parametrize(("env_steps", "reported"), [(400, True), (600, False)])
def test_an_evaluation_beyond_the_checkpoint_that_a_run_falls_back_to_is_not_reported(
    env_steps: int, reported: bool, tmp_path: Path
) -> None:
    """Its env steps come again, and the curve of evaluations would go back."""
    config = config_for(tmp_path, "CartPole-v1", serial=True)
    with begun_run(config) as folder:
        reporter = reporting.Reporter(make_plan(resolve(config)), folder)
        reporter.begin(None, 0.0)
        reporter.add_evaluation(Evaluated(env_steps, 9.0, 1.0, 8.0, 10.0, 9.0))
        reporter.begin(Snapshot({}, {}, 500, 500, 5, 1.0, None), 1.0)
        assert (reporter.report({}).eval_env_steps == env_steps) == reported


@pytest.mark.parametrize(("env", "some"), [("CartPole-v1", True), ("sfactory/TensorCartPole", False)])
def test_the_display_has_the_slots_of_the_arena(
    env: str, some: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is none where environments step on the device."""
    shown = {}
    monkeypatch.setattr(reporting, "Display", lambda mode, **settings: shown.update(settings))
    plan = make_plan(resolve(config_for(tmp_path, env, serial=True)))
    reporting.Reporter(plan, SimpleNamespace(path=tmp_path))
    assert (shown["slots"] > 0) == some


def spread(samples: TermSamples, config: Config) -> dict[str, Tensor]:
    return {"spread": samples.value.square()}


def test_a_report_is_of_all_updates_since_the_last_one_however_often_the_learner_tells_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = []
    for every in (-1.0, 1e9):
        monkeypatch.setattr(learner, "PROGRESS_EVERY_S", every)
        log = dataclasses.replace(QUIET, report_every_s=1e9)
        config = config_for(tmp_path / str(every), Noise, serial=True, log=log, loss=LossConfig(terms=spread))
        train(config)
        reports += rows(config.run_dir)
    often, once = reports
    assert often["learner_updates"] == once["learner_updates"]
    for name in ("policy_lag_mean", "policy_lag_max", "loss", "kl", "behaviour_kl", "grad_norm", "term/spread"):
        assert float(often[name]) == pytest.approx(float(once[name]), rel=1e-5, abs=1e-9), name


def test_a_report_tells_the_share_of_a_batch_that_counts(tmp_path: Path) -> None:
    config = config_for(tmp_path, Brief, serial=True)
    train(config)
    shares = [float(row["valid_fraction"]) for row in rows(config.run_dir) if row["valid_fraction"]]
    assert shares and set(shares) == {0.5}, "every other step is a rest"


class Noise(gymnasium.Env):
    """Rewards that nobody can foresee."""

    observation_space = gymnasium.spaces.Box(-1, 1, (4,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._observe(), {}

    def step(self, action):
        time.sleep(3e-4)  # so that there are reports enough on any machine
        return self._observe(), self.np_random.normal(), self.np_random.random() < 0.05, False, {}

    def _observe(self) -> np.ndarray:
        return self.np_random.uniform(-1, 1, 4).astype(np.float32)


class Brief(Noise):
    """Is truncated by its first step."""

    def step(self, action):
        return *super().step(action)[:2], False, True, {}


class Saturated(nn.Module):
    """An encoder that makes the same of everything."""

    out_features = 8

    def __init__(self, leaf) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 8)

    def forward(self, x):
        return torch.tanh(1e9 * self.layer(torch.ones_like(x)) + 0.0 * x.sum(-1, keepdim=True))


@pytest.mark.parametrize("encoder", [Saturated, "auto"])
def test_a_critic_that_sees_nothing_is_told_once(
    encoder: object, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recent, "BLIND_REPORTS", 3)
    config = config_for(
        tmp_path, Noise, serial=True, steps=8192, model=ModelConfig(encoder=encoder, shared_critic=False),
        log=dataclasses.replace(QUIET, display="plain", report_every_s=0.01),
    )  # fmt: skip
    train(config)
    assert capsys.readouterr().out.count("the critic has the same value for all that it observes") == (
        encoder is Saturated
    )


def test_only_reports_in_a_row_with_something_learned_count() -> None:
    critic, noticed = BlindCritic(), []
    values = [3e-8] * (BLIND_REPORTS - 1) + [0.2] + [-3e-8] * 2 * BLIND_REPORTS
    for update, value in enumerate(values, 1):
        noticed += [critic.noticed(update, math.nan), critic.noticed(update, value)]
    assert noticed.count(True) == 1 and noticed.index(True) == 2 * (2 * BLIND_REPORTS - 1) + 1
    for value in (0.0, math.nan, 1e-3):
        critic = BlindCritic()
        assert not any(critic.noticed(update, value) for update in range(1, 100)), "returns do not vary, or are learned"
