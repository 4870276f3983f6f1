"""perf/peers.py without any peer: its settings are valid, its drivers are asked and read rightly, its tables say what
was measured."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shlex
import signal
import sys
import time
from collections import deque
from pathlib import Path

import psutil
import pytest
from commands import wait_until
from rich.console import Console

from perf import peers, runs
from perf.peer_scripts.window import EARLIEST, KEPT, RECENT, Window, recent_mean, score_of
from perf.peers import (
    PEERS,
    SCORES,
    TASKS,
    WORKLOADS,
    PeerError,
    measure_peer,
    run_driver,
    score_table,
    throughput_table,
)
from perf.references import BY_NAME
from perf.results import NEWCOMERS
from perf.runs import read_reports
from sfactory.config.command_line import from_command_line
from sfactory.config.declaring import given_names

DRIVER = """
import json, sys, time
asked = json.loads(sys.argv[1])
print("starting", flush=True)
exec(asked["setting"]["program"])
"""


@pytest.fixture
def venvs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of environments in which one peer is built: this Python, with a driver that does what its setting
    says."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "stable_baselines3_driver.py").write_text(DRIVER)
    monkeypatch.setattr(peers, "SCRIPTS", tmp_path / "scripts")
    monkeypatch.setattr(peers, "START_LIMIT_S", 1.0)
    (tmp_path / "stable-baselines3" / "bin").mkdir(parents=True)
    python = tmp_path / "stable-baselines3" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o755)
    return tmp_path


def has_ended(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def run(venvs: Path, program: str, limit_s: float = 10.0) -> tuple[dict | None, float]:
    return run_driver("stable-baselines3", venvs, {"setting": {"program": program}}, limit_s)


class TestDriver:
    def test_its_answer_is_found_in_what_it_prints(self, venvs: Path) -> None:
        program = (
            "print('x' * 300_000); print('RESULTS soon'); print('RESULT {\"fps\": 12.5}', flush=True); time.sleep(60)"
        )
        answer, seconds = run(venvs, program)
        assert answer == {"fps": 12.5}
        assert seconds < 10

    def test_it_knows_the_setting_and_the_window(self, venvs: Path) -> None:
        program = "print('RESULT ' + json.dumps({'fps': asked['warmup'] * 100 + asked['seconds']}), flush=True)"
        assert measure_peer("stable-baselines3", venvs, {"program": program}, 2.0, 3.0) == 203.0

    def test_a_failure_is_told_with_the_end_of_its_output(self, venvs: Path) -> None:
        with pytest.raises(PeerError, match=r"(?s)stable-baselines3 failed.*no such environment"):
            run(venvs, "raise ValueError('no such environment')")

    def test_without_an_answer_in_time_there_is_none_and_nothing_lives_on(self, venvs: Path) -> None:
        mark = venvs / "child"
        program = (
            f"import subprocess; open({str(mark)!r}, 'w').write(str(subprocess.Popen(['sleep', '60']).pid)); "
            "time.sleep(60)"
        )
        begin = time.monotonic()
        assert run(venvs, program, 1.5)[0] is None
        assert time.monotonic() - begin < 10
        child = int(mark.read_text())
        assert wait_until(lambda: has_ended(child), 5), "it was killed, and takes a moment to die"

    def test_what_has_left_its_process_group_is_ended_too(self, venvs: Path) -> None:
        mark = venvs / "child"
        program = (
            "import subprocess; child = subprocess.Popen(['sleep', '60'], process_group=0); "
            f"open({str(mark)!r}, 'w').write(str(child.pid)); print('RESULT {{\"fps\": 1}}', flush=True)"
        )
        run(venvs, program)
        child = int(mark.read_text())
        assert wait_until(lambda: has_ended(child), 5), "it was killed, and takes a moment to die"

    def test_shared_memory_of_a_driver_that_crashes_is_taken_away(self, venvs: Path) -> None:
        program = "import os; open(f'/dev/shm/torch_{os.getpid()}_crashed', 'w'); os.abort()"
        with pytest.raises(PeerError):
            run(venvs, program)
        assert not list(Path("/dev/shm").glob("torch_*_crashed"))

    def test_a_peer_that_is_not_built_says_how_to_build_it(self, tmp_path: Path) -> None:
        with pytest.raises(PeerError, match=r"perf\.peers --build --peers torchrl"):
            run_driver("torchrl", tmp_path, {}, 1.0)

    def test_it_runs_without_a_gpu(self, venvs: Path) -> None:
        assert run(
            venvs,
            "import os; print('RESULT ' + json.dumps({'fps': len(os.environ['CUDA_VISIBLE_DEVICES'])}), flush=True)",
        )[0] == {"fps": 0}


class TestWindow:
    def test_it_counts_between_the_first_reports_after_warm_up_and_end(
        self, capsys, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock = iter([100.0, 101.0, 102.5, 104.0, 107.0, 108.0])
        monkeypatch.setattr(time, "monotonic", lambda: next(clock))
        window = Window(warmup=2.0, seconds=3.0)
        closed = [window.report(env_steps) for env_steps in (1000, 2000, 3000, 4000, 12000, 99999)]
        assert closed == [False, False, False, False, True, True]
        assert capsys.readouterr().out == f"RESULT {json.dumps({'fps': 9000 / 4.5})}\n"


class TestScoreInTraining:
    def test_the_episodes_that_end_first_count_for_nothing(self) -> None:
        assert score_of([95.0] * (KEPT - 1)) is None
        assert score_of(deque([95.0] * EARLIEST + [-100.0, -50.0] * (RECENT // 2), maxlen=KEPT)) == -75.0

    def test_a_curve_begins_with_the_first_episode(self) -> None:
        assert recent_mean([3.0]) == 3.0


class TestSettings:
    @pytest.mark.parametrize("name", [name for name in WORKLOADS if name not in NEWCOMERS])
    def test_sfactory_plays_the_peers_game_with_their_sizes(self, name: str) -> None:
        workload = WORKLOADS[name]
        same, throughput = (
            from_command_line(shlex.split(flags), "test") for flags in (workload.same, workload.throughput)
        )
        assert (
            same.env == throughput.env and same.rollout == throughput.rollout and same.epochs == throughput.epochs == 1
        )
        assert (same.model.core, same.model.hidden, same.model.features) == (throughput.model.core, (64, 64), 512)
        assert same.precision == "float32" and same.batch_size == 1024
        for peer, tuned in workload.peers.items():
            assert tuned.fixed["rollout"] == same.rollout, peer
            assert tuned.fixed.get("rnn_type", "none") == same.model.core

    @pytest.mark.parametrize("name", NEWCOMERS)
    def test_environments_of_newcomers_are_the_same_with_defaults_alone(self, name: str) -> None:
        workload = WORKLOADS[name]
        throughput = from_command_line(shlex.split(workload.throughput), "test")
        assert given_names(throughput) <= {"env", "workers"}
        for tuned in workload.peers.values():
            assert tuned.fixed["env"].partition("-v")[0] == str(throughput.env).partition("-v")[0]

    @pytest.mark.parametrize("name", WORKLOADS)
    def test_the_settings_that_are_measured_are_among_those_that_were_tried(self, name: str) -> None:
        for peer, tuned in WORKLOADS[name].peers.items():
            assert peer in PEERS
            assert tuned.best in tuned.tried and len(tuned.tried) >= 6
            assert tuned.usual is None or tuned.usual in tuned.tried
            assert tuned.usual is None or tuned.usual["batch_size"] == 1024
            assert not tuned.fixed.keys() & tuned.best.keys(), "what makes the workload is no matter of tuning"

    def test_scores_are_asked_of_references(self) -> None:
        assert SCORES.keys() <= TASKS.keys() <= BY_NAME.keys()

    @pytest.mark.parametrize("name", TASKS)
    def test_peers_learn_the_reference(self, name: str) -> None:
        assert TASKS[name].keys() <= PEERS.keys()
        for setting in TASKS[name].values():
            played, own = (
                re.sub(r"^viz|^atari|noframeskip|_|-v\d$", "", env.lower())  # games' ids have several spellings
                for env in (setting["env"], BY_NAME[name].env)
            )
            assert played == own

    @pytest.mark.parametrize("peer", PEERS)
    def test_every_peer_has_a_driver(self, peer: str) -> None:
        source = (peers.SCRIPTS / f"{peer.replace('-', '_')}_driver.py").read_text()
        compile(source, peer, "exec")


class TestTables:
    def shown(self, table) -> str:
        console = Console(width=160)
        with console.capture() as capture:
            console.print(table)
        return capture.get()

    def test_ratios_are_of_medians_and_of_the_right_rows(self) -> None:
        speeds = {"sfactory, same": [80.0, 100.0, 120.0], "sfactory, throughput": [400.0]}
        speeds |= {"sample-factory": [25.0, 50.0, 1000.0], "torchrl": [None, None]}
        measurements = [
            {"workload": "pong", "trainer": trainer, "fps": fps} for trainer, values in speeds.items() for fps in values
        ]
        rows = [
            [cell.strip() for cell in line.split("│")[1:-1]]
            for line in self.shown(throughput_table(measurements)).splitlines()
        ]
        found = {row[1]: row[2:] for row in rows if len(row) == 7}
        assert found["sample-factory"] == ["50", "25 to 1,000", "3", "2.0 x", "8.0 x"]
        assert found["sfactory, same"][3:] == ["1.0 x", "4.0 x"]
        assert "torchrl" not in found, "what was never done in time has no speed"

    def test_a_missed_score_is_shown_as_missed(self) -> None:
        rows = [{"workload": "cartpole", "trainer": "sfactory", "seconds": 7.6, "score": 500.0, "target": 475.0}]
        rows += [
            {"workload": "cartpole", "trainer": "torchrl", "seconds": 40.0, "score": score, "target": 475.0}
            for score in (None, 300.0)
        ]
        shown = self.shown(score_table(rows))
        assert "40.0 (missed), 40.0 (missed)" in shown and "none, 300" in shown
        assert "7.6 (missed)" not in shown


def test_a_row_of_metrics_that_is_still_being_written_does_not_count(tmp_path: Path) -> None:
    assert read_reports(tmp_path / "run") == []
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.csv").write_text("wall_s,env_steps,episode_return_mean\n1.0,100,\n2.0,200,9.5\n3.0,3")
    assert read_reports(tmp_path / "run") == [
        {"wall_s": 1.0, "env_steps": 100.0},
        {"wall_s": 2.0, "env_steps": 200.0, "episode_return_mean": 9.5},
    ]


def test_a_run_of_sfactory_is_measured_and_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Here a small program that writes metrics stands in for the trainer."""
    program = tmp_path / "sfactory" / "train.py"
    program.parent.mkdir()
    (program.parent / "__init__.py").touch()
    program.write_text(
        "import os, pathlib, signal, sys, time\n"
        "assert sys.argv[sys.argv.index('--device') + 1] == 'cpu'\n"
        "run = pathlib.Path(sys.argv[sys.argv.index('--run') + 1]); run.mkdir()\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))\n"
        "with open(run / 'metrics.csv', 'w') as file:\n"
        "    print('wall_s,env_steps', file=file)\n"
        "    for i in range(100): print(f'{i * 0.5},{0 if i < 2 else i * 1000}', file=file)\n"
        "signal.signal(signal.SIGINT, lambda *_: sys.exit(130))\n"
        "time.sleep(60)\n"
    )
    monkeypatch.setattr(runs, "ROOT", tmp_path)
    assert peers.measure_sfactory("--env CartPole-v1 --workers 1", warmup=4.0, seconds=10.0) == pytest.approx(2000.0)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGCONT)


