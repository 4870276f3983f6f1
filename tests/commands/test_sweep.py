"""Sweeps: what is refused, which trials are tried and pruned, and what is left after a kill."""

from __future__ import annotations

import contextlib
import csv
import math
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import commands
import psutil
import pytest
import yaml
from cgroup_folders import use_cgroups
from commands import Command, wait_until

from sfactory.commands import main
from sfactory.commands.runs import list_runs
from sfactory.commands.sweeps.listed import ListedTrials
from sfactory.commands.sweeps.runs import BEGINS, GUARD, Reports, Run, curve, score, unscored
from sfactory.commands.sweeps.scheduler import core_shares, write_config
from sfactory.commands.sweeps.space import Dimension, Objective, Pruning, Space
from sfactory.commands.sweeps.space_file import read_space
from sfactory.commands.sweeps.study import StudyTrials
from sfactory.commands.sweeps.trials import Trial
from sfactory.config import Config, LogConfig
from sfactory.config.command_line import from_command_line
from sfactory.errors import ConfigError
from sfactory.runs.run_files import try_lock
from sfactory.telemetry.metrics import Report
from sfactory.telemetry.metrics_file import MetricsWriter

BASE = {
    "env": "CartPole-v1", "steps": 256, "preset": "none", "device": "cpu", "serial": True, "envs_per_worker": 4,
    "rollout": 8, "batch_size": 64, "model": {"hidden": [8]}, "log": {"report_every_s": 0.05},
}  # fmt: skip
PATIENCE_S = 150.0
"""A run starts in seconds, and much later on a machine that has more to do."""
SMALL = {"base": BASE, "search": {"optim.lr": [1e-3, 1e-2]}}


def space_file(folder: Path, **values: Any) -> Path:
    file = folder / "space.yaml"
    file.write_text(yaml.safe_dump(values, sort_keys=False))
    return file


def space_of(folder: Path, **values: Any) -> Space:
    return read_space(space_file(folder, **values))[0]


def rows(sweep: Path) -> dict[str, dict[str, str]]:
    """The rows of trials.csv, by trial."""
    with (sweep / "trials.csv").open() as file:
        return {row["trial"]: row for row in csv.DictReader(file)}


