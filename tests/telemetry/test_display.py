"""What a user would lose: the one look that tells whether the run is well, or a usable terminal after it."""

from __future__ import annotations

import dataclasses
import io
import math
import os
import pty
import re
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from rich.console import Console

from sfactory.telemetry.display import Display
from sfactory.telemetry.metrics import Report

REPORT = Report(
    wall_s=65.0,
    env_steps=1_250_000,
    frames=5_000_000,
    fps=125_000.0,
    frames_per_s=500_000.0,
    episode_return_mean=195.31,
    episode_return_min=9.0,
    episode_return_max=500.0,
    episode_length_mean=201.5,
    policy_lag_mean=1.25,
    policy_lag_max=3.0,
    learner_updates=1205,
    rollout_busy=0.82,
    policy_busy=0.31,
    learner_busy=1.0,
    free_slots=4,
    finished_slots=2,
    extras={"success [x]": 0.51},
)
EARLY = Report(wall_s=0.0, env_steps=0, frames=0)


def display(mode: str, console: Console | None = None, slots: int = 12) -> Display:
    return Display(mode, title="CartPole-v1 [a]", steps=2_500_000, slots=slots, max_lag=7, console=console)


def live_text(width: int, *reports: Report, slots: int = 12) -> str:
    console = Console(file=io.StringIO(), record=True, width=width, force_terminal=True)
    shown = display("live", console, slots)
    for report in reports:
        shown.update(report)
    shown.close()
    return console.export_text().rpartition("╭")[2]


def test_the_live_panel_says_all_at_80_columns() -> None:
    text = live_text(80, EARLY, REPORT)
    for part in (
        "CartPole-v1 [a]",
        "50.0%",
        "1,250,000 of 2,500,000 env steps",
        "0:01:05 elapsed, 0:00:10 left",
        "125,000",
        "500,000",
        "195.3",
        "9 to 500",
        "201.5",
        "1.25 (max 3 of 7)",
        "82%",
        "31%",
        "100%",
        "4/12",
        "2/12",
        "success [x]",
        "0.51",
    ):
        assert part in text, part
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_narrow_terminal_shows_figures_whole() -> None:
    evaluated = dataclasses.replace(REPORT, eval_return_mean=77.5, rss_mb=math.nan)
    text = live_text(40, EARLY, evaluated)
    for part in (
        "1,250,000 of 2,500,000 env steps",
        "0:01:05 elapsed",
        "125,000",
        "500,000",
        "9 to 500",
        "77.5",
        "2/12",
    ):
        assert part in text, part
    assert "…" not in text and "- MiB" not in text


def test_frames_are_told_where_they_are_no_env_steps(capsys: pytest.CaptureFixture[str]) -> None:
    plain = display("plain")
    for frames, told in ((5_000_000, True), (REPORT.env_steps, False)):
        report = dataclasses.replace(REPORT, frames=frames)
        plain.update(report)
        assert ("frames/s" in capsys.readouterr().out) == ("frames/s" in live_text(80, report)) == told


def test_without_an_arena_no_slots_are_shown() -> None:
    assert "slots" in live_text(80, REPORT)
    assert "slots" not in live_text(80, REPORT, slots=0)


@pytest.mark.parametrize("width", [20, 40, 200])
@pytest.mark.parametrize("report", [EARLY, REPORT])
def test_other_terminals_and_unknown_figures_do_no_harm(width: int, report: Report) -> None:
    assert "nan" not in live_text(width, report)


def test_returns_are_a_small_curve_and_an_evaluation_stays_in_view() -> None:
    reports = [dataclasses.replace(REPORT, episode_return_mean=float(value)) for value in range(8)]
    evaluated = dataclasses.replace(reports[3], eval_return_mean=77.5)
    text = live_text(80, *reports[:3], evaluated, *reports[4:])
    assert "▁▂▃▄▅▆▇█" in text and re.search(r"evaluation +77.5", text)
    assert "evaluation" not in live_text(80, REPORT) and "▁" not in live_text(80, REPORT)
    many = live_text(80, *(dataclasses.replace(REPORT, episode_return_mean=float(i)) for i in range(300)))
    assert max(map(len, many.splitlines())) <= 80 and "…" not in many


