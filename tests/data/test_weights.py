"""Flat weights, and their publication to readers at any moment."""

from __future__ import annotations

import multiprocessing

import pytest
import torch
from torch import nn

from sfactory.data import weights
from sfactory.data.weights import FlatWeights, PublishedWeights, WeightPublisher

SPAWN = multiprocessing.get_context("spawn")


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


def test_the_version_is_that_of_a_complete_publication_also_where_the_reader_was_overtaken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The third publication uses the buffer of the first, and is not complete when the reader looks at its version."""
    published, barriers = PublishedWeights(1), []
    published.publish(torch.ones(1), 1)

    def overtake() -> None:
        barriers.append(published._header.array.copy())
        if len(barriers) == 1:
            published.publish(torch.ones(1), 2)
            published._header.array[[0, 3]] = 3, 30  # begun, and its version written

    monkeypatch.setattr(weights, "barrier", overtake)
    assert published.version == 2


@pytest.mark.parametrize("staged", [False, True])
def test_a_publisher_publishes_copies_that_later_updates_do_not_change(staged):
    vector, published = torch.zeros(5), PublishedWeights(5)
    publisher, out = WeightPublisher(published, vector, staged), torch.empty(5)
    for version in range(1, 4):
        vector.fill_(version)
        publisher.publish(version)
        vector.fill_(-1.0)
        publisher.finish()
        assert published.read(out) == published.version == version
        assert (out == version).all()


def test_versions_are_readable_by_another_process():
    published = PublishedWeights(3)
    published.publish(torch.tensor([1.0, 2.0, 3.0]), 8)
    process = SPAWN.Process(target=_check_weights, args=(published,))
    process.start()
    process.join()
    assert process.exitcode == 0


def _check_weights(published: PublishedWeights) -> None:
    out = torch.empty(3)
    assert published.read(out) == 8
    assert out.tolist() == [1.0, 2.0, 3.0]


def test_barriers_stand_between_announcements_and_the_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """In both directions, on machines that reorder stores or loads."""
    published, seen = PublishedWeights(2), []
    header, buffers = published._header.array, published._buffers.array
    monkeypatch.setattr(weights, "barrier", lambda: seen.append((header[:2].tolist(), buffers[1].tolist())))
    published.publish(torch.ones(2), 7)
    assert seen == [([1, 0], [0, 0]), ([1, 0], [1, 1])], "begun, then filled, and only then complete"
    seen.clear()
    assert published.read(out := torch.zeros(2)) == 7
    assert out.tolist() == [1, 1] and len(seen) == 2
