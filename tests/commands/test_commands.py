"""The console script: one program for all commands."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ENVIRONMENT
from short_runs import short_run

import sfactory
from sfactory.commands import COMMANDS, main, runs
from sfactory.errors import CheckpointError, ConfigError, telling_errors


def test_without_arguments_all_commands_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name}" in shown and command.help in shown for name, command in COMMANDS.items())


def test_a_mistyped_command_names_the_right_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian", "--env", "CartPole-v1"]) == 2
    assert "did you mean train?" in capsys.readouterr().err


def test_arguments_reach_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--run", "/nowhere"]) == 2
    assert "/nowhere holds no run" in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_main(name: str) -> None:
    assert callable(importlib.import_module(COMMANDS[name].module).main)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_a_module_that_runs(name: str) -> None:
    """Not silently done, as a module without its last lines is."""
    done = subprocess.run(
        [sys.executable, "-m", COMMANDS[name].module, "--help"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and "usage" in done.stdout.lower()


@pytest.mark.parametrize("name", ["status", "runs", "plot", "report"])
def test_a_command_that_reads_answers_before_torch_could_be_imported(name: str, tmp_path: Path) -> None:
    run = short_run(tmp_path / "run", "CartPole-v1")
    script = """
import sys
from sfactory.commands import main
assert main(sys.argv[1:]) == 0
assert not {"torch", "numba"} & set(sys.modules), "imported in vain"
"""
    command = [sys.executable, "-c", script, name, str(run)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "completion"])
def test_every_command_has_a_complete_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([name, "--help-all"])
    assert end.value.code == 0
    assert f"usage: sfactory {name}" in capsys.readouterr().out


SCRIPT = "import sys; from sfactory.commands import main; sys.exit(main(sys.argv[1:]))"


@pytest.mark.parametrize(
    "arguments",
    [
        ["-c", SCRIPT, "runs", ".", "--json"],
        ["-c", SCRIPT, "runs", "--help"],
        ["-c", SCRIPT, "--help"],
        ["-c", SCRIPT, "runs", "."],
        ["-m", "sfactory.train", "--help"],
        ["-m", "sfactory.train", "CartPole-v1", "--show-config"],
        ["-m", "sfactory.profile", "--help-all"],
    ],
)
def test_a_command_whose_reader_has_ended_ends_silently(arguments: list[str], tmp_path: Path) -> None:
    """As `head` ends."""
    short_run(tmp_path / "run", "CartPole-v1")
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as output:
        command = [sys.executable, *arguments]
        done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, cwd=tmp_path, timeout=60)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_run_goes_on_when_the_reader_of_its_live_display_has_ended(tmp_path: Path) -> None:
    flags = ["--steps", "128", "--serial", "--envs-per-worker", "4", "--rollout", "8", "--batch-size", "64"]
    flags += ["--preset", "none", "--device", "cpu", "--log.display", "live", "--run", str(tmp_path / "run")]
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as output:
        command = [sys.executable, "-m", "sfactory.train", "CartPole-v1", *flags]
        done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "completed"


def test_an_interrupt_while_torch_is_imported_shows_no_traceback(tmp_path: Path) -> None:
    run = short_run(tmp_path / "run", "CartPole-v1")
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt\n")
    command = [sys.executable, "-m", "sfactory.eval", str(run)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=ENVIRONMENT, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (130, "")


def test_a_broken_pipe_to_something_else_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb", buffering=0) as pipe:
        assert telling_errors(lambda: pipe.write(b"x"))() == 1
    assert "Broken pipe" in capsys.readouterr().err


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert sfactory.__version__ in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "flag"),
    [("eval", "--json"), ("status", "--json"), ("play", "--best"), ("report", "--video"), ("export", "--best")],
)
@pytest.mark.parametrize("words", [["/no", "FLAG"], ["FLAG", "/no"], ["FLAG", "--run", "/no"], ["--run=/no"]])
def test_the_run_stands_before_or_behind_flags(
    command: str, flag: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, *(flag if word == "FLAG" else word for word in words)]) == 2
    assert "/no" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (ConfigError("lr is -1", "steps is 0"), 2, "error: lr is -1\nsteps is 0\n"),
        (CheckpointError("it is damaged"), 1, "error: it is damaged\n"),
        (PermissionError(13, "Permission denied", "/x"), 1, "error: [Errno 13] Permission denied: '/x'\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_what_goes_wrong_is_one_message_and_an_exit_status(
    error: BaseException, status: int, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(folder: object) -> None:
        raise error

    monkeypatch.setattr(runs, "list_runs", fails)
    assert main(["runs"]) == status
    assert capsys.readouterr().err == told