def test_a_plain_report_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    shown = display("plain")
    shown.update(REPORT)
    shown.note("saved [bold]")
    shown.close()
    line, note = capsys.readouterr().out.splitlines()
    assert note == "saved [bold]"
    for part in (
        "0:01:05",
        "1,250,000 env steps (50.0%)",
        "125,000/s",
        "500,000 frames/s",
        "return 195.3",
        "length 201.5",
        "success [x] 0.51",
    ):
        assert part in line


def test_a_terminal_without_unicode_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    reports = [dataclasses.replace(REPORT, episode_return_mean=float(value)) for value in range(8)]
    for mode in ("live", "plain"):
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
        monkeypatch.setenv("COLUMNS", "80")
        shown = display(mode)
        for report in reports:
            shown.update(report)
        shown.note("saved in runs/s\N{LATIN SMALL LETTER U WITH DIAERESIS}")
        shown.close()
        sys.stdout.flush()
        text = sys.stdout.buffer.getvalue().decode("ascii")
        assert shown.mode == mode and "125,000" in text and r"runs/s\xfc" in text and r"\u" not in text


def test_auto_is_plain_where_there_is_no_terminal_and_none_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    assert display("auto").mode == "plain"
    shown = display("none")
    shown.update(REPORT)
    shown.note("x")
    shown.close()
    assert capsys.readouterr() == ("", "")


def test_a_reader_that_ends_ends_the_display_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `head` does. What is left in the buffer fails nothing either."""
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        shown = display("plain")
        shown.update(REPORT)
        shown.note("saved")
        shown.close()
    assert shown.mode == "none"


def test_the_time_left_follows_the_recent_speed(capsys: pytest.CaptureFixture[str]) -> None:
    shown = display("plain")
    for seconds, env_steps in (
        (10.0, 0),
        (20.0, 0),
        (30.0, 500_000),
        (32.0, 750_000),
        (33.0, 750_000),
        (36.0, 1_250_000),
    ):
        shown.update(Report(wall_s=seconds, env_steps=env_steps, frames=0, fps=1.0))
    assert "left 0:00:10" in capsys.readouterr().out.splitlines()[-1], "neither start nor pause count"


def test_a_terminal_that_cannot_go_back_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", type("Terminal", (io.StringIO,), {"isatty": lambda self: True})())
    modes = {}
    for term in ("xterm", "dumb"):
        monkeypatch.setenv("TERM", term)
        modes[term] = display("auto").mode
    assert modes == {"xterm": "live", "dumb": "plain"}


_CHILD = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, {tests!r})
from test_display import REPORT, display
shown = display("auto")
assert shown.mode == "live"
shown.note("a note [x]")
shown.update(REPORT)
print("a stray line")
shown.update(REPORT)
os.write(1, b"ready")
try:
    time.sleep(60)
finally:
    if {tidy}:
        shown.close()
"""


@pytest.mark.parametrize("tidy", [True, False])
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_the_terminal_is_whole_whatever_ends_the_run(end: signal.Signals, tidy: bool) -> None:
    controller, terminal = pty.openpty()
    before = termios.tcgetattr(terminal)
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD.format(tests=str(Path(__file__).parent), tidy=tidy)],
        stdin=terminal,
        stdout=terminal,
        stderr=subprocess.DEVNULL,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"TERM": "xterm-256color", "COLUMNS": "80"},
    )
    output = b""
    while not output.endswith(b"ready"):
        output += os.read(controller, 4096)
    child.send_signal(end)
    child.wait()
    assert termios.tcgetattr(terminal) == before
    os.close(terminal)
    try:
        while chunk := os.read(controller, 4096):
            output += chunk
    except OSError:  # Linux reports the last writer's end so
        pass
    os.close(controller)
    text = output.decode()
    assert re.findall(r"\x1b\[\?25[hl]", text)[-1] == "\x1b[?25h", "the cursor is visible"
    assert not re.search(r"\x1b\[\?(1049|1000|2004)h", text), "no alternate screen, mouse or paste mode"
    assert "a note [x]" in text
    assert "a stray line" in text


def test_a_note_may_name_a_folder_whose_name_is_no_text(monkeypatch):
    written = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="strict", write_through=True)
    monkeypatch.setattr(sys, "stdout", written)
    Display("plain", title="run", steps=1, slots=1, max_lag=1).note("saved in runs/\udcff\nthe end")
    assert written.buffer.getvalue() == b"saved in runs/\\udcff\nthe end\n"
