"""Seeing trouble: the status of a run, the report of a run that hangs, and the stacks of processes."""

import dataclasses
import fcntl
import json
import math
import os
import signal
import threading
import time
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
from commands import Command, wait_until
from dying import Dying
from faults import Faulty
from short_runs import begun_run
from whole_runs import config_for, rows, summary

from sfactory import train
from sfactory.config import LogConfig, RuntimeConfig
from sfactory.errors import ConfigError
from sfactory.runs.run_folder import open_run
from sfactory.runs.run_state import ProcessState, RunState, write_status
from sfactory.runtime.observed_state import observe, write_stack_file
from sfactory.runtime.planning import make_plan
from sfactory.runtime.processes import WorkerProcesses
from sfactory.runtime.watchdog import Watchdog
from sfactory.runtime.wires import make_wires
from sfactory.status import RunStatus, main, status
from sfactory.telemetry.stopwatch import COLUMNS

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("nothing_is_left")]
FLAGS = [
    "--steps", "1000000000", "--workers", "1", "--envs-per-worker", "8", "--rollout", "16", "--batch-size", "128",
    "--preset", "none",
    "--log.no-tensorboard", "--log.report-every-s", "0.2", "--device", "cpu",
]  # fmt: skip
STATE = RunState(
    0.0, 1, [ProcessState("rollout-0", None, True, 9.0, "", None, 1.0, 20.0)], {"free": 2}, {}, {"fps": math.nan}
)
PLAIN = LogConfig(report_every_s=0.05, display="plain", tensorboard=False)


