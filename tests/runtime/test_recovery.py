"""Processes that die: the run goes on, and loses no more than it must."""

import contextlib
import dataclasses
import errno
import os
import random
import resource
import signal
import subprocess
import time
from multiprocessing import forkserver
from pathlib import Path

import gymnasium
import numpy as np
import psutil
import pytest
import torch
from commands import Command, wait_until
from dying import Dying
from faults import Faulty, WithProgram
from mistaken import Mistaken
from sampling_run import SamplingRun
from whole_runs import BATCH, config_for, last_known, rows, saved_steps, summary, worker_process

from sfactory import train
from sfactory.config import EvalConfig, LogConfig, LossConfig, ModelConfig, OptimConfig, RuntimeConfig, resolve
from sfactory.config.lag import max_lag, slot_count
from sfactory.data import queues
from sfactory.data.arena import FILLING, FINISHED, FREE
from sfactory.data.scheduler import reclaim_slots
from sfactory.errors import RunFailed
from sfactory.runs.checkpoint import CheckpointStore
from sfactory.runtime import processes, supervisor, wires
from sfactory.runtime.budgets import RestartBudget
from sfactory.runtime.planning import make_plan
from sfactory.runtime.runner import run_plan
from sfactory.runtime.wires import make_wires

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("nothing_is_left")]
PLAIN = LogConfig(report_every_s=0.05, display="plain", tensorboard=False)


# Sampling processes


@pytest.mark.parametrize(
    ("way", "policy_workers"), [("kill", 0), ("kill", 1), ("locked", 1), ("exit", 0), ("hang", 0), ("hang", 1)]
)
def test_sampling_goes_on_when_an_environment_takes_its_process_with_it(way, policy_workers, tmp_path, capsys):
    kwargs = {"way": way, "folder": str(tmp_path), "times": 2}
    runtime = RuntimeConfig(step_timeout_s=1.5, policy_workers=policy_workers)
    result = train(config_for(tmp_path, Dying, env_kwargs=kwargs, workers=2, steps=20_000, runtime=runtime, log=PLAIN))
    assert (result.status, result.env_steps >= 20_000) == ("completed", True)
    assert saved_steps(result.run_dir) == result.env_steps
    assert len(list(tmp_path.glob("death-*"))) == 2
    assert int(rows(result.run_dir)[-1]["restarts"]) in (1, 2)  # both may have died before the first was noticed
    says = {
        "kill": "killed by SIGKILL",
        "locked": "killed by SIGKILL",
        "exit": "exit status 3",
        "hang": "no sign of life",
    }[way]
    assert says in capsys.readouterr().out


@pytest.mark.parametrize(("name", "policy_workers"), [("rollout-1", 1), ("policy-0", 1), ("rollout-1", 0)])
def test_the_learner_lives_on_and_sampling_is_back_within_five_seconds(name, policy_workers, tmp_path):
    killed: list[tuple[float, int]] = []
    learners = set()
    back = []

    def kill(report):
        if report.env_steps > 1000 and not back:
            learners.add(worker_process("learner").pid)
        if report.env_steps > 1000 and not killed:
            killed.append((time.monotonic(), report.env_steps))
            worker_process(name).kill()
        elif (
            killed and report.restarts == 1 and report.env_steps > killed[0][1] + 1024
        ):  # more than had been sampled before
            back.append(time.monotonic() - killed[0][0])
        return not back

    train(
        config_for(tmp_path, WithProgram, workers=2, steps=10**9, runtime=RuntimeConfig(policy_workers=policy_workers)),
        [kill],
    )
    assert back[0] < 5
    assert len(learners) == 1
    steps = [int(row["env_steps"]) for row in rows(tmp_path / "run")]
    assert steps == sorted(steps)
    assert summary(tmp_path / "run")["status"] == "interrupted"


