"""The daemon by which a run's processes share a GPU, with a program that only claims to be NVIDIA's."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import gymnasium
import psutil
import pytest
import torch
from whole_runs import config_for

from sfactory.config import Config, RuntimeConfig, resolve
from sfactory.errors import ConfigError, RunFailed
from sfactory.runtime import mps
from sfactory.runtime.mps import CONTROL, VARIABLES, VISIBLE, mps_daemon, mps_problem
from sfactory.runtime.planning import make_plan
from sfactory.runtime.processes import fork_server
from sfactory.runtime.runner import run_plan

DAEMON = """#!/bin/sh
note() { echo "$1" >> FOLDER/notes; }
cd "$CUDA_MPS_PIPE_DIRECTORY" || exit 1
if [ "$1" = "-f" ]; then
    test "$CUDA_MPS_LOG_DIRECTORY" = "$CUDA_MPS_PIPE_DIRECTORY" || exit 1
    echo $$ > FOLDER/pid
    trap 'note terminated; exit 0' TERM
    touch ready
    while [ ! -e quit ]; do sleep 0.05; done
    note quit
else
    read -r command
    case "$command" in
        get_server_list) test -e ready ;;
        quit) touch QUIT ;;
    esac
fi
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts a program in the place of NVIDIA's; `QUIT` is the file that ends it."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv(VISIBLE, raising=False)

    def put(text: str = DAEMON, end: str = "quit") -> None:
        (tmp_path / CONTROL).write_text(text.replace("FOLDER", str(tmp_path)).replace("QUIT", end))
        (tmp_path / CONTROL).chmod(0o755)

    return put


def notes(folder: Path) -> list[str]:
    return (folder / "notes").read_text().split() if (folder / "notes").exists() else []


def pid_of(folder: Path) -> int:
    return int((folder / "pid").read_text())


def test_a_daemon_of_ones_own_runs_as_long_as_it_is_needed(program, tmp_path: Path) -> None:
    program()
    with mps_daemon() as variables:
        assert set(variables) == set(VARIABLES)
        (folder,) = map(Path, set(variables.values()))
        assert psutil.pid_exists(pid_of(tmp_path)) and (folder / "ready").exists()
        assert not set(VARIABLES) & os.environ.keys()
    assert notes(tmp_path) == ["quit"]
    assert not psutil.pid_exists(pid_of(tmp_path)) and not folder.exists()


def test_gpus_that_the_user_has_named_have_the_daemons_numbers(
    program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon numbers what it sees from 0: a process that looks for GPU 5 among two would find none."""
    program(DAEMON.replace("echo $$", f'echo "${VISIBLE}" > FOLDER/visible; echo $$'))
    monkeypatch.setenv(VISIBLE, "5,GPU-3")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with mps_daemon() as variables:
        assert (tmp_path / "visible").read_text().strip() == "5,GPU-3"
        assert variables[VISIBLE] == "0,1"


def test_a_daemon_that_does_not_start_is_said_and_leaves_nothing(program) -> None:
    program("#!/bin/sh\necho 'no device found'\nexit 1\n")
    with pytest.raises(RunFailed, match=r"does not start: no device found; leave runtime\.mps out"), mps_daemon():
        pass


def test_a_daemon_that_does_not_quit_is_killed(program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(end="nothing")
    monkeypatch.setattr(mps, "QUIT_S", 0.3)
    with mps_daemon():
        pass
    assert notes(tmp_path) == [] and not psutil.pid_exists(pid_of(tmp_path))


@pytest.mark.usefixtures("program")
@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"device": "cpu"}, "the run computes on cpu"),
        ({"device": "cuda", "serial": True}, "with serial there is one process"),
        ({"device": "cuda"}, f"needs {CONTROL}"),
        ({"device": "cuda", "runtime": RuntimeConfig()}, None),
    ],
)
def test_what_it_cannot_be_used_for_is_said_before_anything_starts(
    settings: dict, part: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    config = resolve(Config(env="CartPole-v1", **{"runtime": RuntimeConfig(mps=True)} | settings))
    if part is None:
        assert mps_problem(config) is None
        return
    with pytest.raises(ConfigError, match=part):
        make_plan(config)


class Telling(gymnasium.Wrapper):
    """Leaves what its process knows of a daemon in a file."""

    def __init__(self, told: str) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))
        Path(told).write_text(" ".join(os.environ.get(name, "none") for name in VARIABLES))


def test_the_processes_of_a_run_use_it(program, tmp_path: Path) -> None:
    program()
    plan = make_plan(resolve(config_for(tmp_path, Telling, env_kwargs={"told": str(tmp_path / "told")})))
    runtime = dataclasses.replace(plan.config.runtime, mps=True)
    with fork_server():
        run_plan(dataclasses.replace(plan, config=dataclasses.replace(plan.config, runtime=runtime)))
    first, second = (tmp_path / "told").read_text().split()
    assert first == second and "mps-" in first
    assert notes(tmp_path) == ["quit"]


def test_a_kill_of_the_run_ends_it(program, tmp_path: Path) -> None:
    program()
    code = (
        "import time\nfrom sfactory.runtime.mps import mps_daemon\nfrom sfactory.runtime.processes import fork_server\n"
        "with fork_server(), mps_daemon():\n    time.sleep(60)\n"
    )
    runner = subprocess.Popen([sys.executable, "-c", code])
    try:
        await_that(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    finally:
        runner.send_signal(signal.SIGKILL)
        runner.wait()
    await_that(lambda: not psutil.pid_exists(pid_of(tmp_path)))
    assert notes(tmp_path) == ["terminated"]


def await_that(holds) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)
