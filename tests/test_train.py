"""Starting, stopping, failing and resuming: what a user finds afterwards."""

import contextlib
import dataclasses
import functools
import gc
import itertools
import os
import random
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import commands
import numpy as np
import psutil
import pytest
import torch
import yaml
from commands import Command, OnTerminal, abandoned_shared_memory, wait_until
from environments import Careless, Counting
from faults import Faulty, Panic
from gymnasium import spaces
from sampling_run import SamplingRun
from whole_runs import BATCH, QUIET, config_for, last_known, rows, saved_steps, summary

from sfactory import train
from sfactory.config import LossConfig, ModelConfig, OptimConfig, RuntimeConfig
from sfactory.config.lag import max_lag
from sfactory.data.arena import FILLING, FINISHED, FREE
from sfactory.data.weights import WeightPublisher
from sfactory.errors import ConfigError
from sfactory.files import ELSEWHERE
from sfactory.rollout import RolloutWorker
from sfactory.runs.checkpoint import CheckpointStore
from sfactory.runtime import monitor
from sfactory.runtime.planning import make_plan
from sfactory.runtime.training import Training
from sfactory.train import main

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("nothing_is_left")]
SMALL = ["--preset", "none", "--workers", "1", "--envs-per-worker", "8", "--rollout", "16", "--batch-size", str(BATCH),
         "--device", "cpu", "--log.no-tensorboard", "--log.report-every-s", "0.2"]  # fmt: skip


