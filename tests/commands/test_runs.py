"""``sfactory runs``: what lies below a folder."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys

import pytest
import yaml
from short_runs import short_run

from sfactory.commands import main
from sfactory.commands.runs import list_runs
from sfactory.errors import ConfigError
from sfactory.runs.checkpoint import CheckpointStore
from sfactory.runs.report_page import write_page
from sfactory.runs.run_files import read_config
from sfactory.runs.run_folder import open_run
from sfactory.status import status


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    short_run(folder / "first", "CartPole-v1", seed=5)
    short_run(folder / "deep" / "second", "Pendulum-v1")
    (folder / "deep" / "other").mkdir()
    (folder / "deep" / "other" / "notes.txt").write_text("no run")
    os.utime(folder / "first" / "metrics.csv", (1e9, 1e9))
    return folder


def test_every_run_is_listed_with_what_it_has_reached(runs):
    first, second = list_runs(runs)
    assert (first.folder, first.env, first.seed, first.status) == (
        str(runs / "first"), "CartPole-v1", 5, "completed",
    )  # fmt: skip
    assert first.env_steps >= first.steps == 128 and first.episode_return > 5 and first.fps > 0
    assert (second.env, second.status, second.episode_return) == ("Pendulum-v1", "completed", None)


def test_the_command_shows_a_table_or_one_object_a_line(runs, capsys):
    assert main(["runs", str(runs)]) == 0
    shown = capsys.readouterr().out
    assert "CartPole-v1" in shown and "Pendulum-v1" in shown and "(100%)" in shown and "completed" in shown
    assert main(["runs", str(runs), "--json"]) == 0
    assert [json.loads(line)["env"] for line in capsys.readouterr().out.splitlines()] == ["CartPole-v1", "Pendulum-v1"]


def test_a_run_that_was_continued_until_no_episode_has_ended_has_the_return_of_before(tmp_path):
    run = short_run(tmp_path / "run", "CartPole-v1")
    (run / "summary.json").unlink()
    (before,) = list_runs(run)
    names, *_, last = (run / "metrics.csv").read_text().splitlines()
    row = dict(zip(names.split(","), last.split(","), strict=True))
    row |= {"env_steps": "9000", "episode_return_mean": ""}
    with (run / "metrics.csv").open("a") as file:
        file.write(",".join(row.values()) + "\n")
    with open_run(read_config(run)):  # it goes on
        (found,) = list_runs(run)
    assert (found.env_steps, found.episode_return) == (9000, before.episode_return)


def test_a_killed_run_is_listed_with_what_it_would_go_on_with(tmp_path, capsys):
    run = short_run(tmp_path / "run", "CartPole-v1")
    (run / "summary.json").unlink()
    saved = CheckpointStore(run / "checkpoints").load_latest()
    names, *_, last = (run / "metrics.csv").read_text().splitlines()
    row = dict(zip(names.split(","), last.split(","), strict=True)) | {"env_steps": "9000", "wall_s": "500"}
    with (run / "metrics.csv").open("a") as file:
        file.write(",".join(row.values()) + "\n")
    (found,) = list_runs(run)
    assert (found.status, found.env_steps) == ("killed", saved.env_steps)
    assert found.fps == pytest.approx(saved.env_steps / saved.wall_s)
    assert main(["status", str(run)]) == 0
    assert f"killed  {saved.env_steps} env steps" in capsys.readouterr().out
    shutil.rmtree(run / "checkpoints")
    assert [(found.status, found.env_steps) for found in list_runs(run)] == [("killed", 0)], "it would begin anew"


@pytest.mark.parametrize("saved", [0, 64])
def test_a_run_that_has_lost_what_it_reported_is_listed_with_what_it_has(tmp_path, saved):
    """As its summary, its status and its page say: its learner was lost after the last checkpoint."""
    run = short_run(tmp_path / "run", "CartPole-v1")
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | {"status": "failed", "env_steps": saved}))
    (found,) = list_runs(run)
    assert (found.status, found.env_steps) == ("failed", status(run).summary["env_steps"]) == ("failed", saved)
    assert f"env steps</span><b>{saved}</b>" in write_page(run).read_text()


def test_a_name_with_brackets_is_shown_as_it_is(tmp_path, capsys):
    short_run(tmp_path / "[old]" / "a[/b]", "CartPole-v1")
    assert main(["runs", str(tmp_path)]) == 0
    assert str(tmp_path / "[old]" / "a[/b]") in capsys.readouterr().out


def test_a_name_that_the_terminal_cannot_show_is_escaped(tmp_path, monkeypatch):
    run = short_run(tmp_path / os.fsdecode(b"no\xfftext"), "CartPole-v1")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="utf-8"))
    for command in ("runs", "status", "report"):
        assert main([command, str(run)]) == 0
    sys.stdout.flush()
    assert sys.stdout.buffer.getvalue().decode().count(r"no\udcfftext") == 3
    assert r"no\udcfftext" in (run / "report.html").read_text()


def test_a_link_to_a_run_is_listed_and_no_circle_followed(tmp_path):
    short_run(tmp_path / "disk" / "far", "CartPole-v1")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "near").symlink_to(tmp_path / "disk" / "far")
    (tmp_path / "runs" / "circle").symlink_to(tmp_path / "runs")
    assert [found.folder for found in list_runs(tmp_path / "runs")] == [str(tmp_path / "runs" / "near")]


def test_living_killed_and_damaged_runs_are_told_apart(tmp_path):
    run = short_run(tmp_path / "run", "CartPole-v1")
    (run / "summary.json").unlink()
    assert [found.status for found in list_runs(tmp_path)] == ["killed"]
    with open_run(read_config(run)):
        assert [found.status for found in list_runs(tmp_path)] == ["starting"]
    (run / "config.yaml").write_text("env: [")
    assert [(found.status, found.env) for found in list_runs(run)] == [("damaged", "")]


def test_a_run_of_an_sfactory_with_other_fields_is_listed_as_any_other(tmp_path):
    run = short_run(tmp_path / "run", "CartPole-v1")
    before = list_runs(tmp_path)
    values = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump(values | {"algo": "reinforce", "colour": 1}))
    with pytest.raises(ConfigError, match="other fields"):
        read_config(run)
    assert list_runs(tmp_path) == before


def test_a_folder_without_runs_and_one_that_is_not_there(tmp_path, capsys):
    assert main(["runs", str(tmp_path)]) == 0
    assert "there is no run below" in capsys.readouterr().out
    assert main(["runs", str(tmp_path / "missing")]) == 2
    assert "is not a folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    "summary",
    [
        '{"env_steps": "many", "wall_s": [1], "status": ["x"]}',
        '{"env_steps": NaN}',
        '{"status": "no [/markup]"}',
        '{"phases": ["learner"], "machine": "fast"}',
        '{"phases": {"learner": {"update": "long"}, "policy": 1}}',
        '{"status": "[/bold]"}',
        f'{{"env_steps": 1{"0" * 400}}}',
        "[" * 200_000,
    ],
)
def test_an_edited_summary_hides_no_run(tmp_path, summary):
    run = short_run(tmp_path / "run", "CartPole-v1")
    (run / "summary.json").write_text(summary)
    assert main(["report", str(run)]) == 0
    (run / "metrics.csv").unlink()
    shutil.rmtree(run / "checkpoints")
    assert main(["runs", str(tmp_path)]) == 0
    assert [found.env_steps for found in list_runs(tmp_path)] == [0]
    assert main(["status", str(run)]) == 0


def test_a_strangers_words_do_not_control_the_terminal(tmp_path, capsys):
    retitle = "\x1b]0;title\x1b\\"
    run = short_run(tmp_path / "run", "CartPole-v1")
    for name, old in (("config.yaml", "env: CartPole-v1"), ("summary.json", '"status": "completed"')):
        text = (run / name).read_text()
        key = old.partition(":")[0]
        (run / name).write_text(text.replace(old, f"{key}: {json.dumps('x' + retitle)}"))
    for command, expected in ((["runs", str(tmp_path)], 0), (["status", str(run)], 0), (["eval", str(run)], 2)):
        assert main(command) == expected
        told = capsys.readouterr()
        assert "\x1b" not in told.out + told.err
        assert "x\\x1b]0;title" in (told.out + told.err).replace("\\\\", "\\")
