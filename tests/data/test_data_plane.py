"""Shared memory, arena, queues, weights and the scheduling of slots."""

import multiprocessing
import os
import threading
import time

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from sfactory.config import Config, LossConfig, OptimConfig, RuntimeConfig
from sfactory.config.lag import least_max_lag, max_lag, segments_per_batch, slot_count
from sfactory.config.validation import validate
from sfactory.data.arena import FILLING, FINISHED, FREE, Arena, arena_bytes, segment_fields
from sfactory.data.queues import IndexQueue, LocalQueue, PipeQueue, pack_request, unpack_request
from sfactory.data.scheduler import SlotReleaser, SlotScheduler, reclaim_slots
from sfactory.data.weights import FlatWeights, PublishedWeights
from sfactory.envs.interface import EnvSpec
from sfactory.errors import ConfigError
from sfactory.spaces import ActionSpec, ObservationSpec

SPAWN = multiprocessing.get_context("spawn")


def env_spec(masked: bool = True) -> EnvSpec:
    observation = spaces.Dict({"image": spaces.Box(0, 255, (3, 8, 8), np.uint8), "pos": spaces.Box(-1, 1, (2,))})
    action = spaces.Tuple((spaces.Discrete(3), spaces.Box(-1, 1, (2,))))
    return EnvSpec(ObservationSpec.from_space(observation), ActionSpec.from_space(action), masked=masked)


def make_arena(slots: int = 3, rollout: int = 4, rows: int = 5) -> Arena:
    return Arena(segment_fields(env_spec(), 7), slots, rollout, rows)


def test_every_field_has_its_own_aligned_memory():
    arena = make_arena()
    arrays = [
        *arena.obs,
        *(getattr(arena, f.name) for f in segment_fields(env_spec(), 7) if not f.name.startswith("obs")),
    ]
    for number, array in enumerate(arrays):
        assert array.ctypes.data % 64 == 0
        array[...] = array.dtype.type(number % 2)
    for number, array in enumerate(arrays):
        assert (array == array.dtype.type(number % 2)).all()
    assert arena.obs[0].shape == (3, 5, 5, 3, 8, 8)
    assert arena.rnn_state.shape == (3, 5, 7)
    assert arena.version.shape == (3, 4)


def test_one_step_of_a_group_is_a_contiguous_view():
    arena = make_arena()
    frame, outcome = arena.step_buffers(1, 2), arena.outcome(1, 2)
    assert all(
        leaf.flags.c_contiguous and np.shares_memory(leaf, whole)
        for leaf, whole in zip(frame.obs, arena.obs, strict=True)
    )
    frame.obs[1][:] = 3.0
    outcome.reward[:] = 2.0
    assert (arena.obs[1][1, 2] == 3.0).all()
    assert (arena.reward[1, 2] == 2.0).all()
    assert (arena.reward[1, 1] == 0.0).all()


def _fill(arena: Arena, slot: int) -> None:
    arena.reward[slot] = slot + 0.5
    arena.state[slot] = FINISHED


def test_an_arena_is_the_same_memory_in_another_process_and_has_no_name():
    before = set(os.listdir("/dev/shm"))
    arena = make_arena()
    process = SPAWN.Process(target=_fill, args=(arena, 2))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert (arena.reward[2] == 2.5).all()
    assert arena.state.tolist() == [FREE, FREE, FINISHED]
    assert set(os.listdir("/dev/shm")) <= before


def test_arena_bytes_grow_with_slots():
    fields = segment_fields(env_spec(), 0)
    assert arena_bytes(fields, 20, 4, 5) > 1.9 * arena_bytes(fields, 10, 4, 5)


@pytest.mark.parametrize("values", [(0, 0, 0, False), (5, 1023, 31, True), (70000, 1_000_000, 1_000_000, False)])
def test_requests_survive_packing(values):
    assert unpack_request(pack_request(*values)) == values
    assert pack_request(*values) < 2**63


