"""One run of a sweep: ``python -m sfactory.train`` in a process of its own, and what its folder says of it."""

from __future__ import annotations

import contextlib
import csv
import math
import os
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import IO, cast

from sfactory.commands.sweeps.space import Objective
from sfactory.files import TRIAL
from sfactory.runs.curves import EVALUATIONS, STEPS, Curve, read_table, steps_column
from sfactory.runs.run_files import EVALUATION, METRICS, SUMMARY, is_held, is_number, read_json
from sfactory.runtime.processes import kill_tree

SAVING_S = 90.0
"""Seconds that a run has to save and end; then its processes are killed."""
REASON_LINES = 3
"""Lines of a failed run's log that are told."""
BEGINS = "--- the run begins or goes on ---"
"""A line of a run's log above what each of its processes prints."""
GUARD = "sfactory.commands.sweeps.guard"


def command(trial: Path, seed: int | str) -> list[str]:
    """Arguments of the Python interpreter that train the configuration in a trial's folder with a seed. Both may be
    variables of a shell."""
    run = run_folder(trial, seed)
    return ["-m", "sfactory.train", "--config", str(trial / TRIAL), "--seed", str(seed), "--run", str(run)]


def run_folder(trial: Path, seed: int | str) -> Path:
    """The folder of the run with a seed."""
    return trial / f"seed-{seed}"


def log_file(trial: Path, seed: int | str) -> Path:
    """What the run with a seed prints."""
    return trial / f"seed-{seed}.log"


class Run:
    """A living run. It saves and ends when this process ends, however that happens.

    Args:
        trial: Folder of the trial, which holds its configuration.
        seed: Seed of the run.
        cores: The run sees these cores alone, and sizes itself to them.

    Attributes:
        folder: The run folder.
        asked: How often it was asked to end.
    """

    def __init__(self, trial: Path, seed: int, cores: Collection[int]) -> None:
        self.seed, self.folder = seed, run_folder(trial, seed)
        self._log = log_file(trial, seed)
        self.asked, self._deadline = 0, math.inf
        self._reports = Reports(self.folder)
        own = os.sched_getaffinity(0)
        os.sched_setaffinity(0, cores)
        try:
            with self._log.open("ab") as log:
                log.write(f"{BEGINS}\n".encode())
                log.flush()
                self._process = subprocess.Popen(
                    [sys.executable, "-m", GUARD, *command(trial, seed), "--log.display", "plain"],
                    stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT,
                    bufsize=0,
                    start_new_session=True,  # else a terminal's Ctrl-C would reach it besides the sweep's own request
                )  # fmt: skip
        finally:
            os.sched_setaffinity(0, own)
        self._stdin = cast(IO[bytes], self._process.stdin)

    def poll(self) -> int | None:
        """The exit status, or None while it lives. A run that takes too long to end is killed."""
        status = self._process.poll()
        if status is None and time.monotonic() > self._deadline:
            kill_tree(self._process.pid)
            status = self._process.wait()
        if status is not None:
            self._stdin.close()
        return status

    def end(self) -> None:
        """Ask it to save and end; the second time, to end at once."""
        self.asked += 1
        self._deadline = min(self._deadline, time.monotonic() + SAVING_S)
        with contextlib.suppress(BrokenPipeError, ValueError):  # it has ended
            self._stdin.write(b".")

    def new_reports(self, metric: str) -> list[tuple[int, float]]:
        """Env steps and values of a metric in the reports since the last call."""
        return self._reports.values(metric)

    def reason(self) -> str:
        """The last lines of its log, which say why it has failed."""
        lines = log_lines(self._log)
        return error_of(lines) or "\n".join(lines[-REASON_LINES:])


def log_lines(log: Path) -> list[str]:
    """The lines of a log that its last process has printed and that say anything; none if there is no log."""
    try:
        text = log.read_bytes().decode(errors="replace")
    except OSError:
        return []
    return [line for line in text.rpartition(BEGINS)[2].splitlines() if line.strip()]


def error_of(lines: Sequence[str]) -> str:
    """The last error of a log; empty if it has none."""
    errors = [at for at, line in enumerate(lines) if line.startswith("error:")]
    return "\n".join(lines[errors[-1] :][:REASON_LINES]) if errors else ""


def failure(trial: Path, seed: int) -> str:
    """Why the run with a seed has failed; empty if it has not, or is tried again."""
    folder = run_folder(trial, seed)
    summary = read_json(folder / SUMMARY)
    if is_held(folder) or summary.get("status", "failed") != "failed":
        return ""
    return error_of(log_lines(log_file(trial, seed))) or str(summary.get("error") or "")


def is_complete(folder: Path) -> bool:
    """Whether the run in a folder has been trained to its end."""
    return read_json(folder / SUMMARY).get("status") == "completed"


def env_steps(folder: Path) -> int:
    """Env steps of the run in a folder, by its last report; 0 if it has none."""
    return int(read_table(folder / METRICS).get(STEPS, [0])[-1])


class Reports:
    """The rows of a run's metrics.csv, which grows, and is written anew when it gets a column.

    Args:
        folder: The run folder.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / METRICS
        self._header, self._end, self._rows = b"", 0, 0

    def new(self) -> list[dict[str, str]]:
        """The rows that have been added since the last call. Of a file that has only grown nothing else is read."""
        try:
            with self._file.open("rb") as file:
                header, known = file.readline(), 0
                if header != self._header:
                    self._header, self._end, known = header, len(header), self._rows
                file.seek(self._end)
                text = file.read()
        except OSError:
            return []
        whole = text[: text.rfind(b"\n") + 1]  # a row may be half written
        lines = whole.decode().splitlines(keepends=True)[known:]
        self._end += len(whole)
        self._rows += len(lines)
        return list(csv.DictReader([header.decode(), *lines]))

    def values(self, metric: str) -> list[tuple[int, float]]:
        """Env steps and values of a metric in the rows that have been added since the last call."""
        steps = steps_column(metric)
        return [(int(row[steps]), float(row[metric])) for row in self.new() if row.get(metric)]


def curve(folder: Path, metric: str) -> list[tuple[int, float]]:
    """Env steps and values of a metric, in the order of the reports.

    What a run that was killed had reported beyond the checkpoint from which it went on is left out.
    """
    steps, values = Curve(folder.name, read_table(folder / METRICS)).series(steps_column(metric), metric)
    return list(zip(map(int, steps), values.tolist(), strict=True))


def unscored(seed: int, objective: Objective) -> str:
    """Why a run that was trained to its end has no value."""
    evaluated = objective.metric.startswith(EVALUATIONS)
    late = "no evaluation was done in time, and a short run has none at its end; give base.eval.every"
    return f"seed {seed}: no report has {objective.metric}; {late if evaluated else 'no episode may have ended'}"


def score(folder: Path, objective: Objective) -> float:
    """The value of a run; NaN if nothing was reported. Of a run that was evaluated at its end alone, that counts."""
    reports = curve(folder, objective.metric)
    if not reports and objective.metric.startswith(EVALUATIONS):
        final = read_json(folder / EVALUATION).get(objective.metric.removeprefix(EVALUATIONS))
        return float(final) if is_number(final) else math.nan
    return objective.of_run(reports)
