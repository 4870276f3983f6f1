"""The monitor's accounts of events and counters, handed to it without a run."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from small_plans import small_plan

from sfactory.data.arena import FILLING, FINISHED
from sfactory.runs.run_folder import open_run
from sfactory.runtime import monitor as runtime_monitor
from sfactory.runtime import reporting
from sfactory.runtime.monitor import Monitor
from sfactory.telemetry.events import Failure, TrainingEnded


@pytest.fixture
def monitor(tmp_path: Path) -> Iterator[Monitor]:
    plan = small_plan("sfactory/CartPole", run=str(tmp_path / "run"), workers=2)
    with open_run(plan.config, plan.env) as folder:
        monitor = Monitor(plan, folder)
        monitor.begin(None, 0.0)
        yield monitor


def count(monitor: Monitor, env_faults: int, full_waits: int) -> None:
    watch = monitor.wires.control.stopwatch("rollout-1")
    watch.env_faults, watch.queues = env_faults, [SimpleNamespace(full_waits=full_waits)]
    watch.flush()


def test_counters_go_on_when_the_workers_are_replaced(monitor: Monitor) -> None:
    count(monitor, 7, 3)
    monitor.restarts += 1
    monitor.begin(None, 0.0)
    count(monitor, 2, 1)
    monitor.restarts += 1
    monitor.begin(None, 0.0)
    count(monitor, 1, 0)
    load = monitor._load()
    assert (load["env_faults"], load["queue_full_waits"], load["restarts"]) == (10, 4, 2)


def test_checkpoints_count_the_seconds_that_reports_count(monitor: Monitor, monkeypatch: pytest.MonkeyPatch) -> None:
    """From when a command begins to report: TensorBoard's import takes a while."""
    begun: list[float] = []
    write, make = reporting.MetricsWriter, runtime_monitor.make_wires
    monkeypatch.setattr(reporting, "MetricsWriter", lambda *args: time.sleep(0.02) or write(*args))
    monkeypatch.setattr(runtime_monitor, "make_wires", lambda *args: begun.append(args[-1]) or make(*args))
    monitor.begin(None, 100.0)
    assert begun[0] >= 100.02


def test_slots_that_the_learner_holds_back_are_not_called_free(monitor: Monitor) -> None:
    slots = monitor.wires.arena.slots
    assert slots > 3
    monitor.wires.arena.state[:2] = FINISHED, FILLING
    monitor.wires.free.put_many([2])
    load, counts = monitor._load(), monitor._state().slots
    assert (load["free_slots"], load["finished_slots"]) == (1, 1)
    assert counts == {"free": 1, "held": slots - 3, "filling": 1, "finished": 1}