@pytest.mark.parametrize("policy_workers", [0, 1])
def test_slots_are_conserved_and_no_sample_is_trained_on_twice_through_many_deaths(policy_workers, tmp_path):
    """Free, filling and finished slots add up at every look; with as many steps as samples a batch, none is lost to the
    count."""
    draw, deaths, looks = random.Random(7), [], []

    def look(wires):
        state = wires.arena.state.copy()
        looks.append(len(state) == sum(int((state == kind).sum()) for kind in (FREE, FILLING, FINISHED)))
        if wires.control.total("learner", "batches") > 10 * (len(deaths) + 1):
            with contextlib.suppress(psutil.NoSuchProcess):  # those that are being replaced end between two looks
                names = [
                    p
                    for p in psutil.Process().children(recursive=True)
                    if p.name().startswith(("sf-rollout", "sf-policy"))
                ]
                if names:
                    victim = draw.choice(names)
                    name = victim.name()
                    victim.kill()
                    deaths.append(name)
        return len(deaths) < 6

    config = resolve(
        config_for(tmp_path, Faulty, workers=2, steps=10**9, runtime=RuntimeConfig(policy_workers=policy_workers))
    )
    run_plan(make_plan(config), observer=look)
    assert all(looks)
    assert len(deaths) == 6
    report = last_known(tmp_path / "run")
    assert int(report["env_steps"]) == 128 * int(report["learner_updates"])
    assert float(report["policy_lag_max"]) >= 0


class Uneven(WithProgram):
    """Slow in one of the rollout workers."""

    def step(self, action):
        if Path("/proc/self/comm").read_text().strip() == "sf-rollout-0":
            time.sleep(0.001)
        return super().step(action)


def test_the_bound_on_the_lag_holds_with_a_slow_worker_a_dead_one_and_after_resuming(tmp_path):
    """Where the learner limits, so that slots are given back late."""
    killed = []

    def kill(report):
        if report.env_steps > 2000 and not killed:
            killed.append(worker_process("rollout-1"))
            killed[0].kill()

    config = config_for(tmp_path, Uneven, workers=2, steps=6000, epochs=4, optim=OptimConfig(minibatches=8))
    train(config, [kill])
    train(dataclasses.replace(config, steps=9000))
    assert killed
    lags = [float(row["policy_lag_max"]) for row in rows(tmp_path / "run") if row["policy_lag_max"]]
    assert 31 <= max(lags) <= max_lag(config, config.envs_per_group)


def test_slots_of_dead_processes_are_taken_back_and_finished_ones_kept(tmp_path):
    """As left by a death: an index read and not marked, one marked and not put, one being filled."""
    run = SamplingRun(config_for(tmp_path, Faulty, workers=3, batch_size=768), tmp_path)
    try:
        arena, free, finished = run.wires.arena, run.wires.free, run.wires.finished
        done = run.sample(2)
        finished.put_many(done)
        read, marked, filling = np.flatnonzero(arena.state == FILLING)[:3]
        arena.state[read], arena.state[marked] = FREE, FINISHED
        run.learner.reclaim_slots()
        assert sorted(np.flatnonzero(arena.state == FINISHED)) == sorted(done)
        assert sorted(free.get_many(0)) == sorted(set(range(arena.slots)) - set(done))
        assert {read, marked, filling}.isdisjoint(done)
        assert not (arena.state == FILLING).any()
    finally:
        run.close()
    reclaim_slots(arena, free, [])
    assert (arena.state == FREE).all()
    assert sorted(free.get_many(0)) == list(range(arena.slots))


def test_a_run_whose_slots_do_not_fit_into_a_pipe_goes_on_after_a_death(tmp_path, monkeypatch):
    """As where a user has so many pipes that new ones are small."""
    monkeypatch.setattr(queues, "_PIPE_BYTES", 4096)
    monkeypatch.setattr(wires, "PipeQueue", lambda slots: queues.PipeQueue(1))
    small = {"envs_per_worker": 2, "rollout": 2, "batch_size": 1400, "steps": 6000}
    kwargs, runtime = {"way": "kill", "folder": str(tmp_path), "after": 2000}, RuntimeConfig(spare_batches=3)
    config = config_for(tmp_path, Dying, env_kwargs=kwargs, runtime=runtime, **small)
    assert slot_count(config, 1) > 4 * 512, "a page of each pipe is full before the learner has handed out all"
    assert train(config).status == "completed"
    assert int(rows(tmp_path / "run")[-1]["restarts"]) == 1


