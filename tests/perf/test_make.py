"""The targets of the Makefile that measure keep what they have measured."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from commands import ROOT

PYTHON = """#!/bin/sh
echo "$@" >> {said}
case "$*" in *"perf.learning --record"*) exit 1; esac
"""
"""Stands in for Python: says what it was asked for, and that a reference was missed."""


def asked(target: str, folder: Path) -> tuple[list[str], int]:
    """The commands of a target, and make's exit status."""
    said, python = folder / "said", folder / "python"
    python.write_text(PYTHON.format(said=said))
    python.chmod(0o755)
    done = subprocess.run(["make", "-o", ".venv/dev", f"BIN={folder}", target], cwd=ROOT, capture_output=True)
    return said.read_text().splitlines(), done.returncode


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_a_reference_that_is_missed_is_told_after_its_page_is_written(tmp_path: Path) -> None:
    commands, status = asked("learn", tmp_path)
    assert commands[-2:] == ["-m perf.results", "-m perf.learning_plots --all"] and status != 0


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_what_is_measured_beside_peers_is_recorded(tmp_path: Path) -> None:
    commands, status = asked("peers", tmp_path)
    measuring = [
        line for line in commands if line.startswith(("-m perf.peers", "-m perf.learning ")) and "build" not in line
    ]
    assert measuring and all("--record" in line for line in measuring)
    assert commands[-2] == "-m perf.results" and status == 0
