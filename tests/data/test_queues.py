"""Queues of indices: order, blocking, and users that are killed."""

from __future__ import annotations

import multiprocessing
import threading
import time

import pytest

from sfactory.data.queues import IndexQueue, LocalQueue, PipeQueue, pack_request, unpack_request

SPAWN = multiprocessing.get_context("spawn")


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


@pytest.mark.parametrize("make", [lambda: IndexQueue(64), lambda: PipeQueue(64), LocalQueue])
def test_what_does_not_fit_is_given_back(make):
    queue, left = make(), list(range(20_000))
    sent, received = list(left), []
    while left:
        left = queue.put_some(left[:100]) + left[100:]
        if len(queue) > 50:
            received += queue.get_many(0)
    received += queue.get_many(0)
    assert received == sent
    assert not queue.full_waits


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


@pytest.mark.parametrize("kind", [IndexQueue, PipeQueue])
def test_a_queue_wraps_around_many_times_without_losing_its_place(kind):
    """Each round leaves a few messages behind, so that reads and writes cross the end of the buffer at all offsets."""
    queue, sent, received = kind(7), 0, []
    for round_ in range(3000):
        count = 1 + round_ % 7
        queue.put_many(list(range(sent, sent + count)))
        sent += count
        while len(queue) > 5:
            received += queue.get_many(0, most=3)
    received += queue.get_many(0)
    assert received == list(range(sent))
    assert not queue.full_waits


def _put_slowly(queue, values) -> None:
    for value in values:
        queue.put_many([value])


@pytest.mark.parametrize("kind", [IndexQueue, PipeQueue])
def test_many_writers_in_processes_of_their_own_lose_nothing_and_keep_their_order(kind):
    queue = kind(16)
    parts = [range(number << 20, (number << 20) + 500) for number in range(3)]
    writers = [SPAWN.Process(target=_put_slowly, args=(queue, part)) for part in parts]
    for writer in writers:
        writer.start()
    received: list[int] = []
    while len(received) < 1500:
        received += queue.get_many(10.0)
    for writer in writers:
        writer.join()
    for number, part in enumerate(parts):
        assert [value for value in received if value >> 20 == number] == list(part)


@pytest.mark.parametrize("make", [lambda: IndexQueue(64), lambda: PipeQueue(64)])
def test_a_waiting_reader_gets_what_is_put_and_returns_empty_handed_in_time(make):
    queue = make()
    begin = time.monotonic()
    assert queue.get_many(0.05) == []
    assert 0.03 < time.monotonic() - begin < 5
    writer = threading.Timer(0.05, queue.put_many, ([4, 5],))
    writer.start()
    assert queue.get_many(None) == [4, 5]
    writer.join()
