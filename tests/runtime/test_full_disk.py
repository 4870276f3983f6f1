"""What a user would lose if a full disk, or a folder that somebody has removed, did more than delay what is written.

A limit on the size of files stands for the full disk: it can be set for one process, and for a time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import resource
import shutil
import threading
from collections.abc import Iterator

import pytest
from whole_runs import QUIET, config_for, rows, saved_steps, summary, worker_process

from sfactory import ConfigError, train
from sfactory.config import LogConfig
from sfactory.errors import CheckpointError, RunFailed
from sfactory.runs.checkpoint import CheckpointStore

PLAIN = LogConfig(report_every_s=0.05, save_every_s=0.2, display="plain")


def limit_files(pid: int, size: int | None) -> None:
    """Set the limit on the size of the files that a process writes."""
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard if size is None else size, hard))


@contextlib.contextmanager
def small_files(size: int) -> Iterator[None]:
    limit_files(0, size)
    try:
        yield
    finally:
        limit_files(0, None)


class Steps:
    """A callback that does one thing after the other, each as soon as the one before has shown its effect.

    Attributes:
        seen: Env steps of all reports.
    """

    def __init__(self, *steps) -> None:
        self.steps = list(steps)
        self.seen = []

    def __call__(self, report) -> bool:
        self.seen.append(report.env_steps)
        if self.steps and self.steps[0](report) is not False:
            del self.steps[0]
        return bool(self.steps)


def test_checkpoints_are_written_again_once_there_is_room(tmp_path, capsys):
    config = config_for(tmp_path, "CartPole-v1", steps=10**9, log=PLAIN)
    run, printed = tmp_path / "run", []
    last_good = []

    def fill_the_disk(report):
        if saved_steps(run) > 0:
            last_good.append(saved_steps(run))
            limit_files(worker_process("learner").pid, 1000)
            return None
        return False

    def wait_for_the_warning(report):
        printed.append(capsys.readouterr().out)
        return (
            None
            if "".join(printed).count("checkpoint not written: ") >= 2 and report.env_steps > last_good[0] + 1000
            else False
        )

    def make_room(report):
        assert last_good[0] <= saved_steps(run) < report.env_steps
        last_good[0] = saved_steps(run)
        limit_files(worker_process("learner").pid, None)

    result = train(
        config, [Steps(fill_the_disk, wait_for_the_warning, make_room, lambda report: saved_steps(run) > last_good[0])]
    )
    assert result.status == "interrupted"
    assert saved_steps(run) == result.env_steps
    assert not list((run / "checkpoints").glob(".tmp-*"))


def fill_for_some_reports(folder, pattern: str) -> Steps:
    """Let a file of the run folder have no room for 50 bytes more, from the fourth report of some training to the
    tenth."""
    stack = contextlib.ExitStack()
    steps = Steps(
        lambda report: of_training() > 3,
        lambda report: stack.enter_context(small_files(next(folder.glob(pattern)).stat().st_size + 50)),
        lambda report: of_training() > 10,
        lambda report: stack.close(),
        lambda report: of_training() > 15,
    )

    def of_training() -> int:
        return sum(env_steps > 0 for env_steps in steps.seen)

    return steps


def test_reports_wait_for_room_and_none_is_lost(tmp_path, capsys):
    run = tmp_path / "run"
    steps = fill_for_some_reports(run, "metrics.csv")
    train(config_for(tmp_path, "CartPole-v1", steps=10**9, log=dataclasses.replace(PLAIN, tensorboard=False)), [steps])
    assert [int(row["env_steps"]) for row in rows(run)][: len(steps.seen)] == steps.seen
    printed = capsys.readouterr().out
    assert printed.count("metrics not written: ") == printed.count("metrics are written again") == 1
    assert "Traceback" not in printed


def test_tensorboard_files_can_be_read_after_the_disk_was_full(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = tmp_path / "run"
    steps = fill_for_some_reports(run, "events.out.*")
    train(config_for(tmp_path, "CartPole-v1", steps=10**9, log=dataclasses.replace(QUIET, tensorboard=True)), [steps])
    shown = [event.step for event in EventAccumulator(str(run)).Reload().Scalars("speed/fps")]
    assert set(shown) < {int(row["env_steps"]) for row in rows(run)}
    assert {*steps.seen[:3], *steps.seen[-2:]} <= set(shown)


def test_a_run_whose_last_checkpoint_cannot_be_written_has_failed_and_keeps_the_one_before(tmp_path):
    config = config_for(tmp_path, "CartPole-v1", steps=10**9, log=dataclasses.replace(QUIET, save_every_s=0.2))
    run = tmp_path / "run"
    steps = Steps(
        lambda report: saved_steps(run) > 0,
        lambda report: limit_files(worker_process("learner").pid, 1000),
        lambda report: report.env_steps > saved_steps(run),
    )
    with pytest.raises(RunFailed, match=r"checkpoint not written: .*File too large.* is lost"):
        train(config, [steps])
    assert summary(run)["status"] == "failed"
    assert 0 < saved_steps(run) < summary(run)["env_steps"]
    assert train(dataclasses.replace(config, steps=saved_steps(run) + 500)).status == "completed"


@pytest.mark.parametrize("gone", ["run", "run/checkpoints", "a file instead"])
def test_a_folder_that_is_gone_is_made_again_and_the_run_can_be_resumed(tmp_path, gone):
    config = config_for(
        tmp_path, "CartPole-v1", steps=10**9, log=dataclasses.replace(QUIET, save_every_s=0.2, tensorboard=True)
    )
    run = tmp_path / "run"
    folder = run / "checkpoints" if gone == "a file instead" else tmp_path / gone
    seen = []

    def remove(report):
        if saved_steps(run) == 0:
            return False
        shutil.rmtree(folder)
        if gone == "a file instead":
            folder.write_text("")
        seen.append(report.env_steps)
        return None

    def give_back(report):
        if report.env_steps < seen[0] + 3000:
            return False
        if gone == "a file instead":
            folder.unlink()
        return None

    result = train(config, [Steps(remove, give_back, lambda report: saved_steps(run) > seen[0])])
    assert saved_steps(run) == result.env_steps
    assert rows(run)[-1]["env_steps"] == str(result.env_steps)
    resumed = train(dataclasses.replace(config, steps=result.env_steps + 500))
    assert (resumed.status, resumed.env_steps >= result.env_steps + 500) == ("completed", True)


def test_no_room_for_the_run_folder_is_told_before_anything_starts(tmp_path):
    config = config_for(tmp_path, "CartPole-v1", serial=True)
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ConfigError, match=r"cannot use the run folder .*--run"):
        train(dataclasses.replace(config, run=str(blocked / "run")))
    assert CheckpointStore(tmp_path / "run" / "checkpoints").is_empty()


def test_a_resumed_run_says_where_it_goes_on_and_that_it_fell_back(tmp_path, capsys, caplog):
    log = dataclasses.replace(PLAIN, save_every_s=1000)
    # No row of it ever rests.
    config = config_for(tmp_path, "CartPole-v1", env_backend="gymnasium", serial=True, log=log)
    for steps in (1024, 2048):
        train(dataclasses.replace(config, steps=steps))
    newest = max((tmp_path / "run" / "checkpoints").glob("*.safetensors"))
    newest.write_bytes(newest.read_bytes()[:100])
    capsys.readouterr()
    assert train(dataclasses.replace(config, steps=4096)).status == "completed"
    assert "going on at 1,024 env steps" in capsys.readouterr().out
    assert "checkpoint_000000002048.json cannot be read" in caplog.text


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_learner_that_dies_while_its_checkpoints_are_away_never_begins_at_0(tmp_path, comes_back):
    config = config_for(tmp_path, "CartPole-v1", steps=10**9, log=dataclasses.replace(QUIET, save_every_s=0.2))
    run = tmp_path / "run"
    folder, aside = run / "checkpoints", tmp_path / "aside"
    saved, after = [], []

    def bring_back():
        if comes_back:
            folder.unlink()
            aside.rename(folder)

    def lose_both(report):
        if saved_steps(run) < 2000:
            return False
        folder.rename(aside)
        folder.write_text("")
        saved.append(CheckpointStore(aside).load_latest().env_steps)
        worker_process("learner").kill()
        threading.Timer(1.0, bring_back).start()
        return None

    def go_on(report):
        if report.restarts == 0:
            return False
        after.append(report.env_steps)
        return saved_steps(run) > saved[0]

    steps = Steps(lose_both, go_on)
    if comes_back:
        assert train(config, [steps]).status == "interrupted"
    else:
        with pytest.raises(CheckpointError, match="checkpoints is gone; put it back"):
            train(config, [steps])
        assert summary(run)["status"] == "failed"
    assert min(after, default=saved[0]) >= saved[0]
