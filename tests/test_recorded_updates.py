"""The learner's updates as recordings: with a recorder on the CPU that, as a CUDA graph, repeats operations on the same
memory."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tape
import torch
from torch import Tensor

from perf import gpu_checks
from perf.gpu_checks import CASES, PROBLEMS
from sfactory.data import cuda_graphs
from sfactory.data.batch import Assembler
from sfactory.data.cuda_graphs import WARM_UPS, PlainSteps, RecordedSteps, refusing_waits
from sfactory.learner import Learner
from sfactory.vtrace import unweighted_vtrace

CPU, ROWS = torch.device("cpu"), 2
MANY = WARM_UPS + 5
"""Batches after which the recordings of both staging buffers have been used."""


def make_learner(case: str, recorded: bool, **changes: Any) -> Learner:
    """With the code for CUDA: plain tensor operations on batches by turn in two staging buffers."""
    made = CASES[case]
    config = gpu_checks._config(made._replace(config=made.config | changes), ROWS)
    learner = gpu_checks.device_learner(config, PROBLEMS[made.problem], CPU, None, ROWS)
    learner._feed.assemble = Assembler(learner._feed._arena, learner._feed.per_batch, CPU, staged=True)
    if recorded:
        learner._recorder = learner._recorded_steps()
    else:  # with a rate in float32, as on a device
        learner._recorder = PlainSteps()
        set_rate = learner._set_learning_rate
        learner._set_learning_rate = lambda: (set_rate(), learner._optimizer.update_rate())
    return learner


def train(learner: Learner, batches: int) -> Tensor:
    """On batches that all differ; the weights after each."""
    rng, arena, weights = np.random.default_rng(5), learner._feed._arena, []
    for _ in range(batches):
        slots = rng.choice(arena.slots, 2, replace=False).tolist()
        arena.reward[slots] = rng.standard_normal(arena.reward[slots].shape)
        arena.first[slots] = rng.random(arena.first[slots].shape) < 0.2
        arena.terminated[slots] = rng.random(arena.terminated[slots].shape) < 0.1
        arena.truncated[slots] &= ~arena.terminated[slots]
        arena.log_prob[slots] += rng.normal(0, 0.1, arena.log_prob[slots].shape)
        learner._train(learner._feed.fresh(slots, learner.updates))
        weights.append(learner._flat.vector.detach().clone())
    return torch.stack(weights)


@pytest.fixture
def taped(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Recordings are made by a tape; how many operations each has."""
    lengths: list[int] = []

    def record(work, *_):
        replay = tape.record(work)
        lengths.append(len(replay.__self__.operations))
        return replay

    monkeypatch.setattr(cuda_graphs, "record", record)
    return lengths


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("cnn")])
def test_recorded_updates_are_the_plain_ones_over_many_batches(case: str, taped: list[int], caplog) -> None:
    """Bit for bit: targets, minibatches, rates, PopArt, masks, clipping and resets, none of them as it was when it was
    recorded."""
    plain, recorded = make_learner(case, recorded=False), make_learner(case, recorded=True)
    expected, found = train(plain, MANY), train(recorded, MANY)
    assert not caplog.records
    assert recorded._recorder.enabled and len(taped) == len(recorded._recorder._recordings) >= 2
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    for own, other in zip(recorded._statistics, plain._statistics, strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=0)
    for own, other in zip(recorded._batch_statistics, plain._batch_statistics, strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=0)
    assert recorded.updates == plain.updates == MANY * recorded._config.updates_per_batch


def test_recorded_updates_with_pixels_and_memory_are_the_plain_ones(taped: list[int]) -> None:
    case = "cnn lstm, minibatches"
    expected, found = (train(make_learner(case, recorded), WARM_UPS + 2) for recorded in (False, True))
    assert taped
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("schedule", ["linear", "adaptive_kl"])
def test_a_recorded_step_follows_the_rate(schedule: str, taped: list[int]) -> None:
    optim = dataclasses.replace(gpu_checks._STEP, schedule=schedule, target_kl=1e-7)
    expected, found = (
        train(make_learner("mlp", recorded, optim=optim, steps=1_000), MANY) for recorded in (False, True)
    )
    assert taped
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def in_another_memory_order(*args: Any) -> tuple[Tensor, ...]:
    """V-trace whose results lie column after column."""
    return tuple(found.t().contiguous().t() for found in unweighted_vtrace(*args))


def test_targets_stay_where_they_are_whatever_order_an_estimator_gives_them(taped: list[int]) -> None:
    loss = dataclasses.replace(CASES["masked, impala"].config["loss"], estimator=in_another_memory_order)
    changes = {"epochs": 2, "loss": loss}
    expected, found = (train(make_learner("masked, impala", recorded, **changes), MANY) for recorded in (False, True))
    assert taped
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_an_update_whose_gradient_is_not_finite_is_skipped_within_a_recording(taped: list[int]) -> None:
    learner = make_learner("mlp", recorded=True)
    train(learner, MANY)
    before, reward = learner._flat.parameters.detach().clone(), learner._feed._arena.reward.copy()
    learner._feed._arena.reward[:] = np.inf
    learner._train(learner._feed.fresh([0, 1], learner.updates))
    learner._train(learner._feed.fresh([0, 1], learner.updates))
    assert torch.equal(learner._flat.parameters, before)
    assert int(learner._update.skipped) == int(learner._update.skipped_in_a_row) == 2
    learner._feed._arena.reward[:] = reward
    learner._train(learner._feed.fresh([0, 1], learner.updates))
    assert int(learner._update.skipped_in_a_row) == 0 and not torch.equal(learner._flat.parameters, before)


