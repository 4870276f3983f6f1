"""What a user would lose: a curve with holes, numbers that lie, or a summary that says completed when it was not."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from sfactory.config import Config, LogConfig
from sfactory.errors import ConfigError
from sfactory.losses import BatchStats, LossStats
from sfactory.telemetry.events import Episodes, Evaluated, Progress, by_name
from sfactory.telemetry.metrics import METRICS, Report, scalars, scalars_by_steps
from sfactory.telemetry.metrics_file import MOST_COLUMNS, MetricsWriter
from sfactory.telemetry.recent import EpisodeStatistics, EpisodeWindow, ProgressWindow, Speed, Speedometer
from sfactory.telemetry.summary import Summary

QUIET = Config(log=LogConfig(tensorboard=False))


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def write(folder: Path, *env_steps: int) -> None:
    writer = MetricsWriter(folder, QUIET)
    for steps in env_steps:
        writer.write(Report(wall_s=1.0, env_steps=steps, frames=4 * steps))


def test_the_columns_are_the_documented_ones_in_their_order(tmp_path: Path) -> None:
    write(tmp_path, 1)
    assert (tmp_path / "metrics.csv").read_text().splitlines()[0] == (
        "wall_s,env_steps,frames,fps,frames_per_s,episodes,episode_return_mean,episode_return_min,episode_return_max,episode_length_mean,"
        "eval_env_steps,eval_return_mean,eval_return_std,eval_return_min,eval_return_max,eval_length_mean,"
        "policy_lag_mean,policy_lag_max,learner_updates,skipped_updates,loss,policy_loss,value_loss,entropy,kl,behaviour_kl,clip_fraction,valid_fraction,explained_variance,grad_norm,"
        "lr,rollout_busy,policy_busy,learner_busy,batch_fill,free_slots,finished_slots,queue_full_waits,restarts,env_faults,rss_mb"
    )


def test_a_row_is_in_the_file_at_once_and_the_unknown_is_empty(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, QUIET)
    assert not (tmp_path / "metrics.csv").exists()
    writer.write(
        Report(wall_s=2.5, env_steps=12_345_678_901, frames=4, fps=1e6 / 3, lr=2.5e-05, extras={"success": 1.0})
    )
    (row,) = rows(tmp_path)
    assert row["env_steps"] == "12345678901"
    assert float(row["fps"]) == pytest.approx(1e6 / 3, rel=1e-6)
    assert float(row["lr"]) == 2.5e-05
    assert row["episode_return_mean"] == row["loss"] == ""
    assert row["learner_updates"] == "0"


def test_resuming_appends_under_one_header_and_drops_nothing(tmp_path: Path) -> None:
    write(tmp_path, 10, 20)
    write(tmp_path, 15, 25)
    assert [row["env_steps"] for row in rows(tmp_path)] == ["10", "20", "15", "25"]


@pytest.mark.parametrize("torn", ["1.0,30,4", "wall_s,env"])
def test_a_half_row_of_a_killed_run_does_not_spoil_the_file(tmp_path: Path, torn: str) -> None:
    whole = 0 if torn.startswith("wall") else 2
    write(tmp_path, *(10, 20)[:whole])
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write(torn)
    write(tmp_path, 40)
    assert [row["env_steps"] for row in rows(tmp_path)] == ["10", "20", "40"][2 - whole :]


def test_a_file_that_lacks_a_newer_column_gets_it(tmp_path: Path) -> None:
    write(tmp_path, 10, 20)
    path, old = (
        tmp_path / "metrics.csv",
        [{k: v for k, v in row.items() if k != "behaviour_kl"} for row in rows(tmp_path)],
    )
    path.write_text("\n".join([",".join(old[0]), *(",".join(row.values()) for row in old), ""]))
    write(tmp_path, 30)
    assert [row["env_steps"] for row in rows(tmp_path)] == ["10", "20", "30"]
    assert [{k: v for k, v in row.items() if k != "behaviour_kl"} for row in rows(tmp_path)[:2]] == old
    assert rows(tmp_path)[0]["behaviour_kl"] == ""


def test_a_column_that_there_is_no_more_stays_and_is_empty_in_new_rows(tmp_path: Path) -> None:
    write(tmp_path, 10)
    (old,) = rows(tmp_path)
    with (tmp_path / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["gone", *(name for name in old if name != "kl")], extrasaction="ignore")
        writer.writeheader()
        writer.writerow(old | {"gone": "0.5"})
    for steps in (20, 30):  # each by a process of its own
        write(tmp_path, steps)
    assert [(row["env_steps"], row["gone"], row["kl"]) for row in rows(tmp_path)] == [
        ("10", "0.5", ""),
        ("20", "", ""),
        ("30", "", ""),
    ]
    assert list(rows(tmp_path)[0]) == [*old, "gone"]
    assert rows(tmp_path)[0] == old | {"gone": "0.5"}


@pytest.mark.parametrize("text", ["a,b\n1,2\n", "\n", "wall_s,env_steps,frames,frames\n", "wall_s,env_steps\n1,2\n"])
def test_rows_are_not_appended_to_another_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "metrics.csv").write_text(text)
    with pytest.raises(ConfigError, match="other columns"):
        MetricsWriter(tmp_path, QUIET)
    assert (tmp_path / "metrics.csv").read_text() == text


SOURCES = {
    "progress": {f.name for f in dataclasses.fields(Progress)},
    "speed": set(Speed._fields),
    "totals": {"frames"},
    "episodes": set(EpisodeStatistics._fields),
    "evaluation": {f.name for f in dataclasses.fields(Evaluated)},
    "losses": {f.name for kind in (LossStats, BatchStats) for f in dataclasses.fields(kind)} | {"grad_norm"},
}


def test_extras_get_a_column_when_they_are_first_reported(tmp_path: Path) -> None:
    """Under names that no metric has."""
    for extras in ({}, {"loss": 0.5, "term/pull": 2.0}, {"depth": 7.0}):  # each by a process of its own
        writer = MetricsWriter(tmp_path, QUIET)
        writer.write(Report(wall_s=1.0, env_steps=1, frames=1, extras=extras))
        writer.write(Report(wall_s=1.0, env_steps=2, frames=2, loss=3.0, extras=extras))
    found = [tuple(row[name] for name in ("extra/loss", "term/pull", "extra/depth", "loss")) for row in rows(tmp_path)]
    first, second, third = ("", "", ""), ("0.5", "2", ""), ("", "", "7")
    assert found == [(*each, loss) for each in (first, second, third) for loss in ("", "3")]


def test_ever_new_extras_do_not_make_ever_more_columns(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, QUIET)
    for i in range(5):
        writer.write(Report(wall_s=1.0, env_steps=i, frames=i, extras={f"key {100 * i + j}": 1.0 for j in range(100)}))
    assert [row["env_steps"] for row in rows(tmp_path)] == ["0", "1", "2", "3", "4"]
    assert len(rows(tmp_path)[0]) == MOST_COLUMNS


def test_every_metric_has_a_source_that_knows_it() -> None:
    for metric in METRICS:
        source, _, name = metric.source.partition(".")
        assert source == "load" or (name or metric.name) in SOURCES[source], metric


def test_a_report_is_gathered_by_name() -> None:
    values = {
        source: SimpleNamespace(**{name: f"{source}.{name}" for name in names}) for source, names in SOURCES.items()
    }
    load = {metric.name: f"load.{metric.name}" for metric in METRICS if metric.source == "load"}
    losses = vars(values.pop("losses"))
    report = Report.gathered({"success": 1.0}, **values, losses=losses, load=load)
    for metric in METRICS:
        expected = metric.source if "." in metric.source else f"{metric.source}.{metric.name}"
        assert getattr(report, metric.name) == expected
    assert report.extras == {"success": 1.0}
    early = Report.gathered({}, **values, losses={}, load=load)
    assert math.isnan(early.kl)
    with pytest.raises(KeyError, match="policy_loss"):
        Report.gathered({}, **values, losses={"loss": 1.0}, load=load)


def test_tensorboard_has_the_reports_over_env_steps_and_hides_what_a_crash_lost(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = MetricsWriter(tmp_path, Config())
    for steps in (100, 200, 300):
        first.write(
            Report(wall_s=1.0, env_steps=steps, frames=steps, fps=5.0, extras={"success": 0.5, "gone": math.nan})
        )
    second = MetricsWriter(tmp_path, Config(), env_steps=150)
    second.write(Report(wall_s=1.0, env_steps=250, frames=250, fps=7.0))

    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("speed/fps")] == [(100, 5.0), (250, 7.0)]
    assert [event.step for event in events.Scalars("extra/success")] == [100]
    assert not {"learner/loss", "extra/gone", "progress/env_steps"} & set(events.Tags()["scalars"])


def test_tensorboards_server_hides_what_a_crash_lost(tmp_path: Path) -> None:
    """Also with --load_fast false, which takes the first START of a folder for the run's."""
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

    for begin, reported in ((0, (100, 200, 300)), (200, (250,))):
        writer = MetricsWriter(tmp_path, Config(), env_steps=begin)
        for steps in reported:
            writer.write(Report(wall_s=1.0, env_steps=steps, frames=steps, fps=5.0))
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [event.step for event in events.Tensors("speed/fps")] == [100, 200, 250]


