"""perf/RESULTS.md and perf/LEARNING.md, made of the raw runs in perf/data/*.csv.

    python -m perf.results            # writes them
    python -m perf.results --check    # exit status 1 if they are not what the data make

`perf.fps`, `perf.peers` and `perf.learning` append their runs to the tables with `--record`, through :func:`record`.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import os
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from perf import lag_curves
from perf.references import REFERENCES, Reference
from sfactory.runs.curves import bootstrap_interval, interquartile_mean

FOLDER = Path(__file__).resolve().parent
DATA, RESULTS, LEARNING = FOLDER / "data", FOLDER / "RESULTS.md", FOLDER / "LEARNING.md"
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
PEERS = ("Sample Factory", "SB3", "torchrl", "PufferLib", "RLlib")
HERE = ("SB3", "Sample Factory")
"""Peers that learn the references, too."""
WORKLOADS = (
    "cartpole", "cartpole-lstm", "cartpole-gru", "cartpole-singles", "cartpole-native", "pong", "pong-lstm", "pong-gru",
    "halfcheetah", "halfcheetah-envpool", "vizdoom-basic", "gridworld", "taxi",
    "cartpole-preset", "lunarlander-preset", "hopper-preset", "pong-preset",
)  # fmt: skip
"""Those of perf/fps.py in its order, which is that of the tables."""
NEWCOMERS = ("gridworld", "taxi", "spread", "computing", "waiting", "chase")
"""Environments that no trainer knows, in a table of their own."""
COSTS = ("cartpole", "pong", "halfcheetah")
"""Workloads whose core time is shown; costs.csv has others, too."""
WHERE = ("run", "ceiling", "bound")
"""Whose core time it is: of a whole run, of the part alone, or of what the part cannot do without."""
PLACES = ("--runs", "--venvs", "--json")
"""Flags that say where things lie on a machine: no row names them."""
LEAST_LINES = 3
"""Of a machine's table: one of a header and a single workload is left to the data."""
STARTED = datetime.datetime.now(datetime.UTC)

Row = Mapping[str, str]

