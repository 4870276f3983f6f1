"""perf/learning.py: scores are recorded once, and peers are evaluated as this project is."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from perf import learning
from perf.references import BY_NAME


@pytest.fixture
def args(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """Flags, with a stand-in for training."""

    def train(reference: Any, seed: int, run: Path, sync: bool) -> tuple[float, float]:
        run.mkdir()
        (run / "metrics.csv").write_text("env_steps,wall_s\n1000,2.0\n")
        return 500.0, 3.0

    monkeypatch.setattr(learning, "train", train)
    monkeypatch.setattr(learning, "CURVES", tmp_path / "curves")
    return argparse.Namespace(peer=None, sync=False, runs=tmp_path, record=True, venvs=tmp_path)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    monkeypatch.setattr(learning.tables, "record", lambda table, new, program: rows.extend(new))
    return rows


def test_a_score_is_recorded_once(args: argparse.Namespace, recorded: list[dict[str, Any]]) -> None:
    for _ in range(2):
        assert learning.score_of(BY_NAME["cartpole"], 11, args) == (500.0, 3.0)
    assert [row["score"] for row in recorded] == ["500.00"]
    assert (args.runs / "curves" / "cartpole-11.csv").exists()


def test_a_score_that_was_found_without_recording_can_be_recorded_later(
    args: argparse.Namespace, recorded: list[dict[str, Any]]
) -> None:
    args.record = False
    learning.score_of(BY_NAME["cartpole"], 11, args)
    assert not recorded
    args.record = True
    learning.score_of(BY_NAME["cartpole"], 11, args)
    assert len(recorded) == 1 and (args.runs / "curves" / "cartpole-11.csv").exists()


def test_a_record_that_fails_is_made_again(args: argparse.Namespace, recorded: list[dict[str, Any]]) -> None:
    """Without training anew."""
    (args.runs / "curves").write_text("a file in the place of the folder")
    with pytest.raises(OSError):
        learning.score_of(BY_NAME["cartpole"], 11, args)
    assert not recorded
    (args.runs / "curves").unlink()
    learning.score_of(BY_NAME["cartpole"], 11, args)
    assert len(recorded) == 1


def test_a_folder_of_an_older_version_is_not_recorded_again(
    args: argparse.Namespace, recorded: list[dict[str, Any]]
) -> None:
    (args.runs / "cartpole-11").mkdir()
    (args.runs / "cartpole-11" / "score.json").write_text(json.dumps({"score": 400.0, "seconds": 9.0}))
    assert learning.score_of(BY_NAME["cartpole"], 11, args) == (400.0, 9.0)
    assert not recorded


@pytest.mark.parametrize(("name", "deterministic"), [("cartpole", True), ("pong-classic", False)])
def test_peers_are_evaluated_as_the_reference_says(
    name: str, deterministic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def run_driver(peer: str, venvs: Path, request: dict[str, Any], limit_s: float) -> tuple[dict[str, float], float]:
        asked.update(request)
        return {"score": 1.0}, 2.0

    monkeypatch.setattr(learning, "run_driver", run_driver)
    learning.train_peer(BY_NAME[name], "stable-baselines3", 11, tmp_path / "run", tmp_path)
    assert asked["deterministic"] is deterministic