# The run folder and the command


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of the command to its end, in a process of its own, as a user starts it; the run folder."""
    run = tmp_path_factory.mktemp("train") / "run"
    shared = abandoned_shared_memory()
    arguments = [a for a in SMALL if a != "--log.no-tensorboard"]
    with Command(
        "-m", "sfactory.train", "--env", "CartPole-v1", "--steps", "4096", "--run", str(run), *arguments
    ) as command:
        assert command.wait() == 0, command.errors
        assert command.left_after(2) == []
        *_, last = command.output.splitlines()
        assert re.fullmatch(rf"completed at [\d,]+ env steps; saved in {re.escape(str(run))}", last), last
        assert "Traceback" not in command.errors
    assert abandoned_shared_memory() <= shared
    return run


def test_the_run_folder_holds_what_the_contract_says(finished):
    assert yaml.safe_load((finished / "config.yaml").read_text())["env"] == "CartPole-v1"
    report = last_known(finished)
    promised = (
        "wall_s env_steps fps episode_return_mean episode_length_mean policy_lag_mean policy_lag_max learner_updates"
    )
    assert all(float(report[name]) >= 0 for name in promised.split())
    assert int(report["env_steps"]) >= 4096
    assert list(finished.glob("events.out.tfevents.*"))
    assert saved_steps(finished) == int(report["env_steps"])
    values = summary(finished)
    assert values["status"] == "completed"
    assert values["env_steps"] == values["frames"] == int(report["env_steps"])
    assert values["wall_s"] > 0
    assert values["fps"] > 0.99 * values["env_steps"] / values["wall_s"], "its start does not count"
    assert values["episode_return_mean"] > 5


def test_a_finished_run_has_nothing_to_do(finished, capsys):
    before, config = (summary(finished), rows(finished)), (finished / "config.yaml").read_bytes()
    assert main(["--env", "CartPole-v1", "--steps", "4096", "--run", str(finished), *SMALL, "--loss.gamma", "0.5"]) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert (summary(finished), rows(finished)) == before
    assert (finished / "config.yaml").read_bytes() == config, "nothing was trained with another gamma"


@pytest.mark.parametrize("left", [None, "interrupted", "failed"])
def test_a_run_that_was_ended_after_its_last_checkpoint_is_completed_by_the_same_command(left, tmp_path):
    config = config_for(tmp_path, "CartPole-v1", serial=True, steps=256)
    trained, file = train(config), tmp_path / "run" / "summary.json"
    if left is None:
        file.unlink()  # as where its process was killed
    else:
        file.write_text(f'{{"status": "{left}", "error": "of before"}}')
    assert train(config).status == "completed"
    known = summary(tmp_path / "run")
    assert (known["status"], known["env_steps"], known["error"]) == ("completed", trained.env_steps, None)


@pytest.mark.parametrize("serial", [False, True], ids=["processes", "serial"])
@pytest.mark.parametrize("at", [0, 40], ids=["made", "stepped"])
def test_a_run_stays_in_its_folder_and_learns_whatever_its_environments_change(at, serial, tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(tmp_path)
    errors = np.geterr()
    plain, kwargs = RuntimeConfig(kernels="off"), {"folder": str(elsewhere), "at": at}
    config = config_for(tmp_path, env=Careless, env_kwargs=kwargs, serial=serial, runtime=plain)
    result = train(dataclasses.replace(config, run="here"))
    assert (Path.cwd(), np.geterr(), torch.is_grad_enabled()) == (tmp_path, errors, True)
    assert not list(elsewhere.iterdir())
    assert saved_steps(tmp_path / "here") == int(rows(tmp_path / "here")[-1]["env_steps"]) == result.env_steps
    assert summary(tmp_path / "here")["status"] == "completed"
    assert yaml.safe_load((tmp_path / "here" / "config.yaml").read_text())["run"] == "here"


@pytest.mark.parametrize("way", ["command", "preset", "no preset"])
def test_a_run_stays_in_its_folder_where_the_environments_module_changes_the_working_directory(
    way, tmp_path, monkeypatch
):
    elsewhere, name = tmp_path / "elsewhere", f"moving_{way.replace(' ', '_')}"
    elsewhere.mkdir()
    (tmp_path / f"{name}.py").write_text(f"import os\nfrom faults import Faulty\nos.chdir({str(elsewhere)!r})\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    if way == "command":
        assert main(["--env", f"{name}:Faulty", "--steps", "256", "--run", "here", "--serial", *SMALL]) == 0
    else:
        preset = "none" if way == "no preset" else "auto"
        config = config_for(tmp_path, env=f"{name}:Faulty", serial=True, steps=256, preset=preset)
        train(dataclasses.replace(config, run="here"))
    assert Path.cwd() == elsewhere
    assert not list(elsewhere.iterdir())
    assert saved_steps(tmp_path / "here") == 256


def test_a_changed_model_is_refused_with_the_differences(finished, capsys):
    before = summary(finished)
    arguments = ["--env", "CartPole-v1", "--steps", "8192", "--run", str(finished), *SMALL]
    assert main([*arguments, "--model.hidden", "32", "--model.core", "gru"]) == 2
    errors = capsys.readouterr().err
    assert "model.hidden: [64, 64] -> [32]" in errors
    assert "model.core: none -> gru" in errors
    assert "--overwrite" in errors
    assert summary(finished) == before


def test_weights_of_another_model_are_refused_also_if_only_code_has_changed(tmp_path):
    class Encoder(torch.nn.Module):
        def __init__(self, leaf):
            super().__init__()
            self.out_features = width
            self.linear = torch.nn.Linear(leaf.shape[0], width)

        def forward(self, x):
            return self.linear(x)

    width = 8
    config = config_for(tmp_path, env=Faulty, serial=True, steps=256, model=ModelConfig(encoder=Encoder))
    train(config)
    width = 12
    with pytest.raises(ConfigError, match=r"linear\.weight: \(8, 3\) -> \(12, 3\)"):
        train(dataclasses.replace(config, steps=512))


def test_the_same_command_resumes_where_it_ended(tmp_path):
    optim = OptimConfig(lr=1e-3, schedule="linear", minibatches=2)
    config = config_for(tmp_path, env=Faulty, steps=2048, epochs=2, optim=optim)
    first = train(config)
    second = train(dataclasses.replace(config, steps=4096))
    reports = rows(second.run_dir)
    half = int(reports[-1]["env_steps"]) // 2
    assert (first.env_steps, second.env_steps) == (half, 2 * half)
    assert [int(r["env_steps"]) for r in reports] == sorted(int(r["env_steps"]) for r in reports)
    assert second.wall_s > first.wall_s
    assert summary(second.run_dir)["wall_s"] == pytest.approx(second.wall_s)
    # Every row of every batch counts in this environment, so each sample was trained on once an epoch, before and
    # after.
    assert int(reports[-1]["learner_updates"]) == second.env_steps // BATCH * 4
    assert float(reports[-1]["lr"]) == pytest.approx(1e-3 * BATCH / 4096), (
        "the last batch began one batch before the end"
    )


def test_overwrite_begins_anew(tmp_path):
    train(config_for(tmp_path, env=Faulty, serial=True, steps=512, seed=1))
    result = train(config_for(tmp_path, env=Faulty, serial=True, steps=256, seed=2, overwrite=True))
    assert result.env_steps == saved_steps(result.run_dir) == 256
    assert [int(r["env_steps"]) for r in rows(result.run_dir)][-1] == 256
    assert summary(result.run_dir)["seed"] == 2


@pytest.mark.parametrize("schedule", ["linear", "adaptive_kl"])
def test_a_loaded_learner_is_the_saved_one_in_every_tensor_and_goes_on_alike(schedule, tmp_path):
    optim = OptimConfig(schedule=schedule, minibatches=2, target_kl=1e-5)
    model, loss = ModelConfig(core="lstm", core_size=8, normalize_obs=True), LossConfig(normalize_returns=True)
    config = config_for(tmp_path, env=Counting, epochs=2, optim=optim, model=model, loss=loss)
    run = SamplingRun(config, tmp_path)
    other = SamplingRun(config, tmp_path / "other")
    try:
        for _ in range(3):
            run.learner._train(run.learner._feed.fresh(run.sample(2), run.learner.updates))
            run.give_back([])
        run.training.save()
        again = Training(run.plan, run.wires, CheckpointStore(tmp_path / "checkpoints"))
        again.learner._feed._publisher = WeightPublisher(run.wires.weights, again.learner._flat.vector)
        assert_same(run.training.snapshot(), again.snapshot())
        assert again.learner.env_steps > 0
        slots = run.sample(2)
        for training in (run.training, again):
            training.learner._train(training.learner._feed.fresh(slots, training.learner.updates))
        assert_same(run.training.snapshot(), again.snapshot())
        with pytest.raises(AssertionError):
            assert_same(run.training.snapshot(), other.training.snapshot())
    finally:
        run.close()
        other.close()


def draw(file: str, samples, config):
    """No loss term; writes down what it draws from the global random states."""
    with Path(file).open("a") as out:
        out.write(f"{os.getpid()} {torch.rand(()).item()} {np.random.random()} {random.random()}\n")
    return {"nothing": samples.value * 0.0}


@pytest.mark.parametrize("serial", [True, False], ids=["serial", "processes"])
def test_what_a_resumed_learner_draws_of_the_global_random_states_does_not_begin_anew(serial, tmp_path):
    drawn = []
    for steps in (512, 1024):
        file = tmp_path / str(steps)
        loss = LossConfig(terms=functools.partial(draw, str(file)))
        train(config_for(tmp_path, env=Faulty, serial=serial, steps=steps, loss=loss))
        lines = [line.split() for line in file.read_text().splitlines()]
        drawn.append([each for _, *each in (lines[1:] if serial else (x for x in lines if x[0] != lines[0][0]))])
    before, after = (set(itertools.chain(*each)) for each in drawn)  # without the dry run's before the start
    assert before and after
    assert not before & after


def test_a_linear_rate_falls_to_zero_from_hold_on(tmp_path):
    optim = OptimConfig(lr=1e-2, schedule="linear", hold=0.75)
    run = SamplingRun(config_for(tmp_path, env=Counting, steps=1000, optim=optim), tmp_path)
    try:
        rates = []
        for run.learner.env_steps in (0, 750, 800, 900, 1000, 1100):
            run.learner._set_learning_rate()
            rates.append(run.learner._optimizer.lr)
        np.testing.assert_allclose(rates, [1e-2, 1e-2, 8e-3, 4e-3, 0, 0])
    finally:
        run.close()


@pytest.mark.parametrize(("begun", "rate"), [("linear", 1e-2), ("adaptive_kl", 5e-4)])
def test_only_a_rate_that_was_adapted_goes_on(begun, rate, tmp_path):
    config = config_for(tmp_path, env=Counting, epochs=2, optim=OptimConfig(schedule="adaptive_kl", lr=1e-2))
    run = SamplingRun(config, tmp_path)
    try:
        state = run.learner.state() | {"schedule": begun, "lr": 5e-4}
        run.learner.load_state(state, 0, 0)
        assert float(run.learner._optimizer.lr) == rate
    finally:
        run.close()


def assert_same(one, two) -> None:
    """Compare snapshots tensor by tensor, besides the seconds."""

    def compare(a, b, where):
        if isinstance(a, dict):
            assert a.keys() == b.keys(), where
            for key in a:
                compare(a[key], b[key], f"{where}.{key}")
        elif isinstance(a, list | tuple):
            for i, (x, y) in enumerate(zip(a, b, strict=True)):
                compare(x, y, f"{where}.{i}")
        else:
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, where

    for field in ("model", "trainer", "env_steps", "frames", "updates"):
        compare(getattr(one, field), getattr(two, field), field)


# Ways to run

MODES = {
    "async": {},
    "async, two workers of each kind, lstm": {
        "workers": 2, "runtime": RuntimeConfig(policy_workers=2), "model": ModelConfig(core="lstm", core_size=8,
        normalize_obs=True)},
    "inline inference, lstm": {
        "workers": 2, "runtime": RuntimeConfig(policy_workers=0), "model": ModelConfig(core="lstm", core_size=8,
        normalize_obs=True)},
    "impala, three groups": {"algo": "impala", "runtime": RuntimeConfig(groups=3), "envs_per_worker": 12,
    "batch_size": 192},
    "one group": {"runtime": RuntimeConfig(groups=1), "loss": LossConfig(normalize_returns=True)},
    "async, tight lag, epochs": {"workers": 2, "epochs": 2, "optim": OptimConfig(minibatches=2),
    "loss": LossConfig(max_lag=15)},
    "async, many epochs": {"workers": 2, "epochs": 8, "optim": OptimConfig(minibatches=8)},
    "sync": {"sync": True, "workers": 2, "runtime": RuntimeConfig(policy_workers=1), "epochs": 2,
    "optim": OptimConfig(minibatches=2)},
    "ppo, gru": {"algo": "ppo", "epochs": 3, "optim": OptimConfig(minibatches=2), "model": ModelConfig(core="gru",
    core_size=8)},
    "serial": {"serial": True, "workers": 2, "runtime": RuntimeConfig(policy_workers=2), "epochs": 2},
    "serial, inline inference": {"serial": True, "workers": 2, "runtime": RuntimeConfig(policy_workers=0)},
    "serial ppo, lstm": {"serial": True, "algo": "ppo", "model": ModelConfig(core="lstm", core_size=8,
    normalize_obs=True)},
}  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_every_way_to_run_trains_within_its_bound_on_the_lag(mode, tmp_path):
    config = config_for(tmp_path, env=Counting, **MODES[mode])
    result = train(config)
    assert result.status == "completed"
    assert result.env_steps >= 2048
    lags = [float(r["policy_lag_max"]) for r in rows(result.run_dir) if r["policy_lag_max"]]
    assert lags
    rows_of_group = config.envs_per_worker // config.runtime.groups
    bound = config.updates_per_batch - 1 if config.lag_free else max_lag(config, rows_of_group)
    assert max(lags) <= bound
    assert result.episode_return_mean > 0


@pytest.mark.parametrize(
    ("changes", "policy_workers", "policies"),
    [
        ({"workers": 1}, 1, 1),
        ({"workers": 3}, 0, 3),
        ({"workers": 3, "serial": True}, 1, 1),
        ({"workers": 3, "runtime": RuntimeConfig(policy_workers=2)}, 2, 2),
        ({"workers": 1, "runtime": RuntimeConfig(policy_workers=0)}, 0, 1),
    ],
)
def test_inference_is_inline_where_several_rollout_workers_share_a_cpu_with_it(
    changes, policy_workers, policies, tmp_path
):
    plan = make_plan(config_for(tmp_path, env=Counting, **changes))
    assert (plan.config.runtime.policy_workers, plan.policy_workers) == (policy_workers, policies)
    answered = {plan.policy_worker_of(group) for group in range(plan.groups)}
    assert answered == set(range(policies))


def test_no_slot_is_lost_or_doubled_and_every_sample_counts_once(tmp_path, monkeypatch):
    made = []
    make = monitor.make_wires
    monkeypatch.setattr(monitor, "make_wires", lambda *args: made.append(make(*args)) or made[-1])
    sums = []

    def look(report):
        state = made[0].arena.state.copy()
        sums.append(sum(int((state == kind).sum()) for kind in (FREE, FILLING, FINISHED)))

    result = train(
        config_for(tmp_path, env=Faulty, workers=2, steps=8192, runtime=RuntimeConfig(spare_batches=2)), [look]
    )
    arena, wires = made[0].arena, made[0]
    assert set(sums) == {arena.slots}
    free, done = wires.free.get_many(0), wires.finished.get_many(0)
    assert len({*free, *done}) == len(free) + len(done)
    kept = set(np.flatnonzero(arena.state == FREE).tolist()) - set(free)
    assert set(free) | kept == set(np.flatnonzero(arena.state == FREE).tolist())
    assert len(kept) % 2 == 0, "those of whole batches, which the learner had yet to give back"
    assert set(done) <= set(np.flatnonzero(arena.state == FINISHED))
    assert wires.control.total("learner", "rows") == result.env_steps
    sampled = sum(wires.control.total(f"rollout-{i}", "rows") for i in range(2))
    assert result.env_steps <= sampled <= result.env_steps + arena.slots * arena.rollout * arena.rows


def test_a_callback_sees_every_report_and_can_end_the_run(tmp_path):
    seen = []
    result = train(config_for(tmp_path, env=Faulty, steps=10**9), [seen.append, lambda report: report.env_steps < 1000])
    assert result.status == "interrupted"
    assert result.signal is None
    assert [report.env_steps for report in seen] == [int(r["env_steps"]) for r in rows(result.run_dir)]
    assert saved_steps(result.run_dir) == result.env_steps >= 1000
    assert summary(result.run_dir)["status"] == "interrupted"


@pytest.mark.parametrize("error", [KeyError, SystemExit])
@pytest.mark.parametrize("serial", [False, True])
def test_what_a_callback_raises_reaches_the_caller_after_saving(serial, error, tmp_path):
    def fail(report):
        if report.env_steps > 500:
            raise error("mistake of the user's")

    with pytest.raises(error, match="mistake"):
        train(config_for(tmp_path, env=Faulty, steps=10**9, serial=serial), [fail])
    values = summary(tmp_path / "run")
    assert values["status"] == "failed"
    assert "mistake" in values["error"]
    assert saved_steps(tmp_path / "run") == values["env_steps"] > 500


# Failures


@pytest.mark.parametrize("serial", [False, True], ids=["processes", "serial"])
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("reset", "licence"),
        ("step", "licence"),
        ("nan", "nan"),
        ("shape", "(4,)"),
        ("exit", "SystemExit"),
        ("panic", "raised Panic in step("),
        ("interrupt", "raised KeyboardInterrupt in step("),
    ],
)
def test_an_environment_that_misbehaves_is_told_with_its_number_and_traceback_and_the_run_goes_on(
    fault, says, serial, tmp_path, capsys
):
    log = dataclasses.replace(QUIET, display="plain")
    result = train(
        config_for(tmp_path, env=Faulty, env_kwargs={"fault": fault, "after": 200}, steps=4096, serial=serial, log=log)
    )
    said = capsys.readouterr().out
    assert "environment 5 (Faulty)" in said
    assert says in said
    if says == "licence":
        assert said.count("Traceback") == 1
        assert "faults.py" in said
    assert result.status == "completed"
    assert rows(tmp_path / "run")[-1]["env_faults"] == "1"


def test_whatever_a_serial_run_raises_it_is_saved(tmp_path, monkeypatch):
    poll, calls = RolloutWorker.poll, itertools.count()

    def panic(self, timeout):
        if next(calls) == 500:
            raise Panic("index out of bounds")
        poll(self, timeout)

    monkeypatch.setattr(RolloutWorker, "poll", panic)
    with pytest.raises(Panic, match="out of bounds"):
        train(config_for(tmp_path, env=Faulty, steps=10**9, serial=True))
    values = summary(tmp_path / "run")
    assert (values["status"], values["error"]) == ("failed", "runner: Panic: index out of bounds")
    assert saved_steps(tmp_path / "run") == values["env_steps"] > 500
    assert not (tmp_path / "run" / "status.json").exists()


def test_a_failed_command_ends_with_status_1_and_one_message(tmp_path, capsys):
    arguments = [
        "--env",
        "faults:Flaky",
        "--env-kwargs",
        "{p: 1}",
        "--steps",
        "1000000",
        "--run",
        str(tmp_path / "run"),
        *SMALL,
    ]
    assert main(arguments) == 1
    errors = capsys.readouterr().err
    assert errors.startswith("error: rollout-0: environment ")
    assert "(Flaky) raised RuntimeError in step(" in errors


def test_nothing_outlives_a_killed_runner_and_the_same_command_goes_on(tmp_path, monkeypatch):
    with tempfile.TemporaryDirectory() as temporary:  # a short path, for the fork server's socket
        monkeypatch.setitem(commands.ENVIRONMENT, "TMPDIR", temporary)
        with running(tmp_path) as command:
            assert any(process.name() == "sleep" for process in command.left())
            assert len(os.listdir(temporary)) == 1
            shared = tmp_path / "shared memory of an environment's program"
            shared.touch()
            (folder,) = Path(temporary).rglob("sfactory-rollout-0-*")
            (folder / ELSEWHERE).write_text(f"{shared}\n")
            os.kill(command.pid, signal.SIGKILL)
            assert command.left_after(5) == []
        assert os.listdir(temporary) == []
        assert not shared.exists()
        with running(tmp_path) as command:
            command.interrupt()
            assert command.wait(20) == 130
        assert os.listdir(temporary) == []


@pytest.mark.parametrize("delay", [0.0, 0.1, 0.3, 1.0])
def test_nothing_is_left_of_a_runner_that_is_killed_while_it_starts(delay, tmp_path, monkeypatch):
    with tempfile.TemporaryDirectory() as temporary:
        monkeypatch.setitem(commands.ENVIRONMENT, "TMPDIR", temporary)
        arguments = ["--env", "CartPole-v1", "--steps", "1000000000", "--run", str(tmp_path / "run"), *SMALL]
        with Command("-m", "sfactory.train", *arguments) as command:
            assert wait_until(lambda: os.listdir(temporary), 60)
            time.sleep(delay)
            os.kill(command.pid, signal.SIGKILL)
            assert command.left_after(30) == []
        assert wait_until(lambda: os.listdir(temporary) == [], 5)


@pytest.mark.parametrize("which", ["sf-rollout", ""], ids=["a worker", "all of them"])
def test_stopped_processes_do_not_outlive_a_killed_runner(which, tmp_path):
    """They cannot notice by themselves that the runner is gone."""
    with running(tmp_path) as command:
        for process in command.left():
            if process.name().startswith(which):
                process.send_signal(signal.SIGSTOP)
        os.kill(command.pid, signal.SIGKILL)
        assert command.left_after(5) == []


def test_a_worker_that_keeps_the_interpreter_to_itself_does_not_outlive_a_killed_runner(tmp_path):
    hold = tmp_path / "hold"
    with running(tmp_path, "--env-kwargs", f'{{"hold": "{hold}"}}') as command:
        hold.touch()
        time.sleep(0.5)
        os.kill(command.pid, signal.SIGKILL)
        assert command.left_after(20) == []


# Signals


@contextlib.contextmanager
def running(folder: Path, *flags: str, kind: Callable[..., Command] = Command):
    """The command, training environments that have programs of their own, from when it has reported progress."""
    arguments = ["--env", "faults:WithProgram", "--steps", "1000000000", "--run", str(folder / "run"), *SMALL, *flags]
    metrics = folder / "run" / "metrics.csv"
    earlier = len(rows(folder / "run")) if metrics.exists() else 0
    with kind("-m", "sfactory.train", *arguments) as command:
        assert wait_until(
            lambda: metrics.exists() and any(int(r["env_steps"]) > 0 for r in rows(folder / "run")[earlier:]), 60
        )
        yield command


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_command_saves_and_leaves_nothing(number, status, tmp_path):
    shared = abandoned_shared_memory()
    with running(tmp_path) as command:
        command.interrupt(number)
        assert command.wait(20) == status
        assert command.left_after(2) == []
        assert command.errors == ""
    values = summary(tmp_path / "run")
    said = f"interrupted at {values['env_steps']:,} env steps; saved in {tmp_path / 'run'}; the same command goes on"
    assert command.output.splitlines()[-1] == said
    assert values["status"] == "interrupted"
    assert saved_steps(tmp_path / "run") == values["env_steps"] > 0
    assert abandoned_shared_memory() <= shared


def test_a_run_whose_terminal_is_closed_saves_and_leaves_nothing(tmp_path):
    with running(tmp_path, kind=OnTerminal) as command:
        command.close_terminal()
        assert command.wait(20) == 128 + signal.SIGHUP
        assert command.left_after(2) == []
    assert summary(tmp_path / "run")["status"] == "interrupted"
    assert saved_steps(tmp_path / "run") > 0


def test_a_run_under_nohup_outlives_its_terminal(tmp_path):
    with running(tmp_path, kind=functools.partial(OnTerminal, hangup=signal.SIG_IGN)) as command:
        command.close_terminal()
        reported = len(rows(tmp_path / "run"))
        assert wait_until(lambda: len(rows(tmp_path / "run")) > reported + 2)
        os.kill(command.pid, signal.SIGTERM)
        assert command.wait(20) == 128 + signal.SIGTERM


@pytest.mark.parametrize("model", ["--model.activation relu", "--model.core lstm"], ids=["compiled", "torch"])
def test_nothing_is_imported_that_a_run_starts_the_later_for(model, tmp_path):
    script = """
