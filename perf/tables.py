"""The raw runs in perf/data/*.csv, and Markdown of them.

`perf.fps`, `perf.peers`, `perf.learning` and others append their runs to the tables with `--record`, through
:func:`record`.
"""

from __future__ import annotations

import csv
import datetime
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
DATA = FOLDER / "data"
ORIGIN = ("commit", "date", "machine")
"""Of every row: the commit that was measured, or that reported the figure; its day; the class of the machine."""
TABLES: dict[str, tuple[str, ...]] = {
    "throughput": (
        *ORIGIN, "session", "command", "workload", "trainer", "runs", "env_steps_per_s", "ceiling",
        "fraction_of_ceiling", "note",
    ),
    "peers": (
        *ORIGIN, "session", "command", "workload", "trainer", "version", "setting", "round", "env_steps_per_s", "ratio",
        "note",
    ),
    "time_to_score": (
        *ORIGIN, "session", "command", "workload", "trainer", "version", "round", "target", "score", "seconds", "note",
    ),
    "learning": (
        *ORIGIN, "session", "command", "env", "flags", "trainer", "seed", "env_steps", "measure", "expected", "score",
        "seconds", "note",
    ),
    "changes": (*ORIGIN, "change", "workload", "quantity", "unit", "variant", "value", "note"),
    "gains": (*ORIGIN, "session", "command", "workload", "kernel", "without", "with"),
    "costs": (*ORIGIN, "session", "command", "workload", "part", "where", "low", "high", "note"),
    "kernels": (*ORIGIN, "command", "kernel", "size", "implementation", "value", "unit", "note"),
    "queues": (*ORIGIN, "command", "queue", "quantity", "unit", "value", "note"),
    "memory": (*ORIGIN, "session", "command", "env", "size", "quantity", "unit", "value", "note"),
}  # fmt: skip
"""Columns of each table. A session is what was measured together; sessions follow each other in the order of time. A
row is one run, or the median of as many as `runs` says. A ratio is sfactory's speed by the trainer's in one round. What
was not told is empty."""
PLACES = ("--runs", "--venvs", "--json")
"""Flags that say where things lie on a machine: no row names them."""
STARTED = datetime.datetime.now(datetime.UTC)

Row = Mapping[str, str]


def read(table: str, folder: Path = DATA) -> list[Row]:
    """All rows of a table, the oldest first."""
    with (folder / f"{table}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def machine_class(cpuinfo: str | None = None, cores: int | None = None) -> str:
    """What of this machine decides how fast it trains: the processor's maker, its widest instructions, its cores."""
    text = Path("/proc/cpuinfo").read_text() if cpuinfo is None else cpuinfo
    words = set(text.split())
    maker = "AMD" if "AuthenticAMD" in words else "Intel" if "GenuineIntel" in words else "other"
    widest = {"amx_tile": "AMX", "avx512_bf16": "AVX-512 bf16", "avx512f": "AVX-512", "avx2": "AVX2"}
    kind = next((name for flag, name in widest.items() if flag in words), "")
    if os.environ.get("ATEN_CPU_CAPABILITY") == "avx2" and kind != "AVX2":
        kind += " held to AVX2"
    cores = len(os.sched_getaffinity(0)) if cores is None else cores
    return f"{maker} {kind}".strip() + f", {cores} cores"


def record(table: str, rows: Iterable[Mapping[str, object]], program: str, folder: Path = DATA) -> None:
    """Append runs to a table, with where they come from; a session is one command.

    Args:
        rows: Columns besides those of where they come from; what is missing stays empty.
        program: Name of the module that was called.
    """
    describe = ["git", "describe", "--always", "--exclude", "*"]
    asked = subprocess.run(describe, cwd=FOLDER, capture_output=True, text=True)
    # What is recorded on the way makes the code no other.
    changes = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", ":/", ":(top,exclude)perf/data"], cwd=FOLDER)
    origin = {
        "commit": asked.stdout.strip() + "-dirty" * (changes.returncode == 1), "date": f"{STARTED:%Y-%m-%d}",
        "machine": machine_class(),
        "session": f"{STARTED:%Y-%m-%d %H:%M}", "command": shlex.join(("python", "-m", program, *_told(sys.argv[1:]))),
    }  # fmt: skip
    with (folder / f"{table}.csv").open("a", newline="") as file:
        writer = csv.DictWriter(file, TABLES[table], restval="", lineterminator="\n")
        writer.writerows({**origin, **row} for row in rows)


def _told(words: Sequence[str]) -> list[str]:
    """What of a command line a row tells."""
    told = [word for word in words if word != "--record" and not word.startswith(tuple(f"{flag}=" for flag in PLACES))]
    for flag in PLACES:
        while flag in told:
            del told[(at := told.index(flag)) : at + 2]
    return told


def newest(rows: Sequence[Row]) -> list[Row]:
    """The rows of the session that the last one belongs to."""
    return [row for row in rows if row["session"] == rows[-1]["session"]] if rows else []


def select(rows: Iterable[Row], **columns: str) -> list[Row]:
    """Rows with these values."""
    return [row for row in rows if all(row[name] == value for name, value in columns.items())]


def numbers(rows: Iterable[Row], column: str) -> list[float]:
    """The numbers of a column, without empty cells."""
    return [float(row[column]) for row in rows if row[column]]


def distinct(rows: Iterable[Row], column: str) -> list[str]:
    """The values of a column, in the order of their first appearance."""
    return list(dict.fromkeys(row[column] for row in rows))


def figure(value: float) -> str:
    """A number with as many digits as it deserves."""
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def summary(values: Sequence[float], runs: int | None = None) -> str:
    """Median, and in brackets the range and the number of runs."""
    if not values:
        return ""
    count = len(values) if runs is None else runs
    low, high = min(values), max(values)
    spread = f"{figure(low)} to {figure(high)}; " if low != high else ""
    return f"{figure(statistics.median(values))} ({spread}{count})"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of Markdown, without columns that are empty throughout."""
    rows = list(rows)
    kept = [i for i in range(len(header)) if any(row[i] for row in rows)]
    lines = [[header[i] for i in kept], ["---"] * len(kept), *([row[i] for i in kept] for row in rows)]
    return ["| " + " | ".join(cells) + " |" for cells in lines]