class Drawing(Faulty):
    """Draws from the global random states, and writes the first draws into a folder."""

    def __init__(self, draws: str) -> None:
        super().__init__()
        self.draws = draws

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            file = Path(self.draws) / f"{os.getpid()}.txt"
            file.write_text(f"{np.random.random()} {random.random()} {torch.rand(()).item()}")
        return super().reset(seed=seed, options=options)


def test_every_process_draws_its_own_global_random_numbers_also_one_that_takes_anothers_place(tmp_path):
    killed = []

    def kill(report):
        if report.env_steps and not killed:
            killed.append(worker_process("rollout-0"))
            killed[0].kill()
        return report.restarts == 0 or report.env_steps < 10_000

    (tmp_path / "draws").mkdir()
    kwargs = {"draws": str(tmp_path / "draws")}
    config = config_for(tmp_path, Drawing, env_kwargs=kwargs, workers=2, envs_per_worker=2, steps=10**9, batch_size=64)
    train(config, [kill])
    draws = [file.read_text().split() for file in (tmp_path / "draws").iterdir()]
    assert len(draws) >= 4
    for of_one_kind in zip(*draws, strict=True):
        assert len(set(of_one_kind)) == len(draws)


def test_new_workers_that_wait_for_the_learner_show_that_they_live(tmp_path):
    plan = make_plan(resolve(config_for(tmp_path, "CartPole-v1")))
    control = make_wires(plan, local=True, wall_s=100.0).control
    assert 100 <= control.wall_s < 160
    control.stopwatch("rollout-0")
    time.sleep(0.3)
    before = control.total("rollout-0", "heartbeat")
    control.rest()
    assert before != control.total("rollout-0", "heartbeat") <= time.monotonic()


def test_the_evaluator_gets_no_time_for_a_start_when_sampling_is_started_anew(tmp_path):
    plan = make_plan(resolve(config_for(tmp_path, "CartPole-v1", eval=EvalConfig(every=512))))
    control = make_wires(plan, local=True).control
    control.forget("evaluator")
    control.restart_sampling()
    assert control.total("evaluator", "heartbeat") == 0.0
    assert control.total("rollout-0", "heartbeat") > time.monotonic()


def test_a_death_by_a_real_time_signal_has_a_description():
    assert supervisor._exit_description(-40, "") == "killed by signal 40"
    assert "SIGKILL; the system may have run out of memory" in supervisor._exit_description(-signal.SIGKILL, "")


def test_deaths_without_progress_end_the_run_saved(tmp_path):
    kwargs = {"way": "kill", "folder": str(tmp_path), "times": 10**6, "after": 3}
    config = config_for(tmp_path, Dying, env_kwargs=kwargs, steps=10**9, runtime=RuntimeConfig(restarts=3))
    with pytest.raises(RunFailed, match=r"rollout-0.*killed by SIGKILL.*3 restarts.*runtime\.restarts"):
        train(config)
    assert summary(tmp_path / "run")["status"] == "failed"


def test_a_run_that_ends_for_its_deaths_is_saved(tmp_path):
    kwargs = {"way": "exit", "folder": str(tmp_path), "times": 10**6, "after": 200}
    config = config_for(tmp_path, Dying, env_kwargs=kwargs, steps=10**9, runtime=RuntimeConfig(restarts=0))
    with pytest.raises(RunFailed, match=r"exit status 3"):
        train(config)
    values = summary(tmp_path / "run")
    assert values["status"] == "failed"
    assert saved_steps(tmp_path / "run") == values["env_steps"] > 0


