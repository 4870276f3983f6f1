"""The profile: its accounts add up, its files can be used, and it leaves nothing behind."""

import dataclasses
import io
import itertools
import json
import math
import re
import sys
import tempfile
import types
from time import process_time

import gymnasium
import numpy as np
import pytest
import torch
from commands import Command, wait_until
from environments import Pixels
from rich.console import Console

from sfactory.config import Config, RuntimeConfig, merged, resolve
from sfactory.config.command_line import from_command_line
from sfactory.errors import RunFailed
from sfactory.profile import main
from sfactory.profiling import measure as profiling
from sfactory.profiling import tune as tuning_module
from sfactory.profiling.bottleneck import find_bottleneck
from sfactory.profiling.measure import Interrupted, Level, Profile
from sfactory.profiling.report import show
from sfactory.profiling.tune import searched_values, tune, tuned_values
from sfactory.runtime.planning import make_plan
from sfactory.runtime.processes import fork_server
from sfactory.telemetry import stopwatch
from sfactory.telemetry.stopwatch import COLUMNS, PHASES, Interval, ProcessBusyTime, Stopwatch
from sfactory.telemetry.trace import LAPS_KEPT, TracingStopwatch
from sfactory.train import main as train_main

pytestmark = pytest.mark.timeout(120)
SMALL = [
    "--preset",
    "none",
    "--workers",
    "1",
    "--envs-per-worker",
    "8",
    "--rollout",
    "16",
    "--batch-size",
    "128",
    "--device",
    "cpu",
]
PROCESSES = ["learner", "policy-0", "rollout-0"]


@dataclasses.dataclass(frozen=True)
class FixedCeiling:
    """In place of the ceiling's measurements, which take their time."""

    simulation_s: float = 1e-6
    inference_s: float = 2e-6
    training_s: float = 5e-6
    cores: int = 2

    @property
    def env_steps_per_s(self) -> float:
        return self.cores / (self.simulation_s + self.inference_s + self.training_s)


