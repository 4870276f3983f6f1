"""The learner's gradient is the same by chunks on several threads as in one piece."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from sampling_run import SamplingRun

from sfactory.chunks import ChunkThreads, chunk_columns
from sfactory.config import Config, ModelConfig


@pytest.mark.parametrize("core", ["none", "gru"])
@pytest.mark.parametrize("columns", [3, 8, 100])
def test_chunks_have_the_gradient_of_the_whole_batch(core: str, columns: int, tmp_path) -> None:
    config = Config(
        env="CartPole-v1", preset="none", envs_per_worker=16, rollout=8, batch_size=128, model=ModelConfig(core=core, normalize_obs=True)
    )
    run = SamplingRun(config, tmp_path)
    try:
        learner = run.learner
        batch = learner._assemble(run.sample(learner._per_batch))
        loss, _ = learner.loss(batch)
        loss.backward()
        expected = learner._flat.parameters.grad.clone()
        assert expected.abs().sum() > 0
        seen = []
        learner._step = lambda: seen.append(learner._flat.parameters.grad.clone()) or torch.zeros(())
        learner._chunk_columns, learner._threads = columns, ChunkThreads(3)
        learner._update(batch, None)
        torch.testing.assert_close(seen[0], expected, rtol=1e-4, atol=1e-6)
        parts = batch.split(columns)
        for f in dataclasses.fields(batch):
            if isinstance(whole := getattr(batch, f.name), torch.Tensor):
                joined = torch.cat([getattr(part, f.name) for part in parts], 0 if f.name in ("rnn_state", "owner") else 1)
                assert torch.equal(joined.nan_to_num(7), whole.nan_to_num(7))
    finally:
        run.close()


@pytest.mark.parametrize(
    ("columns", "steps", "threads", "images", "expected"),
    [
        (512, 32, 2, False, 128),  # two chunks for each thread
        (2048, 32, 1, False, 256),  # of 8192 samples, for the cache
        (32, 32, 8, False, 32),  # too few to share out
        (32, 32, 2, True, 8),
        (32, 32, 1, True, 32),
        (1, 32, 4, True, 1),
    ],
)
def test_sizes_of_chunks(columns: int, steps: int, threads: int, images: bool, expected: int) -> None:
    assert chunk_columns(columns, steps, threads, images) == expected


def test_an_error_in_a_thread_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        ChunkThreads(2).map(lambda x: 1 / x, [1, 0, 2])