def test_only_restarts_in_a_row_without_progress_count():
    restarts = RestartBudget(2)
    assert [restarts.allow(steps) for steps in (0, 0, 5, 5, 5)] == [True, True, True, True, False]


# The learner and the fork server


class Unhurried(Faulty):
    """Gives reports time to show every thousand env steps of a run."""

    def step(self, action):
        time.sleep(0.001)
        return super().step(action)


def test_a_killed_learner_is_restarted_from_the_last_checkpoint(tmp_path, capsys):
    seen: list[int] = []
    saved: list[int] = []

    def kill(report):
        seen.append(report.env_steps)
        if not saved and 0 < saved_steps(tmp_path / "run") < report.env_steps - 500:
            (learner := worker_process("learner")).suspend()  # what it has saved by now is the last
            saved.append(saved_steps(tmp_path / "run"))
            learner.kill()

    log = dataclasses.replace(PLAIN, save_every_s=3)
    result = train(config_for(tmp_path, Unhurried, steps=10_000, log=log), [kill])
    assert (result.status, result.env_steps >= 10_000) == ("completed", True)
    drop = next(i for i in range(1, len(seen)) if seen[i] < seen[i - 1])
    assert saved[0] <= seen[drop] < 10_000
    assert saved_steps(result.run_dir) == result.env_steps
    said = capsys.readouterr().out
    assert "learner: killed by SIGKILL" in said
    assert f"starts anew from the checkpoint at {saved[0]} env steps" in said
    assert int(rows(result.run_dir)[-1]["restarts"]) == 1


@pytest.mark.parametrize("way", ["hangs", "dies"])
def test_what_an_interrupted_learner_could_not_save_is_told(way, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(supervisor, "SAVING_S", 1.0)

    def interrupt(report):
        if report.env_steps < 1000:
            return True
        learner = worker_process("learner")
        learner.suspend() if way == "hangs" else learner.kill()
        return False

    config = config_for(tmp_path, Unhurried, steps=10**9, log=dataclasses.replace(PLAIN, save_every_s=1000))
    with pytest.raises(RunFailed, match=r"learner has ended without its last checkpoint.*is lost"):
        train(config, [interrupt])
    values = summary(tmp_path / "run")
    assert (values["status"], values["env_steps"]) == ("failed", 0)
    assert saved_steps(tmp_path / "run") == 0


def _slow_term(samples, config):
    time.sleep(0.05)
    return {"slow": 0 * samples.value}


def test_an_interrupted_learner_that_works_long_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "SAVING_S", 2.0)
    long = {"epochs": 10, "optim": OptimConfig(minibatches=8), "loss": LossConfig(terms=_slow_term)}  # 4 s a batch
    result = train(config_for(tmp_path, "CartPole-v1", steps=10**9, **long), [lambda report: report.env_steps < BATCH])
    assert result.status == "interrupted"
    assert saved_steps(tmp_path / "run") == result.env_steps >= BATCH


@pytest.mark.parametrize("error", [EOFError, ConnectionRefusedError])
def test_a_process_starts_although_the_server_is_just_dying(error):
    class Process:
        failures = 2

        def start(self):
            self.failures -= 1
            if self.failures >= 0:
                raise error

    process = Process()
    with processes.fork_server():
        processes._launch(process)
    assert process.failures == -1


def test_a_server_that_cannot_start_leaves_no_user_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(processes, "_users", 0)
    monkeypatch.setattr(processes, "_start_server", full)
    with pytest.raises(OSError, match="Too many open files"), processes.fork_server():
        pass
    stopped = []
    monkeypatch.setattr(processes, "_start_server", lambda: None)
    monkeypatch.setattr(processes, "_stop_server", lambda: stopped.append(True))
    monkeypatch.setattr(processes, "server_pid", lambda: None)
    with processes.fork_server():
        assert not stopped
    assert stopped


