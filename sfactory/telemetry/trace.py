"""Traces: timelines of all processes on one clock, as a file for ui.perfetto.dev or chrome://tracing.

Every stopwatch reads CLOCK_MONOTONIC, which all processes of a machine share. A tracing process keeps its last laps in
memory and writes them when it ends; :func:`write_trace` merges the laps of all processes.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from sfactory.files import write_atomically
from sfactory.telemetry.stopwatch import PHASES, ProcessBusyTime, Stopwatch

LAPS_KEPT = 200_000
"""Most laps kept by each worker, 9 bytes each."""
_NUMBER = {name: i for i, name in enumerate(PHASES)}


class TracingStopwatch(Stopwatch):
    """A stopwatch that keeps its last laps and writes them when it is closed.

    Args:
        row: As for :class:`Stopwatch`.
        path: The npz file to write: ``ends`` float64 ``[n]`` in monotonic seconds, in order, and ``phases`` uint8
            ``[n]``, indices of PHASES. A lap begins where the previous one ends, so the first one only marks the begin
            of the second.
        busy_time: As for :class:`Stopwatch`.
    """

    def __init__(self, row: np.ndarray, path: Path, busy_time: ProcessBusyTime | None = None) -> None:
        super().__init__(row, busy_time)
        self._path = path
        self._ends, self._phases = array("d", bytes(8 * LAPS_KEPT)), array("B", bytes(LAPS_KEPT))
        self._ends[0] = self._last
        self._laps = 1

    def lap(self, phase: str) -> None:
        super().lap(phase)
        place = self._laps % LAPS_KEPT
        self._ends[place] = self._last
        self._phases[place] = _NUMBER[phase]
        self._laps += 1

    def close(self) -> None:
        super().close()
        order = np.arange(max(0, self._laps - LAPS_KEPT), self._laps) % LAPS_KEPT
        np.savez(self._path, ends=np.array(self._ends)[order], phases=np.array(self._phases)[order])


def write_trace(
    file: Path,
    parts: Path,
    names: Sequence[str],
    begin: float,
    end: float,
    levels: Mapping[str, Sequence[tuple[float, float]]],
) -> None:
    """Write one file in Chrome's trace event format (JSON object with ``traceEvents``) from the laps of all workers.

    Args:
        file: The file to write.
        parts: Folder with the npz file of every worker.
        names: Names of the workers, in the order in which they are shown. A killed one has no file and shows no laps.
        begin, end: Interval to write, in monotonic seconds. Times in the file count from `begin`.
        levels: Values over time by name, as (monotonic seconds, value), for example lengths of queues.

    Raises:
        OSError: If the file cannot be written.
    """
    events: list[dict] = []
    for number, name in enumerate(names, 1):
        events.append({"ph": "M", "name": "process_name", "pid": number, "args": {"name": name}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": number, "args": {"sort_index": number}})
        if (part := parts / f"{name}.npz").exists():
            events += _laps(part, number, begin, end)
    for name, values in levels.items():
        events += (
            {"ph": "C", "name": name, "pid": 0, "ts": _us(at - begin), "args": {name: value}} for at, value in values
        )
    write_atomically(file, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}).encode())


def _laps(part: Path, process: int, begin: float, end: float) -> Iterator[dict]:
    with np.load(part) as arrays:
        ends, phases = arrays["ends"], arrays["phases"]
    begins, ends, phases = ends[:-1], ends[1:], phases[1:]
    inside = (begins >= begin) & (ends <= end)
    for lap_begin, lap_end, phase in zip(
        begins[inside].tolist(), ends[inside].tolist(), phases[inside].tolist(), strict=True
    ):
        yield {
            "ph": "X", "name": PHASES[phase], "pid": process, "tid": process, "ts": _us(lap_begin - begin),
            "dur": _us(lap_end - lap_begin),
        }  # fmt: skip


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)