@pytest.mark.parametrize("wait", ["item", "nonzero", "from the host"])
def test_an_update_that_waits_for_the_device_is_not_recorded_and_goes_on_plainly(
    wait: str, taped: list[int], caplog
) -> None:
    plain, waiting = make_learner("mlp", recorded=False), make_learner("mlp", recorded=True)
    step = waiting._update.step

    def waits(count: Tensor) -> Tensor:
        norm = step(count)
        {"item": norm.item, "nonzero": norm.reshape(1).nonzero, "from the host": lambda: torch.tensor(1.0)}[wait]()
        return norm

    waiting._update.step = waits
    with caplog.at_level(logging.WARNING):
        found = train(waiting, MANY)
    torch.testing.assert_close(found, train(plain, MANY), rtol=0, atol=0)
    assert not waiting._recorder.enabled and not taped
    (told,) = caplog.records
    assert "no CUDA graphs in the learner" in told.message and "\n" not in told.message


def test_an_update_that_waits_is_noticed_before_a_recording_where_the_device_tells(
    monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    monkeypatch.setattr(cuda_graphs, "refusing_waits", lambda _: tape.NoWaits())
    monkeypatch.setattr(cuda_graphs, "record", lambda *_: pytest.fail("a recording was begun"))
    plain, waiting = make_learner("mlp", recorded=False), make_learner("mlp", recorded=True)
    step = waiting._update.step

    def waits(count: Tensor) -> Tensor:
        norm = step(count)  # which has changed the weights by the time that it waits
        norm.item()
        return norm

    waiting._update.step = waits
    torch.testing.assert_close(train(waiting, MANY), train(plain, MANY), rtol=0, atol=0)
    assert not waiting._recorder.enabled and len(caplog.records) == 1


def test_pytorchs_own_doubts_about_refusing_waits_are_not_told(monkeypatch: pytest.MonkeyPatch, recwarn) -> None:
    modes: list[str | int] = []

    def set_mode(mode: str | int) -> None:
        if not modes:
            warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=2)
        modes.append(mode)

    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    with refusing_waits(torch.device("cuda")):
        warnings.warn("of the model's own", stacklevel=2)
    assert modes == ["error", 0]
    assert [str(each.message) for each in recwarn] == ["of the model's own"]


def test_a_recording_that_fails_says_why_and_not_that_it_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an error within it, the end of a CUDA graph raises one of its own."""

    @contextlib.contextmanager
    def graph(*_: object, **__: object) -> Iterator[None]:
        try:
            yield
        finally:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    def work() -> None:
        raise ValueError("the model asks for a number")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(cuda_graphs, "_failed", "")
    with pytest.raises(RuntimeError, match=r"^the model asks for a number$"):
        cuda_graphs.record(work, torch.device("cuda"))
    with pytest.raises(RuntimeError, match=r"failed in this process: the model asks for a number$"):
        cuda_graphs.record(work, torch.device("cuda"))
    monkeypatch.setattr(cuda_graphs, "_failed", "")
    with pytest.raises(RuntimeError, match="previous error during capture"):
        cuda_graphs.record(lambda: None, torch.device("cuda"))


def test_nothing_is_recorded_after_a_recording_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "_failed", "the model waits")
    with pytest.raises(RuntimeError, match="an earlier recording has failed in this process: the model waits"):
        cuda_graphs.record(lambda: None, torch.device("cuda"))


def test_a_recording_that_gives_other_numbers_is_not_used(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    monkeypatch.setattr(cuda_graphs, "record", lambda *_: lambda: None)  # it does nothing
    plain, recorded = (train(make_learner("mlp", flag), MANY) for flag in (False, True))
    torch.testing.assert_close(recorded, plain, rtol=0, atol=0)
    assert len(caplog.records) == 1 and "other numbers" in caplog.records[0].message


def test_batches_of_another_shape_are_recorded_anew(taped: list[int]) -> None:
    plain, recorded = make_learner("mlp", recorded=False), make_learner("mlp", recorded=True)
    for learner in (plain, recorded):
        train(learner, MANY)
        learner._feed.per_batch = 1
        learner._feed.assemble = Assembler(learner._feed._arena, 1, CPU, staged=True)
        arena = learner._feed._arena
        for turn in range(MANY):
            learner._learn(learner._feed.assemble([turn % arena.slots]))
    assert len(taped) == 4, "two turns of each shape"
    assert torch.equal(recorded._flat.vector, plain._flat.vector)


def test_what_is_kept_stays_where_it_is() -> None:
    steps, addresses = RecordedSteps(CPU, []), set()
    for number in range(5):
        kept = steps.keep("rows", torch.full((3,), float(number)))
        addresses.add(kept.data_ptr())
        assert kept.tolist() == [number] * 3
    assert len(addresses) == 1
