"""Sampling on the learner's device, and whole runs by it."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensor_environments import Schedules
from torch import Tensor
from whole_runs import rows

from sfactory import Config, evaluate, train
from sfactory.config import EvalConfig, LogConfig, LossConfig, ModelConfig, OptimConfig, resolve
from sfactory.data.batch import Batch
from sfactory.device_rollout import DeviceRollout
from sfactory.errors import ConfigError, EnvironmentFault
from sfactory.runs.checkpoint import CheckpointStore
from sfactory.runtime.planning import make_plan
from sfactory.runtime.training import Training
from sfactory.runtime.wires import Wires, make_wires
from sfactory.telemetry.events import Episodes

QUIET = LogConfig(display="none", tensorboard=False)


def made(folder: Path, **changes: Any) -> tuple[Training, DeviceRollout, Wires]:
    settings: dict[str, Any] = {"envs_per_worker": 6, "rollout": 8, "batch_size": 96, "preset": "none", "device": "cpu"}
    config = resolve(
        Config(**{"env": Schedules, "run": str(folder), "serial": True, "log": QUIET} | settings | changes)
    )
    plan = make_plan(config)
    wires = make_wires(plan, local=True)
    (folder / "checkpoints").mkdir(parents=True)
    training = Training(plan, wires, CheckpointStore(folder / "checkpoints"))
    training.learner.start()
    return training, training._feed, wires


def copied(batch: Batch) -> Batch:
    return batch.copy()


@pytest.mark.parametrize("core", ["none", "lstm"])
@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_a_batch_holds_what_happened_and_what_the_policy_says_of_it(mode: str, core: str, tmp_path: Path) -> None:
    """The numbers of a batch against the model's own unrolled over it, and against the schedule of the rows."""
    model = ModelConfig(encoder="mlp", core=core, core_size=8)
    training, rollout, wires = made(tmp_path / "r", env_kwargs={"mode": mode, "masked": True}, model=model)
    learner = training.learner
    net, last = learner._model, None
    for _ in range(4):
        fresh = rollout.next(0, 0)
        batch = copied(fresh.batch)
        assert fresh.samples == int(batch.active[:-1].sum()) and (fresh.lag_mean, fresh.lag_max) == (0.0, 0)
        with torch.no_grad():
            params, _ = net.unroll(batch.obs, batch.first, batch.rnn_state)
        expected = net.distribution.log_prob(params[:-1], batch.categorical, batch.continuous, batch.mask[:-1])
        torch.testing.assert_close(batch.log_prob, expected, rtol=1e-4, atol=1e-5)
        for half in (batch.select(slice(0, 6)), batch.select(slice(6, 12))):
            if last is not None:
                assert all(torch.equal(a[-1], b[0]) for a, b in zip(last.obs, half.obs, strict=True))
                assert torch.equal(last.first[-1], half.first[0]) and torch.equal(last.active[-1], half.active[0])
            check_segment(half, mode)
            check_final_values(half, net, mode)
            last = half
    episodes = [event for event in wires.events.take() if isinstance(event, Episodes)]
    lengths = np.concatenate([event.lengths for event in episodes])
    returns = np.concatenate([event.returns for event in episodes])
    assert set(lengths.tolist()) == {2, 3, 4}
    for length, total in zip(lengths.tolist(), returns.tolist(), strict=True):
        episode, rest = divmod(total - length * (length + 1) / 2, 10 * length)
        assert rest == 0 and episode >= 0


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_reports_count_whole_games_and_have_what_info_says_of_them(mode: str, tmp_path: Path) -> None:
    _, rollout, wires = made(tmp_path / "r", env_kwargs={"mode": mode, "told": True})
    for _ in range(6):
        rollout.next(0, 0)
    episodes = [event for event in wires.events.take() if isinstance(event, Episodes)]
    lengths = np.concatenate([event.lengths for event in episodes])
    numbers = np.concatenate([event.extras["number"] for event in episodes])
    assert len(lengths) == len(numbers)
    assert set(lengths.tolist()) == {3, 4}  # rows 0 and 3 play two episodes of two steps in a game
    assert set(numbers[lengths == 3].tolist()) >= {0, 1, 2, 3}


def check_segment(segment: Batch, mode: str) -> None:
    """The schedule: row i's episodes last 2 + i % 3 steps and pay 10 x episode + step."""
    count = segment.obs[0]
    row, episode, step = count.unbind(-1)
    lasts = 2 + row.long() % 3
    assert torch.equal(row[0].long() % 6, torch.arange(6))
    resting = ~segment.active[:-1]
    assert bool(resting.any()) == (mode == "NextStep")
    paid = torch.where(resting, 0.0, 10 * episode[:-1] + step[:-1] + 1)
    assert torch.equal(segment.reward, paid)
    ends = ~resting & (step[:-1] + 1 == lasts[:-1])
    assert torch.equal(segment.terminated, ends & (episode[:-1] % 2 == 0))
    assert torch.equal(segment.truncated, ends & (episode[:-1] % 2 == 1))
    assert torch.equal(segment.first, step == 0)
    assert torch.equal(segment.obs[2], (step % 4).int()), "categories count from 0"


