"""The files that reports go to: metrics.csv, and TensorBoard's."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from sfactory.config import Config
from sfactory.errors import ConfigError
from sfactory.files import METRICS_FILE, append_whole, write_atomically
from sfactory.telemetry.metrics import METRICS, REQUIRED, Report, extras_by_name, scalars_by_steps
from sfactory.telemetry.tensorboard import EventFile

_COLUMNS = tuple(each.name for each in METRICS)
_ALWAYS_THERE = {f.name for f in dataclasses.fields(Report) if f.metadata and f.default is REQUIRED}
"""Columns without which a file is no metrics.csv of any sfactory."""
MOST_COLUMNS = 256
"""Of metrics.csv: an environment may give its extras ever new names."""


class MetricsWriter:
    """Appends reports to metrics.csv and, with `log.tensorboard`, to TensorBoard files in the run folder.

    A metrics.csv of another version of sfactory goes on: it gets the columns that it lacks, and keeps those that there
    are no more, empty in new rows.

    Args:
        run_folder: An existing folder.
        env_steps: Where a resumed run goes on. TensorBoard hides what was reported beyond; metrics.csv keeps every row.

    Raises:
        ConfigError: If the file to continue is no metrics.csv, or TensorBoard is wanted and not installed.
    """

    def __init__(self, run_folder: str | os.PathLike[str], config: Config, env_steps: int = 0) -> None:
        self._csv = Path(run_folder) / METRICS_FILE
        self._columns = _mend_csv(self._csv) if self._csv.exists() else _COLUMNS
        self._unwritten: list[dict[str, str]] = []
        self._events = EventFile(run_folder, env_steps) if config.log.tensorboard else None

    def write(self, report: Report) -> None:
        """Add one row; it is in the file when this returns. The first row brings the header, and an extra that has not
        been reported before its column.

        Raises:
            OSError: For example if the disk is full. metrics.csv has whole rows only, and gets those that it lacks the
                next time.
        """
        values = {name: getattr(report, name) for name in _COLUMNS} | extras_by_name(report)
        self._unwritten.append({name: _cell(value) for name, value in values.items()})
        self._add_columns([name for name in values if name not in self._columns])
        header = _csv_text(self._columns, [], header=True)
        append_whole(self._csv, _csv_text(self._columns, self._unwritten), header)
        self._unwritten.clear()
        if self._events is not None:
            self._events.write(scalars_by_steps(report))

    def _add_columns(self, names: Sequence[str]) -> None:
        """Write the file anew with further columns, of which it has at most :data:`MOST_COLUMNS`."""
        names = names[: max(0, MOST_COLUMNS - len(self._columns))]
        if not names:
            return
        columns = (*self._columns, *names)
        if self._csv.exists():
            rows = csv.DictReader(io.StringIO(self._csv.read_text()))
            write_atomically(self._csv, _csv_text(columns, rows, header=True))
        self._columns = columns


def _mend_csv(path: Path) -> Sequence[str]:
    """Make a metrics.csv fit to be continued: without the half row of a process that was killed while writing it, and
    with all columns.

    Returns:
        The columns of the file.
    """
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.truncate(path, whole)
    if not whole or data.startswith(_csv_text(_COLUMNS, [], header=True)):
        return _COLUMNS
    try:
        rows = csv.DictReader(io.StringIO(data[:whole].decode(errors="replace")))
        found = rows.fieldnames or []
        if not set(found) >= _ALWAYS_THERE or len(set(found)) < len(found):
            raise ConfigError(
                f"{path} has other columns than sfactory writes; move it away, or name another folder with --run"
            )
        columns = (*_COLUMNS, *(name for name in found if name not in _COLUMNS))
        if columns != tuple(found):
            write_atomically(path, _csv_text(columns, rows, header=True))
    except csv.Error as error:
        raise ConfigError(
            f"{path} cannot be continued ({error}); move it away, or name another folder with --run"
        ) from None
    return columns


def _csv_text(columns: Sequence[str], rows: Iterable[Mapping[str, str]], header: bool = False) -> bytes:
    """Rows as lines of a CSV file; cells that they lack are empty, and cells beyond the columns are left out."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def _cell(value: float | int) -> str:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.8g}"
    return str(value)
