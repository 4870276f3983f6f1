"""Display of a run on the terminal or in a notebook: a live panel, one plain line per report, or nothing."""

from __future__ import annotations

import contextlib
import math
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from sfactory.errors import clock, discard_output, escape_unencodable, thousands
from sfactory.telemetry.metrics import METRICS, Metric, Report
from sfactory.telemetry.notebook import MOST_POINTS, NotebookView, in_notebook
from sfactory.telemetry.sparkline import History, sparkline

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live
    from rich.progress_bar import ProgressBar
    from rich.table import Table

_SPEEDS = 6
"""Reports with new env steps over which the speed for the estimate of the remaining time is averaged."""
_WIDTH = 100
"""Width of the live panel on a wide terminal, in characters."""
_NARROW = 70
"""Below this width the live panel has one column."""
_AROUND_CURVE = 14
"""Characters of the panel's width that the curve of returns leaves to its name and to the frame."""
_EXTRAS = 8
"""Most extras that are shown. TensorBoard has all of them."""


class Display:
    """Shows reports on standard output, as long as somebody can read it.

    The live panel is redrawn only on updates, without a thread, and the cursor stays visible. So the terminal stays
    intact however the process ends.

    Args:
        mode: live, plain or none; auto is live in a notebook and on a terminal that can go back to a line, and plain
            elsewhere.
        title: Name of the run.
        steps: Env steps to train for.
        slots: Slots of the arena; 0 where there is none.
        max_lag: The bound on the policy lag, in learner updates.
        console: Where to draw the live panel; None: standard output.

    Attributes:
        returns: Mean returns of the reports so far.
    """

    def __init__(
        self,
        mode: Literal["auto", "live", "plain", "none"],
        *,
        title: str,
        steps: int,
        slots: int,
        max_lag: int,
        console: Console | None = None,
    ) -> None:
        notebook = in_notebook()
        escape_unencodable()
        self.mode = mode if mode != "auto" else "live" if notebook or _on_terminal() else "plain"
        self._title = title
        self._steps = steps
        self._slots = slots
        self._max_lag = max_lag
        self._trained: deque[tuple[float, int]] = deque(maxlen=_SPEEDS + 1)
        self.returns = History()
        self._evaluation = math.nan
        self._console = console
        self._live: Live | None = None
        self._notebook = NotebookView(title) if notebook else None

    def update(self, report: Report) -> None:
        """Show a report."""
        self._note_progress(report)
        self.returns.add(report.env_steps, report.episode_return_mean)
        if not math.isnan(report.eval_return_mean):
            self._evaluation = report.eval_return_mean
        with self._while_read():
            if self.mode == "plain":
                print(self._line(report), flush=True)
            elif self.mode == "live" and self._notebook is not None:
                self._notebook.show(*self._cells(report), self.returns.points(MOST_POINTS))
            elif self.mode == "live":
                self._running().update(self._panel(report), refresh=True)

    def note(self, text: str) -> None:
        """Show a line of text, above the live panel."""
        with self._while_read():
            if self.mode == "plain" or (self.mode == "live" and self._notebook is not None):
                print(text, flush=True)
            elif self.mode == "live":
                self._running().console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        """Leave the last panel on the terminal, with the cursor below it. May be called twice."""
        with self._while_read():
            if self._live is not None:
                self._live.stop()
                self._live = None

    @contextlib.contextmanager
    def _while_read(self) -> Iterator[None]:
        """Show nothing more after the terminal was closed, or the program that read a pipe has ended: the run goes on
        without."""
        try:
            yield
        except (OSError, SystemExit):  # by which rich ends a program that nobody reads
            self.mode, self._live = "none", None
            with contextlib.suppress(OSError):
                discard_output()

    def _running(self) -> Live:
        if self._live is None:
            from rich.live import Live

            from sfactory.telemetry.console import new_console

            self._live = Live(console=self._console or new_console(), auto_refresh=False)
            self._live.start()
            self._live.console.show_cursor(True)
        return self._live

    def _note_progress(self, report: Report) -> None:
        """Keep when there were new env steps; a run that falls back to a checkpoint begins anew."""
        before = self._trained[-1][1] if self._trained else 0
        if report.env_steps < before:
            self._trained.clear()
        if report.env_steps != before:
            self._trained.append((report.wall_s, report.env_steps))

    def _left_s(self, report: Report) -> float:
        speed = report.fps
        if len(self._trained) > 1:
            (begin_s, begin), (end_s, end) = self._trained[0], self._trained[-1]
            speed = (end - begin) / (end_s - begin_s) if end_s > begin_s else math.nan
        return max(0, self._steps - report.env_steps) / speed if speed > 0 else math.nan

    def _share(self, report: Report) -> float:
        return min(1.0, report.env_steps / self._steps)

    def _lag(self, report: Report) -> str:
        return f"{_number(report.policy_lag_mean)} (max {_number(report.policy_lag_max)} of {self._max_lag})"

    def _line(self, report: Report) -> str:
        parts = [
            clock(report.wall_s),
            f"{thousands(report.env_steps)} env steps ({self._share(report):.1%})",
            f"{thousands(report.fps)}/s",
            *([] if _steps_are_frames(report) else [f"{thousands(report.frames_per_s)} frames/s"]),
            f"return {_number(report.episode_return_mean)}",
            *([] if math.isnan(self._evaluation) else [f"evaluation {_number(self._evaluation)}"]),
            f"length {_number(report.episode_length_mean)}",
            f"lag {self._lag(report)}",
            f"left {clock(self._left_s(report))}",
            *(f"{name} {value}" for name, value in _extras(report)),
        ]
        return "  ".join(parts)

    def _cells(self, report: Report) -> tuple[str, list[tuple[str, str]]]:
        """What the notebook shows above the curve: a head, and labels with values."""
        head = (
            f"{self._share(report):.1%}: {self._progress(report)}, {clock(report.wall_s)} elapsed, "
            f"{clock(self._left_s(report))} left"
        )
        rows = [(each.label or "lowest, highest", self._text(each, report)) for each in self._shown(report)]
        return head, rows + _extras(report)

    def _progress(self, report: Report) -> str:
        return f"{thousands(report.env_steps)} of {thousands(self._steps)} env steps"

    def _panel(self, report: Report) -> RenderableType:
        from rich import box
        from rich.console import Group
        from rich.panel import Panel
        from rich.table import Table
        from rich.text import Text

        console = self._running().console
        width = min(_WIDTH, console.width)
        per_row = 1 if width < _NARROW else 2
        head = Table.grid(expand=True, padding=(0, 2))
        head.add_column(ratio=1, no_wrap=True)
        head.add_column(justify="right", no_wrap=True)
        head.add_row(_bar(self._share(report), 1.0), f"{self._share(report):.1%}")
        progress = Text(self._progress(report))
        times = f"{clock(report.wall_s)} elapsed, {clock(self._left_s(report))} left"
        if per_row == 2:
            head.add_row(progress, times)
        body = _grid(per_row, [self._results(report), self._load(report)])
        extras = _extras(report)
        half = -(-len(extras) // per_row)
        title = Text(f" {self._title} ", style="bold")
        points = [] if console.options.ascii_only else self.returns.means(max(2, width - _AROUND_CURVE))
        curve = sparkline(points)
        parts: list[RenderableType] = [head]
        if per_row == 1:
            parts += [progress, Text(times)]
        parts += ["", body]
        if extras:
            parts += ["", _grid(per_row, [_pairs(part) for part in (extras[:half], extras[half:]) if part])]
        if curve:
            parts += ["", Text.assemble(("return  ", "dim"), (curve, "cyan"))]
        return Panel(Group(*parts), title=title, title_align="left", box=box.ROUNDED, padding=(0, 1), width=width)

    def _results(self, report: Report) -> Table:
        return _pairs(
            [(each.label or "", self._text(each, report)) for each in self._shown(report) if each.section != "load"]
        )

    def _load(self, report: Report) -> Table:
        from rich.table import Table

        table = Table.grid(expand=True, padding=(0, 1))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(ratio=1)
        table.add_column(justify="right", no_wrap=True, min_width=5)
        for each in self._shown(report):
            if each.section == "load":
                table.add_row(each.label, self._gauge(each, report), self._text(each, report))
        return table

    def _shown(self, report: Report) -> list[Metric]:
        """Metrics that have a row; those of evaluations from the first one on, those of slots where there are any, and
        those of frames where they are no env steps."""
        evaluated = not math.isnan(self._evaluation)
        hidden = {"slots": not self._slots, "frames/s": _steps_are_frames(report)}
        shown = (each for each in METRICS if evaluated or each.section != "eval")
        return [each for each in shown if each.label is not None and not hidden.get(each.unit)]

    def _text(self, metric: Metric, report: Report) -> str:
        value = getattr(report, metric.name)
        if metric.name == "policy_lag_mean":
            return self._lag(report)
        if metric.name == "eval_return_mean":
            return _number(self._evaluation)
        if metric.name == "episode_return_min":
            return f"{_number(value)} to {_number(report.episode_return_max)}"
        if math.isnan(value):
            return "-"
        if metric.unit == "share":
            return f"{value:.0%}"
        if metric.unit == "slots":
            return f"{value}/{self._slots}"
        if metric.unit == "MiB":
            return f"{thousands(value)} MiB"
        return thousands(value) if isinstance(value, int) or metric.unit.endswith("/s") else _number(value)

    def _gauge(self, metric: Metric, report: Report) -> RenderableType:
        value = getattr(report, metric.name)
        if metric.unit == "share":
            return _bar(0.0 if math.isnan(value) else min(1.0, value), 1.0)
        return _bar(value, self._slots) if metric.unit == "slots" else ""


def _on_terminal() -> bool:
    from sfactory.telemetry.console import new_console

    return sys.stdout.isatty() and not new_console().is_dumb_terminal


def _steps_are_frames(report: Report) -> bool:
    return report.frames == report.env_steps


def _grid(per_row: int, cells: Sequence[RenderableType]) -> Table:
    """Cells of the same width, so many in a row."""
    from rich.table import Table

    grid = Table.grid(expand=True, padding=(0, 3))
    for _ in range(per_row):
        grid.add_column(ratio=1)
    for first in range(0, len(cells), per_row):
        grid.add_row(*cells[first : first + per_row])
    return grid


def _bar(completed: float, total: float) -> ProgressBar:
    from rich.progress_bar import ProgressBar

    return ProgressBar(
        total=total, completed=completed, style="bright_black", complete_style="cyan", finished_style="cyan"
    )


def _extras(report: Report) -> list[tuple[str, str]]:
    return [(name, _number(value)) for name, value in list(report.extras.items())[:_EXTRAS]]


def _pairs(rows: list[tuple[str, str]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(expand=True, padding=(0, 1))
    table.add_column(style="dim", no_wrap=True, max_width=20)
    table.add_column(ratio=1, justify="right", no_wrap=True)
    for name, value in rows:
        table.add_row(Text(name), Text(value))
    return table


def _number(value: float) -> str:
    """Four significant digits, without an exponent where that is short."""
    if math.isnan(value):
        return "-"
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:.4g}"
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.3e}"