def shown(run, capsys) -> dict:
    capsys.readouterr()
    assert main(["--run", str(run), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("policy_workers", "names"),
    [
        (1, ["learner", "policy-0", "rollout-0", "rollout-1"]),
        (0, ["learner", "policy-0", "policy-1", "rollout-0", "rollout-1"]),
    ],
)
def test_a_living_run_shows_what_each_worker_does(policy_workers, names, tmp_path, capsys):
    seen = []

    def look(report):
        state = status(tmp_path / "run").state
        if state is not None and state.figures.get("env_steps", 0) > 1000:
            seen.append(shown(tmp_path / "run", capsys))
        return not seen

    train(
        config_for(tmp_path, Faulty, workers=2, steps=10**9, runtime=RuntimeConfig(policy_workers=policy_workers)),
        [look],
    )
    state = seen[-1]
    assert state["status"] == "living"
    assert state["pid"] == os.getpid()
    assert [process["name"] for process in state["processes"]] == names
    assert len({process["pid"] for process in state["processes"]}) == 3 + policy_workers
    assert all(
        process["alive"] and process["rss_mb"] > 10 and process["silent_s"] < 5 for process in state["processes"]
    )
    assert sum(state["slots"].values()) > 0
    assert state["figures"]["env_steps"] > 1000
    assert time.time() - state["time"] < 30
    ended = shown(tmp_path / "run", capsys)
    assert (ended["status"], ended["env_steps"]) == ("interrupted", summary(tmp_path / "run")["env_steps"])


def test_a_killed_run_is_shown_as_such_and_a_folder_without_a_run_is_an_error(tmp_path, capsys):
    run = tmp_path / "run"
    with Command("-m", "sfactory.train", "--env", "CartPole-v1", "--run", str(run), *FLAGS) as command:
        assert wait_until((run / "status.json").exists, 60)
        assert status(run).word == "living"
        os.kill(command.pid, signal.SIGKILL)
        assert command.left_after(5) == []
    assert shown(run, capsys)["status"] == "killed"
    assert main(["--run", str(run)]) == 0
    assert "killed" in capsys.readouterr().out
    with begun_run(config_for(tmp_path, Faulty, overwrite=True)):
        assert status(run).word == "starting"
    with pytest.raises(ConfigError, match="holds no run"):
        status(tmp_path)
    assert main(["--run", str(tmp_path)]) == 2


def test_a_run_that_is_over_is_shown_as_its_summary_says_until_it_starts_again(tmp_path):
    config = config_for(tmp_path, Faulty, serial=True, steps=256)
    run = train(config).run_dir
    assert status(run).word == "completed"
    with open_run(make_plan(config).config) as folder:
        write_status(run, STATE)
        assert status(run).word == "completed", "as while it is evaluated at its end"
    train(config)
    assert status(run).word == "completed", "there was nothing left to do"
    with open_run(make_plan(config).config) as folder:
        folder.begin()
        assert status(run).word == "starting"
        write_status(run, STATE)
        assert status(run).word == "living"
    assert status(run).word == "killed"


def test_in_a_serial_run_all_work_is_done_by_one_process(tmp_path):
    seen = []

    def look(report):
        seen.extend([] if (state := status(tmp_path / "run").state) is None else state.processes)
        return not seen

    train(config_for(tmp_path, Faulty, serial=True, steps=10**9), [look])
    assert {process.pid for process in seen} == {os.getpid()}
    assert all(process.alive and process.sentence != "gone" for process in seen)


def test_watching_goes_on_until_the_run_ends(monkeypatch, capsys):
    states = iter([RunStatus("starting"), RunStatus("living", STATE), RunStatus("completed", summary={"env_steps": 7})])
    monkeypatch.setattr("sfactory.status.status", lambda run: next(states))
    monkeypatch.setattr("sfactory.status.WATCH_EVERY_S", 0.0)
    assert main(["--run", "run", "--watch", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["status"] for line in lines] == ["starting", "living", "completed"]
    assert lines[1]["age_s"] > 1000
    assert lines[1]["figures"]["fps"] is None
    assert lines[2]["env_steps"] == 7


def test_whoever_asks_whether_a_run_lives_keeps_nobody_from_starting_it(tmp_path):
    config = config_for(tmp_path, Faulty)
    open_run(config).close()
    with (config.run_dir / ".lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # as is_held does, for a moment
        threading.Timer(0.05, fcntl.flock, (file, fcntl.LOCK_UN)).start()
        open_run(config).close()


@pytest.mark.parametrize(
    ("silent_s", "doing", "idle_s", "sentence"),
    [
        (0.1, "environment", 0.2, "environment"),
        (0.1, "waiting", 45.0, "waiting; last work 45 s ago"),
        (0.1, "starting", None, "starting"),
        (12.0, "", 13.0, "silent for 12 s"),
    ],
)
def test_the_state_of_a_process_says_since_when(silent_s, doing, idle_s, sentence):
    assert ProcessState("learner", 1, True, silent_s, doing, idle_s, 0.0, 0.0).sentence == sentence


def test_inference_in_a_rollout_worker_that_steps_for_long_is_not_called_silent(tmp_path):
    plan = make_plan(config_for(tmp_path, Faulty, runtime=RuntimeConfig(policy_workers=0)))
    wires = make_wires(plan, local=False)
    wires.control._table.array[:, COLUMNS.index("heartbeat")] = time.monotonic() - 16
    processes = SimpleNamespace(names=["x"], pids=dict, alive=lambda: {"learner", "policy-0", "rollout-0"})
    found = {each.name: each.sentence for each in observe(wires, processes, wires.control.snapshot()).processes}
    assert found["rollout-0"].startswith("silent for 16 s") and "silent" not in found["policy-0"]


def test_the_status_tells_figures_with_their_units(tmp_path, monkeypatch, capsys):
    summary = {"env_steps": 400_413, "episode_return_mean": 195.25, "fps": 12_345.6}
    figures = {"wall_s": 65.0, "env_steps": 1000, "restarts": 2, "fps": 125.0, "episode_return_mean": math.nan}
    for found in (
        RunStatus("completed", summary=summary),
        RunStatus("living", dataclasses.replace(STATE, figures=figures)),
    ):
        monkeypatch.setattr("sfactory.status.status", lambda run, found=found: found)
        assert main(["run"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "run: completed 400,413 env steps, return 195.25, 12,346 env steps/s" in text
    assert "last report: wall_s 65 s, env_steps 1,000, restarts 2, fps 125 env steps/s" in text and "nan" not in text


def test_only_the_newest_reports_are_kept(tmp_path):
    paths = [write_stack_file(tmp_path, f"reason {i}", STATE, WorkerProcesses()) for i in range(12)]
    assert sorted(tmp_path.iterdir()) == paths[2:]
    assert "rollout-0    pid None  silent for 9 s" in paths[-1].read_text()


def test_a_hanging_environment_is_reported_with_the_line_where_it_hangs(tmp_path, capsys):
    kwargs = {"way": "hang", "folder": str(tmp_path)}
    config = config_for(
        tmp_path, Dying, env_kwargs=kwargs, steps=4096, runtime=RuntimeConfig(step_timeout_s=1.5), log=PLAIN
    )
    assert train(config).status == "completed"
    (report,) = (tmp_path / "run").glob("stall-*.txt")
    text = report.read_text()
    assert "rollout-0: no sign of life" in text
    (line,) = [line for line in text.splitlines() if line.startswith("rollout-0    pid")]
    assert "waiting" not in line, "it hangs"
    assert "dying.py" in text.split("=== rollout-0")[1].split("===")[0]
    assert "in _hang" in text
    assert "=== learner" in text
    assert "slots: free" in text
    assert str(report) in capsys.readouterr().out


def test_sigusr2_writes_a_report_and_the_run_goes_on(tmp_path):
    asked = []

    def ask(report):
        if report.env_steps > 1000 and not asked:
            asked.append(report)
            os.kill(os.getpid(), signal.SIGUSR2)

    assert train(config_for(tmp_path, Faulty, steps=20_000), [ask]).status == "completed"
    (report,) = (tmp_path / "run").glob("stall-*.txt")
    assert "asked for" in report.read_text()


class Crashing(gymnasium.Env):
    """Brings its process down as a fault in C code does, once."""

    observation_space = gymnasium.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, folder):
        self.count, self.folder = 0, folder

    def reset(self, *, seed=None, options=None):
        return np.zeros(3, np.float32), {}

    def step(self, action):
        self.count += 1
        if self.count == 100 and not os.path.exists(f"{self.folder}/crashed"):
            open(f"{self.folder}/crashed", "w").close()
            os.kill(os.getpid(), signal.SIGSEGV)
        return np.zeros(3, np.float32), 1.0, self.count % 10 == 0, False, {}


def test_a_crash_of_a_serial_run_shows_its_python_stack(tmp_path):
    kwargs = f"{{folder: {tmp_path}}}"
    flags = ["--run", str(tmp_path / "run"), "--serial", "--env-kwargs", kwargs, *FLAGS]
    with Command("-m", "sfactory.train", "--env", "test_status:Crashing", *flags) as command:
        assert command.wait() == -signal.SIGSEGV
        assert "test_status.py" in command.errors
        assert "in step" in command.errors


def test_a_crash_is_told_with_its_python_stack(tmp_path, capsys):
    result = train(config_for(tmp_path, Crashing, env_kwargs={"folder": str(tmp_path)}, steps=8192, log=PLAIN))
    assert result.status == "completed"
    said = capsys.readouterr().out
    assert "killed by SIGSEGV" in said
    assert "test_status.py" in said
    assert "Extension modules" not in said
    assert int(rows(result.run_dir)[-1]["restarts"]) == 1


class TestWatchdog:
    def setup_method(self):
        self.now = 100.0
        self.watchdog = Watchdog({"rollout-0": 10.0, "learner": 60.0}, {"rollout-0"}, 30.0, lambda: self.now)

    def look(self, seconds: float, rollout: float, learner: float, work: float) -> dict[str, str]:
        """Look once a second for some time; heartbeats and work as at its end."""
        found: dict[str, str] = {}
        for _ in range(int(seconds)):
            self.now += 1
            found = self.watchdog.look({"rollout-0": rollout, "learner": learner}, work)
        return found

    def test_each_process_has_its_own_limit(self):
        assert self.look(9, 100, 100, 1) == {}
        assert list(self.look(2, 100, 100, 2)) == ["rollout-0"]

    def test_only_what_steps_environments_may_hang_for_them(self):
        assert "an environment may hang" in self.look(11, 100, 100, 1)["rollout-0"]
        assert "environment" not in self.look(60, 160, 100, 2)["learner"]

    def test_a_run_in_which_nobody_works_hangs_though_all_are_alive(self):
        for _ in range(30):
            assert self.look(1, self.now, self.now, 5) == {}
        assert list(self.look(2, self.now, self.now, 5)) == ["sampling"]
        assert self.look(1, self.now, self.now, 6) == {}

    def test_nobody_is_blamed_for_the_time_in_which_the_watcher_was_held_up_itself(self):
        self.look(2, 101, 101, 1)
        self.now += 500
        assert self.look(9, 101, 101, 1) == {}
        assert list(self.look(3, 101, 101, 1)) == ["rollout-0"]

    def test_a_watcher_that_is_always_late_still_notices(self):
        found = {}
        for _ in range(15):
            self.now += 59
            found = found or self.look(1, 100, self.now, self.now)
        assert list(found) == ["rollout-0"]

    def test_a_process_that_is_about_to_start_has_that_much_longer(self):
        assert self.look(29, 120, 101, 1) == {}
        assert list(self.look(2, 120, 101, 2)) == ["rollout-0"]


def test_a_run_shows_a_small_curve_of_its_returns(tmp_path, capsys):
    with begun_run(config_for(tmp_path, Faulty)):
        write_status(tmp_path / "run", dataclasses.replace(STATE, returns=[1.0, 2.0, 8.0]))
        assert main(["--run", str(tmp_path / "run")]) == 0
    assert "returns: ▁▂█  1 to 8" in capsys.readouterr().out