import sys
from sfactory.train import main
assert main(sys.argv[1:]) == 0
assert not {"sympy", "torch._dynamo", "matplotlib", "pandas"} & set(sys.modules), "imported in vain"
"""
    arguments = ["--env", "CartPole-v1", "--steps", "1024", "--run", str(tmp_path / "run"), "--serial", *model.split()]
    with Command("-c", script, *arguments, *SMALL) as command:
        assert command.wait() == 0, command.errors


def has_begun(pid: int) -> bool:
    """Whether the program has taken signals over from Python, the last of which is SIGUSR2, ignored until a run."""
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(re.search(r"SigIgn:\s*(\w+)", status)[1], 16) >> (signal.SIGUSR2 - 1) & 1)


@pytest.mark.parametrize("seconds", [0.3, 1.2])
@pytest.mark.parametrize("inherited", [signal.default_int_handler, signal.SIG_IGN], ids=["", "begun in the background"])
def test_an_interrupt_at_start_up_ends_at_once_without_a_traceback(inherited, seconds, tmp_path):
    before = signal.signal(signal.SIGINT, inherited)
    try:
        command = Command("-m", "sfactory.train", "--env", "CartPole-v1", "--run", str(tmp_path / "run"), *SMALL)
    finally:
        signal.signal(signal.SIGINT, before)
    with command:
        assert wait_until(lambda: has_begun(command.pid))
        time.sleep(seconds)
        command.interrupt()
        assert command.wait(20) == 130
        assert command.errors == ""
        assert command.left_after(2) == []


def survives(pid: int, number: int) -> bool:
    """Whether a process ignores a signal or has a handler of its own for it."""
    masks = re.findall(r"^Sig(?:Ign|Cgt):\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return any(int(mask, 16) >> (number - 1) & 1 for mask in masks)


def test_signals_that_ask_for_something_end_no_run_that_is_starting(tmp_path):
    with Command(
        "-m", "sfactory.train", "--env", "CartPole-v1", "--run", str(tmp_path / "run"), "--steps", "512", *SMALL
    ) as command:
        assert wait_until(lambda: survives(command.pid, signal.SIGUSR2))  # as soon as it is the command's own
        for number in (signal.SIGUSR1, signal.SIGUSR2) * 5:
            os.kill(command.pid, number)
            time.sleep(0.1)
        assert command.wait() == 0


def test_a_second_interrupt_ends_at_once(tmp_path):
    with running(tmp_path, "--env-kwargs", "{fault: hang, after: 200}") as command:
        time.sleep(2)  # by then the environment hangs
        command.interrupt()
        time.sleep(0.3)
        command.interrupt()
        assert command.wait(20) == 130
        assert "Traceback" not in command.errors
        assert command.left_after(2) == []


@pytest.mark.parametrize("serial", [False, True])
def test_sigusr1_saves_and_goes_on_and_sigterm_ends_a_call_from_python(serial, tmp_path):
    asked_at = []

    def ask(report):
        if report.env_steps > 500 and not asked_at:
            asked_at.append(report.env_steps)
            os.kill(os.getpid(), signal.SIGUSR1)
        elif len(asked_at) == 1 and 0 < saved_steps(tmp_path / "run") < report.env_steps:
            asked_at.append(report.env_steps)
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    result = train(config_for(tmp_path, env=Faulty, steps=10**9, serial=serial), [ask])
    assert (result.status, result.signal) == ("interrupted", signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before
    assert result.env_steps > asked_at[0]
    assert len(list((tmp_path / "run" / "checkpoints").glob("*.json"))) == 2


def test_signals_to_other_processes_of_a_run_than_its_runner_change_nothing(tmp_path):
    sent = []

    def disturb(report):
        if report.env_steps > 500 and not sent:
            sent.extend(
                p for p in psutil.Process().children(recursive=True) if "resource_tracker" not in " ".join(p.cmdline())
            )
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
                for process in sent:
                    process.send_signal(number)

    result = train(config_for(tmp_path, env=Faulty, steps=20_000), [disturb])
    assert result.status == "completed"
    assert len(sent) == 4, "the server, the learner, a policy worker and a rollout worker"


# Users' programs

SCRIPT = """
import gymnasium as gym, numpy as np, psutil, threading
from sfactory import Config, LogConfig, train