# What is searched


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"serach": {}}, "unknown key serach; did you mean search?"),
        ({"search": {"lr": [1e-3]}}, "unknown field lr; did you mean optim.lr?"),
        ({"search": {"optim.lrr": [1e-3]}}, "unknown field optim.lrr; did you mean optim.lr?"),
        ({"search": {"optim": [1e-3]}}, "unknown field optim"),
        ({"search": {"seed": [1, 2]}}, "search.seed: name the seeds of every trial under seeds"),
        ({"search": {"algo": ["appo", "sac"]}}, "search.algo: algo is 'sac'; it must be one of appo, impala, ppo"),
        ({"search": {"algo": {"range": [0, 1]}}, "trials": 2}, "algo is no number, so it has no range"),
        ({"search": {"optim.lr": {"log": [0.0, 1.0]}}, "trials": 2}, "and above 0"),
        ({"search": {"optim.lr": {"range": [2.0, 1.0]}}, "trials": 2}, "the first end must be below the second one"),
        ({"search": {"optim.lr": {"rang": [1e-3, 1.0]}}, "trials": 2}, "write a list of choices"),
        ({"search": {"epochs": {"range": [0.5, 2.5]}}, "trials": 2}, "epochs is an integer"),
        ({"search": {"epochs": {"range": [0, 2]}}, "trials": 2}, "search.epochs reaches 0; it must be at least 1"),
        ({"search": {"loss.gamma": {"range": [0.9, 2.0]}}, "trials": 2}, "search.loss.gamma reaches 2.0"),
        ({"search": {"optim.lr": {"log": [1e-4, 1e-2]}}}, "trials is unset"),
        ({"search": {"optim.lr": {"log": [1e-4, 1e-2]}}, "sampler": "grid"}, "optim.lr is an interval"),
        ({"base": {"envv": "CartPole-v1"}}, "base: unknown key envv; did you mean env?"),
        ({"base": {"run": "here"}}, "base.run: each run has a folder of its own"),
        ({"seeds": [1, 1]}, "seeds is [1, 1]"),
        ({"seeds": "three"}, "seeds is 'three'"),
        ({"seeds": [0, 2**60]}, "it must be a list of different integers from 0 to 2**53"),
        ({"seeds": 20_261_129}, "seeds is 20261129"),
        ({"parallel": 0}, "parallel is 0"),
        ({"objective": {"metric": "return_mean"}}, "objective.metric is 'return_mean', which is no column"),
        ({"objective": {"metric": "eval_return_mean"}}, "nothing is evaluated; give base.eval.every"),
        ({"objective": {"last": 5}}, "objective.last is 5; it must be above 0 and at most 1"),
        ({"objective": {"direction": "up"}}, "objective.direction is 'up'; it must be one of maximize, minimize"),
        ({"search": {"env_kwargs": [{}], "env_kwargs.g": [9.8]}}, "search has env_kwargs and its entry env_kwargs.g"),
        ({"search": {"optim.lr": [0.001, "1e-3"]}}, "search.optim.lr has 0.001 more than once"),
        ({"search": {"loss.entropy_coef": [0, 0.01, 0.0]}}, "search.loss.entropy_coef has 0.0 more than once"),
        (
            {"search": {"epochs": {"range": [1, 3], "step": 4}}, "trials": 2},
            "has step 4, which is wider than its range",
        ),
        (
            {"objective": {"over_seeds": "min", "direction": "minimize"}},
            "which of a metric to minimize is the best seed",
        ),
        ({"sampler": "tpe", "trials": 2, "prune": {"first": 256}}, "prune.first is 256, and runs have 256 env steps"),
        ({"prune": True}, "prune needs sampler tpe"),
        ({"prune": {}}, "prune needs sampler tpe"),
        ({"sampler": "tpe", "trials": 2, "prune": 0}, "prune is 0; it must be a mapping"),
        ({"sampler": "tpe", "trials": 2, "prune": {"factor": 1}}, "prune.factor is 1"),
    ],
)
def test_what_cannot_be_searched_is_told_before_anything_starts(
    tmp_path: Path, change: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = tmp_path / "sweep"
    assert main(["sweep", str(space_file(tmp_path, **SMALL | change)), "--folder", str(sweep)]) == 2
    assert message in capsys.readouterr().err
    assert not sweep.exists()


def test_an_environment_that_cannot_be_made_is_told_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = space_file(tmp_path, **SMALL | {"base": BASE | {"env": "CartPol-v1"}})
    assert main(["sweep", str(file), "--folder", str(tmp_path / "sweep")]) == 2
    assert "did you mean CartPole-v1" in capsys.readouterr().err
    assert not (tmp_path / "sweep").exists()


@pytest.mark.parametrize(
    ("name", "choices", "message"),
    [
        ("model.encoder", ["auto", "no_such_module:Encoder"], "search.model.encoder 'no_such_module:Encoder': "),
        ("loss.terms", ["none", "no_such_module:term"], "search.loss.terms 'no_such_module:term': "),
        ("env_kwargs", [{}, {"no_such": 1}], "search.env_kwargs {'no_such': 1}: "),
        ("env", ["CartPole-v1", "CartPol-v1"], "search.env 'CartPol-v1': "),
    ],
)
def test_each_choice_of_what_only_a_plan_can_tell_is_planned(
    tmp_path: Path, name: str, choices: list[Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = space_file(tmp_path, base=BASE, search={"model.hidden": [[8], [16]], name: choices})
    assert main(["sweep", str(file), "--folder", str(tmp_path / "sweep")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "sweep").exists()


@pytest.mark.parametrize(
    ("limit", "parallel", "runs", "sizes"),
    [
        ("max", None, 40, [2] * 8),
        ("max", None, 3, [5] * 3),
        ("max", 3, 40, [5] * 3),
        ("400000", None, 40, [2] * 2),
        ("400000", 1, 40, [4]),
        ("50000", None, 40, [1]),
    ],
)
def test_cores_are_shared_out_evenly_as_far_as_a_container_has_time_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, parallel: int | None, runs: int, sizes: list[int]
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)))
    use_cgroups(monkeypatch, tmp_path, "0::/", {"cpu.max": f"{limit} 100000"})
    shares = core_shares(parallel, runs)
    assert [len(share) for share in shares] == sizes
    assert len({core for share in shares for core in share}) == sum(sizes)
    with pytest.raises(ConfigError, match="a run needs at least one"):
        core_shares(17 if limit == "max" else 5, runs)


def test_more_runs_than_cores_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", str(space_file(tmp_path, **SMALL, parallel=100_000))]) == 2
    assert "a run needs at least one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("metric", "change"),
    [
        ("extra/success", {}),
        ("term/curiosity", {}),
        ("eval_return_mean", {"base": BASE | {"eval": {"every": 64}}}),
        ("eval_return_mean", {"base": BASE | {"eval": {"at_end": True}}}),
        ("eval_return_mean", {"search": {"eval.every": [64, 128]}}),
    ],
)
def test_columns_of_ones_own_and_of_evaluation_may_be_the_objective(
    tmp_path: Path, metric: str, change: dict[str, Any]
) -> None:
    assert space_of(tmp_path, **SMALL | change, objective={"metric": metric}).objective.metric == metric


def test_a_grid_has_all_combinations_and_nested_values_reach_the_base(tmp_path: Path) -> None:
    search = {
        "optim.lr": [1e-3, "1e-2"],
        "env_kwargs.sutton_barto_reward": [True, False],
        "model.hidden": [[8], [16, 16]],
    }
    space = space_of(tmp_path, base=BASE | {"env_kwargs": {"max_episode_steps": 9}}, search=search)
    assert space.sampler == "grid" and space.trials == len(space.listed()) == 8
    values = space.values(space.listed()[-1])
    assert values["env_kwargs"] == {"max_episode_steps": 9, "sutton_barto_reward": False}
    assert values["model"] == {"hidden": [16, 16]} and values["optim"] == {"lr": "1e-2"}
    assert BASE["model"] == {"hidden": [8]}


@pytest.mark.parametrize(
    "dimension",
    [
        Dimension("a", low=1e-5, high=1e-1, log=True),
        Dimension("a", low=1, high=512, log=True, whole=True),
        Dimension("a", low=16, high=100, step=16, whole=True),
        Dimension("a", low=-1.0, high=1.0),
        Dimension("a", low=0.09, high=1.0, step=0.07),  # 0.09 + 13 * 0.07 is above 1
        Dimension("a", choices=([1], [2])),
    ],
)
def test_random_values_are_within_their_bounds(dimension: Dimension) -> None:
    generator = random.Random(1)
    drawn = [dimension.draw(generator) for _ in range(200)]
    if dimension.choices:
        assert set(map(tuple, drawn)) == {(1,), (2,)}
        return
    assert all(dimension.low <= value <= dimension.high for value in drawn)
    if dimension.whole:
        assert all(isinstance(value, int) for value in drawn)
    if dimension.step and dimension.whole:
        assert set(drawn) == {16, 32, 48, 64, 80, 96}
    if dimension.log:
        middle = (dimension.low * dimension.high) ** 0.5
        assert 60 < sum(value < middle for value in drawn) < 140


