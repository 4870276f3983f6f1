"""Which segments make a batch, the bound on the policy lag, and when slots are released."""

from __future__ import annotations

import numpy as np
import pytest
from arenas import make_arena

from sfactory.config import Config, LossConfig, OptimConfig, RuntimeConfig
from sfactory.config.lag import least_max_lag, max_lag, segments_per_batch, slot_count
from sfactory.config.validation import validate
from sfactory.data.arena import FILLING, FINISHED, FREE
from sfactory.data.queues import LocalQueue
from sfactory.data.scheduler import SlotReleaser, SlotScheduler
from sfactory.errors import ConfigError


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
            runtime=RuntimeConfig(spare_batches=int(rng.integers(0, 4))),
        )  # fmt: skip
        rows, updates = 2, config.updates_per_batch
        limit = max_lag(config, rows) if seed % 2 else least_max_lag(config, rows)
        per_batch, slots = segments_per_batch(config, rows), slot_count(config, rows)
        arena = make_arena(slots=slots)
        scheduler, queue = SlotScheduler(arena, per_batch, updates, limit), LocalQueue()
        releaser = SlotReleaser(arena, queue)
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
                releaser.hold(batch, now)
                releaser.release_due(now + rng.random())
                free += queue.get_many(0)
                for other in range(len(holding)):
                    if holding[other] is None and free and rng.random() < 0.5:
                        holding[other] = free.pop(0)
                        arena.state[holding[other]], arena.begun[holding[other]] = FILLING, version
                version += updates
                batches += 1
                releaser.batch_wanted(now + 1)
                if rng.random() < 0.02:  # all sampling processes have died
                    holding = [None] * len(holding)
                    releaser.reclaim(scheduler.finished)
                    free = queue.get_many(0)
            if len(scheduler.finished) < per_batch:
                releaser.release_all()
            kept = sum(len(slots) for _, slots in releaser._held)
            assert kept + len(free) + len(queue) == int((arena.state == FREE).sum()), (
                "no slot is lost or released twice"
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


class TestSlotReleaser:
    """A simulation of one learner and sampling that fills a batch's slots together."""

    PER_BATCH, SLOTS = 2, 4

    def simulate(self, training_s: float, sampling_s: float, batches: int = 200) -> tuple[list[float], list[float]]:
        """For each batch how long the learner waited for it, and how old its oldest sample was when it was taken."""
        arena, queue = make_arena(slots=self.SLOTS), LocalQueue()
        releaser, now, waits, ages = SlotReleaser(arena, queue), 0.0, [], []
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
            releaser.batch_wanted(now)
            sample_until(now, enough=False)
            if not finished:
                releaser.release_all()
                ready = sample_until(now, enough=True)
                waits.append(max(0.0, ready - now))
                now = max(now, ready)
            else:
                waits.append(0.0)
            begun, slots = finished.pop(0)
            ages.append(now - begun)
            releaser.hold(slots, now)
            for _ in range(20):  # updates
                now += training_s / 20
                sampled_to = max(sampled_to, now) if filling is None and not free else sampled_to
                releaser.release_due(now)
                sample_until(now, enough=False)
        return waits, ages

    def test_where_the_learner_limits_samples_are_little_older_than_sampling_takes(self):
        waits, ages = self.simulate(training_s=1.0, sampling_s=0.3)
        assert max(ages[:2]) < 1.5 and ages[3] > 1.0, "at first a batch waits while another is trained on"
        assert np.mean(ages[-50:]) < 0.3 + 0.2
        assert np.mean(waits[-50:]) < 0.05

    def test_where_sampling_limits_slots_are_released_at_once(self):
        waits, _ = self.simulate(training_s=0.2, sampling_s=1.0)
        assert np.mean(waits[-50:]) == pytest.approx(0.8, abs=0.02)