@pytest.mark.parametrize("make", [lambda: IndexQueue(64), lambda: PipeQueue(64), LocalQueue])
def test_a_queue_keeps_order_and_takes_no_more_than_asked(make):
    queue = make()
    queue.put_many([3, 1, 2**62])
    queue.put_many([7])
    assert queue.get_many(0, most=2) == [3, 1]
    assert queue.get_many(0.1) == [2**62, 7]
    assert queue.get_many(0) == []
    assert queue.get_many(0.01) == []


@pytest.mark.parametrize(("kind", "count"), [(IndexQueue, 5000), (PipeQueue, 50_000)])
def test_a_full_queue_blocks_counts_and_drops_nothing(kind, count):
    queue = kind(8)
    sent, received = list(range(count)), []
    writer = threading.Thread(target=lambda: [queue.put_many([n]) for n in sent])
    writer.start()
    while not queue.full_waits:
        time.sleep(0.001)
    assert len(queue) < len(sent)
    while len(received) < len(sent):
        received += queue.get_many(1.0, most=16)
    writer.join()
    assert received == sent


def _put_without_pause(queue: PipeQueue) -> None:
    while True:
        queue.put_many([1] * 300)


def _take_without_pause(queue: PipeQueue) -> None:
    while True:
        queue.get_many(None)


@pytest.mark.parametrize("work", [_put_without_pause, _take_without_pause])
def test_a_pipe_serves_whoever_is_left_when_a_user_of_it_is_killed(work):
    queue = PipeQueue(64)
    for _ in range(10):
        process = multiprocessing.get_context("fork").Process(target=work, args=(queue,))
        process.start()
        if work is _put_without_pause:
            assert set(queue.get_many(5)) == {1}
        process.kill()
        process.join()
        while values := queue.get_many(0):
            assert set(values) == {1}
        queue.put_many([7, 8])
        assert queue.get_many(1) == [7, 8]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.out = nn.Linear(4, 2)
        self.register_buffer("mean", torch.tensor([5.0]))

    def forward(self, x):
        return self.out(self.conv(x).mean((2, 3))) + self.mean


def test_flat_weights_keep_the_function_the_memory_format_and_the_gradients():
    torch.manual_seed(0)
    net, twin, x = Net(), Net(), torch.randn(2, 3, 6, 6)
    twin.load_state_dict(net.state_dict())
    flat = FlatWeights(net, gradients=True)
    assert net.conv.weight.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(net(x), twin(x))
    for _ in range(2):
        net(x).sum().backward()
        twin(x).sum().backward()
    for a, b in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
        assert a.grad.untyped_storage().data_ptr() == flat.parameters.grad.untyped_storage().data_ptr()
    with torch.no_grad():
        flat.vector.zero_()
    assert not net(x).any()


def test_published_weights_arrive_whole_with_their_version():
    net, other = Net(), Net()
    flat, copy = FlatWeights(net, gradients=True), FlatWeights(other)
    published = PublishedWeights(flat.vector.numel())
    published.publish(flat.vector, 12)
    assert published.version == 12
    assert published.read(copy.vector) == 12
    x = torch.randn(1, 3, 6, 6)
    torch.testing.assert_close(net(x), other(x))


def _publish_many(published: PublishedWeights, size: int, stop) -> None:
    version = 0
    while not stop.is_set():
        version += 1
        published.publish(torch.full((size,), float(version)), version)


def test_a_reader_never_sees_torn_weights():
    size, stop = 200_000, SPAWN.Event()
    published = PublishedWeights(size)
    published.publish(torch.zeros(size), 0)
    writer = SPAWN.Process(target=_publish_many, args=(published, size, stop))
    writer.start()
    out, last = torch.empty(size), 0
    while last < 300:
        version = published.read(out)
        assert (out == float(version)).all()
        assert version >= last
        last = version
    stop.set()
    writer.join()


class _SlowReader:
    """The target of a copy that is overtaken by two publications half way."""

    def __init__(self, published: PublishedWeights, size: int) -> None:
        self.published, self.value, self.overtaken = published, torch.zeros(size), False

    def copy_(self, source: torch.Tensor) -> None:
        half = len(self.value) // 2
        self.value[:half] = source[:half]
        if not self.overtaken:
            self.overtaken = True
            self.published.publish(torch.full_like(self.value, 2.0), 2)
            self.published.publish(torch.full_like(self.value, 3.0), 3)
        self.value[half:] = source[half:]


