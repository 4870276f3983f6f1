"""Display of a run on the terminal or in a notebook: a live panel, one plain line per report, or nothing."""

from __future__ import annotations

import contextlib
import math
import sys
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from sfactory.errors import clock, discard_output, thousands
from sfactory.telemetry.metrics import METRICS, Metric, Report
from sfactory.telemetry.notebook import MOST_POINTS, NotebookView, in_notebook
from sfactory.telemetry.sparkline import History, sparkline

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live
    from rich.progress_bar import ProgressBar
    from rich.table import Table

_SPEEDS = 6
"""Reports over which the speed for the estimate of the remaining time is averaged."""
_WIDTH = 100
"""Width of the live panel on a wide terminal, in characters."""
_AROUND_CURVE = 14
"""Characters of the panel's width that the curve of returns leaves to its name and to the frame."""
_EXTRAS = 8
"""Most extras that are shown. TensorBoard has all of them."""


class Display:
    """Shows reports on standard output, as long as somebody can read it.

    The live panel is redrawn only on updates, without a thread, and the cursor stays visible. So the terminal stays
    intact however the process ends.

    Args:
        mode: live, plain or none; auto is live on a terminal and in a notebook, and plain elsewhere.
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
        self.mode = mode if mode != "auto" else "live" if notebook or sys.stdout.isatty() else "plain"
        self._title = title
        self._steps = steps
        self._slots = slots
        self._max_lag = max_lag
        self._speeds: deque[float] = deque(maxlen=_SPEEDS)
        self.returns = History()
        self._evaluation = math.nan
        self._console = console
        self._live: Live | None = None
        self._notebook = NotebookView(title) if notebook else None

    def update(self, report: Report) -> None:
        """Show a report."""
        if not math.isnan(report.fps):
            self._speeds.append(report.fps)
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
        except OSError:
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

    def _left_s(self, report: Report) -> float:
        speed = sum(self._speeds) / len(self._speeds) if self._speeds else 0.0
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
            f"{thousands(report.frames_per_s)} frames/s",
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
        rows = [(each.label or "lowest, highest", self._text(each, report)) for each in self._shown()]
        return head, rows + _extras(report)

    def _progress(self, report: Report) -> str:
        return f"{thousands(report.env_steps)} of {thousands(self._steps)} env steps"

    def _panel(self, report: Report) -> RenderableType:
        from rich import box
        from rich.console import Group
        from rich.panel import Panel
        from rich.table import Table
        from rich.text import Text

        head = Table.grid(expand=True, padding=(0, 2))
        head.add_column(ratio=1, no_wrap=True)
        head.add_column(justify="right", no_wrap=True)
        head.add_row(_bar(self._share(report), 1.0), f"{self._share(report):.1%}")
        head.add_row(
            Text(self._progress(report)),
            f"{clock(report.wall_s)} elapsed, {clock(self._left_s(report))} left",
        )
        body = Table.grid(expand=True, padding=(0, 3))
        for _ in range(2):
            body.add_column(ratio=1)
        body.add_row(self._results(report), self._load(report))
        extras = _extras(report)
        if extras:
            half = (len(extras) + 1) // 2
            body.add_row("", "")
            body.add_row(_pairs(extras[:half]), _pairs(extras[half:]))
        title = Text(f" {self._title} ", style="bold")
        width = min(_WIDTH, self._running().console.width)
        curve = sparkline(self.returns.means(max(2, width - _AROUND_CURVE)))
        parts = [head, "", body, *(["", Text.assemble(("return  ", "dim"), (curve, "cyan"))] if curve else [])]
        return Panel(Group(*parts), title=title, title_align="left", box=box.ROUNDED, padding=(0, 1), width=width)

    def _results(self, report: Report) -> Table:
        return _pairs([(each.label, self._text(each, report)) for each in self._shown() if each.section != "load"])

    def _load(self, report: Report) -> Table:
        from rich.table import Table

        table = Table.grid(expand=True, padding=(0, 1))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(ratio=1)
        table.add_column(justify="right", no_wrap=True, min_width=5)
        for each in self._shown():
            if each.section == "load":
                table.add_row(each.label, self._gauge(each, report), self._text(each, report))
        return table

    def _shown(self) -> list[Metric]:
        """Metrics that have a row; those of evaluations from the first one on, those of slots where there are any."""
        evaluated = not math.isnan(self._evaluation)
        shown = (each for each in METRICS if evaluated or each.section != "eval")
        return [each for each in shown if each.label is not None and (self._slots or each.unit != "slots")]

    def _text(self, metric: Metric, report: Report) -> str:
        value = getattr(report, metric.name)
        if metric.name == "policy_lag_mean":
            return self._lag(report)
        if metric.name == "eval_return_mean":
            return _number(self._evaluation)
        if metric.name == "episode_return_min":
            return f"{_number(value)} to {_number(report.episode_return_max)}"
        if metric.unit == "share":
            return "-" if math.isnan(value) else f"{value:.0%}"
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
