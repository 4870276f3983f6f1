"""The learning curves of perf/data/learning, with peers beside them where they have run.

    python -m perf.learning_plots [--all | --only NAME ...] [--out FILE]

A panel for each reference that a peer has learned on this machine, too; with `--all` for every one, with `--only` for
those that are named. It shows training return against wall time, a line for each seed, and below it against env steps,
where lines are interquartile means over seeds with bootstrap intervals, as `sfactory plot` draws them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from perf import learning_results, tables
from perf.learning import CURVES, curve_name
from perf.references import BY_NAME, REFERENCES
from sfactory.commands.plot import band_of
from sfactory.runs.curves import Curve, read_curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FIGURE = Path("build/learning.svg")
TRAINERS = {"": "sfactory", "sync": "sfactory --sync", "sb3": "SB3", "sf": "Sample Factory"}
"""By the word in a curve's name."""
RETURN = "episode_return_mean"
Axis = Literal["time", "env_steps"]
AXES: dict[Axis, str] = {"time": "wall time, minutes", "env_steps": "env steps"}
SMOOTH = 0.03
PANEL = 3.1, 2.3
"""Inches."""
COLUMNS = 5
"""Most references beside one another."""

Curves = Mapping[str, Mapping[str, Sequence[Curve]]]
"""Of each reference, those of each trainer."""


def read(folder: Path) -> Curves:
    """The curves of the scores that LEARNING.md shows, as far as they have been kept."""
    runs, found = tables.read("learning"), {}
    for each in REFERENCES:
        by_trainer = {}
        for kind, trainer in TRAINERS.items():
            seeds = [row["seed"] for row in learning_results.scores_of(runs, each, trainer)]
            paths = [folder / f"{curve_name(each, kind, seed)}.csv" for seed in seeds]
            by_trainer[trainer] = [read_curve(path) for path in paths if path.exists()]
        if by_trainer := {trainer: curves for trainer, curves in by_trainer.items() if curves}:
            found[each.name] = by_trainer
    return found


def with_peers(curves: Curves) -> Curves:
    """The references that a peer has learned, too."""
    return {name: by_trainer for name, by_trainer in curves.items() if set(learning_results.HERE) & set(by_trainer)}


def draw(curves: Curves, out: Path) -> None:
    """Two panels, one above the other, for each reference."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import EngFormatter

    columns = min(len(curves), COLUMNS)
    rows = len(AXES) * -(-len(curves) // columns)
    figure = Figure(figsize=(PANEL[0] * columns, PANEL[1] * rows + 0.3), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    colours = {trainer: f"C{number}" for number, trainer in enumerate(TRAINERS.values())}
    for number, (name, by_trainer) in enumerate(curves.items()):
        for below, (axis, label) in enumerate(AXES.items()):
            panel = grid[len(AXES) * (number // columns) + below, number % columns]
            for trainer, seeds in by_trainer.items():
                _add(panel, trainer, seeds, axis, colours[trainer])
            panel.axhline(BY_NAME[name].expected, color="0.6", linewidth=0.8, linestyle=":")
            panel.set_xlabel(label)
            if axis == "time":
                panel.set_title(BY_NAME[name].env_name, fontsize=10)
            else:
                panel.xaxis.set_major_formatter(EngFormatter(sep=""))
            panel.spines[["top", "right"]].set_visible(False)
            panel.grid(alpha=0.3, linewidth=0.5)
    for unused in (panel for panel in grid.flat if not panel.lines):
        unused.set_axis_off()
    for row in grid:
        row[0].set_ylabel("training return")
    seen = [trainer for trainer in colours if any(trainer in by_trainer for by_trainer in curves.values())]
    handles = [Line2D([], [], color=colours[trainer], label=trainer) for trainer in seen]
    handles.append(Line2D([], [], color="0.6", linestyle=":", label="what the reference asks of an evaluation"))
    figure.legend(
        handles=handles, loc="outside lower center", ncols=min(len(handles), columns), frameon=False, fontsize=9
    )
    figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)


def _add(panel: Axes, trainer: str, seeds: Sequence[Curve], axis: Axis, colour: str) -> None:
    """A trainer's curves, apart against time: a busy machine stretches each by another factor."""
    groups = [[seed] for seed in seeds] if axis == "time" else [seeds]
    scale, width = (60.0, 1.0) if axis == "time" else (1.0, 1.5)
    for group in groups:
        if (band := band_of(trainer, group, axis, RETURN, SMOOTH)) is not None:
            panel.plot(band.x / scale, band.line, color=colour, linewidth=width)
            if band.interval is not None:
                panel.fill_between(band.x / scale, *band.interval, color=colour, alpha=0.2, linewidth=0)


def main() -> int:
    """Exit status 1 if there is nothing to draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--all", action="store_true", help="references without a peer's curve, too")
    which.add_argument("--only", nargs="+", choices=BY_NAME, metavar="NAME", default=())
    parser.add_argument("--out", type=Path, metavar="FILE", default=FIGURE)
    args = parser.parse_args()
    curves = read(CURVES)
    names = args.only or (curves if args.all else with_peers(curves))
    chosen = {name: curves[name] for name in names if name in curves}
    if not chosen:
        print("no such curves; python -m perf.learning --record, or --peer, makes them", file=sys.stderr)
        return 1
    args.out.parent.mkdir(parents=True, exist_ok=True)
    draw(chosen, args.out)
    print(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
