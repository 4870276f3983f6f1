"""The figure of learning curves has what LEARNING.md shows."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from perf import learning_plots, learning_results, tables
from perf.references import BY_NAME, REFERENCES


def test_every_curve_is_of_a_score_that_is_shown() -> None:
    curves, runs = learning_plots.read(learning_plots.CURVES), tables.read("learning")
    assert set(curves) <= set(BY_NAME)
    for trainer in ("sfactory", "sfactory --sync"):
        shown = [row["seed"] for row in learning_results.scores_of(runs, BY_NAME["hopper"], trainer)]
        assert [curve.name.rsplit("-", 1)[1] for curve in curves["hopper"][trainer]] == shown


def test_all_references_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "learning.svg"
    monkeypatch.setattr(sys, "argv", ["learning_plots", "--all", "--out", str(out)])
    assert learning_plots.main() == 0
    drawn = out.read_text()
    assert "<svg" in drawn
    monkeypatch.setattr(learning_plots, "read", lambda folder: {})
    assert learning_plots.main() == 1


def test_names_of_environments_are_short() -> None:
    assert {each.env_name for each in REFERENCES if ":" in each.env} >= {"GridWorld-v0", "mpe2.simple_spread_v3"}