METHOD = """\
# Results

`python -m perf.results` makes this file of perf/data/*.csv; [docs/decisions](../docs/decisions/README.md) says why.

## Method

A cell is the median of the newest session, with range and runs in brackets. Machines are shared, so ratios count; they
are named by maker and widest instructions; AVX-512 bf16 and AMX multiply bfloat16. No GPU, torch 2.13, NumPy 2.4.
"""
THROUGHPUT = """\
## Throughput

Beside peers: in the rounds of Sample Factory. A peer's cell: its speed, and how many times as fast sfactory was in the
same round. CartPole is Gymnasium's vector environment for sfactory and PufferLib, single environments for others.
"""
NEWCOMERS_METHOD = """\
**Environments that no trainer knows** ([039](../docs/decisions/039-newcomers.md)), 32 updates of a batch or one: times
"""
LEARNING_METHOD = """\
# Learning references

`python -m perf.results` makes this file of perf/data/learning.csv; `make learn` fills that, and goes on where it was
interrupted. Presets alone, with seeds that tuned nothing, but that `loss.tv_limit` was chosen on seeds 11 and 12 of
hopper, lunarlander and cartpole-lstm ([docs/lag.md](../docs/lag.md)). Peers have the settings of their documentation or
zoo (`python -m perf.learning --peer`); their seconds include start and evaluation. A seed's score is the mean of 50
evaluation episodes (20 before November 2026) by the most probable actions, in Atari by drawn ones, as where the
published scores come from; a cell is the interquartile mean over seeds (the mean of fewer than four), with its 95 %
bootstrap interval and the number of seeds. Seconds are of a shared machine, often beside other runs. The last column
has the commit of the runs, or the first and the last of several between which what trains has not changed.
`sfactory plot perf/data/learning/hopper-*.csv` draws the curves.
"""
COMPARED = "evaluation, 400 episodes"
COMPARED_METHOD = """\
## Settings compared

400 evaluation episodes from the same starts, for each of seeds 101 to 110: `python -m sfactory.train --env Pendulum-v1
--steps 200000 --seed SEED --run RUN` with the flags, then `python -m sfactory.eval --run RUN --episodes 400 --seed 7`.
A start has failed that returns less than -700.
"""
METHODS = (
    (
        "throughput", "env steps trained on by seconds, from when twice the content of all slots has been trained on",
        "`python -m perf.fps`", "throughput.csv",
    ),
    (
        "ceiling", "core time of simulation, inference and training, each alone on all cores, caches warm; by turns "
        "with the runs", "`python perf/ceiling.py`", "throughput.csv, costs.csv",
    ),
    (
        "peers", "all trainers in turn, each at the fastest setting that a search found (perf/peer_settings.py); "
        "sfactory with the model, rollout and epochs of Sample Factory's", "`python -m perf.peers`", "peers.csv",
    ),
    (
        "time to score", "from the command to the end of an evaluation (CartPole), or to a mean of 20 training "
        "episodes (all others; sfactory's of all in half a second where those are more), since November 29 not of the "
        "first 100", "`python -m perf.peers --to-score`",
        "time_to_score.csv",
    ),
    (
        "learning", "presets, seeds that tuned nothing: [LEARNING.md](LEARNING.md)", "`python -m perf.learning`",
        "learning.csv, learning/",
    ),
    ("forced lag", "training return over the last quarter, means of seeds from 21 on", "`python -m perf.lag`", "lag/"),
    ("core time in a run", "by kind of worker", "`python -m sfactory.profile`", "costs.csv"),
    ("kernels", "speed with all kernels by that without one, or without any", "`python -m perf.gains`", "gains.csv"),
    (
        "parts alone", "kernels, queues, memory", "`python -m perf.kernels`, `perf.queues`, `perf.scaling`",
        "kernels.csv, queues.csv, memory.csv",
    ),
)  # fmt: skip


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


def throughput(machine: str, runs: Sequence[Row], peers: Sequence[Row]) -> list[str]:
    """Each workload's newest speed, its share of the ceiling, and the peers in the same rounds. One without peers is
    shown where it was measured last."""
    rows = []
    for workload in dict.fromkeys((*WORKLOADS, *distinct(runs, "workload"))):
        mine = newest(select(runs, machine=machine, workload=workload))
        beside = [] if workload in NEWCOMERS else select(peers, machine=machine, workload=workload)
        main = newest([row for row in select(beside, trainer=PEERS[0], setting="best") if row["ratio"]])
        session = main[0]["session"] if main else ""
        own = numbers(select(beside, session=session, trainer="sfactory", setting="throughput"), "env_steps_per_s")
        if beside or (mine and mine == newest(select(runs, workload=workload))):
            others = [peer_cell(select(beside, trainer=peer, setting="best")) for peer in PEERS]
            rows.append([workload, *alone(mine), f"{figure(statistics.median(own))}" if own else "", *others])
    header = ("workload", "env steps/s", "ceiling", "share", "beside peers", *PEERS)
    return table(header, rows)


def newcomers(peers: Sequence[Row]) -> list[str]:
    """Environments that no trainer knows, in their newest sessions: with the defaults, and with one epoch of one
    minibatch, as peers have."""
    rows = []
    for workload in NEWCOMERS:
        here = newest(select(peers, workload=workload))
        defaults, single = (
            numbers(select(here, trainer="sfactory", setting=setting), "env_steps_per_s")
            for setting in ("throughput", "same")
        )
        cells = [summary(defaults), summary(single)]
        for peer in ("SB3", "Sample Factory"):
            speeds = numbers(select(here, trainer=peer, setting="best"), "env_steps_per_s")
            times = [
                f"{statistics.median(own) / statistics.median(speeds):.3g}" for own in (defaults, single) if speeds
            ]
            cells.append(f"{figure(statistics.median(speeds))}: {times[0]} x, {times[1]} x" if speeds else "")
        rows.append([workload, *cells])
    return table(("workload", "defaults", "one epoch", "SB3", "Sample Factory"), rows)


