"""``sfactory plot``: learning curves of runs as PNG and SVG."""

from __future__ import annotations

import logging
import re
import sys
import textwrap
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro

from sfactory.commands.runs import run_folders
from sfactory.errors import ConfigError, installing, telling_errors
from sfactory.runs.curves import (
    Curve,
    bootstrap_interval,
    interquartile_mean,
    read_curve,
    smoothed,
    steps_column,
)
from sfactory.runs.run_files import METRICS

DESCRIPTION = """Draw curves of run folders and CSV files. Runs of one group are seeds: the line is their interquartile
mean (with less than four, their mean), the band its 95 % interval by a stratified bootstrap."""
POINTS = 300
"""Points of a curve at which the runs of a group are compared."""
NEAR = 0.1
"""Share by which runs with one report each may differ in its place, and still share it."""
WAYS = ("config", "none")
IGNORED = re.compile(r"(seed|run|overwrite|(log|eval)\..*)$")
"""Settings by which groups do not differ."""
TYPES = (".png", ".svg", ".pdf")
LINES = "-", "--", ":", "-."
"""Kinds of lines, which tell groups apart where there are more than colours."""
PANEL = 4.8, 3.2
"""Inches."""
LEGEND_LINE, LEGEND_WIDTH = 0.18, 64
"""Inches by which a line of the legend makes the figure higher, and characters of one below each panel."""
_LONG_S = 2 * 3600.0, 300.0
"""Seconds from which a time is told in hours, and in minutes."""


@dataclass(frozen=True)
class Options:
    """What the command takes."""

    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN ...")]
    """Run folders, folders of runs, and CSV files with a column env_steps."""
    x: Literal["env_steps", "time"] = "env_steps"
    """The horizontal axis: env steps, or the wall time of training."""
    y: Annotated[tuple[str, ...], tyro.conf.arg(metavar="COLUMN ...")] = ("return_mean",)
    """Columns of metrics.csv, a panel for each; return_mean is short for episode_return_mean."""
    group: str = "config"
    """config: runs of one environment and configuration, whatever their seed; none: each run by itself; else a regular
    expression: runs in whose names it finds the same text (its first group, if it has one)."""
    out: str = "plot"
    """The file; without a suffix both FILE.png and FILE.svg."""
    smooth: float = 0.0
    """Share of the horizontal axis over which a running mean is taken, 0 to 1."""


@dataclass(frozen=True)
class Band:
    """A line with its interval.

    Attributes:
        label: Of its group.
        runs: How many runs it is of.
        x, line: float64 ``[n]``.
        interval: Its ends, ``[n]`` each; None for a single run.
    """

    label: str
    runs: int
    x: np.ndarray
    line: np.ndarray
    interval: tuple[np.ndarray, np.ndarray] | None


@telling_errors
def main(args: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        The exit status: 0 done, 2 if there is nothing to draw or it cannot be drawn.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    options = tyro.cli(Options, args=args, prog="sfactory plot", description=DESCRIPTION)
    for path in plot(options):
        print(path)
    return 0


def plot(options: Options) -> list[Path]:
    """Draw what the options ask for, and say on standard error what could not be shown.

    Returns:
        The files.

    Raises:
        ConfigError: If an option cannot work, or no run has anything to draw.
    """
    files = _files(options)
    curves = _filled(_read(options.runs))
    groups = grouped(curves, options.group)
    _draw(_panels(groups, options), options.x, files)
    return files


def _files(options: Options) -> list[Path]:
    """The files to write, after a check of the options."""
    if not options.runs:
        raise ConfigError("no run is named; name run folders or CSV files: sfactory plot runs/*")
    if not 0 <= options.smooth <= 1:
        raise ConfigError(f"smooth is {options.smooth:g}; it must be 0 to 1, a share of the horizontal axis")
    if not options.y:
        raise ConfigError("no column is named after --y; leave it out for returns")
    path = Path(options.out)
    if path.name in ("", ".."):
        raise ConfigError(f"out is {path}, a folder; name a file in it, for example {path / 'curves'}")
    if path.suffix and path.suffix not in TYPES:
        raise ConfigError(f"out is {path}; its suffix must be one of {', '.join(TYPES)}, or none for PNG and SVG")
    if not path.parent.is_dir():
        raise ConfigError(f"out is {path}, and there is no folder {path.parent}; make it, or name another file")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"plot needs matplotlib: {error}; {installing('plot')}") from error
    return [path] if path.suffix else [path.with_name(f"{path.name}{suffix}") for suffix in TYPES[:2]]