@pytest.mark.parametrize(
    ("spec", "whole"),
    [
        ({"range": [0.0, 1.0]}, False),
        ({"range": [0, 1]}, True),
        ({"range": [0, 1.0]}, False),
        ({"range": [0, 10], "step": 2.0}, False),
        ({"log": [1.0, 8.0]}, False),
        ({"log": [1, 8]}, True),
    ],
)
def test_a_range_of_an_environments_argument_is_of_integers_only_if_it_is_written_so(
    tmp_path: Path, spec: dict[str, Any], whole: bool
) -> None:
    dimension = space_of(tmp_path, base=BASE, search={"env_kwargs.noise": spec}, trials=2).search["env_kwargs.noise"]
    assert dimension.whole is whole
    assert {type(dimension.draw(random.Random(seed))) for seed in range(9)} == {int if whole else float}


def test_more_random_trials_begin_with_the_same_ones(tmp_path: Path) -> None:
    search = {"optim.lr": {"log": [1e-4, 1e-2]}, "epochs": {"range": [1, 8]}}
    few, many = (space_of(tmp_path, base=BASE, search=search, sampler="random", trials=n).listed() for n in (3, 9))
    assert few == many[:3]


@pytest.mark.parametrize(("over_seeds", "value"), [("iqm", 2.5), ("mean", 27.0), ("median", 2.5), ("min", 1.0)])
def test_the_value_of_a_trial_is_taken_over_its_seeds(over_seeds: Any, value: float) -> None:
    assert Objective(over_seeds=over_seeds).across([1.0, 102.0, 2.0, 3.0]) == value


def test_the_value_of_a_run_does_not_depend_on_how_often_it_reports() -> None:
    objective = Objective(last=0.2)
    often = [(steps, float(steps > 900)) for steps in range(10, 1001, 10)]
    assert objective.of_run(often) == objective.of_run([(900, 0.0), (1000, 1.0)]) == 0.5
    assert objective.of_run([*often[:80], (900, 0.0), (1000, 1.0)]) == 0.5
    assert objective.of_run(often, 950) == pytest.approx(5 / 19)
    assert objective.of_run([(100, 3.0)], 50) == objective.of_run([(0, 3.0)]) == 3.0
    assert math.isnan(objective.of_run([]))


@pytest.mark.parametrize(("base", "at_end"), [({}, False), ({"eval": {"at_end": True, "episodes": 3}}, True)])
def test_trials_are_not_evaluated_at_their_end_unless_the_space_says_so(
    tmp_path: Path, base: dict[str, Any], at_end: bool
) -> None:
    space = space_of(tmp_path, **SMALL | {"base": BASE | base})
    trial = write_config(space, tmp_path, Trial(0, space.listed()[0])) / "trial.yaml"
    assert yaml.safe_load(trial.read_text())["eval"] == base.get("eval", {}) | {"at_end": at_end}


def test_the_evaluation_at_the_end_is_the_value_of_a_run_without_others(tmp_path: Path) -> None:
    objective = Objective(metric="eval_return_mean")
    (tmp_path / "evaluation.json").write_text('{"env_steps": 256, "return_mean": 12.5}')
    assert score(tmp_path, objective) == 12.5
    assert math.isnan(score(tmp_path, Objective()))
    (tmp_path / "metrics.csv").write_text("env_steps,eval_env_steps,eval_return_mean\n128,100,3\n256,200,5\n")
    assert score(tmp_path, objective) == 5


@pytest.mark.parametrize("prune", [None, True, {}])
def test_trials_are_pruned_unless_the_space_says_no(tmp_path: Path, prune: Any) -> None:
    assert space_of(tmp_path, **SMALL, trials=2, prune=prune).prune == Pruning()
    assert space_of(tmp_path, **SMALL, trials=2, prune=False).prune is None


@pytest.mark.parametrize("more", [{}, {"sampler": "random", "trials": 2}, {"sampler": "tpe", "trials": 2}])
@pytest.mark.parametrize(
    ("begun", "now", "other"),
    [
        ({"search": {"env_kwargs.x": [1, 2]}}, {"search": {"env_kwargs.x": [True, 2]}}, "search"),
        ({"base": BASE | {"env_kwargs": {"x": 1}}}, {"base": BASE | {"env_kwargs": {"x": True}}}, "base"),
    ],
)
def test_true_is_not_taken_for_1_when_a_sweep_goes_on(
    tmp_path: Path, begun: dict[str, Any], now: dict[str, Any], other: str, more: dict[str, Any], capsys: Any
) -> None:
    sweep = tmp_path / "sweep"
    sweep.mkdir()
    kept = read_space(space_file(tmp_path, **SMALL | begun | more))[1]
    (sweep / "space.yaml").write_text(yaml.safe_dump(kept))
    file = space_file(tmp_path, **SMALL | now | more)
    assert main(["sweep", str(file), "--folder", str(sweep)]) == 2
    assert f"begun with other values of {other} " in capsys.readouterr().err


def test_a_number_that_yaml_takes_for_text_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = space_file(tmp_path, base=BASE)
    file.write_text(file.read_text() + "search: {env_kwargs.sutton_barto_reward: [1e-3, 1.0e-2, 'yes']}\n")
    assert main(["sweep", str(file), "--folder", str(tmp_path / "sweep"), "--slurm"]) == 0
    shown = capsys.readouterr().out
    assert "env_kwargs.sutton_barto_reward is the text '1e-3': YAML takes only" in shown and "as 1.0e-3" in shown
    assert shown.count(" is the text ") == 1


# What is reported