def check_final_values(segment: Batch, net: Any, mode: str) -> None:
    """Only where a truncated row has been reset: the value of what it ended with, less that of the step before."""
    known = ~segment.final_change.isnan()
    if mode == "NextStep":
        assert not known.any()
        return
    assert torch.equal(known, segment.truncated) and known.any()
    if net.state_size:
        return
    steps, rows = known.nonzero(as_tuple=True)
    count = segment.obs[0][steps, rows].clone()
    count[:, 2] += 1
    kind, eye = (count[:, 2] % 4).int(), count[:, 2].to(torch.uint8)[:, None, None, None].expand(-1, 3, 8, 8)
    with torch.no_grad():
        _, value, _ = net((count, eye, kind), None)
        _, before, _ = net(tuple(leaf[steps, rows] for leaf in segment.obs), None)
    expected = (value - before) * net.unit.std  # in another batch, so rounded otherwise
    torch.testing.assert_close(
        segment.final_change[steps, rows], expected, rtol=1e-5, atol=1e-5 * max(1.0, float(net.unit.std))
    )


def test_the_state_before_a_final_observation_is_that_of_its_episode(tmp_path: Path) -> None:
    """V(final_obs) of a recurrent policy, against the whole segment unrolled with the final observations in place."""
    model = ModelConfig(encoder="mlp", core="gru", core_size=8)
    _, rollout, _ = made(tmp_path / "r", model=model, batch_size=48, env_kwargs={"mode": "SameStep"})
    net = rollout._model
    for _ in range(3):
        batch = copied(rollout.next(0, 0).batch)
    finals = tuple(leaf.clone() for leaf in rollout._finals)
    for t, row in batch.truncated.nonzero().tolist():
        obs = tuple(torch.cat((leaf[: t + 1, row : row + 1], final[t : t + 1, row : row + 1])) for leaf, final in
                    zip(batch.obs, finals, strict=True))  # fmt: skip
        first = torch.cat((batch.first[: t + 1, row : row + 1], torch.zeros(1, 1, dtype=torch.bool)))
        with torch.no_grad():
            _, values = net.unroll(obs, first, batch.rnn_state[row : row + 1])
        change = values[-1, 0] - values[-2, 0]
        torch.testing.assert_close(batch.final_change[t, row], change, rtol=1e-4, atol=1e-5)