def _read(names: Sequence[str]) -> list[Curve]:
    """The curves of runs, of those below a folder that is none, and of files. What is neither is left out.

    Raises:
        ConfigError: If nothing is left.
    """
    curves: list[Curve] = []
    problems: list[str] = []
    for name in names:
        path = Path(name)
        alone = not path.is_dir() or (path / METRICS).exists()
        for run in [path] if alone else sorted(run_folders(path)) or [path]:
            try:
                curves.append(read_curve(run))
            except ConfigError as error:
                problems += error.problems
    if not curves:
        raise ConfigError(*problems)
    for problem in problems:
        _say(f"{problem.splitlines()[0].partition('; name ')[0]}; it is left out")
    return curves


def _filled(curves: Sequence[Curve]) -> list[Curve]:
    """The curves that have reports."""
    for curve in curves:
        if not curve.rows:
            _say(f"{curve.name} has no report{' yet' if curve.living else ''}, and is left out")
        elif curve.living:
            _say(f"{curve.name} still goes on; it is drawn as far as it has come")
    if not (found := [curve for curve in curves if curve.rows]):
        remedy = "wait for the first, or name others" if any(curve.living for curve in curves) else "name others"
        raise ConfigError(f"none of these runs has a report; {remedy}")
    return found


def column_of(curves: Sequence[Curve], name: str) -> str:
    """The column that a name means: itself, or the one of episodes.

    Raises:
        ConfigError: If no curve has it.
    """
    known = dict.fromkeys(column for curve in curves for column in curve.columns)
    for column in (name, f"episode_{name}"):
        if column in known:
            return column
    raise ConfigError(f"y is {name}, and no run has such a column; there are {', '.join(known)}")


def grouped(curves: Sequence[Curve], way: str) -> dict[str, list[Curve]]:
    """Curves by the label of their group.

    Args:
        way: config, none, or a regular expression.

    Raises:
        ConfigError: If it is no regular expression, or finds nothing.
    """
    if way == "none":
        return {f"{curve.name} ({i})" if _repeats(curves, i) else curve.name: [curve] for i, curve in enumerate(curves)}
    labels = _config_labels(curves) if way == "config" else _found_labels(curves, way)
    groups: dict[str, list[Curve]] = {}
    for label, curve in zip(labels, curves, strict=True):
        groups.setdefault(label, []).append(curve)
    return groups


def _repeats(curves: Sequence[Curve], index: int) -> bool:
    return any(curve.name == curves[index].name for curve in curves[:index])


def _config_labels(curves: Sequence[Curve]) -> list[str]:
    """The environment of each curve with the settings in which the curves of that environment differ."""
    labels = []
    for curve in curves:
        # files have no settings, which other curves would then not differ in
        alike = [o.settings for o in curves if o.env == curve.env and bool(o.settings) == bool(curve.settings)]
        shared = set.intersection(*map(set, alike))  # an older run lacks newer settings
        names = sorted(name for name in shared if not IGNORED.match(name))
        differing = [name for name in names if any(s[name] != alike[0][name] for s in alike[1:])]
        told = [f"{name} {_shown(curve.settings[name])}" for name in differing]
        labels.append(", ".join((curve.env, *told)))
    return labels


def _found_labels(curves: Sequence[Curve], pattern: str) -> list[str]:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ConfigError(
            f"group is {pattern}, which is no regular expression ({error}); use {', '.join(WAYS)} or another"
        ) from None
    found = [compiled.search(curve.name) for curve in curves]
    if not any(found):
        raise ConfigError(f"group is {pattern}, and no run's name has it: {', '.join(curve.name for curve in curves)}")
    return [
        curve.name if match is None else (match[1] or "" if compiled.groups else match[0])
        for curve, match in zip(curves, found, strict=True)
    ]


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _panels(groups: dict[str, list[Curve]], options: Options) -> dict[str, list[Band]]:
    """For each column that has values, a band for each group that has them.

    Raises:
        ConfigError: If no run has a column of that name, or none of the columns has values.
    """
    curves = [curve for group in groups.values() for curve in group]
    panels, empty = {}, []
    for y in options.y:
        column = column_of(curves, y)
        bands = [band_of(label, group, options.x, column, options.smooth) for label, group in groups.items()]
        if found := [band for band in bands if band is not None]:
            panels[y] = found
        else:
            empty.append(f"{column} by {_axis(options.x, column)}")
    if not panels:
        remedy = "wait for more reports, or name" if any(curve.living for curve in curves) else "name"
        raise ConfigError(f"there is no curve of {', nor of '.join(empty)}; {remedy} another column with --y")
    for column in empty:
        _say(f"there is no curve of {column}, which has no panel")
    return panels


def _axis(x: str, y: str) -> str:
    """The column of the horizontal axis."""
    return "wall_s" if x == "time" else steps_column(y)