def test_the_run_goes_on_when_all_its_processes_and_the_fork_server_are_killed(tmp_path, capsys):
    killed = []

    def kill(report):
        if report.env_steps > 1000 and not killed:
            killed.append(forkserver._forkserver._forkserver_pid)
            for name in ("policy-0", "rollout-0", "learner"):
                worker_process(name).kill()
            os.kill(killed[0], signal.SIGKILL)

    result = train(config_for(tmp_path, WithProgram, steps=6_000, log=PLAIN), [kill])
    assert (result.status, result.env_steps >= 6_000) == ("completed", True)
    assert "; everything starts anew at 0 env steps: none are saved yet" in capsys.readouterr().out
    assert killed != [forkserver._forkserver._forkserver_pid]


@pytest.mark.parametrize("own_session", [False, True])
def test_the_programs_of_a_killed_worker_end_with_it(own_session, tmp_path):
    seen = []

    def kill(report):
        if report.env_steps > 500 and not seen:
            worker = worker_process("rollout-0")
            seen.extend(child for child in worker.children() if child.name() == "sleep")
            worker.kill()
        elif seen and not all(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in seen):
            return False
        return None

    config = config_for(tmp_path, WithProgram, env_kwargs={"own_session": own_session}, steps=10**9)
    assert train(config, [kill]).status == "interrupted"
    assert seen


def has_ended(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE
    return True


def test_a_program_that_may_not_be_killed_keeps_no_others_alive(monkeypatch):
    """As one of another user, which an environment has started by sudo."""
    with subprocess.Popen(["bash", "-c", "sleep 1000 & sleep 1000 & wait"], start_new_session=True) as program:
        assert wait_until(lambda: len(psutil.Process(program.pid).children()) == 2)
        spared, other = psutil.Process(program.pid).children()
        kill = psutil.Process.kill

        def kill_unless_spared(process):
            if process == spared:
                raise psutil.AccessDenied(process.pid)
            kill(process)

        monkeypatch.setattr(psutil.Process, "kill", kill_unless_spared)
        try:
            processes.kill_tree(program.pid)
            assert program.wait(5) == -signal.SIGKILL
            assert wait_until(lambda: has_ended(other), 5)
            assert spared.is_running()
        finally:
            os.killpg(program.pid, signal.SIGKILL)
            assert wait_until(lambda: has_ended(spared), 5)


class Stopping(WithProgram):
    """Ends its program as Ctrl-C does, at its first step."""

    def step(self, action):
        if self.program.poll() is None:
            self.program.send_signal(signal.SIGINT)
            self.program.wait(5)
        return super().step(action)


def test_the_programs_of_an_environment_end_by_signals(tmp_path):
    result = train(config_for(tmp_path, Stopping, steps=256))
    assert result.status == "completed"
    assert int(rows(tmp_path / "run")[-1]["env_faults"]) == 0


# Mistakes in a user's model


@pytest.mark.parametrize("serial", [False, True], ids=["processes", "serial"])
@pytest.mark.parametrize("before", ["", "spoil the weights", "fill the disk"], ids=["sound", "unsound", "full"])
def test_a_mistake_in_the_learner_ends_the_run_with_what_was_learned_before_it(before, serial, tmp_path, capsys):
    (mistake := tmp_path / "mistake").write_text(before)
    model = ModelConfig(model=Mistaken, kwargs={"mistake": str(mistake)})
    config = config_for(tmp_path, Faulty, steps=20_000, epochs=3, serial=serial, model=model, log=PLAIN)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with pytest.raises(KeyError if serial else RunFailed, match="mistake in my model") as caught:
            train(config)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    if not serial:
        assert "in unroll" in str(caught.value)
    run, said = tmp_path / "run", capsys.readouterr().out
    assert saved_steps(run) == 0 if before else saved_steps(run) > 1000
    if not (serial and before == "fill the disk"):  # which cannot take the summary either
        assert summary(run)["status"] == "failed"
        assert "mistake in my model" in summary(run)["error"]
        assert summary(run)["env_steps"] > 1000
    if before:
        reason = "not all numbers of actor." if before == "spoil the weights" else "File too large"
        assert said.count("checkpoint not written: ") == 1
        assert reason in said
    else:
        assert saved_steps(run) == summary(run)["env_steps"]
        snapshot = CheckpointStore(run / "checkpoints").load_latest()
        assert snapshot.updates == snapshot.trainer["optimizer"]["steps"] == 76, (
            "25 batches, each of a pass for targets and three updates, and one update"
        )
    mistake.unlink()
    assert train(config).status == "completed"
    assert ("going on at" in capsys.readouterr().out) == (not before)


def test_a_command_whose_model_has_a_mistake_ends_with_status_1_and_goes_on_once_it_is_mended(tmp_path):
    (mistake := tmp_path / "mistake").write_text("")
    command = [
        "-m", "sfactory.train", "--env", "faults:Faulty", "--run", str(tmp_path / "run"), "--steps", "20000",
        "--epochs", "3",
        "--workers", "1", "--envs-per-worker", "8", "--rollout", "16", "--batch-size", "128", "--preset", "none",
        "--device", "cpu",
        "--model.model", "mistaken:Mistaken", "--model.kwargs", f"{{mistake: {mistake}}}",
    ]  # fmt: skip
    with Command(*command) as failing:
        assert failing.wait() == 1
    assert failing.errors.count("Traceback") == 1
    assert "KeyError: 'mistake in my model'" in failing.errors
    saved = saved_steps(tmp_path / "run")
    mistake.unlink()
    with Command(*command) as mended:
        assert mended.wait() == 0
    assert f"going on at {saved:,} env steps" in mended.output


# Numbers that are not finite


class Exploding(gymnasium.Env):
    """Finite rewards whose sums are not: every target overflows, in some episodes or in all.

    Args:
        every: One episode in so many.
    """

    observation_space = gymnasium.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, every: int = 1):
        self.every, self.count, self.episode = every, 0, 0

    def reset(self, *, seed=None, options=None):
        self.episode += 1
        return np.zeros(3, np.float32), {}

    def step(self, action):
        self.count += 1
        reward = 3e38 if self.episode % self.every == 0 else 1.0
        return self.observation_space.sample(), reward, self.count % 10 == 0, False, {}


