"""What a plot rests on: the right rows of a file, and statistics over seeds that the field knows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from short_runs import short_run

from sfactory.config import flattened
from sfactory.errors import ConfigError
from sfactory.runs.curves import bootstrap_interval, interquartile_mean, read_curve, read_table, smoothed

CSV = "env_steps,wall_s,episode_return_mean\n"


def table(folder: Path, text: str) -> dict[str, list[float]]:
    (folder / "curve-1.csv").write_text(text)
    return {name: values.tolist() for name, values in read_table(folder / "curve-1.csv").items()}


def test_a_row_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    assert table(tmp_path, CSV + "10,1,5\n20,2,6\n30,3")["env_steps"] == [10, 20]
    assert table(tmp_path, CSV + "10,1,5\n20,2\n30,3,7\n")["env_steps"] == [10, 30], "a torn row in the middle"


def test_reports_of_a_future_that_the_run_fell_back_from_do_not_count(tmp_path: Path) -> None:
    found = table(tmp_path, CSV + "10,1,5\n20,2,6\n30,3,7\n20,4,8\n30,5,9\n30,6,10\n")
    assert found["episode_return_mean"] == [5, 8, 10]


@pytest.mark.parametrize(
    ("text", "returns", "evaluations"),
    [
        ("10,5,,\n20,6,10,1\n20,6,20,2\n", [5, 6, 6], [(10, 1), (20, 2)]),
        ("10,5,,\n20,6,15,1\n20,,,\n30,7,,\n", [5, 6, 7], [(15, 1)]),
        ("10,5,,\n20,6,,\n20,7,,\n20,7,,\n20,,,\n", [5, 7], []),
        ("10,,,\n10,,,\n20,6,,\n20,,20,2\n20,8,,\n", [8], [(20, 2)]),
        ("10,5,,\n30,9,30,9\n30,9,,\n20,6,20,2\n", [5, 6], [(20, 2)]),
        ("10,5,10,1\n30,9,25,9\n40,6,20,2\n50,7,25,3\n60,8,,\n", [5, 9, 6, 7, 8], [(10, 1), (20, 2), (25, 3)]),
    ],
    ids=[
        "evaluations at the end",
        "continued",
        "waiting",
        "before an episode has ended",
        "fallen back",
        "reported beyond that",
    ],
)
def test_where_env_steps_repeat_no_evaluation_is_lost_and_the_last_return_counts(
    tmp_path: Path, text: str, returns: list[float], evaluations: list[tuple[float, float]]
) -> None:
    (tmp_path / "curve.csv").write_text("env_steps,episode_return_mean,eval_env_steps,eval_return_mean\n" + text)
    curve = read_curve(tmp_path / "curve.csv")
    assert curve.series("env_steps", "episode_return_mean")[1].tolist() == returns
    assert list(zip(*curve.series("eval_env_steps", "eval_return_mean"), strict=True)) == evaluations
    assert (np.diff(curve.columns["env_steps"]) >= 0).all()


def test_what_is_known_of_the_learner_is_not_lost_with_its_row(tmp_path: Path) -> None:
    """A run that waits at its end goes on to report episodes, and updates no more."""
    found = table(tmp_path, "env_steps,loss,episode_return_mean\n10,1,5\n20,2,6\n20,,7\n")
    assert (found["loss"], found["episode_return_mean"]) == ([1, 2], [5, 7])


def test_the_speed_of_a_run_that_reports_oftener_than_it_trains_is_not_zero(tmp_path: Path) -> None:
    """Its batches take 40 s, and its reports come every 10 s. It is killed, and at its end its clock stops."""
    rows = "10,0,0\n20,0,0\n30,80,8\n40,80,0\n60,80,0\n70,200,12\n50,160,4\n60,160,0\n100,240,2\n100,240,\n"
    found = table(tmp_path, "wall_s,env_steps,fps\n" + rows)
    assert (found["env_steps"], found["wall_s"]) == ([0, 80, 160, 240], [20, 60, 60, 100])
    assert found["fps"] == [0, 80 / 40, 4, 80 / 40]


def test_an_empty_cell_is_unknown_and_no_point_of_a_series(tmp_path: Path) -> None:
    table(tmp_path, CSV + "10,1,\n20,2,6\n")
    steps, returns = read_curve(tmp_path / "curve-1.csv").series("env_steps", "episode_return_mean")
    assert steps.tolist() == [20] and returns.tolist() == [6]
    assert not len(read_curve(tmp_path / "curve-1.csv").series("env_steps", "nothing")[0])


def test_a_run_folder_gives_its_curve_with_its_settings(tmp_path: Path) -> None:
    curve = read_curve(short_run(tmp_path / "run", "CartPole-v1", seed=3))
    assert (curve.name, curve.env, curve.settings["seed"], curve.living) == ("run", "CartPole-v1", 3, False)
    assert curve.settings["optim.lr"] > 0 and curve.rows and curve.columns["env_steps"][-1] >= 128


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [("there.csv", None, "no run folder and no CSV"), ("a.txt", "x", "no CSV"), ("a.csv", "a,b\n1,2\n", "env_steps")],
)
def test_what_is_no_curve_is_one_clear_error(tmp_path: Path, name: str, text: str | None, problem: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=problem):
        read_curve(tmp_path / name)
    with pytest.raises(ConfigError, match="holds no run"):
        read_curve(tmp_path)


@pytest.mark.parametrize("runs", [1, 3, 4, 9, 10])
def test_the_interquartile_mean_leaves_out_a_quarter_at_either_end(runs: int) -> None:
    values = np.random.default_rng(0).normal(size=(runs, 5))
    cut = runs // 4
    expected = [np.mean(sorted(column)[cut : runs - cut]) for column in values.T]
    np.testing.assert_allclose(interquartile_mean(values), expected)


def test_the_interval_covers_the_true_mean_about_as_often_as_it_says() -> None:
    generator, hits = np.random.default_rng(1), []
    for _ in range(40):
        low, high = bootstrap_interval(generator.normal(5, 1, (20, 10)), ["one"] * 20)
        hits.append(np.mean((low <= 5) & (high >= 5)))
    assert 0.85 <= np.mean(hits) <= 0.99


def test_the_bootstrap_draws_within_each_environment() -> None:
    values = np.array([[0.0], [0.0], [0.0], [100.0], [100.0], [100.0]])
    low, high = bootstrap_interval(values, ["easy"] * 3 + ["hard"] * 3)
    assert low == high == 50, "each draw has three runs of either"
    low, high = bootstrap_interval(values, ["one"] * 6)
    assert low < 50 < high


def test_smoothing_keeps_lines_and_ends() -> None:
    line = np.linspace(0, 7, 101)[None]
    np.testing.assert_allclose(smoothed(line, 0.2), line)
    bumps = np.where(np.arange(101) % 2, 1.0, -1.0)[None]
    assert np.abs(smoothed(bumps, 0.2)[0, 20:-20]).max() < 0.06
    assert (smoothed(bumps, 0.0) == bumps).all()


def test_settings_have_dotted_names_and_mappings_of_the_user_stay_whole() -> None:
    values = {"env": "A", "env_kwargs": {"size": 3}, "optim": {"lr": 1.0}, "model": {"kwargs": {"width": 2}}}
    expected = {"env": "A", "env_kwargs": {"size": 3}, "optim.lr": 1.0, "model.kwargs": {"width": 2}}
    assert flattened(values) == expected


def test_a_sweeps_runs_are_told_apart(tmp_path: Path) -> None:
    run = tmp_path / "sweep-x" / "trials" / "0003" / "seed-0"
    run.mkdir(parents=True)
    (run / "metrics.csv").write_text("env_steps\n1\n")
    assert read_curve(run).name == "seed-0"
    (run.parent / "trial.yaml").touch()
    assert read_curve(run).name == "sweep-x/0003/seed-0"