def band_of(label: str, curves: Sequence[Curve], x: str, y: str, smooth: float) -> Band | None:
    """The curves of a group on common points, from where all of them have begun to where the shortest ends; None, and a
    line on standard error, where they have nothing in common.

    Args:
        label: Of the group.
        x: env_steps or time.
        y: A column of the curves.
        smooth: Share of the horizontal axis over which a running mean is taken.
    """
    series = []
    for curve in curves:
        horizontal, vertical = curve.series(_axis(x, y), y)
        if len(horizontal):
            series.append((curve, horizontal, vertical))
        else:
            _say(f"{curve.name} has no {y}, and is left out of its panel")
    if not series:
        return None
    begin, end = max(h[0] for _, h, _ in series), min(h[-1] for _, h, _ in series)
    longest = max(h[-1] for _, h, _ in series)
    shortest = min(series, key=lambda one: one[1][-1])[0]
    if end < (1 - NEAR) * begin:
        _say(f"the runs of {label} have no {x} in common; plot them with --group none")
        return None
    if end < 0.95 * longest:
        _say(f"{label}, {y}: drawn to {end:,.0f}, where {shortest.name} ends, of {longest:,.0f}; --group none has all")
    points = np.linspace(begin, end, POINTS) if end > begin else np.array([end])
    values = smoothed(np.stack([np.interp(points, h, v) for _, h, v in series]), smooth)
    if len(series) == 1:
        return Band(label, 1, points, values[0], None)
    interval = bootstrap_interval(values, [curve.env for curve, _, _ in series])
    return Band(label, len(series), points, interquartile_mean(values), interval)


def _draw(panels: dict[str, list[Band]], x: str, files: Sequence[Path]) -> None:
    from matplotlib import rcParams
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import EngFormatter

    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    counts = _run_counts(panels)
    told = {label: _legend_text(label, count, LEGEND_WIDTH * columns) for label, count in counts.items()}
    lines = sum(text.count("\n") + 1 for text in told.values())
    size = PANEL[0] * columns, PANEL[1] * rows + LEGEND_LINE * lines
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flat
    colours = len(rcParams["axes.prop_cycle"])
    styles = {label: _style(number, colours) for number, label in enumerate(counts)}
    unit, scale = _time_unit(panels) if x == "time" else ("", 1.0)
    for one, (y, bands) in zip(axes, panels.items(), strict=False):
        for band in bands:
            style, marker = styles[band.label], "o" if len(band.x) == 1 else None
            one.plot(band.x / scale, band.line, marker=marker, linewidth=1.5, **style)
            if band.interval is not None:
                one.fill_between(band.x / scale, *band.interval, color=style["color"], alpha=0.2, linewidth=0)
        one.set_xlabel(f"wall time, {unit}" if x == "time" else "env steps")
        one.set_ylabel(y.replace("_", " "), parse_math=False)
        if x != "time":
            one.xaxis.set_major_formatter(EngFormatter(sep=""))
        one.spines[["top", "right"]].set_visible(False)
        one.grid(alpha=0.3, linewidth=0.5)
    for unused in list(figure.axes)[len(panels) :]:
        unused.set_axis_off()
    handles = [Line2D([], [], label=text, **styles[label]) for label, text in told.items()]
    legend = figure.legend(handles=handles, loc="outside lower left", frameon=False, fontsize=8)
    for text in legend.get_texts():  # a name with dollar signs is no formula
        text.set_parse_math(False)
    for file in files:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Glyph .* missing from")
                figure.savefig(file, dpi=150)
        except OSError as error:
            raise ConfigError(f"cannot write {file}: {error.strerror}; name another file with --out") from error


def _style(number: int, colours: int) -> dict[str, Any]:
    """How the lines of a group are drawn."""
    return {"color": f"C{number % colours}", "linestyle": LINES[number // colours % len(LINES)]}


def _legend_text(label: str, count: int, width: int) -> str:
    """What the legend says of a group, in lines of at most so many characters."""
    return textwrap.fill(f"{label} ({count} runs)" if count > 1 else label, width)


def _run_counts(panels: dict[str, list[Band]]) -> dict[str, int]:
    """The most runs of each group in any panel."""
    counts: dict[str, int] = {}
    for band in (band for bands in panels.values() for band in bands):
        counts[band.label] = max(band.runs, counts.get(band.label, 0))
    return counts


def _time_unit(panels: dict[str, list[Band]]) -> tuple[str, float]:
    longest = max(band.x[-1] for bands in panels.values() for band in bands)
    hours, minutes = _LONG_S
    return ("hours", 3600.0) if longest >= hours else ("minutes", 60.0) if longest >= minutes else ("seconds", 1.0)


def _say(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
