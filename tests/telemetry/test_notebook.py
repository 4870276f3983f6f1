"""A run in a Jupyter notebook, in a real kernel: what its cell shows, how it is interrupted, and how it goes on."""

from __future__ import annotations

import asyncio
import csv
import re
import tempfile
import xml.dom.minidom
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import ROOT

from sfactory.telemetry.display import Display
from sfactory.telemetry.notebook import MOST_POINTS, NotebookView, _page
from sfactory.telemetry.sparkline import History

SETUP = """
import gymnasium
import numpy as np
from sfactory import Config, LogConfig, evaluate, train

SIZE = 3

class Corridor(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 1, (SIZE,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self.observation_space.sample() * 0, {}

    def step(self, action):
        self.count += 1
        return self.observation_space.sample(), float(action), self.count == 8, False, {}

def run(steps):
    return train(Config(
        env=Corridor, run=RUN, steps=steps, workers=1, envs_per_worker=8, rollout=8, batch_size=64, preset="none",
        device="cpu", log=LogConfig(report_every_s=0.05, tensorboard=False),
    ))
"""


def env_steps(run: Path) -> int:
    """Those of the last report."""
    try:
        with (run / "metrics.csv").open() as file:
            return int(list(csv.DictReader(file))[-1]["env_steps"] or 0)
    except (OSError, IndexError):
        return 0


def execute(cells: list[str], while_running: Callable[[int], bool]) -> Any:
    """Run cells in a kernel; gives the notebook with their outputs.

    Args:
        while_running: Asked again and again with the number of the cell that runs; True interrupts the kernel once.
    """
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3")

    async def all_cells() -> None:
        async with client.async_setup_kernel():
            for number, cell in enumerate(notebook.cells):
                running = asyncio.ensure_future(client.async_execute_cell(cell, number))
                while not running.done() and not while_running(number):
                    await asyncio.sleep(0.05)
                if not running.done():
                    await client.km.interrupt_kernel()
                await running

    # A kernel waits in the end for multiprocessing's resource tracker, which heeds no signal, until it is killed.
    with tempfile.TemporaryDirectory() as left, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", left)
        asyncio.run(all_cells())
    return notebook


def printed(cell: Any) -> str:
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


def shown(cell: Any) -> list[str]:
    """The HTML outputs of a cell."""
    return [output.data["text/html"] for output in cell.outputs if "text/html" in output.get("data", {})]


@pytest.mark.timeout(600)
def test_training_shows_a_curve_is_interrupted_and_goes_on_in_the_next_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    run = tmp_path / "run"
    cells = [
        f"RUN = {str(run)!r}\n{SETUP}",
        "first = run(10**9)\nprint(first.status, first.env_steps)",
        "second = run(first.env_steps + 2000)\nprint(second.status, second.env_steps)",
        "print(evaluate(RUN, episodes=2, env=Corridor).return_mean)",
    ]
    _, first, second, evaluated = execute(cells, lambda number: number == 1 and env_steps(run) > 2000).cells
    status, steps = printed(first).split()[-2:]
    assert status == "interrupted" and int(steps) > 2000
    assert len(shown(first)) == 1
    assert all(part in shown(first)[0] for part in ("Corridor", "env steps/s", "<polyline", "<table"))
    assert f"going on at {int(steps):,} env steps" in printed(second)
    assert printed(second).split()[-2] == "completed"
    assert float(printed(evaluated).split()[-1]) >= 0


def test_the_page_is_well_formed_and_shows_what_it_is_given() -> None:
    page = _page("A <b>", "1 & 2", [("return", "3"), ("<length>", "4"), ("lag", "5")], [(0, 1.0), (10, 3.0)])
    text = xml.dom.minidom.parseString(page).documentElement
    assert [node.firstChild.data for node in text.getElementsByTagName("text")][:2] == ["3", "1"]
    assert "<b>A &lt;b&gt;</b> 1 &amp; 2" in page and "&lt;length&gt;" in page


def test_a_long_run_has_a_curve_of_few_points(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("IPython")
    pages: list[Any] = []
    monkeypatch.setattr("IPython.display.display", lambda page, display_id: pages.append(page))
    history = History()
    for step in range(3 * MOST_POINTS):
        history.add(step, float("nan") if step == 1 else float(step))
    NotebookView("run").show("", [], history.points(MOST_POINTS))
    points = re.findall(r"[\d.]+,[\d.]+", pages[-1].data.partition('points="')[2].partition('"')[0])
    assert len(points) == MOST_POINTS
    assert points[0].startswith("36.0,") and points[-1].startswith("524.0,")


def test_outside_of_notebooks_the_display_is_as_ever() -> None:
    assert Display("auto", title="run", steps=1, slots=1, max_lag=1).mode == "plain"