def alone(runs: Sequence[Row]) -> tuple[str, str, str]:
    """A session's speed, ceiling, and the share of it: of the medians, or as reported where no ceiling was."""
    speeds, ceilings = numbers(runs, "env_steps_per_s"), numbers(runs, "ceiling")
    if not speeds:
        return "", "", ""
    count = sum(int(row["runs"] or 1) for row in runs)
    shares = numbers(runs, "fraction_of_ceiling")
    share = statistics.median(speeds) / statistics.median(ceilings) if ceilings else None
    if share is None and shares:
        share = statistics.median(shares)
    ceiling = figure(statistics.median(ceilings)) if ceilings else ""
    return summary(speeds, count), ceiling, "" if share is None else f"{share:.0%}"


def peer_cell(rows: Sequence[Row]) -> str:
    """A peer's newest speed and by how much sfactory was faster, with the range over rounds."""
    rows = newest([row for row in rows if row["ratio"]])
    ratios, speeds = numbers(rows, "ratio"), numbers(rows, "env_steps_per_s")
    if not ratios:
        return ""
    low, high = min(ratios), max(ratios)
    spread = f", {low:g} to {high:g}" if low != high else ""
    return f"{figure(statistics.median(speeds)) + ': ' if speeds else ''}{statistics.median(ratios):.3g} x{spread}"


def scores(runs: Sequence[Row]) -> list[str]:
    """Seconds to a target, each trainer's newest session, where sfactory has been measured more than once, or
    nowhere else."""
    rows = []
    for machine in distinct(runs, "machine"):
        for workload in distinct(runs, "workload"):
            here = select(runs, machine=machine, workload=workload)
            sessions = [newest(select(here, trainer=trainer)) for trainer in ("sfactory", *PEERS)]
            cells = [score_cell(session) for session in sessions]
            if len(sessions[0]) > 1 or here == select(runs, workload=workload):
                notes = "; ".join(row["note"] for session in sessions for row in session)
                limits = sorted(set(re.findall(r"not in (\d+) s", notes)), key=int)
                name = f"{workload}, {figure(float(here[-1]['target']))}"
                rows.append([machine, name, *cells, " or ".join(limits)])
    trainers = (f"{trainer}, s" for trainer in ("sfactory", *PEERS))
    return table(("machine", "workload, target", *trainers, "missed: not in, s"), rows)


def score_cell(runs: Sequence[Row]) -> str:
    """Seconds of the runs that reached the target, and how many did not."""
    reached = [row for row in runs if row["seconds"] and float(row["score"] or "inf") >= float(row["target"])]
    missed = len(runs) - len(reached)
    parts = [summary(numbers(reached, "seconds"))] if reached else []
    return "; ".join(parts + ([f"{missed} of {len(runs)} missed it"] if missed else []))


def score(rows: Sequence[Row]) -> str:
    """Interquartile mean over seeds, and in brackets its 95 % bootstrap interval and the number of seeds."""
    values = numbers(rows, "score")
    if not values:
        return ""
    columns = np.array(values)[:, None]
    mean, (low, high) = interquartile_mean(columns)[0], np.concatenate(bootstrap_interval(columns, [0] * len(values)))
    spread = f"{figure(low)} to {figure(high)}; " if low != high else ""
    return f"{figure(mean)} ({spread}{len(values)})"


