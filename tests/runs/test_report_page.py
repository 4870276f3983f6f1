"""The page of a run: whole, safe to open, and never a run's undoing."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
from pathlib import Path

import pytest
from environments import Counting
from short_runs import short_run

from sfactory import Config, train
from sfactory.commands.report import main as report_command
from sfactory.config import LogConfig
from sfactory.errors import ConfigError
from sfactory.runs import report_page
from sfactory.runs.report_page import write_page
from sfactory.runs.run_files import read_config
from sfactory.runtime import reporting
from sfactory.telemetry.metrics import Report


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return short_run(tmp_path_factory.mktemp("page") / "run", "CartPole-v1", steps=2048, seed=3)


def test_a_run_ends_with_a_page_that_needs_nothing_else(run: Path) -> None:
    page = (run / "report.html").read_text()
    assert "<h1>CartPole-v1, seed 3</h1>" in page and "completed" in page
    for section in ("Returns", "Learning", "Where the time went", "Configuration", "Machine"):
        assert f"<h2>{section}</h2>" in page
    assert page.count("<svg") > 5 and "<polyline" in page
    assert not re.search(r'(src|href)="(?!data:)', page) and "<script" not in page


def test_the_summary_keeps_the_machine_and_the_phases(run: Path) -> None:
    values = json.loads((run / "summary.json").read_text())
    assert values["machine"]["cores"] and values["machine"]["torch"]
    assert set(values["phases"]) == {"learner", "policy", "rollout"}
    assert sum(values["phases"]["learner"].values()) == pytest.approx(1)


def test_a_run_that_goes_on_has_no_summary_of_how_it_ended_before(tmp_path: Path) -> None:
    folder = short_run(tmp_path / "run", "CartPole-v1", steps=128)
    short_run(folder, "CartPole-v1", steps=128)
    before = json.loads((folder / "summary.json").read_text())["env_steps"]
    pages = []

    def look(report: Report) -> None:
        assert not (folder / "summary.json").exists()
        pages.append(write_page(folder).read_text())

    config = dataclasses.replace(read_config(folder), run=str(folder), steps=512)
    result = train(dataclasses.replace(config, log=dataclasses.replace(config.log, report_every_s=1e-3)), [look])
    assert pages and all("still training" in page for page in pages) and f"<b>{before}</b>" not in pages[-1]
    page = (folder / "report.html").read_text()
    assert "<b>completed</b>" in page and f"<b>{result.env_steps:,}</b>" in page


def test_settings_other_than_the_defaults_are_marked(tmp_path: Path) -> None:
    folder = short_run(tmp_path / "run", "CartPole-v1")
    marked = re.findall(r'<tr class="changed"><td>([\w.]+)', (folder / "report.html").read_text())
    assert {"serial", "rollout", "batch_size"} <= set(marked)
    assert not {"env", "optim.lr", "workers"} & set(marked)


def test_videos_are_inside_the_page_as_far_as_they_are_small(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run / "videos").mkdir(exist_ok=True)
    (run / "videos" / "a.mp4").write_bytes(b"abc")
    (run / "videos" / "b.gif").write_bytes(b"GIF89a")
    (run / "evaluation.json").write_text('{"return_mean": 12.5, "episodes": 4, "checkpoint": "latest"}')
    page = write_page(run).read_text()
    assert 'src="data:video/mp4;base64,YWJj"' in page and 'src="data:image/gif;base64,' in page
    assert "12.5" in page
    monkeypatch.setattr(report_page, "MOST_VIDEO_BYTES", 2)
    assert 'src="videos/a.mp4"' in write_page(run).read_text()
    assert f'src="{run.name}/videos/a.mp4"' in write_page(run, out=run.parent / "page.html").read_text()


def test_a_page_without_an_evaluation_says_how_to_have_one(tmp_path: Path) -> None:
    folder = short_run(tmp_path / "a run", "CartPole-v1")
    assert f"sfactory report &#x27;{folder}&#x27; --episodes 20 --video" in (folder / "report.html").read_text()
    assert report_command([str(folder), "--episodes", "2"]) == 0
    assert "--video" not in (folder / "report.html").read_text()


def test_the_command_for_an_evaluation_works_for_an_environment_of_ones_own(tmp_path: Path) -> None:
    folder = short_run(tmp_path / "run", "environments:Counting", env_kwargs={"longest": 10**9})
    (printed,) = re.findall("<code>(.*)</code> adds one", (folder / "report.html").read_text())
    words = shlex.split(printed)
    assert words[-3:] == ["--trust", "--max-steps", "10000"], "no episode has ended in training"
    words[-1] = "10"
    assert report_command([word for word in words[2:] if word != "--video"]) == 0
    assert json.loads((folder / "evaluation.json").read_text())["length_mean"] == 10


def test_what_a_strangers_folder_says_is_text(tmp_path: Path) -> None:
    folder = short_run(tmp_path / "run", "CartPole-v1")
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("env: CartPole-v1", "env: <script>alert(1)</script>"))
    (folder / "summary.json").write_text('{"status": "<b>x", "error": "<i>", "machine": {"<u>": "<u>"}}')
    page = write_page(folder).read_text()
    assert not re.search("<(script|b>x|i|u)>", page)


def test_an_edited_evaluation_hides_no_run(tmp_path: Path) -> None:
    folder = short_run(tmp_path / "run", "CartPole-v1")
    (folder / "evaluation.json").write_text('{"return_mean": "12", "length_mean": [3], "env_steps": 1000}')
    assert "1,000 env steps" in write_page(folder).read_text()


def test_a_run_that_has_only_begun_has_a_page(tmp_path: Path) -> None:
    folder = short_run(tmp_path / "run", "CartPole-v1")
    for name in ("metrics.csv", "summary.json"):
        (folder / name).unlink()
    assert "ended without a summary" in write_page(folder).read_text()
    with pytest.raises(ConfigError, match="holds no run"):
        write_page(tmp_path)


def test_a_page_that_cannot_be_written_does_not_fail_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(folder: Path, ended: bool) -> None:
        raise RuntimeError("no more paper")

    monkeypatch.setattr(reporting, "write_page", fails)
    config = Config(
        env="CartPole-v1", run=str(tmp_path / "run"), steps=128, envs_per_worker=4, rollout=8, batch_size=64,
        preset="none", device="cpu", serial=True, log=LogConfig(display="plain", tensorboard=False),
    )  # fmt: skip
    assert train(config).status == "completed"
    assert "report.html not written: no more paper" in capsys.readouterr().out


def test_log_report_off_writes_no_page(tmp_path: Path) -> None:
    config = Config(
        env="CartPole-v1", run=str(tmp_path / "run"), steps=128, envs_per_worker=4, rollout=8, batch_size=64,
        preset="none", device="cpu", serial=True, log=LogConfig(display="none", tensorboard=False, report=False),
    )  # fmt: skip
    train(config)
    assert not (tmp_path / "run" / "report.html").exists()


def test_numbers_of_the_environments_info_have_charts(tmp_path: Path) -> None:
    folder = short_run(tmp_path / "run", Counting)
    assert 'aria-label="extra/last"' in (folder / "report.html").read_text()


def test_a_folder_whose_name_is_no_text_has_a_page(tmp_path: Path) -> None:
    run = short_run(Path(os.fsdecode(os.fsencode(tmp_path / "run") + b"-\xff")), "CartPole-v1")
    assert "run-\\udcff" in write_page(run).read_text()