@pytest.fixture(scope="module", autouse=True)
def server():
    """One for all runs in this process; each would start its own otherwise."""
    with fork_server():
        yield


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """A working folder in which nothing but the files that were asked for may be left."""
    ceiling = types.SimpleNamespace(measure_ceiling=lambda *_, **__: FixedCeiling())
    monkeypatch.setitem(sys.modules, "sfactory.profiling.ceiling", ceiling)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def profile(capsys, *args: str) -> dict:
    """What the command prints with ``--json``."""
    assert main([*args, "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def interval_of(**columns: dict[str, float]) -> Interval:
    """What a learner and a rollout worker did."""
    after = np.zeros((2, len(COLUMNS)))
    for row, kind in zip(after, ("learner", "rollout"), strict=True):
        for name, value in columns[kind].items():
            row[COLUMNS.index(name)] = value
    return Interval(["learner", "rollout-0"], np.zeros_like(after), after)


@pytest.mark.parametrize(
    ("learner_waits", "blocked", "expected"),
    [
        (9.0, 0.0, 80.0),  # the learner works in bursts: its rate is that of a burst
        (0.0, 9.0, 6400.0),  # the rollout workers do
        (9.0, 9.0, 6400.0),  # they take turns
        (0.0, 0.0, 80.0),  # slots fill or drain
    ],
)
def test_the_speed_is_that_of_whoever_does_not_wait(learner_waits, blocked, expected):
    """Four batches of 128 with 64 env steps each, in 0.04 s of the 10 s in which 1,600 rows were stepped."""
    plan = plan_for(envs_per_worker=4, rollout=8, batch_size=128)
    learner = {"rows": 256, "batches": 4, "counted": 0.04, "waiting": learner_waits, "forward": 10 - learner_waits}
    rollout = {"rows": 1600, "counted": 10, "blocked": blocked, "environment": 10 - blocked}
    interval = interval_of(learner=learner, rollout=rollout)
    assert profiling.env_steps_per_s(plan, interval) == pytest.approx(expected)
    sampling = dataclasses.replace(plan, sample_only=True)  # whose learner counts segments: of 16 rows
    if expected == 80:
        assert profiling.env_steps_per_s(sampling, interval) == pytest.approx(640)
    serial = dataclasses.replace(plan, config=dataclasses.replace(plan.config, serial=True))
    assert profiling.env_steps_per_s(serial, interval) == pytest.approx(6400)
    none = interval_of(learner={"waiting": 10.0}, rollout=rollout)
    assert math.isnan(profiling.env_steps_per_s(plan, none))


def test_a_run_is_warm_after_a_few_batches_and_says_how_far_it_is(monkeypatch):
    monkeypatch.setattr(profiling, "WARM_UP_S", 0.0)
    plan = make_plan(from_command_line(["--env", "CartPole-v1", *SMALL], "test"))
    told: list[str] = []
    interval = profiling.profile_run(plan, 0.3, tell=told.append).interval
    assert interval.before[interval.names.index("learner"), COLUMNS.index("batches")] >= 1
    assert re.fullmatch(r"warming up: (1 batch|\d+ batches)", told[0])  # the first may be there when it is looked for
    assert any(text.startswith("measuring: ") for text in told)


def test_a_measurement_that_is_shorter_than_a_batch_waits_for_one():
    small = ["--preset", "none", "--workers", "1", "--envs-per-worker", "4", "--rollout", "8", "--batch-size", "32"]
    plan = make_plan(from_command_line(["--env", "broken:Slow", *small, "--device", "cpu"], "test"))
    told: list[str] = []
    profile = profiling.profile_run(plan, 0.01, tell=told.append)
    assert 0 < profile.fps < 60  # a batch takes at least 0.64 s
    assert profile.seconds > 0.01
    assert told[0] == "warming up: 0 batches"
    assert told[-1].endswith("until a batch is trained")


def test_the_ceiling_is_that_of_the_run_and_its_episodes(monkeypatch, capsys):
    given = []
    ceiling = types.SimpleNamespace(measure_ceiling=lambda *_, **named: given.append(named) or FixedCeiling())
    monkeypatch.setitem(sys.modules, "sfactory.profiling.ceiling", ceiling)
    kwargs = ["--env-backend", "gymnasium", "--env-kwargs", '{"max_episode_steps": 7}']  # no pole falls so soon
    profile(capsys, "--env", "CartPole-v1", *kwargs, *SMALL, "--seconds", "1")
    assert given == [{"episode_length": 7.0}]


def test_a_profile_accounts_for_all_time_and_leaves_only_its_trace(place, capsys):
    values = profile(capsys, "--env", "CartPole-v1", *SMALL, "--seconds", "2", "--trace", "trace.json")
    assert values["fps"] > 0
    assert values["frames_per_s"] == values["fps"]
    assert values["fraction"] == pytest.approx(values["fps"] / 250_000)
    assert values["ceiling"] == pytest.approx(250_000)
    assert values["bottleneck"] in ("environments", "policy workers", "learner", "slots", "latency")
    assert values["advice"]
    for kind, doing in {
        "rollout": ("waiting", "environment", "copying", "queue"),
        "policy": ("waiting", "forward", "sampling", "queue", "weights"),
        "learner": ("copying", "forward", "update", "weights"),
    }.items():
        phases = values["phases"][kind]
        assert sum(phases.values()) == pytest.approx(1)
        assert all(phases[phase] > 0 for phase in doing), (kind, phases)
        assert phases["starting"] == 0
        assert values["accounted_s"][kind] == pytest.approx(values["seconds"], abs=0.8)
    assert list(values["start_s"]) == ["before the run", "rollout", "policy", "learner", "run to first batch"]
    assert all(0 < seconds < 60 for seconds in values["start_s"].values())
    assert values["start_s"]["learner"] < values["start_s"]["run to first batch"]
    assert 4 <= values["batch_mean"] <= 8
    assert values["lag_max"] >= 0
    assert [path.name for path in place.iterdir()] == ["trace.json"]

    events = json.loads((place / "trace.json").read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(names.values()) == PROCESSES
    assert {e["name"] for e in events if e["ph"] == "C"} == {"requests", "free", "filling", "finished"}
    for process, name in names.items():
        laps = [e for e in events if e["ph"] == "X" and e["pid"] == process]
        assert {e["name"] for e in laps} <= set(PHASES)
        assert laps[0]["ts"] >= 0
        ends = np.array([e["ts"] + e["dur"] for e in laps])
        assert (np.array([e["ts"] for e in laps[1:]]) >= ends[:-1] - 0.2).all(), name
        assert ends[-1] <= values["seconds"] * 1e6 + 0.2
        assert ends[-1] > 0.5 * values["seconds"] * 1e6


def test_sampling_alone_learns_nothing(place, capsys):
    values = profile(capsys, "--env", "sfactory/CartPole", *SMALL, "--seconds", "1", "--sample-only")
    assert values["fps"] > 0
    assert values["ceiling"] == pytest.approx(2 / 3e-6)
    learner = values["phases"]["learner"]
    assert learner["forward"] == learner["update"] == 0
    assert values["lag_mean"] is values["lag_max"] is None
    assert values["bottleneck"] != "learner"
    assert list(place.iterdir()) == []


def test_one_process_can_be_profiled(place, capsys):
    values = profile(capsys, "--env", "sfactory/CartPole", *SMALL, "--seconds", "0.5", "--serial")
    assert values["fps"] > 0
    assert values["bottleneck"] == "synchronisation"
    assert sum(values["busy"].values()) <= 1.2, "one process does one thing at a time"
    assert list(place.iterdir()) == []


def test_what_is_tuned_can_be_trained(place, capsys):
    values = profile(
        capsys,
        "--env",
        "sfactory/CartPole",
        *SMALL,
        "--model.core",
        "gru",
        "--seconds",
        "4",
        "--tune",
        "--tune-out",
        "best.yaml",
    )
    assert values["tuned"] == "best.yaml"
    assert [path.name for path in place.iterdir()] == ["best.yaml"]
    config = from_command_line(["--config", "best.yaml"], "test")
    assert config.env == "sfactory/CartPole"
    assert config.rollout == 16
    assert config.model.core == "gru"
    assert searched_values(config) == values["settings"]
    assert (
        train_main(
            [
                "--config",
                "best.yaml",
                "--steps",
                "2000",
                "--run",
                "run",
                "--log.display",
                "none",
                "--log.no-tensorboard",
            ]
        )
        == 0
    )


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--env", "CartPole-v1", "--seconds", "0"], "seconds is 0; it must be above 0"),
        (
            ["--env", "CartPole-v1", "--trace", "nowhere/trace.json"],
            "trace is nowhere/trace.json, which cannot be written",
        ),
        (["--env", "CartPole-v1", "--tune-out", "best.yaml"], "nothing is tuned; add --tune"),
        (["--env", "CartPole-v1", "--tune", "--serial"], "serial is on"),
        (["--env", "sfactory/TensorCartPole", "--tune"], "steps on the learner's device"),
        (["--env", "sfactory/TensorCartPole", "--env-backend", "vector", "--tune", "--serial"], "error: serial is on"),
        (["--env", "CartPole-v1", "--rollout", "32", "--envs-per-worker", "32", "--batch-size", "1000"], "try 1024"),
        (["--env", "NoSuchEnvironment-v0"], "NoSuchEnvironment"),
        ([], "env is not set"),
    ],
)
def test_bad_input_ends_with_status_2_and_one_error(args, says, place, capsys, monkeypatch):
    monkeypatch.setattr("sfactory.profiling.measure.profile_run", lambda *_: pytest.fail("a run was started"))
    assert main(args) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("error: ")
    assert says in errors
    assert list(place.iterdir()) == []


def test_an_interrupt_ends_everything_and_leaves_nothing(place):
    arguments = ["--env", "CartPole-v1", *SMALL, "--seconds", "60"]
    script = (
        f"import runpy, sys, tempfile; tempfile.tempdir = {str(place)!r}; sys.argv[1:] = {arguments!r}; "
        "runpy.run_module('sfactory.profile', run_name='__main__')"
    )
    with Command("-c", script) as command:
        assert wait_until(lambda: list(place.glob("sfactory-*/run/metrics.csv")), 40)
        command.interrupt()
        assert command.wait(30) == 130
        assert "Traceback" not in command.errors
        assert command.left_after(5) == []
    assert list(place.iterdir()) == []


def test_laps_add_up_to_the_time_that_has_passed():
    table = np.zeros((2, len(COLUMNS)))
    before = table.copy()
    watch = Stopwatch(table[0])
    for _ in range(1000):
        watch.lap("environment")
        watch.lap("waiting")
        watch.count(20)
    watch.close()
    interval = Interval(["rollout-0", "policy-0"], before, table)
    shares = interval.phases("rollout")
    assert sum(shares.values()) == pytest.approx(1)
    assert interval.busy("rollout") == pytest.approx(1 - shares["waiting"])
    assert interval.column("rollout", "rows").tolist() == [20_000]
    assert interval.batch_sizes("rollout") == {31: 1000}
    assert interval.phases("policy") == {}
    assert math.isnan(interval.busy("policy"))


def test_time_in_which_others_have_the_core_is_told_apart(monkeypatch):
    waits = itertools.count(5.0)  # of each look, one second more than of the one before
    monkeypatch.setattr(stopwatch, "processor_wait_s", lambda: next(waits))
    row = np.zeros(len(COLUMNS))
    row[COLUMNS.index("crowded_s")] = 7  # of the worker before this one
    watch = Stopwatch(row)
    watch.flush()
    watch.flush()
    assert row[COLUMNS.index("crowded_s")] == 9


def test_workers_in_one_process_share_its_time_by_what_they_do():
    table, household = np.zeros((2, len(COLUMNS))), ProcessBusyTime()
    policy, rollout = (Stopwatch(row, household) for row in table)
    begin = process_time()
    for seconds, worker, other in ((0.3, rollout, policy), (0.1, policy, rollout)):
        end = process_time() + seconds
        while process_time() < end:
            pass
        worker.lap("forward")
        other.lap("waiting")
    for watch in (policy, rollout):
        watch.flush()
    spent = process_time() - begin
    shares = table[:, COLUMNS.index("cpu_s")]
    assert shares.sum() == pytest.approx(spent, rel=0.2)
    assert shares[1] == pytest.approx(3 * shares[0], rel=0.3)


def test_a_trace_keeps_the_last_laps(tmp_path):
    watch = TracingStopwatch(np.zeros(len(COLUMNS)), tmp_path / "part.npz")
    for _ in range(LAPS_KEPT):
        watch.lap("waiting")
    watch.lap("environment")
    watch.close()
    with np.load(tmp_path / "part.npz") as part:
        assert len(part["ends"]) == len(part["phases"]) == LAPS_KEPT
        assert (np.diff(part["ends"]) >= 0).all()
        assert PHASES[part["phases"][-2]] == "environment"


def plan_for(**changes):
    settings = {"env": "CartPole-v1", "preset": "none", "device": "cpu", "workers": 1, "envs_per_worker": 32}
    return make_plan(resolve(Config(**settings | changes)))


def profile_of(
    plan, busy: dict[str, float], cpu: dict[str, float], fps: float = 1000.0, blocked: float = 0.0
) -> Profile:
    """A profile of ten seconds with given busy shares and cores at work."""
    names = ["learner", "policy-0", "rollout-0"]
    after = np.zeros((3, len(COLUMNS)))
    working = {"learner": "update", "policy": "forward", "rollout": "environment"}
    for row, (kind, phase) in zip(after, working.items(), strict=True):
        row[COLUMNS.index(phase)] = 10 * busy[kind]
        row[COLUMNS.index("blocked")] = 10 * blocked if kind == "rollout" else 0
        row[COLUMNS.index("waiting")] = 10 * (1 - busy[kind]) - row[COLUMNS.index("blocked")]
        row[COLUMNS.index("cpu_s")] = 10 * cpu[kind]
    return Profile(
        plan, 1.0, 10.0, fps, Interval(names, np.zeros_like(after), after), {"requests": Level(0, 0)}, 1.0, 2.0
    )


@pytest.mark.parametrize(
    ("busy", "cpu", "blocked", "name", "flag"),
    [
        ((0.97, 0.5, 0.3), (1.0, 0.3, 0.2), 0.6, "learner", "--runtime.learner-threads 2"),
        ((0.97, 0.5, 0.3), (1.0, 0.3, 0.2), 0.6, "learner", "--batch-size (now 1024)"),
        ((0.3, 0.97, 0.5), (0.3, 0.9, 0.4), 0.0, "policy workers", "--envs-per-worker (now 32)"),
        ((0.3, 0.5, 0.97), (0.3, 0.4, 0.9), 0.0, "environments", "--workers (now 1)"),
        ((0.97, 0.98, 0.95), (0.3, 0.2, 3.5), 0.0, "environments", "--env-backend"),
        ((0.5, 0.5, 0.3), (0.5, 0.5, 0.3), 0.6, "slots", "--runtime.spare-batches"),
        ((0.5, 0.5, 0.3), (0.5, 0.5, 0.3), 0.1, "latency", "--envs-per-worker"),
    ],
)
def test_the_bottleneck_comes_with_its_flag(busy, cpu, blocked, name, flag, monkeypatch):
    monkeypatch.setattr("sfactory.config.devices.cores", lambda: 4)
    plan = plan_for(runtime=RuntimeConfig(learner_threads=1), batch_size=1024)
    kinds = ("learner", "policy", "rollout")
    found = find_bottleneck(
        profile_of(plan, dict(zip(kinds, busy, strict=True)), dict(zip(kinds, cpu, strict=True)), blocked=blocked)
    )
    assert found.name == name
    assert any(flag in advice for advice in found.advice)


@pytest.mark.parametrize(
    ("threads", "cpu", "busy", "advised"),
    [(2, 0.6, 0.7, True), (2, 1.2, 0.7, False), (1, 0.6, 0.7, False), (2, 0.1, 0.1, False)],
)
def test_a_learner_that_needs_one_core_is_advised_to_have_one_thread(threads, cpu, busy, advised, monkeypatch):
    monkeypatch.setattr("sfactory.config.devices.cores", lambda: 2)
    plan = plan_for(runtime=RuntimeConfig(learner_threads=threads))
    at_work = {"learner": cpu, "policy": 0.2, "rollout": 1.2}
    found = find_bottleneck(profile_of(plan, {"learner": busy, "policy": 0.3, "rollout": 0.97}, at_work))
    assert found.name == "environments"
    assert any("--runtime.learner-threads 1" in advice for advice in found.advice) == advised


def test_the_two_halves_of_a_process_that_infers_inline_are_one_stage(monkeypatch):
    monkeypatch.setattr("sfactory.config.devices.cores", lambda: 4)
    plan = plan_for(workers=2)
    assert plan.inline_inference
    cpu = {"learner": 0.5, "policy": 0.4, "rollout": 0.6}
    found = find_bottleneck(profile_of(plan, {"learner": 0.5, "policy": 0.4, "rollout": 0.58}, cpu))
    assert (found.name, found.reason) == ("environments", "busy 98% of the time")
    assert "higher --workers (now 2)" in found.advice
    found = find_bottleneck(profile_of(plan, {"learner": 0.5, "policy": 0.3, "rollout": 0.2}, cpu))
    assert found.name == "slots"


@pytest.mark.parametrize("full", [False, True])
def test_environments_that_take_less_than_inference_are_not_the_bottleneck(full, monkeypatch):
    """What rollout workers do besides stepping environments is no environment's time."""
    monkeypatch.setattr("sfactory.config.devices.cores", lambda: 2 if full else 4)
    profile = profile_of(
        plan_for(workers=2),
        {"learner": 0.1, "policy": 0.42, "rollout": 0.54},
        {"learner": 0.1, "policy": 0.8, "rollout": 1.0},
    )
    rollout = profile.interval.after[profile.interval.names.index("rollout-0")]
    rollout[[COLUMNS.index("environment"), COLUMNS.index("copying")]] = 3.4, 2.0
    found = find_bottleneck(profile)
    assert found.name == "policy workers"
    assert not any("learner-threads" in advice for advice in found.advice)


class FakeRuns:
    """Stands for real runs: a speed by a formula, and a clock that they take."""

    def __init__(self, monkeypatch, ends_at: int | None = None, first_batch_s: float = 2) -> None:
        self.now, self.seen, self._ends_at, self._first_batch_s = 0.0, [], ends_at, first_batch_s
        monkeypatch.setattr(tuning_module, "profile_run", self)
        monkeypatch.setattr(tuning_module, "monotonic", lambda: self.now)
        monkeypatch.setattr("sfactory.config.devices.cores", lambda: 4)

    def __call__(self, plan, seconds: float, patience_s: float) -> Profile:
        config = plan.config
        self.now += min(self._first_batch_s, patience_s) + seconds
        self.seen.append(config)
        if self._first_batch_s > patience_s:
            raise RunFailed("no batch was trained in time")
        if len(self.seen) == self._ends_at:
            raise Interrupted(2)
        if config.runtime.groups == 1:
            raise RunFailed("no batch was trained within 15 s")
        speed = 1000.0 * config.workers * min(config.envs_per_worker, 128) / (config.runtime.policy_workers or 2)
        return profile_of(
            plan,
            {"learner": 0.5, "policy": 0.5, "rollout": 0.5},
            {"learner": 0.5, "policy": 0.5, "rollout": 0.5},
            speed,
        )


def test_tuning_finds_the_fastest_within_its_time_and_keeps_what_is_learned(monkeypatch):
    runs = FakeRuns(monkeypatch)
    plan = plan_for(rollout=16, epochs=3, batch_size=16384)
    found = tune(plan, 600)
    best = found.plan.config
    assert best.workers == 16
    assert best.envs_per_worker == 128
    assert best.runtime.policy_workers == 1
    assert runs.now <= 600
    assert all((config.rollout, config.epochs, config.batch_size) == (16, 3, 16384) for config in runs.seen)
    assert len(found.trials) == len(runs.seen)
    assert any("no batch" in trial.note for trial in found.trials)
    assert max(trial.fps for trial in found.trials if not math.isnan(trial.fps)) == found.profile.fps


@pytest.mark.parametrize("algo", ["appo", "ppo"])
def test_tuning_has_no_more_samples_under_way_than_presets_were_tuned_with(monkeypatch, algo):
    """Batch size and rollout stay, also where the number of environments would have others."""
    runs = FakeRuns(monkeypatch)
    plan = plan_for(algo=algo, rollout=16, batch_size=768)
    tune(plan, 600)
    assert {(config.rollout, config.batch_size) for config in runs.seen} == {(16, 768)}
    assert {config.workers for config in runs.seen} >= {1, 2, 3, 4}
    most = (1 if algo == "ppo" else 2) * 768 // 16
    assert max(config.workers * config.envs_per_worker for config in runs.seen) == most


def six_cartpoles() -> gymnasium.vector.VectorEnv:
    return gymnasium.make_vec("CartPole-v1", 6)


def test_a_vector_environment_is_tuned_with_as_many_environments_as_it_has(monkeypatch):
    runs = FakeRuns(monkeypatch)
    found = tune(plan_for(env=six_cartpoles, envs_per_worker=12, batch_size=768, rollout=16), 600)
    assert not [trial.note for trial in found.trials if "num_envs" in trial.note]
    assert {config.envs_per_group for config in runs.seen} == {6}
    assert {config.workers for config in runs.seen} >= {1, 2, 3, 4}


def test_a_setting_must_be_faster_twice(monkeypatch):
    """A first run with other numbers of workers may have been lucky."""
    runs = FakeRuns(monkeypatch)
    lucky = iter([100.0, 200.0])
    monkeypatch.setattr(
        tuning_module,
        "profile_run",
        lambda *args, **named: dataclasses.replace(runs(*args, **named), fps=next(lucky, 100.0)),
    )
    found = tune(plan_for(), 300)
    assert found.plan.config.workers == 1


@pytest.mark.parametrize(("asked", "on_gpu"), [("auto", "bfloat16"), ("float32", "float32")])
def test_the_other_device_is_tried_in_the_precision_that_it_would_choose(monkeypatch, asked, on_gpu):
    runs = FakeRuns(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr("sfactory.config.devices.computes_bfloat16", lambda device: device.type == "cuda")
    monkeypatch.setattr(tuning_module, "make_plan", lambda config: dataclasses.replace(plan, config=config))
    config = resolve(Config(env=Pixels, preset="none", device="cpu", precision=asked, envs_per_worker=32))
    plan = dataclasses.replace(make_plan(config), device_reason="it is left open")
    tune(plan, 300)
    tried = {(config.device, config.precision) for config in runs.seen}
    assert ("cpu", "float32") in tried and ("cuda", on_gpu) in tried
    assert runs.seen[0].device == "cpu" and runs.seen[1].device == "cuda"
    assert (runs.seen[0].precision, runs.seen[1].precision) == ("float32", on_gpu)


def test_the_first_run_of_a_search_has_time_to_begin(monkeypatch):
    FakeRuns(monkeypatch, first_batch_s=20)
    found = tune(plan_for(), 8)
    assert [trial.fps for trial in found.trials] == [found.profile.fps]


def test_an_interrupted_search_keeps_the_best_so_far(monkeypatch):
    FakeRuns(monkeypatch, ends_at=4)
    found = tune(plan_for(), 300)
    assert found.signal == 2
    assert len(found.trials) == 3
    assert found.profile.fps == max(trial.fps for trial in found.trials)


def test_an_interrupt_of_the_first_run_leaves_nothing_to_keep(monkeypatch):
    FakeRuns(monkeypatch, ends_at=1)
    with pytest.raises(Interrupted):
        tune(plan_for(), 300)


@pytest.mark.parametrize("asked", [{}, {"preset": "none"}, {"workers": 64}])
def test_tuned_values_alone_train_what_was_tuned(asked):
    asked = resolve(Config(env="CartPole-v1", **asked))
    best = make_plan(asked).config
    again = make_plan(resolve(merged(Config(), tuned_values(asked, best)))).config
    runtime = dataclasses.replace(again.runtime, learner_threads=None, inference_threads=None)  # which it writes
    assert dataclasses.replace(again, run=best.run, runtime=runtime) == best


def test_tuned_values_say_what_was_asked_for_and_no_more():
    asked = resolve(Config(env="CartPole-v1", preset="none", rollout=64, epochs=2, run="somewhere"))
    values = tuned_values(asked, dataclasses.replace(asked, workers=3))
    assert {key: values[key] for key in ("env", "preset", "rollout", "epochs", "workers")} == {
        "env": "CartPole-v1", "preset": "none", "rollout": 64, "epochs": 2, "workers": 3,
    }  # fmt: skip
    assert "run" not in values
    assert "optim" not in values


@pytest.mark.parametrize(("trials", "told"), [(1, "no time to compare anything; use more --seconds"), (2, "2 runs")])
def test_what_a_search_prints_can_be_run(trials, told, place, capsys, monkeypatch):
    plan, halves = plan_for(workers=1), dict.fromkeys(("learner", "policy", "rollout"), 0.5)
    trial = tuning_module.Trial(searched_values(plan.config), 1000.0)
    tuning = tuning_module.Tuning(plan, profile_of(plan, halves, halves), trials * [trial])
    monkeypatch.setattr(tuning_module, "tune", lambda *_: tuning)
    file = place / "my best.yaml"
    assert main(["--env", "CartPole-v1", *SMALL, "--tune", "--tune-out", str(file)]) == 0
    shown = capsys.readouterr().out
    assert told in shown and f"sfactory train --config '{file}'" in shown
    assert "1 rollout worker " in shown and "1 policy worker " in shown


@pytest.mark.parametrize("learns", [True, False])
def test_lag_is_told_where_something_is_learned(learns):
    plan, halves = plan_for(), dict.fromkeys(("learner", "policy", "rollout"), 0.5)
    found = profile_of(dataclasses.replace(plan, sample_only=not learns), halves, halves)
    found = found if learns else dataclasses.replace(found, lag_mean=math.nan, lag_max=math.nan)
    console = Console(record=True, width=120, file=io.StringIO())
    show(console, found, 1000.0, find_bottleneck(found))
    text = console.export_text()
    assert ("policy lag" in text) == learns
