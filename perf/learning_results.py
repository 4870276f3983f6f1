"""perf/LEARNING.md, made of the learning runs in perf/data; `python -m perf.results` writes it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import numpy as np

from perf.references import REFERENCES, Reference
from perf.tables import Row, distinct, figure, newest, numbers, select, summary, table
from sfactory.runs.curves import bootstrap_interval, interquartile_mean

HERE = ("SB3", "Sample Factory")
"""Peers that learn the references, too."""
METHOD = """\
# Learning references

`python -m perf.results` makes this file of perf/data/learning.csv; `make learn` fills that, and goes on where it was
interrupted. Presets alone, with seeds that tuned nothing, but that `loss.tv_limit` was chosen on seeds 11 and 12 of
hopper, lunarlander and cartpole-lstm ([docs/lag.md](../docs/lag.md)). Peers have the settings of their documentation or
zoo (`python -m perf.learning --peer`); their seconds include start and evaluation. Sample Factory documents MuJoCo for
10,000,000 env steps, and of Gymnasium's other tasks CartPole-v1 alone, whose setting is taken for them all. A seed's
score is the mean of 50 evaluation episodes (20 before November 2026) by the most probable actions, in Atari by drawn
ones, as where the published scores come from; a cell is the interquartile mean over seeds (the mean of fewer than
four), with its 95 % bootstrap interval and the number of seeds. Seconds are of a shared machine, often beside other
runs. The last column has the commit of the runs, or the first and the last of several between which what trains has
not changed.
`sfactory plot perf/data/learning/hopper-*.csv` draws the curves.
"""
COMPARED = "evaluation, 400 episodes"
COMPARED_METHOD = """\
## Settings compared

400 evaluation episodes from the same starts, for each of seeds 101 to 110: `python -m sfactory.train --env Pendulum-v1
--steps 200000 --seed SEED --run RUN` with the flags, then `python -m sfactory.eval --run RUN --episodes 400 --seed 7`.
A start has failed that returns less than -700.
"""


def report(load: Callable[[str], Sequence[Row]]) -> str:
    """All of LEARNING.md."""
    runs = load("learning")
    lines = [*METHOD.splitlines(), "", *references(runs), "", "## Small tasks, defaults alone", ""]
    lines += ["`python -m pytest tests/test_small_tasks.py` (seed 11), and other seeds.", "", *small_tasks(runs)]
    lines += ["", *COMPARED_METHOD.splitlines(), "", *settings(runs)]
    return "\n".join(lines) + "\n"


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


def newest_seeds(rows: Sequence[Row], since: str = "") -> list[Row]:
    """The last score of each seed, of the commit that the last row belongs to, or of all from `since` on."""
    commits = distinct(rows, "commit")
    counted = commits[commits.index(since) if since in commits else -1 :]
    return list({row["seed"]: row for row in rows if row["seed"] and row["commit"] in counted}.values())


def score(rows: Sequence[Row]) -> str:
    """Interquartile mean over seeds, and in brackets its 95 % bootstrap interval and the number of seeds."""
    values = numbers(rows, "score")
    if not values:
        return ""
    columns = np.array(values)[:, None]
    mean, (low, high) = interquartile_mean(columns)[0], np.concatenate(bootstrap_interval(columns, [0] * len(values)))
    spread = f"{figure(low)} to {figure(high)}; " if low != high else ""
    return f"{figure(mean)} ({spread}{len(values)})"


def peer_score(found: Sequence[Row]) -> str:
    """A peer's score and its median seconds."""
    return f"{score(found)}, {statistics.median(numbers(found, 'seconds')):,.0f} s" if found else ""


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