def test_reports_come_once_and_half_a_row_waits(tmp_path: Path) -> None:
    file = tmp_path / "metrics.csv"
    reports = Reports(tmp_path)
    assert reports.new() == []
    file.write_text("env_steps,episode_return_mean\n10,1.5\n20,")
    assert [row["env_steps"] for row in reports.new()] == ["10"]
    with file.open("a") as more:
        more.write("2.5\n")
    assert [row["episode_return_mean"] for row in reports.new()] == ["2.5"]
    assert reports.new() == []


def test_reports_go_on_where_the_file_gets_a_column(tmp_path: Path) -> None:
    writer, reports = MetricsWriter(tmp_path, Config(log=LogConfig(tensorboard=False))), Reports(tmp_path)
    writer.write(Report(wall_s=1.0, env_steps=10, frames=10, episode_return_mean=1.5))
    assert [row["env_steps"] for row in reports.new()] == ["10"]
    for steps in (20, 30):
        writer.write(Report(wall_s=2.0, env_steps=steps, frames=30, episode_return_mean=2.5, extras={"success": 1.0}))
    found = [(row["env_steps"], row["episode_return_mean"], row["extra/success"]) for row in reports.new()]
    assert found == [("20", "2.5", "1"), ("30", "2.5", "1")]
    assert reports.new() == []


def test_reports_of_a_long_run_are_read_once(tmp_path: Path) -> None:
    def bytes_read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    file, reports = tmp_path / "metrics.csv", Reports(tmp_path)
    file.write_text("env_steps,episode_return_mean\n" + "10,1.5\n" * 100_000)
    assert len(reports.new()) == 100_000
    before = bytes_read()
    with file.open("a") as more:
        more.write("20,2.5\n")
    assert [row["env_steps"] for row in reports.new()] == ["20"]
    assert bytes_read() - before < 100_000


def test_an_evaluation_counts_by_the_env_steps_of_its_weights(tmp_path: Path) -> None:
    """The last one comes when training is over, as may the one before it."""
    header = "env_steps,eval_env_steps,eval_return_mean\n"
    (tmp_path / "metrics.csv").write_text(header + "500,400,1\n1000,600,2\n1000,,\n1000,1000,10\n")
    assert score(tmp_path, Objective(metric="eval_return_mean")) == 10
    assert Reports(tmp_path).values("eval_return_mean") == [(400, 1), (600, 2), (1000, 10)]


def test_what_a_killed_run_reported_beyond_its_checkpoint_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("env_steps,episode_return_mean\n10,1\n20,2\n30,3\n15,4\n25,\n35,5\n")
    assert curve(tmp_path, "episode_return_mean") == [(10, 1.0), (15, 4.0), (35, 5.0)]


# Optuna's trials


def study_of(folder: Path, **changes: Any) -> Any:
    pytest.importorskip("optuna")
    search = {"optim.lr": {"log": [1e-4, 1e-2]}, "model.hidden": [[8], [16, 16]], "epochs": {"range": [1, 8]}}
    values = {"base": BASE | {"steps": 900}, "search": search, "trials": 6} | changes
    return StudyTrials(space_of(folder, **values), folder)


def test_a_trial_that_is_behind_at_a_rung_ends_early(tmp_path: Path) -> None:
    study = study_of(tmp_path)
    assert study.rungs == [100, 300]
    good, bad = study.next(), study.next()
    assert not study.loses(good, 100, 50.0)
    assert study.loses(bad, 100, 10.0)
    bad.state = "pruned"
    study.end(bad)
    assert [(trial.state, trial.value) for trial in study.all()] == [("running", 50.0), ("pruned", 10.0)]


@pytest.mark.parametrize(("steps", "rungs"), [(200_000, [22_223, 66_669]), (10, [2, 6]), (2, [1]), (1, [])])
def test_trials_are_not_compared_just_before_their_end(tmp_path: Path, steps: int, rungs: list[int]) -> None:
    assert study_of(tmp_path, base=BASE | {"steps": steps}).rungs == rungs


def test_a_study_is_kept_where_its_folder_says(tmp_path: Path) -> None:
    folder = tmp_path / "what? #1 of 100%25"
    folder.mkdir()
    assert study_of(folder).next().number == 0
    assert (folder / "study.db").exists() and not list(tmp_path.glob("what"))


def test_trials_are_compared_where_less_is_better(tmp_path: Path) -> None:
    study = study_of(tmp_path, objective={"direction": "minimize"})
    good, bad = study.next(), study.next()
    assert not study.loses(good, 100, 10.0)
    assert study.loses(bad, 100, 50.0)


def test_trials_that_are_evaluated_at_their_end_alone_are_not_compared(tmp_path: Path) -> None:
    base, objective = BASE | {"steps": 900, "eval": {"at_end": True}}, {"metric": "eval_return_mean"}
    assert study_of(tmp_path, base=base, objective=objective).rungs == []
    base["eval"]["every"] = 100
    assert study_of(tmp_path, base=base, objective=objective).rungs == [100, 300]


def test_unfinished_trials_go_on_and_none_is_chosen_twice(tmp_path: Path) -> None:
    first = study_of(tmp_path)
    done, left = first.next(), first.next()
    done.state, done.value, done.scores = "completed", 7.0, {0: 7.0}
    first.end(done)
    again = study_of(tmp_path)
    assert again.next() == left
    rest = []
    while (trial := again.next()) is not None:
        rest.append(trial)
    assert [trial.number for trial in rest] == [2, 3, 4, 5]
    assert len({trial.chosen["optim.lr"] for trial in again.all()}) == 6
    assert again.all()[0] == Trial(0, done.chosen, "completed", {0: 7.0}, 7.0)
    assert all(trial.chosen["model.hidden"] in ([8], [16, 16]) for trial in rest)