def references(runs: Sequence[Row]) -> list[str]:
    """The newest scores of every reference beside those of peers run here, with those that have not been run."""
    rows = []
    for each in REFERENCES:
        found, sync = scores_of(runs, each, "sfactory"), scores_of(runs, each, "sfactory --sync")
        expected = f"{'at most ' if each.at_most else ''}{each.expected:g}"
        beside = [peer_score(scores_of(runs, each, peer)) for peer in HERE]
        cells = [score(found) or "not run", summary(numbers(found, "seconds")), score(sync), *beside, each.peer]
        older = ["by the most probable actions"] if each.sampled and "evaluation" in distinct(found, "measure") else []
        commits = sorted(distinct(found, "commit"), key=distinct(runs, "commit").index)
        span = " to ".join(dict.fromkeys([*commits[:1], *commits[-1:]]))
        origin = ", ".join([span, *distinct(found, "machine")[-1:], *older])
        rows.append([each.name, each.env_name, f"{each.steps:,}", expected, *cells, origin])
    header = (
        "reference", "environment", "env steps", "expected", "score", "seconds", "--sync",
        *(f"{peer} here" for peer in HERE), "published", "of",
    )  # fmt: skip
    return table(header, rows)


def scores_of(runs: Sequence[Row], reference: Reference, trainer: str) -> list[Row]:
    """The newest score of each seed in a reference.

    Args:
        trainer: sfactory, sfactory --sync, or one of `HERE`.
    """
    name, _, more = trainer.partition(" --")
    found = select(runs, env=reference.env, env_steps=str(reference.steps), trainer=name if more else trainer)
    if trainer in HERE:
        return newest_seeds([row for row in found if row["session"]])
    flags = (*reference.flags, *([f"--{more}"] if more else []))
    return newest_seeds(select(found, flags=" ".join(flags)), reference.same_since)


def peer_score(found: Sequence[Row]) -> str:
    """A peer's score and its median seconds."""
    return f"{score(found)}, {statistics.median(numbers(found, 'seconds')):,.0f} s" if found else ""


def newest_seeds(rows: Sequence[Row], since: str = "") -> list[Row]:
    """The last score of each seed, of the commit that the last row belongs to, or of all from `since` on."""
    commits = distinct(rows, "commit")
    counted = commits[commits.index(since) if since in commits else -1 :]
    return list({row["seed"]: row for row in rows if row["seed"] and row["commit"] in counted}.values())


def small_tasks(runs: Sequence[Row]) -> list[str]:
    """The newest scores of other tasks that have an expected score."""
    held = [row for row in runs if row["expected"] and row["env"] not in {each.env for each in REFERENCES}]
    rows = []
    for env, flags in dict.fromkeys((row["env"], row["flags"]) for row in held):
        here = newest(select(held, env=env, flags=flags))
        cells = [figure(float(here[0]["env_steps"])), here[0]["expected"], score(here)]
        rows.append([f"{env} {flags}".strip(), *cells, ", ".join(distinct(here, "seed"))])
    return table(("task", "env steps", "expected", "score", "seeds"), rows)


def settings(runs: Sequence[Row]) -> list[str]:
    """What seeds reached with settings or code that were compared over more episodes than a reference has."""
    held = [row for row in runs if row["measure"] == COMPARED]
    rows = []
    for env, flags, commit in dict.fromkeys((row["env"], row["flags"], row["commit"]) for row in held):
        here = select(held, env=env, flags=flags, commit=commit)
        failed = sum(int(row["note"].split()[0]) for row in here)
        rows.append([env, flags, here[0]["env_steps"], commit, score(here), f"{failed}"])
    return table(("environment", "flags", "env steps", "commit", "score", "starts that failed"), rows)


def learning_report(load: Callable[[str], Sequence[Row]]) -> str:
    """All of LEARNING.md."""
    runs = load("learning")
    lines = [*LEARNING_METHOD.splitlines(), "", *references(runs), "", "## Small tasks, defaults alone", ""]
    lines += ["`python -m pytest tests/test_small_tasks.py` (seed 11), and other seeds.", "", *small_tasks(runs)]
    lines += ["", *COMPARED_METHOD.splitlines(), "", *settings(runs)]
    return "\n".join(lines) + "\n"