def test_no_array_of_the_host_takes_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the environment is given and gives are tensors, and the batch is where they were written."""
    _, rollout, _ = made(tmp_path / "r", env_kwargs={"mode": "SameStep"})
    taken = rollout._group._env.actions
    batch = rollout.next(0, 0).batch
    assert all(isinstance(actions, Tensor) for actions in taken)
    assert torch.equal(torch.stack(taken[:8]), batch.categorical[:, :6, 0])
    assert rollout.next(0, 0).batch.reward.data_ptr() == batch.reward.data_ptr()


def config_of(folder: Path, **changes: Any) -> Config:
    settings: dict[str, Any] = {
        "env": "sfactory/TensorCartPole", "envs_per_worker": 64, "rollout": 16, "batch_size": 1024, "steps": 8192,
        "device": "cpu", "run": str(folder), "log": QUIET,
    }  # fmt: skip
    return Config(**settings | changes)


def test_a_run_has_no_process_but_the_learner_and_resumes(tmp_path: Path) -> None:
    seen: set[str] = set()

    def look(report: Any) -> None:
        seen.update(child.name for child in multiprocessing.active_children())

    result = train(config_of(tmp_path / "r"), [look])
    assert (result.status, result.env_steps) == ("completed", 8192)
    again = train(config_of(tmp_path / "r", steps=16_384))
    assert (again.status, again.env_steps) == ("completed", 16_384)
    reports = rows(tmp_path / "r")
    assert {row["policy_lag_mean"] for row in reports} <= {"", "0"}
    assert not [name for name in seen if "rollout" in name or "policy" in name]
    assert evaluate(tmp_path / "r", 5).episodes == 5
    assert not multiprocessing.active_children()


def test_the_same_seed_is_the_same_run(tmp_path: Path) -> None:
    one, two = (train(config_of(tmp_path / name, serial=True, seed=3, steps=4096)) for name in "ab")
    assert one.episode_return_mean == two.episode_return_mean
    stores = [CheckpointStore(tmp_path / name / "checkpoints").load_latest() for name in "ab"]
    assert all(torch.equal(tensor, stores[1].model[name]) for name, tensor in stores[0].model.items())


def test_cart_pole_is_learned_on_the_device(tmp_path: Path) -> None:
    train(config_of(tmp_path / "r", envs_per_worker=256, batch_size=4096, steps=250_000, seed=5))
    assert evaluate(tmp_path / "r", 20).return_mean >= 400


def test_memory_is_learned_on_the_device(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "env": "sfactory/TensorMemoryGrid", "env_kwargs": {"length": 2}, "envs_per_worker": 64, "batch_size": 1024,
        "epochs": 2, "optim": OptimConfig(minibatches=2, lr=1e-3), "seed": 5,
        "model": ModelConfig(core="lstm", encoder="mlp", hidden=(64,), features=64, core_size=64),
    }  # fmt: skip
    train(config_of(tmp_path / "r", steps=60_000, **settings))
    assert evaluate(tmp_path / "r", 50).return_mean >= 0.9


def test_evaluation_beside_a_run_on_the_device(tmp_path: Path) -> None:
    train(config_of(tmp_path / "r", steps=40_960, eval=EvalConfig(every=8192, episodes=2)))
    assert [row for row in rows(tmp_path / "r") if row["eval_return_mean"] not in ("", "nan")]


@pytest.mark.parametrize("serial", [False, True])
def test_an_environment_that_raises_ends_the_run_saved(serial: bool, tmp_path: Path) -> None:
    kwargs = {"mode": "SameStep", "broken": 200}
    settings = {"env": Schedules, "env_kwargs": kwargs, "serial": serial, "steps": 100_000, "preset": "none"}
    with pytest.raises(EnvironmentFault, match="raised RuntimeError in step\\(\\): the simulation has exploded"):
        train(config_of(tmp_path / "r", model=ModelConfig(encoder="mlp"), **settings))
    assert CheckpointStore(tmp_path / "r" / "checkpoints").load_latest().env_steps == 12 * 1024


def test_a_row_with_a_bad_value_is_left_out_of_its_segment_and_its_episode_of_reports(tmp_path: Path) -> None:
    _, rollout, wires = made(tmp_path / "r", env_kwargs={"bad": 5}, batch_size=48, model=ModelConfig(encoder="mlp"))
    batch = copied(rollout.next(0, 0).batch)
    assert batch.active[:-1].all(0).tolist() == [True, False, True, True, True, True]
    assert not batch.active[:-1, 1].any()
    ended = int((batch.terminated | batch.truncated)[:, [0, 2, 3, 4, 5]].sum())
    told = [event for event in wires.events.take() if isinstance(event, Episodes)]
    assert sum(len(event.lengths) for event in told) == ended
    assert rollout.next(0, 0).batch.active[:-1].all(), "from the next segment on the row counts"


class Lost(Schedules):
    """All rows see what is not finite in the first steps."""

    def _observation(self) -> dict[str, Tensor]:
        seen = super()._observation()
        if 0 < self._steps < 20:
            seen["count"] = seen["count"] * torch.nan
        return seen


def test_the_learner_leaves_a_batch_without_a_valid_sample_alone(tmp_path: Path) -> None:
    training, _, _ = made(tmp_path / "r", env=Lost, model=ModelConfig(encoder="mlp"))
    learner = training.learner
    weights = learner._flat.vector.clone()
    learner.poll(0)
    assert (learner.env_steps, learner.updates) == (0, 0)
    assert torch.equal(learner._flat.vector, weights)
    for _ in range(3):
        learner.poll(0)
    assert learner.updates > 0


def test_a_bad_value_is_counted_as_a_fault(tmp_path: Path) -> None:
    settings = {"env": Schedules, "env_kwargs": {"bad": 40}, "steps": 4096, "preset": "none"}
    train(config_of(tmp_path / "r", model=ModelConfig(encoder="mlp"), **settings))
    assert float(rows(tmp_path / "r")[-1]["env_faults"]) == 1


def test_through_the_host_it_is_a_vector_environment(tmp_path: Path) -> None:
    result = train(config_of(tmp_path / "r", env_backend="vector", preset="none", workers=1))
    assert result.status == "completed"


def test_workers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="leave workers out and raise envs_per_worker, or use env_backend vector"):
        train(config_of(tmp_path / "r", workers=3))


def test_normalised_returns_bootstrap_in_units_of_return(tmp_path: Path) -> None:
    loss, model = LossConfig(normalize_returns=True), ModelConfig(encoder="mlp")
    training, rollout, _ = made(tmp_path / "r", loss=loss, model=model, env_kwargs={"mode": "SameStep"})
    for _ in range(3):
        training.learner.poll(0)
    net = training.learner._model
    assert float(net.unit.std) != 1.0
    for half in (batch := copied(rollout.next(0, 0).batch)).select(slice(0, 6)), batch.select(slice(6, 12)):
        check_final_values(half, net, "SameStep")
