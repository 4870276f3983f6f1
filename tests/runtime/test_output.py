"""Under a live display, what environments print goes to the run folder, where whoever debugs with prints finds it."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
from broken import Prints, Sound
from short_runs import begun_run
from whole_runs import QUIET, config_for

from sfactory import train
from sfactory.runtime import output
from sfactory.runtime.output import PrintedLines

LIVE = dataclasses.replace(QUIET, display="live")


@pytest.mark.usefixtures("nothing_is_left")
def test_a_live_display_is_told_once_that_an_environment_prints(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = train(config_for(tmp_path, Prints, log=LIVE)).run_dir
    shown = " ".join(capfd.readouterr().out.split())
    assert "an environment or a model prints, first: 'stepping" in shown and "--log.display plain" in shown
    assert shown.count("stepping") == 1
    lines = (run / "output.log").read_text().splitlines()
    assert len(lines) >= 2048 and all(line.startswith("stepping") for line in lines)
    with begun_run(config_for(tmp_path, Prints, overwrite=True)):
        assert not (run / "output.log").exists()


@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.parametrize(("env", "log"), [(Sound, LIVE), (Prints, QUIET)])
def test_there_is_no_file_where_nothing_is_printed_or_no_panel_is_covered(
    tmp_path: Path, env: type, log: object
) -> None:
    run = train(config_for(tmp_path, env, log=log)).run_dir
    assert not (run / "output.log").exists()


def test_a_resumed_run_keeps_what_was_printed_before(tmp_path: Path) -> None:
    file, notes = tmp_path / "output.log", list[str]()
    file.write_text("of before\n")
    with PrintedLines(file, notes.append) as printed:
        printed.look()
        assert not notes
        with file.open("a") as more:
            more.write("and now\nmore\n")
        for _ in range(2):
            printed.look()
    [note] = notes
    assert "'and now'" in note and str(file) in note
    assert file.read_text() == "of before\nand now\nmore\n"


def test_the_file_does_not_fill_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "MOST_BYTES", 1000)
    file = tmp_path / "output.log"
    with PrintedLines(file, print) as printed, file.open("ab", buffering=0) as writer:
        for i in range(10):
            writer.write(b"%d" % i * 400)
            printed.look()
            assert os.path.getsize(file) <= 1000
        assert file.read_bytes() == b"9" * 400


def test_a_full_disk_is_no_error_of_whoever_prints() -> None:
    code = "import sys; from sfactory.runtime.output import print_into; print_into('/dev/full'); print('x' * 9999)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
