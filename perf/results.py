"""perf/RESULTS.md and perf/LEARNING.md, made of the raw runs in perf/data/*.csv.

    python -m perf.results            # writes them
    python -m perf.results --check    # exit status 1 if they are not what the data make

RESULTS.md is made here, LEARNING.md by :mod:`perf.learning_results`.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from perf import lag_curves, learning_results
from perf.tables import FOLDER, Row, distinct, figure, newest, numbers, read, select, summary, table

RESULTS, LEARNING = FOLDER / "RESULTS.md", FOLDER / "LEARNING.md"
PEERS = ("Sample Factory", "SB3", "torchrl", "PufferLib", "RLlib")
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
LEAST_LINES = 3
"""Of a machine's table: one of a header and a single workload is left to the data."""
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
    pages = {RESULTS: report(), LEARNING: learning_results.report(read)}
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