def test_a_reader_that_was_overtaken_reads_again():
    published = PublishedWeights(10)
    published.publish(torch.full((10,), 1.0), 1)
    reader = _SlowReader(published, 10)
    version = published.read(reader)
    assert version == 3
    assert (reader.value == 3.0).all()


class TestSlotScheduler:
    def scheduler(self, slots=6, per_batch=2, updates=1, limit=5):
        arena = make_arena(slots=slots)
        return arena, SlotScheduler(arena, per_batch, updates, limit)

    def test_oldest_first(self):
        arena, scheduler = self.scheduler()
        arena.begun[:] = [5, 3, 4, 3, 5, 5]
        arena.state[:4] = FINISHED
        scheduler.add([0, 2, 1])
        assert scheduler.take(5) == [1, 2]
        assert scheduler.take(6) is None
        scheduler.add([3])
        assert scheduler.take(6) == [3, 0]

    def test_a_finished_segment_that_is_still_in_the_queue_is_not_forgotten(self):
        arena, scheduler = self.scheduler(limit=2)
        arena.state[:5], arena.begun[:5] = FINISHED, [0, 2, 2, 2, 2]
        scheduler.add([1, 2, 3, 4])
        assert scheduler.take(2) is None, "slot 0 would come at lag 3"
        scheduler.add([0])
        assert 0 in scheduler.take(2)

    def test_waits_for_a_slow_group_rather_than_break_the_bound(self):
        arena, scheduler = self.scheduler(limit=5)
        arena.state[0], arena.begun[0] = FILLING, 0
        version = 0
        for _ in range(20):
            arena.state[1:3], arena.begun[1:3] = FINISHED, version
            scheduler.add([1, 2])
            if scheduler.take(version) is None:
                break
            version += 1
        assert version == 5
        arena.state[0] = FINISHED
        scheduler.add([0])
        assert 0 in scheduler.take(version)

    @pytest.mark.parametrize("seed", range(12))
    def test_the_bound_holds_for_groups_of_any_speed_and_nothing_stalls(self, seed):
        """A simulation of groups with random speeds: every batch's lag stays within the limit, and batches keep
        coming."""
        rng = np.random.default_rng(seed)
        config = Config(
            env="x", workers=int(rng.integers(1, 5)), envs_per_worker=4, rollout=4, batch_size=8 * int(rng.integers(1,
            5)),
            epochs=int(rng.integers(1, 3)), optim=OptimConfig(minibatches=int(rng.integers(1, 3))),
            runtime=RuntimeConfig(spare_batches=int(rng.integers(1, 4))),
        )  # fmt: skip
        rows, updates = 2, config.updates_per_batch
        limit = max_lag(config, rows) if seed % 2 else least_max_lag(config, rows)
        per_batch, slots = segments_per_batch(config, rows), slot_count(config, rows)
        arena = make_arena(slots=slots)
        scheduler, queue = SlotScheduler(arena, per_batch, updates, limit), LocalQueue()
        returns = SlotReleaser(arena, queue)
        free, holding = list(range(slots)), [None] * (config.workers * 2)
        speeds, version, batches, published = rng.random(len(holding)) ** 4 + 1e-3, 0, 0, 0
        for now in range(6_000):
            free += queue.get_many(0)
            group = rng.choice(len(holding), p=speeds / speeds.sum())
            if holding[group] is None and free:
                holding[group] = free.pop(0)
                arena.state[holding[group]], arena.begun[holding[group]] = FILLING, published
            elif holding[group] is not None:
                arena.state[holding[group]], arena.finished_s[holding[group]] = FINISHED, now
                scheduler.add([holding[group]])
                holding[group] = None
            published = version
            while (batch := scheduler.take(version)) is not None:
                assert version + updates - 1 - arena.begun[batch].min() <= limit
                # Slots that begin while the batch is trained on still see the old version, or one between.
                arena.state[batch] = FREE
                returns.take(batch, now)
                returns.give_back_due(now + rng.random())
                free += queue.get_many(0)
                for other in range(len(holding)):
                    if holding[other] is None and free and rng.random() < 0.5:
                        holding[other] = free.pop(0)
                        arena.state[holding[other]], arena.begun[holding[other]] = FILLING, version
                version += updates
                batches += 1
                returns.want(now + 1)
                if rng.random() < 0.02:  # all sampling processes have died
                    holding = [None] * len(holding)
                    returns.forget()
                    reclaim_slots(arena, queue, scheduler.finished)
                    free = queue.get_many(0)
            if len(scheduler) < per_batch:
                returns.give_back_all()
            kept = sum(len(slots) for _, slots in returns._kept)
            assert kept + len(free) + len(queue) == int((arena.state == FREE).sum()), (
                "no slot is lost or given back twice"
            )
        assert batches > 5

    def test_lag_free_runs_have_exactly_one_batch_of_slots(self):
        config = Config(env="x", sync=True, workers=2, envs_per_worker=4, rollout=4, batch_size=32)
        assert slot_count(config, 2) == segments_per_batch(config, 2) == 4
        assert max_lag(config, 2) == 0

    def test_a_bound_below_what_the_slots_imply_is_refused(self):
        config = Config(env="x", workers=1, envs_per_worker=4, rollout=4, batch_size=8, loss=LossConfig(max_lag=1))
        with pytest.raises(ConfigError, match=r"loss\.max_lag 1 is below 3"):
            validate(config)