@pytest.mark.parametrize("choices", [[1, True], [False, 0.0], ["[1]", [1]]])
def test_choices_that_look_alike_are_all_tried(tmp_path: Path, choices: list[Any]) -> None:
    study = study_of(tmp_path, search={"env_kwargs.x": choices}, trials=12)
    tried = {repr(trial.chosen["env_kwargs.x"]) for trial in iter(study.next, None)}
    assert tried == set(map(repr, choices))
    dimension = space_of(tmp_path, base=BASE, search={"env_kwargs.x": choices}).search["env_kwargs.x"]
    assert len({dimension.label_of(choice) for choice in choices}) == len(choices)


def test_optuna_is_asked_for_by_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    file = space_file(tmp_path, **SMALL, trials=2)
    assert main(["sweep", str(file), "--folder", str(tmp_path / "sweep")]) == 2
    assert 'pip install -e ".[sweep]", or write sampler: random or grid' in capsys.readouterr().err


# Whole sweeps


def test_a_grid_needs_no_optuna_and_its_best_configuration_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    sweep, file = tmp_path / "sweep", space_file(tmp_path, base=BASE, search={"batch_size": [64, 100]}, seeds=[101])
    assert main(["sweep", str(file), "--folder", str(sweep)]) == 0
    shown = capsys.readouterr().out
    assert "trial 1 failed: seed 101: error: batch_size 100" in shown
    assert f"--config {sweep}/best.yaml" in shown
    assert [(run.env, run.seed, run.status) for run in list_runs(sweep)] == [("CartPole-v1", 101, "completed")]
    found = rows(sweep)
    assert [found[number]["state"] for number in ("0", "1")] == ["completed", "failed"]
    assert float(found["0"]["value"]) > 5 and "batch_size 100" in found["1"]["reason"]
    best = from_command_line(["--config", str(sweep / "best.yaml")], "train")
    assert (best.env, best.batch_size, best.optim.minibatches) == ("CartPole-v1", 64, 1)
    assert not ListedTrials(read_space(file)[0], sweep).all()[0].reason

    file.write_text(file.read_text().replace("CartPole", "Acrobot"))
    assert main(["sweep", str(file), "--folder", str(sweep)]) == 2
    assert "was begun with other values of base" in capsys.readouterr().err