def test_a_round_runs_each_trainer_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    monkeypatch.setattr(peers, "measure_sfactory", lambda flags, *_: ran.append(flags) or 1.0)
    monkeypatch.setattr(
        peers, "measure_peer", lambda peer, venvs, setting, *_: ran.append((peer, setting["batch_size"])) or 2.0
    )
    args = argparse.Namespace(peers=["sample-factory"], venvs=Path(), warmup=1.0, seconds=1.0)
    rows = list(peers.throughput_round("cartpole", args))
    assert [row["trainer"] for row in rows] == [
        "sfactory, same",
        "sample-factory, usual",
        "sample-factory",
        "sfactory, throughput",
    ]
    assert ran[1:3] == [("sample-factory", 1024), ("sample-factory", 16384)]
    assert ran[0] == WORKLOADS["cartpole"].same and ran[3] == WORKLOADS["cartpole"].throughput


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Trainers and seeds as they are run to a score, by stand-ins."""
    ran: list[tuple[str, int]] = []
    monkeypatch.setattr(peers, "score_sfactory", lambda name, seed: ran.append(("sfactory", seed)) or (500.0, 5.0))
    monkeypatch.setattr(peers, "score_peer", lambda name, peer, seed, _: ran.append((peer, seed)) or (480.0, 20.0))
    return ran


def measure(monkeypatch: pytest.MonkeyPatch, *flags: str) -> None:
    monkeypatch.setattr(sys, "argv", ["peers", "--to-score", "--only", "cartpole", *flags])
    monkeypatch.setattr(peers, "exit_at_signals", lambda: None)
    peers.main()


def test_a_measurement_in_parts_has_other_seeds_in_each(
    scored: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for rounds in ("2", "1"):
        measure(monkeypatch, "--peers", "sample-factory", "--rounds", rounds, "--json", str(tmp_path / "file"))
    assert scored == [(trainer, seed) for seed in (1, 2, 3) for trainer in ("sfactory", "sample-factory")]
    assert len(json.loads((tmp_path / "file").read_text())) == 6


def test_a_round_that_breaks_off_keeps_what_it_has_measured(
    scored: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(*_: object) -> None:
        raise PeerError("sample-factory failed")

    kept: list[dict] = []
    monkeypatch.setattr(peers, "score_peer", fails)
    monkeypatch.setattr(peers, "record", lambda table, rows, program: kept.extend(rows))
    with pytest.raises(PeerError):
        measure(monkeypatch, "--record", "--json", str(tmp_path / "file"))
    assert [(row["trainer"], row["seconds"]) for row in kept] == [("sfactory", "5.0")]
    assert len(json.loads((tmp_path / "file").read_text())) == 1


class TestScoreOfSfactory:
    @pytest.fixture
    def trainer(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A program that stands in for sfactory.train."""
        folder = tmp_path / "sfactory"
        folder.mkdir()
        (folder / "__init__.py").touch()
        monkeypatch.setattr(runs, "ROOT", tmp_path)
        return folder / "train.py"

    @pytest.mark.parametrize("name", ["cartpole", "acrobot"])
    def test_a_run_that_takes_too_long_has_none(
        self, name: str, trainer: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        trainer.write_text("import time; time.sleep(60)")
        monkeypatch.setitem(peers.SCORES, name, dataclasses.replace(SCORES[name], limit_s=0.5))
        assert peers.score_sfactory(name, 1)[0] is None

    @pytest.mark.parametrize("name", ["cartpole", "acrobot"])
    def test_a_run_that_fails_is_not_one_that_missed_it(self, name: str, trainer: Path) -> None:
        trainer.write_text("raise SystemExit(2)")
        with pytest.raises(PeerError, match="status 2"):
            peers.score_sfactory(name, 1)