class TestSlotReturns:
    """A simulation of one learner and sampling that fills a batch's slots together."""

    PER_BATCH, SLOTS = 2, 4

    def simulate(self, training_s: float, sampling_s: float, batches: int = 200) -> tuple[list[float], list[float]]:
        """For each batch how long the learner waited for it, and how old its oldest sample was when it was taken."""
        arena, queue = make_arena(slots=self.SLOTS), LocalQueue()
        returns, now, waits, ages = SlotReleaser(arena, queue), 0.0, [], []
        free, filling, finished = list(range(self.SLOTS)), None, []

        def sample_until(time: float, enough: bool) -> float:
            """Let sampling go on to a time, or until a batch is finished; the time that it is then."""
            nonlocal free, filling, finished, sampled_to
            while True:
                free += queue.get_many(0)
                if filling is None:
                    if len(free) < self.PER_BATCH or sampled_to > time:
                        break
                    filling = (sampled_to, [free.pop(0) for _ in range(self.PER_BATCH)])
                end = filling[0] + sampling_s
                if end > time and not (enough and not finished):
                    break
                arena.finished_s[filling[1]] = end
                finished.append(filling)
                filling, sampled_to = None, end
            sampled_to = max(sampled_to, now if filling is None else sampled_to)
            return finished[0][0] + sampling_s if enough else time

        sampled_to = 0.0
        for _ in range(batches):
            returns.want(now)
            sample_until(now, enough=False)
            if not finished:
                returns.give_back_all()
                ready = sample_until(now, enough=True)
                waits.append(max(0.0, ready - now))
                now = max(now, ready)
            else:
                waits.append(0.0)
            begun, slots = finished.pop(0)
            ages.append(now - begun)
            returns.take(slots, now)
            for _ in range(20):  # updates
                now += training_s / 20
                sampled_to = max(sampled_to, now) if filling is None and not free else sampled_to
                returns.give_back_due(now)
                sample_until(now, enough=False)
        return waits, ages

    def test_where_the_learner_limits_samples_are_little_older_than_sampling_takes(self):
        waits, ages = self.simulate(training_s=1.0, sampling_s=0.3)
        assert max(ages[:2]) < 1.5 and ages[3] > 1.0, "at first a batch waits while another is trained on"
        assert np.mean(ages[-50:]) < 0.3 + 0.2
        assert np.mean(waits[-50:]) < 0.05

    def test_where_sampling_limits_slots_are_given_back_at_once(self):
        waits, _ = self.simulate(training_s=0.2, sampling_s=1.0)
        assert np.mean(waits[-50:]) == pytest.approx(0.8, abs=0.02)
