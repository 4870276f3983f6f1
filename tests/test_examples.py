"""Every example runs as printed; with few env steps here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sfactory.eval import main as eval_main
from sfactory.train import main as train_main

ROOT = Path(__file__).parent.parent


def run(folder: Path, *command: str) -> str:
    """What a command prints, run in an empty folder with one torch thread."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("custom_env", "caught"),
        ("custom_model", "return"),
        ("loss_term", "term/reward_error"),
        ("estimator", "return"),
        ("distribution", "return"),
        ("logger", "last report"),
        ("replay", "return"),
        ("multi_agent", "return of an agent"),
        ("brax_env", "return"),
        ("resume", "interrupted after"),
        ("evaluate", "episode 4: return"),
    ],
)
def test_an_example_runs(name, says, tmp_path):
    pytest.importorskip({"multi_agent": "pettingzoo", "brax_env": "brax"}.get(name, "sfactory"))
    steps = 60_000 if name == "resume" else 2048  # it has to be interrupted midway
    assert says in run(tmp_path, str(ROOT / "examples" / f"{name}.py"), "--steps", str(steps))
    folder = next((tmp_path / "runs").iterdir())
    assert json.loads((folder / "summary.json").read_text())["status"] == "completed"
    if name == "resume":
        assert json.loads((folder / "summary.json").read_text())["env_steps"] >= 2 * steps
    if name == "evaluate":
        printed = run(tmp_path, "-m", "sfactory.eval", "--run", str(folder), "--episodes", "2", "--json")
        assert json.loads(printed.splitlines()[-1])["episodes"] == 2


def test_the_custom_model_can_be_named_on_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT)
    folder = str(tmp_path / "run")
    flags = ["--model.encoder", "examples.custom_model:FourierEncoder", "--model.kwargs", "{frequencies: 8}"]
    assert (
        train_main(
            ["--env", "CartPole-v1", "--steps", "1024", "--serial", "--run", folder, "--log.display", "none", *flags]
        )
        == 0
    )
    assert eval_main(["--run", folder, "--episodes", "2", "--json"]) == 2
    assert "--trust" in capsys.readouterr().err
    assert eval_main(["--run", folder, "--episodes", "2", "--json", "--trust"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["episodes"] == 2
