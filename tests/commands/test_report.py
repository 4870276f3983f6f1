"""The command that makes a run's page anew."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
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


@pytest.mark.parametrize(
    ("flags", "problem"), [([], "holds no run"), (["--episodes", "-1"], "episodes is -1; it must be 0 or more")]
)
def test_a_mistake_is_one_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], problem: str
) -> None:
    assert main(["report", str(tmp_path), *flags]) == 2
    assert problem in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
