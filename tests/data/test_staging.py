"""What travels between host and device in one copy arrives whole, and nothing is overwritten while it is still
needed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from late_device import LateDevice
from sampling_run import SamplingRun
from test_invariants import busy_config

from sfactory.config import LossConfig, OptimConfig
from sfactory.data.batch import Assembler
from sfactory.data.staging import DoubleBuffer, StagingBuffer
from sfactory.data.weights import PublishedWeights, WeightPublisher

CPU = torch.device("cpu")
ARRAYS = [
    ((3, 5), np.dtype(np.uint8)),
    ((2,), np.dtype(np.int64)),
    ((4, 0), np.dtype(np.float32)),
    ((7,), np.dtype(bool)),
]


@pytest.fixture(params=[False, True], ids=["late", "eager"])
def device(request, monkeypatch) -> LateDevice:
    """A device whose copies run at its own time."""
    device = LateDevice(request.param)
    monkeypatch.setattr(torch, "get_device_module", lambda *_: device)
    for name in ("upload", "download"):
        original = getattr(StagingBuffer, name)
        monkeypatch.setattr(
            StagingBuffer, name, lambda self, *args, original=original: device.later(original)(self, *args)
        )
    return device


@pytest.mark.parametrize("staged", [True, False])
def test_one_copy_moves_all_arrays(staged: bool) -> None:
    packed = StagingBuffer(ARRAYS, CPU, staged)
    rng = np.random.default_rng(0)
    values = [rng.integers(0, 2, shape).astype(dtype) for shape, dtype in ARRAYS]
    for array, value in zip(packed.arrays, values, strict=True):
        array[...] = value
    packed.upload()
    for tensor, value in zip(packed.tensors, values, strict=True):
        assert tensor.data_ptr() % value.itemsize == 0
        np.testing.assert_array_equal(tensor.numpy(), value)
    for tensor in packed.tensors:
        tensor.fill_(1)
    packed.download(2)
    assert all((array == 1).all() for array in packed.arrays[:2])
    np.testing.assert_array_equal(packed.arrays[3], 1 if not staged else values[3])


def test_no_batch_is_overwritten_before_the_device_has_used_it(device: LateDevice) -> None:
    turns = DoubleBuffer([((4,), np.dtype(np.float32))], CPU)
    seen: list[torch.Tensor] = []
    for number in range(7):
        packed = turns.next()
        packed.arrays[0][:] = number
        turns.upload()
        for _ in range(2):
            device.current.give(lambda tensor=packed.tensors[0]: seen.append(tensor.clone()))
    device.default.run_to(device.default.given)
    assert [float(tensor[0]) for tensor in seen] == [number for number in range(7) for _ in range(2)]
    assert all((tensor == tensor[0]).all() for tensor in seen)


def test_weights_are_published_as_they_were_and_never_before_they_have_arrived(device: LateDevice) -> None:
    published, vector = PublishedWeights(3), torch.zeros(3)
    publisher, out = WeightPublisher(published, vector, staged=True), torch.zeros(3)
    publisher._host.copy_ = device.later(publisher._host.copy_)
    for version in range(1, 5):
        device.current.give(lambda version=version: vector.fill_(version))
        publisher.publish(version)
        publisher.finish(wait=False)
        assert published.version == version - 1, "the device has not come to it yet"
        if version % 2:
            publisher.finish()
            assert published.read(out) == version
            assert (out == version).all()
    publisher.finish()
    assert published.read(out) == 4
    assert (out == 4).all()


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("algo", ["appo", "ppo"])
def test_training_by_staged_batches_is_the_same(algo: str, sync: bool, tmp_path) -> None:
    """The learner's way on CUDA, batches and weights by memory of their own, gives bit for bit the weights of the plain
    way."""
    optim = OptimConfig(minibatches=2, schedule="adaptive_kl", lr=1e-3)
    config = busy_config("gru", algo=algo, sync=sync, epochs=2, optim=optim, loss=LossConfig(normalize_returns=True))
    vectors = []
    for staged in (False, True):
        torch.manual_seed(0)
        run = SamplingRun(config, tmp_path / str(staged))
        learner = run.learner
        try:
            learner._feed.assemble = Assembler(run.wires.arena, learner._feed.per_batch, CPU, staged)
            learner._feed._publisher = WeightPublisher(run.wires.weights, learner._flat.vector, staged)
            while learner.updates < 24:
                for worker in (*run.policies, *run.rollouts, learner):
                    worker.poll(0)
            vectors.append(learner._flat.vector.detach().clone())
            assert isinstance(learner._optimizer.lr, torch.Tensor) and 1e-6 <= float(learner._optimizer.lr) <= 1e-2
        finally:
            run.close()
    assert torch.equal(*vectors)
