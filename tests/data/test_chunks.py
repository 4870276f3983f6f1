"""The learner's gradient and statistics are the same by chunks on several threads as in one piece."""

from __future__ import annotations

import pytest
import torch
from sampling_run import SamplingRun

from perf.learner_numbers import backward
from sfactory.config import Config, LossConfig, ModelConfig
from sfactory.data.chunks import ChunkThreads, chunk_columns, chunk_slices, select_columns


@pytest.mark.parametrize("core", ["none", "gru"])
@pytest.mark.parametrize("width", [3, 8, 100])
@pytest.mark.parametrize(
    "loss", [LossConfig(), LossConfig(normalize_returns=True, normalize_advantage=False, value_clip=0.2)]
)
def test_chunks_have_the_gradient_and_statistics_of_the_whole_batch(
    core: str, width: int, loss: LossConfig, tmp_path
) -> None:
    config = Config(
        env="CartPole-v1",
        preset="none",
        envs_per_worker=16,
        rollout=8,
        batch_size=128,
        model=ModelConfig(core=core, normalize_obs=True),
        loss=loss,
    )
    run = SamplingRun(config, tmp_path)
    try:
        learner = run.learner
        batch = learner._feed.assemble(run.sample(learner._feed.per_batch))
        batch.active[2, 5] = False
        moments = {name: value.clone() for name, value in learner.state()["returns"].items()}
        weights = learner._flat.vector.clone()

        def gradient(width: int, threads: int) -> tuple[torch.Tensor, ...]:
            """From the same weights and moments; normalising returns changes both."""
            learner._flat.vector.copy_(weights)
            learner._units.load_state_dict(moments)
            learner._batch_chunk, learner._threads = width, ChunkThreads(threads)
            update, whole = backward(learner, batch)
            return learner._flat.parameters.grad.clone(), update.stacked(), whole.stacked()

        expected = gradient(100, 1)
        assert expected[0].abs().sum() > 0
        for found, one in zip(gradient(width, 3), expected, strict=True):
            torch.testing.assert_close(found, one, rtol=1e-4, atol=1e-6)
    finally:
        run.close()


def test_slices_of_columns() -> None:
    assert chunk_slices(7, 3) == [slice(0, 3), slice(3, 6), slice(6, 7)]
    x = torch.arange(14).reshape(2, 7)
    for part in chunk_slices(7, 3):
        assert torch.equal(select_columns(x, part, 1), x[:, part])
    assert torch.equal(select_columns(x, torch.tensor([4, 1]), 1), x[:, [4, 1]])


@pytest.mark.parametrize(
    ("columns", "steps", "threads", "kind", "expected"),
    [
        (512, 32, 2, "flat", 128),  # two chunks for each thread
        (2048, 32, 1, "flat", 256),  # of 8192 samples, for the cache
        (2048, 32, 1, "dense", 512),
        (32, 32, 8, "dense", 32),  # too few to share out
        (32, 32, 2, "image", 16),
        (32, 32, 1, "image", 32),
        (8, 32, 2, "image", 4),
        (256, 1, 2, "image", 128),  # a minibatch of the preset for Atari keeps two threads at work
        (3, 32, 2, "image", 3),
        (1, 32, 4, "image", 1),
    ],
)
def test_sizes_of_chunks(columns: int, steps: int, threads: int, kind: str, expected: int) -> None:
    assert chunk_columns(columns, steps, threads, kind) == expected


def test_an_error_in_a_thread_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        ChunkThreads(2).map(lambda x: 1 / x, [1, 0, 2])