def test_memory_that_processes_share_counts_once(monitor: Monitor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what they have from the process that they were forked from, and have not written to."""
    monkeypatch.setattr("sfactory.runtime.processes.MEASURE_EVERY", 0)
    inherited, shared = np.ones(64 * 2**20, np.uint8), mmap.mmap(-1, 64 * 2**20)
    shared.write(inherited)
    alone = monitor._load()["rss_mb"]
    with contextlib.ExitStack() as forked:
        pids = {f"rollout-{i}": forked.enter_context(another_process(inherited, shared)) for i in range(4)}
        monkeypatch.setattr(monitor.processes, "pids", lambda: pids)
        assert alone - 16 < monitor._load()["rss_mb"] < alone + 64


@contextlib.contextmanager
def another_process(*read: np.ndarray | mmap.mmap) -> Iterator[int]:
    """A process forked from this one, which has read some memory."""
    ready, told = os.pipe()
    if (pid := os.fork()) == 0:
        for memory in read:
            np.frombuffer(memory, np.uint8).max()
        os.write(told, b".")
        signal.pause()
    os.read(ready, 1)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(ready)
        os.close(told)


def test_a_worker_that_fails_after_the_learner_is_done_does_not_fail_the_run(monitor: Monitor) -> None:
    monitor.watch([TrainingEnded(20_000, True)], report=False)
    monitor.watch([Failure("rollout-0", "environment 0 has failed 10 times", "", True)], report=False)
    assert monitor.exception is None
    assert monitor.summarize().status == "completed"


def test_a_worker_that_fails_before_does(monitor: Monitor) -> None:
    monitor.watch([Failure("rollout-0", "environment 0 has failed 10 times", "", True)], report=False)
    monitor.watch([TrainingEnded(10_000, False)], report=False)
    assert monitor.summarize().status == "failed"


@pytest.mark.parametrize(("answer", "ends"), [(False, True), (np.mean([1.0]) > 2, True), (None, False), (0, False)])
def test_a_callback_ends_the_run_by_false_of_python_or_of_numpy(
    answer: object, ends: bool, monitor: Monitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "_callbacks", [lambda report: answer])
    monitor._report()
    assert monitor.ending == ends


@pytest.fixture
def told(monitor: Monitor, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Notes of the monitor, on a machine that has nothing else to do."""
    notes: list[str] = []
    monkeypatch.setattr("sfactory.telemetry.stopwatch.processor_wait_s", lambda: 0.0)
    monkeypatch.setattr("sfactory.runtime.monitor.programs_s", lambda pid: 0.0)
    monkeypatch.setattr(monitor.reporter, "note", notes.append)
    return notes


def step(monitor: Monitor, worker: int, seconds: float, computing: float = 0.0, crowded: float = 0.0) -> None:
    """A step of a worker's four rows, and the monitor's next look. `computing` and `crowded` are the shares of its time
    in which it computes, and in which others have its core."""
    watch = monitor.wires.control.stopwatch(f"rollout-{worker}")
    watch._last -= seconds
    watch._cpu_s += computing * seconds
    watch._crowded_s += crowded * seconds
    watch.lap("environment")
    watch.count(4)
    monitor._tell_of_slow_steps()


def test_steps_are_not_called_slow_for_the_first_ones_in_which_functions_are_compiled(
    monitor: Monitor, told: list[str]
) -> None:
    step(monitor, 0, 90)
    step(monitor, 1, 90)  # as late as it likes
    for worker in (0, 1):
        step(monitor, worker, 0.001)
    assert told == []


def test_slow_steps_are_told_once_by_the_steps_after_the_first(monitor: Monitor, told: list[str]) -> None:
    step(monitor, 0, 90)
    for _ in range(3):
        step(monitor, 0, 8)
    (note,) = told
    assert "an env step takes 2 s" in note


@pytest.mark.parametrize(("computing", "crowded", "notes"), [(0.02, 0.0, 1), (0.9, 0.0, 0), (0.02, 0.9, 0)])
def test_steps_that_wait_are_told_with_the_workers_that_could_wait_at_once(
    monitor: Monitor, told: list[str], computing: float, crowded: float, notes: int
) -> None:
    groups_of_one = monitor._plan.config.workers * monitor._plan.config.envs_per_worker // 2
    for _ in range(200):
        step(monitor, 0, 4 * 0.005, computing, crowded)
    assert len(told) == notes
    assert all(f"raise --workers to {groups_of_one}" in note and "an env step takes 0.005 s" in note for note in told)


def test_steps_that_a_program_computes_do_not_wait(
    monitor: Monitor, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    computed = itertools.count(0.0, 4 * 0.005)
    monkeypatch.setattr("sfactory.runtime.monitor.programs_s", lambda pid: next(computed))
    for _ in range(200):
        step(monitor, 0, 4 * 0.005, 0.02)
    assert told == []


def test_quick_steps_are_not_told_however_little_they_compute(monitor: Monitor, told: list[str]) -> None:
    for _ in range(2000):
        step(monitor, 0, 4 * 0.0005)
    assert told == []