class Mine(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gym.spaces.Discrete(2)
    def __init__(self, length=10):
        self.length, self.count = length, 0
    def reset(self, *, seed=None, options=None):
        self.count = 0
        return np.zeros(3, np.float32), {}
    def step(self, action):
        self.count += 1
        return np.zeros(3, np.float32), 1.0, self.count == self.length, False, {}

gym.register("Mine-v0", Mine)
print("once")

def go(name, env, **kwargs):
    log = LogConfig(tensorboard=False, display="none")
    sizes = dict(steps=1024, workers=1, envs_per_worker=8, rollout=16, batch_size=128)
    result = train(Config(env=env, device="cpu", run=f"FOLDER/{name}", log=log, **sizes, **kwargs))
    print(name, result.status, result.episode_return_mean)
    children = psutil.Process().children(recursive=True)
    print([p.name() for p in children if "resource_tracker" not in " ".join(p.cmdline())])

go("lambda", lambda: Mine(5))
thread = threading.Thread(target=go, args=("thread", "Mine-v0"), kwargs={"env_kwargs": {"length": 7}})
thread.start()
thread.join()
"""


@pytest.mark.parametrize("way", ["file", "stdin"])
def test_a_script_needs_no_guard_and_keeps_no_process(way, tmp_path):
    script = SCRIPT.replace("FOLDER", str(tmp_path))
    if way == "stdin":
        command = Command("-", stdin=script)
    else:
        (tmp_path / "script.py").write_text(script)
        command = Command(str(tmp_path / "script.py"))
    with command:
        assert command.wait() == 0, command.errors
        assert command.output.split("\n") == ["once", "lambda completed 5.0", "[]", "thread completed 7.0", "[]", ""]
        assert command.errors == ""


@pytest.fixture
def no_collections():
    """Nothing that a collection would find goes by itself."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("serial", [False, True])
@pytest.mark.usefixtures("no_collections")
def test_repeated_runs_keep_neither_descriptors_nor_processes_nor_threads(serial, tmp_path):
    me, counts = psutil.Process(), []
    for turn in range(5):
        train(config_for(tmp_path / str(turn), env=Faulty, steps=512, serial=serial))
        counts.append((me.num_fds(), threading.active_count(), len(me.memory_maps(grouped=False))))
    assert counts[4][:2] == counts[1][:2]
    assert counts[4][2] <= counts[1][2] + 8


def test_a_serial_run_leaves_the_random_states_of_its_caller(tmp_path):
    drawn = []
    for seed in (1, 2):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        before = random.getstate(), np.random.get_state()[1].tolist()
        train(config_for(tmp_path / str(seed), env=Faulty, steps=128, serial=True))
        assert (random.getstate(), np.random.get_state()[1].tolist()) == before
        drawn.append(torch.rand(4))
    assert not torch.equal(*drawn)


# Bad configurations


def refused(arguments: list[str], capsys) -> str:
    """What the command says when it refuses to start."""
    try:
        status = main(arguments)
    except SystemExit as error:  # of the flags' parser
        status = error.code
    assert status == 2
    return capsys.readouterr().err


def test_all_mistakes_are_named_at_once_and_nothing_is_made(tmp_path, capsys):
    run = tmp_path / "run"
    mistakes = ["--optim.lr", "-1", "--epochs", "0", "--device", "tpu"]
    errors = refused(["--env", "CartPol-v1", "--run", str(run), *mistakes], capsys)
    for said in ("did you mean CartPole-v1", "optim.lr is -1", "epochs is 0", "device is 'tpu'"):
        assert said in errors
    assert "batch_size 1000 is not a multiple of rollout 32 x rows 16 = 512; try 1024" in refused(
        ["--env", "CartPole-v1", "--run", str(run), "--preset", "none", "--batch-size", "1000"], capsys
    )
    assert "--batch-size" in refused(["--env", "CartPole-v1", "--run", str(run), "--bath-size", "1000"], capsys)
    assert "unknown model.core 'lstn'" in refused(
        ["--env", "CartPole-v1", "--run", str(run), "--model.core", "lstn"], capsys
    )
    assert not run.exists()


def test_unsupported_spaces_are_refused_before_anything_is_made(tmp_path):
    class Text(Counting):
        observation_space = spaces.Text(5)

    with pytest.raises(ConfigError, match=r"the observation space Text"):
        train(config_for(tmp_path, env=Text))
    assert not (tmp_path / "run").exists()


def test_a_folder_in_use_is_refused(tmp_path):
    refusals = []

    def intrude(report):
        with pytest.raises(ConfigError, match="is in use by a running process") as caught:
            train(config_for(tmp_path, env=Faulty, serial=True))
        refusals.append(caught.value)
        return False

    train(config_for(tmp_path, env=Faulty), [intrude])
    assert refusals


@pytest.mark.parametrize("policy_workers", [0, 1])
def test_sampling_is_scheduled_as_batch_processes_at_the_priority_that_is_asked_for(policy_workers, tmp_path):
    nice, scheduling = {}, {}

    def look(report):
        workers = [p for p in psutil.Process().children(recursive=True) if p.name().startswith("sf-")]
        nice.update({p.name(): p.nice() - psutil.Process().nice() for p in workers})
        scheduling.update({p.name(): os.sched_getscheduler(p.pid) for p in workers})

    runtime = RuntimeConfig(rollout_nice=3, policy_workers=policy_workers)
    train(config_for(tmp_path, env="CartPole-v1", workers=2, steps=4096, runtime=runtime), [look])
    policies = [f"sf-policy-{i}" for i in range(policy_workers)]
    assert nice == {"sf-learner": 0, "sf-rollout-0": 3, "sf-rollout-1": 3} | dict.fromkeys(policies, 0)
    batch = dict.fromkeys(("sf-rollout-0", "sf-rollout-1", *policies), os.SCHED_BATCH)
    assert scheduling == {"sf-learner": os.SCHED_OTHER} | batch
