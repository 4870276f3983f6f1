"""The command that makes a run's page anew."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from environments import Drawn
from short_runs import short_run

from sfactory.commands import main


def test_a_final_evaluation_and_a_video_come_into_the_page(tmp_path: Path) -> None:
    pytest.importorskip("imageio_ffmpeg")
    pytest.importorskip("pygame")
    run = short_run(tmp_path / "run", "CartPole-v1")
    assert main(["report", str(run), "--episodes", "2", "--video", "--max-steps", "20"]) == 0
    values = json.loads((run / "evaluation.json").read_text())
    assert (values["episodes"], values["checkpoint"]) == (2, "latest") and values["env_steps"] >= 128
    page = (run / "report.html").read_text()
    assert "<h2>Evaluation</h2>" in page and 'src="data:video/mp4;base64,' in page
    short_run(run, "CartPole-v1", overwrite=True)
    assert not (run / "videos").exists() and not (run / "evaluation.json").exists()


@pytest.mark.parametrize("command", [["report", "--episodes", "1", "--video"], ["play"]], ids=" ".join)
def test_pictures_need_no_display_wherever_environments_are_made_before(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("imageio_ffmpeg")
    run = short_run(tmp_path / "run", Drawn)
    for variable in ("DISPLAY", "WAYLAND_DISPLAY", "MUJOCO_GL"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("sfactory.runs.video._has_egl", lambda: True)
    monkeypatch.setattr("sfactory.commands.play.on_terminal", lambda: True)
    monkeypatch.setattr(Drawn, "drawn_by", None)
    assert main([*command, str(run), "--env", "environments:Drawn", "--max-steps", "2"]) == 0


def test_a_folder_that_cannot_be_written_to_is_told_before_anything_is_played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, elsewhere = short_run(tmp_path / "run", "CartPole-v1"), tmp_path / "page.html"
    (run / "report.html").unlink()
    may = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != run and may(path, mode))  # root may all
    assert main(["report", str(run)]) == 2
    assert f"the folder {run} cannot be written to; name a file in another one" in capsys.readouterr().err
    for flags in (["--video"], ["--episodes", "1000000", "--out", str(elsewhere)]):
        assert main(["report", str(run), *flags]) == 2
        assert "copy it, or leave out --episodes and --video and name a file elsewhere" in capsys.readouterr().err
    assert main(["report", str(run), "--out", str(elsewhere)]) == 0
    assert "<h1>CartPole-v1, seed 0</h1>" in elsewhere.read_text()
    assert not (run / "report.html").exists() and not (run / "evaluation.json").exists()


@pytest.mark.parametrize("out", ["", "missing/page.html"])
def test_a_page_has_a_place(tmp_path: Path, capsys: pytest.CaptureFixture[str], out: str) -> None:
    run = short_run(tmp_path / "run", "CartPole-v1")
    assert main(["report", str(run), "--episodes", "1000000", "--out", str(tmp_path / out)]) == 2
    assert f"out is {tmp_path / out}, " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ([], "holds no run"),
        (["--episodes", "-1"], "episodes is -1; it must be 0 or more"),
        (["--env", "CartPole-v1", "--sampled"], "--env, --sampled: only with --episodes N or --video"),
    ],
)
def test_a_mistake_is_one_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], problem: str
) -> None:
    assert main(["report", str(tmp_path), *flags]) == 2
    assert problem in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