def test_tensorboard_keeps_the_last_report_of_a_run_that_goes_on(tmp_path: Path) -> None:
    """It was made at the env steps of the checkpoint."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for begin, steps in ((0, 100), (100, 200), (200, 300)):
        writer = MetricsWriter(tmp_path, Config(), env_steps=begin)
        writer.write(Report(wall_s=1.0, env_steps=steps, frames=steps, fps=5.0))
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [event.step for event in events.Scalars("speed/fps")] == [100, 200, 300]


def test_an_evaluation_is_shown_over_the_env_steps_of_its_weights(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = MetricsWriter(tmp_path, Config())
    known = {"eval_return_mean": 7.0, "eval_length_mean": 9.0}
    reports = [
        Report(wall_s=1.0, env_steps=100, frames=100, fps=5.0),
        Report(wall_s=2.0, env_steps=200, frames=200, fps=5.0, eval_env_steps=50.0, **known),
        Report(wall_s=3.0, env_steps=300, frames=300, fps=5.0, eval_env_steps=300.0, **known),
    ]
    for report in reports:
        writer.write(report)
    assert [list(scalars_by_steps(report)) for report in reports] == [[100], [50, 200], [300]]
    for report in reports:
        shown = [entry for tagged in scalars_by_steps(report).values() for entry in tagged]
        assert sorted(shown) == sorted(scalars(report))
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [event.step for event in events.Scalars("eval/eval_return_mean")] == [50, 300]
    assert [event.step for event in events.Scalars("speed/fps")] == [100, 200, 300]


def test_tensorboard_hides_a_run_that_has_left_no_checkpoint(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for fps in (5.0, 7.0):
        writer = MetricsWriter(tmp_path, Config())
        for steps in (100, 200):
            writer.write(Report(wall_s=1.0, env_steps=steps, frames=steps, fps=fps))
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("speed/fps")] == [(100, 7.0), (200, 7.0)]


def test_a_missing_tensorboard_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.record_writer", None)
    with pytest.raises(ConfigError, match=r"--log\.no-tensorboard"):
        MetricsWriter(tmp_path, Config())
    MetricsWriter(tmp_path, QUIET)


def test_the_summary_is_plain_json_and_replaces_the_last_one(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    for status, error in (("interrupted", None), ("failed", "worker 3 died")):
        summary = Summary(
            status=status,
            env="CartPole-v1",
            seed=1,
            env_steps=5,
            frames=20,
            wall_s=2.0,
            fps=np.float32(2.5),
            episode_return_mean=math.nan,
            protocol="classic",
            extras={"success": np.float64(0.5)},
            error=error,
        )
        summary.write(path)
    assert json.loads(path.read_text()) == {
        "status": "failed",
        "env": "CartPole-v1",
        "seed": 1,
        "env_steps": 5,
        "frames": 20,
        "wall_s": 2.0,
        "fps": 2.5,
        "episode_return_mean": None,
        "protocol": "classic",
        "extras": {"success": 0.5},
        "error": "worker 3 died",
        "phases": {},
        "machine": {},
    }
    assert [entry.name for entry in tmp_path.iterdir()] == ["summary.json"]


def test_the_window_keeps_the_last_episodes_over_reports() -> None:
    window = EpisodeWindow(4)
    assert window.report()[:2] == (0, 0)
    assert math.isnan(window.report().return_mean)
    window.add(Episodes(np.array([1.0, 2.0, 3.0], np.float32), np.array([10, 20, 30])))
    assert window.report() == (3, 3, 2.0, 1.0, 3.0, 20.0, {})
    window.add(Episodes(np.array([4.0, 5.0]), np.array([40, 50])))
    assert window.report() == (2, 4, 3.5, 2.0, 5.0, 35.0, {})
    assert window.report() == (0, 4, 3.5, 2.0, 5.0, 35.0, {})


def test_all_episodes_since_the_last_report_count_where_they_are_more_than_the_window() -> None:
    window = EpisodeWindow(2)
    for chunk in np.split(np.arange(100.0), 10):
        window.add(Episodes(chunk, chunk + 1))
    assert window.report() == (100, 100, 49.5, 0.0, 99.0, 50.5, {})
    assert window.report()[:3] == (0, 2, 98.5)


def test_the_window_copies_what_it_is_given() -> None:
    window = EpisodeWindow(3)
    returns = np.array([1.0, 1.0])
    window.add(Episodes(returns, np.ones(2)))
    returns[:] = 9.0
    assert window.report().return_mean == 1.0


def test_extras_are_means_over_the_episodes_that_have_them() -> None:
    window = EpisodeWindow(2)
    extras = [{"success": 1.0}, {"success": 0.0, "depth": 7}, {"success": math.nan, "odd": math.inf}]
    window.add(Episodes(np.zeros(3), np.ones(3), by_name(extras)))
    assert window.report().extras == {"success": 0.5, "depth": 7.0}
    window.add(Episodes(np.zeros(3), np.ones(3), by_name([{"success": 0.0}] * 3)))
    assert window.report().extras == {"success": 0.0, "depth": 7.0}


def progress(updates: int, loss: float = math.nan, lag: float = math.nan, trained: bool = True) -> Progress:
    losses = {"loss": loss, "behaviour_kl": float(updates)} if trained else {}
    return Progress(10 * updates, updates, lag, lag, losses, lr=0.1 * updates)


def test_the_learners_statistics_are_means_of_all_updates_since_the_last_report() -> None:
    window = ProgressWindow(progress(100, trained=False))
    assert math.isnan(window.report().lag_max) and window.report().losses == {}
    window.add(progress(103, loss=2.0, lag=9.0))
    window.add(progress(103, trained=False))
    window.add(progress(104, loss=6.0, lag=1.0))
    found = window.report()
    assert (found.env_steps, found.updates, found.lr) == (1040, 104, pytest.approx(10.4))
    assert found.losses == {"loss": 3.0, "behaviour_kl": 103.25}
    assert (found.lag_mean, found.lag_max) == (7.0, 9.0)
    window.add(progress(110, loss=5.0, lag=2.0))
    assert window.report().losses["loss"] == 5.0, "of this report's updates alone"
    window.add(progress(111, trained=False))
    found = window.report()
    assert (found.losses, found.updates) == ({}, 111), "nothing was trained since"
    assert math.isnan(found.lag_mean) and math.isnan(found.lag_max)


def test_where_a_report_knows_nothing_new_the_last_known_figures_are_shown() -> None:
    first = Report(wall_s=1.0, env_steps=10, frames=10, loss=2.0, rss_mb=7.0, extras={"success": 1.0, "term/x": 3.0})
    second = Report(wall_s=2.0, env_steps=10, frames=10, episode_return_mean=5.0, extras={"success": 0.5})
    assert first.after(None) == first
    found = second.after(first)
    assert (found.wall_s, found.loss, found.rss_mb, found.episode_return_mean) == (2.0, 2.0, 7.0, 5.0)
    assert found.extras == {"success": 0.5, "term/x": 3.0}


def test_updates_that_were_all_skipped_have_no_part_in_a_mean() -> None:
    window = ProgressWindow(progress(0, trained=False))
    window.add(progress(1, loss=4.0))
    window.add(progress(9))
    assert window.report().losses == {"loss": 4.0, "behaviour_kl": pytest.approx(73 / 9)}
    window.add(progress(20))
    assert math.isnan(window.report().losses["loss"])


@pytest.fixture
def clock() -> list[float]:
    return [100.0]


def test_speeds_are_those_of_this_process_and_time_adds_up_over_resumes(clock: list[float]) -> None:
    speedometer = Speedometer(wall_s=50.0, env_steps=1000, frames=4000, clock=lambda: clock[0])
    assert math.isnan(speedometer.report(1000, 4000).fps)
    clock[0] += 2.0
    assert speedometer.report(1100, 4400) == (52.0, 50.0, 200.0)
    clock[0] += 3.0
    assert speedometer.report(1700, 6800) == (55.0, 200.0, 800.0)
    assert speedometer.overall_fps(1700) == pytest.approx(1700 / 55.0)


def test_neither_the_start_nor_what_is_waited_for_at_the_end_makes_a_run_slower(clock: list[float]) -> None:
    speedometer = Speedometer(wall_s=10.0, env_steps=1000, frames=1000, clock=lambda: clock[0])
    for seconds, env_steps in ((20.0, 1100), (1.0, 1200), (1.0, 1300)):
        clock[0] += seconds
        speedometer.trained(env_steps)
    clock[0] += 60.0
    speedometer.stop()
    assert speedometer.report(1300, 1300).wall_s == speedometer.wall_s == 32.0
    assert math.isnan(speedometer.report(1300, 1300).fps), "nothing more was to be trained"
    assert speedometer.overall_fps(1300) == pytest.approx((1000 + 200) / (10 + 2))


def test_time_never_goes_back_where_it_stops(clock: list[float]) -> None:
    speedometer = Speedometer(clock=lambda: clock[0])
    clock[0] += 2.0
    speedometer.trained(100)
    clock[0] += 3.0
    assert speedometer.report(100, 100).wall_s == 5.0
    clock[0] += 4.0
    speedometer.stop()
    assert speedometer.wall_s == 5.0
