"""perf/learning.py: peers are evaluated as this project is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from perf import learning
from perf.references import BY_NAME


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