@pytest.mark.parametrize("serial", [False, True], ids=["processes", "serial"])
def test_updates_that_are_never_finite_end_the_run_saved_with_good_weights(serial, tmp_path):
    config = config_for(tmp_path, Exploding, steps=10**9, serial=serial, optim=OptimConfig(max_skipped=20))
    with pytest.raises(RunFailed, match=r"not finite in \d+ updates in a row \(optim\.max_skipped\)"):
        train(config)
    values = summary(tmp_path / "run")
    assert values["status"] == "failed"
    assert saved_steps(tmp_path / "run") == values["env_steps"] > 0
    assert_finite(tmp_path)


def test_updates_that_are_not_finite_now_and_then_are_skipped_and_counted(tmp_path):
    result = train(config_for(tmp_path, Exploding, env_kwargs={"every": 40}, steps=20_000, serial=True))
    assert result.status == "completed"
    report = last_known(result.run_dir)
    assert 0 < int(report["skipped_updates"]) < int(report["learner_updates"])
    assert float(report["loss"]) < 1e6
    assert_finite(tmp_path)


def test_skipped_updates_are_counted_over_all_resumes(tmp_path):
    config = config_for(tmp_path, Exploding, env_kwargs={"every": 40}, serial=True)
    before, after = (last_known(train(dataclasses.replace(config, steps=steps)).run_dir) for steps in (20_000, 20_256))
    assert 0 < int(before["skipped_updates"]) <= int(after["skipped_updates"])


def assert_finite(folder) -> None:
    snapshot = CheckpointStore(folder / "run" / "checkpoints").load_latest()
    tensors = [
        *snapshot.model.values(),
        *(t for t in snapshot.trainer["optimizer"].values()),
        *snapshot.trainer["returns"].values(),
    ]
    assert all(torch.isfinite(tensor).all() for tensor in tensors)
