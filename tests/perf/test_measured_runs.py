"""perf/runs.py and perf/sessions.py: what a measuring program has started ends with it, and a run that ends by itself
has no speed."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from commands import ROOT, wait_until

from perf import fps, runs, scaling, sessions

PROGRAMS = {
    "fps": "run", "gains": "speeds", "gpu": "run_all", "lag": "run_all", "learning": "score_of",
    "peers": "measure_round", "queues": "EventfdRing", "scaling": "sweep", "soak": "soak", "starts": "one_run",
}  # fmt: skip
"""Each with the first that it does."""
TRAINER = """
import os, pathlib, sys, time
run = pathlib.Path(sys.argv[sys.argv.index('--run') + 1]); run.mkdir()
pathlib.Path('pid').write_text(str(os.getpid()))
with open(run / 'metrics.csv', 'w') as file:
    print('wall_s,env_steps', file=file)
    for i in range(1, 100): print(f'{i},{i * 10**6}', file=file)
"""
"""Stands in for sfactory.train: it has trained, and then does what is appended."""


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The program that stands in for sfactory.train."""
    path = tmp_path / "sfactory" / "train.py"
    path.parent.mkdir()
    (path.parent / "__init__.py").touch()
    path.write_text(TRAINER)
    monkeypatch.setattr(runs, "ROOT", tmp_path)
    return path


@pytest.fixture
def _signals_as_before() -> Iterator[None]:
    """Without a handler SIGTERM would end the tests."""

    def unhandled(*_: object) -> None:
        raise AssertionError("SIGTERM would end the program, and leave what it has started")

    before = {number: signal.signal(number, unhandled) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_signals_as_before")
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_that_is_ended_unwinds(program: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = importlib.import_module(f"perf.{program}")

    def work(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)

    monkeypatch.setattr(module, PROGRAMS[program], work)
    monkeypatch.setattr(sys, "argv", [program])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 128 + signal.SIGTERM


def test_its_run_is_ended_with_it(trainer: Path, tmp_path: Path) -> None:
    trainer.write_text(TRAINER + "time.sleep(60)\n")
    program = (
        "import pathlib, sys; from perf import runs\n"
        "runs.ROOT = pathlib.Path(sys.argv[1]); runs.exit_at_signals()\n"
        "with runs.training([], sys.argv[1]) as run: run.wait_until(lambda _: False, 60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT)
    assert wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), 20)
    process.terminate()
    assert process.wait(20) == 128 + signal.SIGTERM
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


def test_a_run_that_ends_by_itself_has_no_speed(trainer: Path) -> None:
    trainer.write_text(TRAINER + "sys.exit(1)\n")
    with pytest.raises(SystemExit, match="ended by itself with status 1"):
        fps.measure("--env CartPole-v1 --workers 1", 1.5)
    with pytest.raises(SystemExit, match="ended by itself with status 1"):
        scaling.measure("CartPole-v1", scaling.Size(environments=4), 1.5, scaling.BATCH_ROWS)


def test_the_speed_of_a_size_is_that_of_a_run_that_has_settled() -> None:
    """Before, it trains on what was sampled before its first update."""
    steps = [0, 1_000_000, 2_000_000, 2_000_100, 2_000_200, 2_000_300]
    reports = [{"wall_s": float(second), "env_steps": float(count)} for second, count in enumerate(steps)]
    assert scaling.speed(reports, settled=1_500_000) == 100.0


def test_all_of_a_session_ends() -> None:
    """Also what has left its process group."""
    program = "import subprocess, time; subprocess.Popen(['sleep', '60'], process_group=0); time.sleep(60)"
    leader = subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
    assert wait_until(lambda: len(sessions.members(leader.pid)) == 2, 10)
    assert len(sessions.end(leader.pid)) == 2
    assert not sessions.members(leader.pid)
    leader.wait()