def costs(workload: str, rows: Sequence[Row]) -> list[str]:
    """The parts of a workload's env step in its newest session: in a run, and alone as the ceiling counts them."""
    sessions = [row for row in rows if row["workload"] == workload and row["where"] != "bound"]
    here = select(rows, workload=workload, session=sessions[-1]["session"])
    lines = []
    for part in distinct(here, "part"):
        found = {row["where"]: row for row in here if row["part"] == part}
        notes = dict.fromkeys(note for row in found.values() for note in row["note"].split("; "))
        lines.append([part, *(span(found.get(where)) for where in WHERE), "; ".join(filter(None, notes))])
    title = ", ".join(filter(None, [workload, here[0]["machine"]]))
    return table((title, "in a run", "alone", "at least", "note"), lines)


def span(row: Row | None) -> str:
    """A value or a range."""
    if row is None:
        return ""
    return row["low"] if row["low"] == row["high"] else f"{row['low']} to {row['high']}"


def lag(data: Path = lag_curves.DATA) -> list[str]:
    """Mean scores under forced lag, in batches, without and with the limit on the total variation."""
    tasks = sorted({curve.name.split(".")[0] for curve in data.glob("*.mended.*.csv")})
    found = lag_curves.scores(data, tasks, ("no-tv", "mended"))

    def cell(task: str, lag: int) -> str:
        return ", ".join(figure(statistics.fmean(found[task, variant, lag])) for variant in ("no-tv", "mended"))

    header = ("task", *(f"lag {lag}" for lag in lag_curves.LAGS))
    return table(header, ([task, *(cell(task, lag) for lag in lag_curves.LAGS)] for task in tasks))


def gains(rows: Sequence[Row]) -> list[str]:
    """By what each kernel makes a run faster, in each workload's newest session."""
    last = [row for workload in distinct(rows, "workload") for row in newest(select(rows, workload=workload))]
    kernels, workloads = distinct(last, "kernel"), distinct(last, "workload")

    def cell(workload: str, kernel: str) -> str:
        found = select(last, workload=workload, kernel=kernel)
        return f"{float(found[0]['with']) / float(found[0]['without']):.2f}" if found else ""

    header = ("workload", *("all" if kernel == "off" else kernel for kernel in kernels))
    return table(header, ([workload, *(cell(workload, kernel) for kernel in kernels)] for workload in workloads))


def report(load: Callable[[str], Sequence[Row]] = read) -> str:
    """All of RESULTS.md."""
    runs, peers, score_runs, spent, gained = map(load, ("throughput", "peers", "time_to_score", "costs", "gains"))
    lines = [*METHOD.splitlines(), "", *table(("figure", "how it is measured", "command", "data"), METHODS)]
    lines += ["", *THROUGHPUT.splitlines()]
    for machine in sorted({row["machine"] for row in runs}):
        if len(shown := throughput(machine, runs, peers)) > LEAST_LINES:
            lines += ["", f"**{machine}**", "", *shown]
    lines += ["", *NEWCOMERS_METHOD.splitlines(), "", *newcomers(peers)]
    lines += ["", "## Time to score", "", *scores(score_runs)]
    lines += ["", "## Forced lag in batches: without and with `loss.tv_limit`", "", *lag()]
    lines += ["", "## By what each kernel makes a run faster", "", *gains(gained)]
    lines += ["", "## Where the core time of an env step goes, in microseconds"]
    for workload in COSTS:
        lines += ["", *costs(workload, spent)]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Exit status 1 if the pages are checked and are not what the data make."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args()
    pages = {RESULTS: report(), LEARNING: learning_report(read)}
    stale = [page for page, text in pages.items() if not page.exists() or page.read_text() != text]
    if not args.check:
        for page in stale:
            page.write_text(pages[page])
        return 0
    for page in stale:
        print(f"{page} is not what perf/data makes; run python -m perf.results", file=sys.stderr)
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())