def test_an_array_job_trains_its_tasks_and_the_summary_counts_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = tmp_path / "a sweep"
    file = space_file(tmp_path, **SMALL, seeds=[101, 105])
    assert main(["sweep", str(file), "--folder", str(sweep), "--slurm"]) == 0
    script = sweep / "array.sbatch"
    assert f"sbatch '{script}'\n" in capsys.readouterr().out
    assert f'#SBATCH --output="{sweep}/slurm/%a.log"\n' in script.read_text()
    assert "#SBATCH --job-name=a_sweep\n" in script.read_text()
    assert "#SBATCH --array=0-3\n" in script.read_text()
    environment = commands.ENVIRONMENT | {"SLURM_ARRAY_TASK_ID": "3"}
    done = subprocess.run(["bash", str(script)], env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert main(["sweep", str(file), "--folder", str(sweep), "--summary"]) == 1
    assert rows(sweep)["1"]["seed 105"] and not rows(sweep)["1"]["seed 101"]


def test_a_summary_tells_of_what_a_task_of_an_array_job_has_failed(tmp_path: Path) -> None:
    sweep, file = tmp_path / "a sweep", space_file(tmp_path, base=BASE, search={"batch_size": [64, 100]})
    assert main(["sweep", str(file), "--folder", str(sweep), "--slurm"]) == 0
    environment = commands.ENVIRONMENT | {"SLURM_ARRAY_TASK_ID": "1"}
    task = ["bash", str(sweep / "array.sbatch")]
    assert subprocess.run(task, env=environment, capture_output=True, timeout=PATIENCE_S).returncode == 2
    assert main(["sweep", str(file), "--folder", str(sweep), "--summary"]) == 1
    found = rows(sweep)
    assert [found[number]["state"] for number in "01"] == ["unfinished", "failed"]
    assert "batch_size 100" in found["1"]["reason"]
    assert (sweep / "trials" / "0001" / "seed-0.log").read_text().startswith(f"{BEGINS}\nerror: ")


def test_a_summary_takes_a_run_without_a_return_for_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    search = {"optim.lr": [1e-3, 3e-3, 1e-2]}
    file, sweep = space_file(tmp_path, base=BASE, search=search, seeds=[101, 105]), tmp_path / "sweep"
    assert main(["sweep", str(file), "--folder", str(sweep), "--slurm"]) == 0
    for number, returns in enumerate([("", ""), ("", "9"), ("5", "7")]):
        for seed, value in zip((101, 105), returns, strict=True):
            run = sweep / "trials" / f"{number:04d}" / f"seed-{seed}"
            run.mkdir(parents=True)
            (run / "summary.json").write_text('{"status": "completed"}')
            (run / "metrics.csv").write_text(f"env_steps,episode_return_mean\n256,{value}\n")
    assert main(["sweep", str(file), "--folder", str(sweep), "--summary"]) == 0
    assert "best: trial 2, 6" in capsys.readouterr().out
    found = rows(sweep)
    assert [found[number]["state"] for number in "012"] == ["failed", "failed", "completed"]
    assert found["1"]["reason"] == "seed 101: no report has episode_return_mean; no episode may have ended"
    assert (found["1"]["seed 101"], found["1"]["seed 105"]) == ("", "9.0")


class FailedRun:
    """A run that has failed at once."""

    asked = 0

    def __init__(self, trial: Path, seed: int, cores: Any) -> None:
        self.seed, self.folder = seed, trial / f"seed-{seed}"

    def poll(self) -> int:
        return 1

    def reason(self) -> str:
        return "error: no such thing"

    def end(self) -> None:
        """It has ended."""


def test_what_the_first_trials_failed_of_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("sfactory.commands.sweeps.scheduler.Run", FailedRun)
    file, sweep = space_file(tmp_path, base=BASE, search={"optim.lr": [1e-3, 2e-3, 3e-3, 4e-3]}), tmp_path / "sweep"
    assert main(["sweep", str(file), "--folder", str(sweep)]) == 1
    assert "the first 3 trials have failed; seed 0: error: no such thing" in capsys.readouterr().err
    found = rows(sweep)
    assert [found[number]["state"] for number in "0123"] == ["failed", "failed", "failed", "unfinished"]
    assert found["0"]["reason"] == "seed 0: error: no such thing"


class FirstOfFiveRuns(FailedRun):
    """A run that has failed at once, but for that of the first trial, which ends once there is a fifth one."""

    def __init__(self, trial: Path, seed: int, cores: Any) -> None:
        super().__init__(trial, seed, cores)
        self.trials, self.is_first = trial.parent, trial.name == "0000"
        if self.is_first:
            self.folder.mkdir()
            (self.folder / "metrics.csv").write_text("env_steps,episode_return_mean\n256,9\n")

    def poll(self) -> int | None:
        if not self.is_first:
            return 1
        if not (self.trials / "0004").exists():
            return None
        (self.folder / "summary.json").write_text('{"status": "completed"}')
        return 0


def test_failures_end_no_sweep_of_which_a_trial_has_come_farther(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sfactory.commands.sweeps.scheduler.Run", FirstOfFiveRuns)
    monkeypatch.setattr("sfactory.commands.sweep.core_shares", lambda parallel, runs: [[0], [1]])
    file = space_file(tmp_path, base=BASE, search={"optim.lr": [1e-3, 2e-3, 3e-3, 4e-3, 5e-3]})
    assert main(["sweep", str(file), "--folder", str(tmp_path / "sweep")]) == 0
    assert "best: trial 0, 9" in capsys.readouterr().out
    assert [rows(tmp_path / "sweep")[number]["state"] for number in "01234"] == ["completed", *["failed"] * 4]


def test_failures_end_no_sweep_of_which_an_earlier_command_has_completed_a_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sfactory.commands.sweeps.scheduler.Run", FailedRun)
    search = {"optim.lr": [1e-3, 2e-3, 3e-3, 4e-3]}
    file, sweep = space_file(tmp_path, base=BASE, search=search, parallel=1), tmp_path / "sweep"
    run = sweep / "trials" / "0003" / "seed-0"
    run.mkdir(parents=True)
    (sweep / "space.yaml").write_text(file.read_text())
    (run / "summary.json").write_text('{"status": "completed"}')
    (run / "metrics.csv").write_text("env_steps,episode_return_mean\n256,9\n")
    assert main(["sweep", str(file), "--folder", str(sweep)]) == 0
    assert "best: trial 3, 9" in capsys.readouterr().out
    assert [rows(sweep)[number]["state"] for number in "0123"] == ["failed", "failed", "failed", "completed"]


def test_a_run_has_not_failed_of_what_an_earlier_try_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "seed-0.log").write_text("error: of an earlier try\n")
    monkeypatch.setattr("sfactory.commands.sweeps.runs.command", lambda trial, seed: ["-c", "print('Killed'); exit(3)"])
    run = Run(tmp_path, 0, os.sched_getaffinity(0))
    assert wait_until(lambda: run.poll() is not None, PATIENCE_S)
    assert (run.poll(), run.reason()) == (3, "Killed")


def test_a_run_that_was_too_short_to_be_evaluated_is_told_so(tmp_path: Path) -> None:
    assert "no episode may have ended" in unscored(0, Objective())
    assert "a short run has none at its end; give base.eval.every" in unscored(0, Objective("eval_return_mean"))


def begun_grid(folder: Path, summary: str, log: str = "") -> tuple[Path, Path]:
    """A grid of two trials, one of which has come to its end; its file, and its folder."""
    file, sweep = space_file(folder, **SMALL), folder / "sweep"
    assert main(["sweep", str(file), "--folder", str(sweep), "--slurm"]) == 0
    for number, text in enumerate(['{"status": "completed"}', summary]):
        run = sweep / "trials" / f"{number:04d}" / "seed-0"
        run.mkdir()
        (run / "summary.json").write_text(text)
        (run / "metrics.csv").write_text("env_steps,episode_return_mean,episode_length_mean\n256,9,5\n")
    (sweep / "trials" / "0001" / "seed-0.log").write_text(log)
    return file, sweep


@pytest.mark.parametrize(
    ("summary", "log", "state", "reason"),
    [
        ('{"status": "failed", "error": "it broke"}', "", "failed", "seed 0: it broke"),
        ("", "starting\nerror: batch_size 100\nuse 96\n", "failed", "seed 0: error: batch_size 100\nuse 96"),
        ('{"status": "interrupted"}', "error: of an earlier try\n", "unfinished", ""),
        ("", "Killed\n", "unfinished", ""),
        ("", f"error: of an earlier try\n{BEGINS}\nKilled\n", "unfinished", ""),
    ],
)
def test_a_summary_tells_what_has_failed(tmp_path: Path, summary: str, log: str, state: str, reason: str) -> None:
    file, sweep = begun_grid(tmp_path, summary, log)
    assert main(["sweep", str(file), "--folder", str(sweep), "--summary"]) == 0
    assert (rows(sweep)["1"]["state"], rows(sweep)["1"]["reason"]) == (state, reason)


def test_brackets_in_the_name_of_an_objective_are_shown_as_they_are(tmp_path: Path, capsys: Any) -> None:
    _, sweep = begun_grid(tmp_path, "{}")
    file = space_file(tmp_path, **SMALL, objective={"metric": "extra/[b] [/y]"})
    assert main(["sweep", str(file), "--folder", str(sweep), "--summary"]) == 1
    assert "[b] [/y]" in capsys.readouterr().out


def test_a_sweep_that_goes_on_can_be_summarized(tmp_path: Path) -> None:
    file, sweep = begun_grid(tmp_path, "{}")
    lock = os.open(sweep / ".lock", os.O_RDWR)
    try:
        assert try_lock(lock, exclusive=True)
        assert main(["sweep", str(file), "--folder", str(sweep), "--summary"]) == 0
        assert main(["sweep", str(file), "--folder", str(sweep)]) == 2
    finally:
        os.close(lock)
    assert rows(sweep)["0"]["value"] == "9.0"


def test_a_grid_takes_another_objective_and_more_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, sweep = begun_grid(tmp_path, "{}")
    same = {"optim.lr": ["1e-3", 0.01]}  # written in another way
    more = space_file(tmp_path, base=BASE, search=same, seeds=[0, 7], objective={"metric": "episode_length_mean"})
    assert main(["sweep", str(more), "--folder", str(sweep), "--summary"]) == 1
    assert (rows(sweep)["0"]["seed 0"], rows(sweep)["0"]["seed 7"]) == ("5.0", "")
    assert main(["sweep", str(more), "--folder", str(sweep), "--slurm"]) == 0
    assert main(["sweep", str(space_file(tmp_path, **SMALL)), "--folder", str(sweep), "--summary"]) == 2
    assert "begun with other values of seeds" in capsys.readouterr().err


def test_a_summary_of_optunas_trials_takes_another_objective(tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("optuna")
    sweep = tmp_path / "sweep"
    sweep.mkdir()
    values = {"base": BASE, "search": {"optim.lr": {"log": [1e-4, 1e-2]}}, "trials": 2, "seeds": [0]}
    file = space_file(tmp_path, **values)
    space, kept = read_space(file)
    (sweep / "space.yaml").write_text(yaml.safe_dump(kept))
    study = StudyTrials(space, sweep)
    done = study.next()
    done.state, done.value, done.scores = "completed", 9.0, {0: 9.0}
    study.end(done)
    run = sweep / "trials" / "0000" / "seed-0"
    run.mkdir(parents=True)
    (run / "summary.json").write_text('{"status": "completed"}')
    (run / "metrics.csv").write_text("env_steps,episode_return_mean,episode_length_mean\n256,9,5\n")
    other = space_file(tmp_path, **values, objective={"metric": "episode_length_mean", "direction": "minimize"})
    assert main(["sweep", str(other), "--folder", str(sweep), "--summary"]) == 0
    assert "best: trial 0, 5" in capsys.readouterr().out
    assert main(["sweep", str(other), "--folder", str(sweep)]) == 2
    assert "begun with other values of objective" in capsys.readouterr().err


def test_a_damaged_study_is_told_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("optuna")
    sweep = tmp_path / "sweep"
    sweep.mkdir()
    file = space_file(tmp_path, **SMALL, trials=2)
    (sweep / "space.yaml").write_text(file.read_text())
    (sweep / "study.db").write_bytes(b"no database" * 1000)
    assert main(["sweep", str(file), "--folder", str(sweep), "--summary"]) == 1
    said = capsys.readouterr().err
    assert "cannot use study.db in the sweep's folder: " in said and "file is not a database" in said


def test_optunas_choices_stay_as_they_were_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("optuna")
    sweep = tmp_path / "sweep"
    sweep.mkdir()
    space, kept = read_space(space_file(tmp_path, base=BASE, search={"optim.lr": ["1e-3", 0.01]}, trials=2))
    (sweep / "space.yaml").write_text(yaml.safe_dump(kept))
    StudyTrials(space, sweep).next()
    other = space_file(tmp_path, base=BASE, search={"optim.lr": [0.001, 0.01]}, trials=2)
    assert main(["sweep", str(other), "--folder", str(sweep)]) == 2
    assert "begun with other values of search" in capsys.readouterr().err


def test_a_summary_needs_a_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", str(space_file(tmp_path, **SMALL)), "--folder", str(tmp_path / "sweep"), "--summary"]) == 2
    assert "holds no sweep (no space.yaml)" in capsys.readouterr().err
    assert not (tmp_path / "sweep").exists()


def test_an_array_job_may_ask_for_what_this_machine_lacks(tmp_path: Path) -> None:
    base = BASE | {"device": "cuda:7", "serial": False}
    file = space_file(tmp_path, **SMALL | {"base": base}, parallel=100_000)
    assert main(["sweep", str(file), "--folder", str(tmp_path / "sweep"), "--slurm"]) == 0
    assert yaml.safe_load((tmp_path / "sweep" / "trials" / "0001" / "trial.yaml").read_text())["device"] == "cuda:7"
    assert "--array=0-1%100000\n" in (tmp_path / "sweep" / "array.sbatch").read_text()


def test_a_sweep_stays_where_it_is_if_an_environments_module_changes_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "moving_sweep.py").write_text("import os\nfrom faults import Faulty\nos.chdir('elsewhere')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    space_file(tmp_path, **SMALL | {"base": BASE | {"env": "moving_sweep:Faulty"}})
    assert main(["sweep", "space.yaml", "--folder", "here", "--slurm"]) == 0
    assert f"\ncd {tmp_path}\n" in (tmp_path / "here" / "array.sbatch").read_text()


def test_an_array_job_cannot_have_trials_that_depend_on_others(tmp_path: Path, capsys: Any) -> None:
    file = space_file(tmp_path, **SMALL, trials=2)
    assert main(["sweep", str(file), "--folder", str(tmp_path / "sweep"), "--slurm"]) == 2
    assert "write sampler: random or grid" in capsys.readouterr().err


@pytest.fixture
def marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The living processes of a sweep, which are in sessions of their own. None is left at the end."""
    monkeypatch.setitem(commands.ENVIRONMENT, "SFACTORY_TEST_SWEEP", str(tmp_path))

    def living() -> list[psutil.Process]:
        processes = psutil.process_iter(["environ", "status"])
        own = [p for p in processes if (p.info["environ"] or {}).get("SFACTORY_TEST_SWEEP") == str(tmp_path)]
        return [process for process in own if process.info["status"] != psutil.STATUS_ZOMBIE]

    yield living
    wait_until(lambda: not living(), PATIENCE_S)
    left = living()
    for process in left:
        process.kill()
    assert not left


def long_sweep(folder: Path) -> tuple[Path, list[str]]:
    """A sweep whose runs last until they are ended; its folder, and its command."""
    pytest.importorskip("optuna")
    base = BASE | {"steps": 10**9, "serial": False, "workers": 1}
    search = {"optim.lr": {"log": [1e-4, 1e-2]}}
    file = space_file(folder, base=base, search=search, trials=2, seeds=[101], prune=False)
    sweep = folder / "sweep"
    return sweep, ["-m", "sfactory.commands.sweep", str(file), "--folder", str(sweep)]


def is_reporting(sweep: Path, number: int = 0) -> bool:
    return len(curve(sweep / "trials" / f"{number:04d}" / "seed-101", "env_steps")) > 1


@pytest.mark.timeout(600)
def test_an_interrupted_sweep_saves_its_runs_and_leaves_no_process(tmp_path: Path, marked: Any) -> None:
    sweep, arguments = long_sweep(tmp_path)
    with Command(*arguments) as command:
        assert wait_until(lambda: is_reporting(sweep), PATIENCE_S)
        command.interrupt(signal.SIGINT)
        assert command.wait(PATIENCE_S) == 128 + signal.SIGINT, command.errors
    run = sweep / "trials" / "0000" / "seed-101"
    assert yaml.safe_load((run / "summary.json").read_text())["status"] == "interrupted"
    assert list((run / "checkpoints").iterdir())
    assert "Traceback" not in command.errors
    assert wait_until(lambda: not marked(), PATIENCE_S)
    assert rows(sweep)["0"]["state"] == "unfinished"


def test_a_run_that_does_not_listen_yet_ends_with_its_sweep() -> None:
    child = "import time; print('begun', flush=True); time.sleep(60)"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-m", GUARD, "-c", child], env=commands.ENVIRONMENT, **pipes) as guard:
        assert guard.stdout.readline() == b"begun\n"
        guard.stdin.close()
        assert guard.wait() == 128 + signal.SIGTERM


def test_a_run_whose_guard_is_killed_ends() -> None:
    child = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-m", GUARD, "-c", child], env=commands.ENVIRONMENT, **pipes) as guard:
        run = psutil.Process(int(guard.stdout.readline()))

        def has_ended() -> bool:
            with contextlib.suppress(psutil.NoSuchProcess):
                return run.status() == psutil.STATUS_ZOMBIE
            return True

        guard.kill()
        try:
            assert wait_until(has_ended, PATIENCE_S)
        finally:
            if not has_ended():
                run.kill()


@pytest.mark.timeout(600)
def test_a_killed_sweep_takes_its_runs_along_and_the_next_one_goes_on_with_them(tmp_path: Path, marked: Any) -> None:
    sweep, arguments = long_sweep(tmp_path)
    with Command(*arguments) as command:
        assert wait_until(lambda: is_reporting(sweep), PATIENCE_S)
        os.kill(command.pid, signal.SIGKILL)
        command.wait()
    assert wait_until(lambda: not marked(), PATIENCE_S)
    config = sweep / "trials" / "0000" / "trial.yaml"
    before = config.read_text()
    saved = curve(sweep / "trials" / "0000" / "seed-101", "env_steps")[-1][0]
    with Command(*arguments) as command:
        assert wait_until(lambda: curve(sweep / "trials" / "0000" / "seed-101", "env_steps")[-1][0] > saved, PATIENCE_S)
        command.interrupt(signal.SIGTERM)
        assert command.wait(PATIENCE_S) == 128 + signal.SIGTERM, command.errors
    log = (sweep / "trials" / "0000" / "seed-101.log").read_text()
    assert "going on at" in log
    assert config.read_text() == before and [path.name for path in sorted((sweep / "trials").iterdir())] == ["0000"]


@pytest.mark.timeout(600)
def test_a_search_with_optuna_leaves_its_best_configuration_and_plots(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    pytest.importorskip("matplotlib")
    search = {"optim.lr": {"log": [1e-4, 1e-2]}, "epochs": [1, 2]}
    file = space_file(tmp_path, base=BASE | {"steps": 2048}, search=search, trials=2, seeds=[101, 105])
    sweep = tmp_path / "sweep"
    assert main(["sweep", str(file), "--folder", str(sweep)]) == 0
    found = rows(sweep)
    assert sorted(found) == ["0", "1"] and "completed" in {row["state"] for row in found.values()}
    best = yaml.safe_load((sweep / "best.yaml").read_text())
    assert best["epochs"] in (1, 2) and 1e-4 <= best["optim"]["lr"] <= 1e-2
    assert {"history.png", "curves.png", "slices.png"} <= {path.name for path in (sweep / "plots").iterdir()}
