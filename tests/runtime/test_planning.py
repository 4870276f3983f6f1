"""What a run says of itself before it begins."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_tasks import Crowd
from whole_runs import config_for

from sfactory import Config, train
from sfactory.config import LogConfig, from_command_line, resolve
from sfactory.runtime.planning import make_plan, notes_on


def test_a_run_of_few_updates_names_the_figures_and_the_flags():
    (note,) = notes_on(make_plan(resolve(Config(env="CartPole-v1", preset="default", steps=10_000, batch_size=1024))))
    assert "10,000 steps are only 320 updates (10 batches of 1,024 x 4 epochs x 8 minibatches)" in note
    for flag in ("--steps", "--epochs", "--optim.minibatches", "--batch-size"):
        assert flag in note
    assert notes_on(make_plan(resolve(Config(env="CartPole-v1", preset="default", steps=20_000)))) == []


def test_a_batch_that_is_not_the_presets_is_told_unless_it_was_asked_for():
    (note,) = notes_on(make_plan(resolve(Config(env=Crowd))))
    for part in (
        "batch_size is 960, not the preset's 1,024",
        "rollout 32 x rows 15 = 480",
        "8 minibatches",
        "--envs-per-worker",
    ):
        assert part in note
    for flags in ([], ["--batch-size", "2048"]):
        assert notes_on(make_plan(from_command_line(["--env", "CartPole-v1", *flags], "test"))) == []
    assert notes_on(make_plan(resolve(Config(env=Crowd, batch_size=768)))) == []


@pytest.mark.parametrize(("display", "times"), [("plain", 1), ("none", 0)])
def test_a_run_says_it_once_at_its_start(display: str, times: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    train(
        config_for(tmp_path, "CartPole-v1", steps=256, serial=True, log=LogConfig(display=display, tensorboard=False))
    )
    assert capsys.readouterr().out.count("256 steps are only 2 updates") == times
