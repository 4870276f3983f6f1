"""The invariants of the design that a user's results rest on, each on real segments."""

import dataclasses

import numpy as np
import pytest
import torch
from environments import MODES, Busy, Counting, vector_of
from sampling_run import SamplingRun, transitions

from perf.learner_numbers import backward, outputs_of
from sfactory.config import Config, LossConfig, ModelConfig, OptimConfig, RuntimeConfig
from sfactory.data.arena import FILLING, FINISHED, FREE
from sfactory.objective import final_values

SMALL = {"envs_per_worker": 8, "workers": 1, "rollout": 16, "batch_size": 128, "preset": "none"}


def busy_config(core: str, env=Busy, precision="float32", **kwargs) -> Config:
    model = ModelConfig(
        core=core, core_size=16, core_layers=2, hidden=(16,), features=32, normalize_obs=True, squash="tanh"
    )
    return Config(env=env, model=model, precision=precision, **SMALL, **kwargs)


def shake(run: SamplingRun) -> None:
    """Weights and statistics that are anything but their initial values."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in run.training._model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        for name, buffer in run.training._model.named_buffers():
            if ("mean" in name or "var" in name) and not name.startswith("unit"):
                buffer.add_(torch.rand(buffer.shape, generator=generator))
    run.wires.weights.publish(run.learner._flat.vector, 1)


@pytest.mark.parametrize(
    ("core", "shared", "env", "precision"),
    [
        ("none", True, Busy, "float32"),
        ("gru", True, Busy, "float32"),
        ("lstm", True, Busy, "float32"),
        ("lstm", False, Busy, "float32"),
        ("lstm", False, Busy, "bfloat16"),
        *(("lstm", True, vector_of(Busy, mode), "float32") for mode in MODES),
    ],
    ids=["none", "gru", "lstm", "separate critic", "bfloat16", *(mode.name for mode in MODES)],
)
def test_lag_zero_importance_weights_are_one(core, shared, env, precision, tmp_path):
    """Sums of batches of other sizes may be of another order, which bfloat16 rounds to another number now and then."""
    config, close = busy_config(core, env, precision), {"float32": 1e-5, "bfloat16": 2**-8}[precision]
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, shared_critic=shared))
    run = SamplingRun(config, tmp_path)
    try:
        run.give_back([])
        shake(run)
        for _ in range(3):
            slots = run.sample(2)
            batch = run.learner._feed.assemble(slots)
            assert batch.first[1:].any(), "an episode must begin inside the segment"
            assert (batch.terminated & batch.active[:-1]).any()
            assert (batch.truncated & batch.active[:-1]).any()
            assert not batch.mask.all()
            assert (run.importance_weights(batch) - 1).abs().max() < close
            values, stored = (
                outputs_of(run.learner, batch).value[:-1],
                torch.from_numpy(np.concatenate(run.wires.arena.value[slots], 1)),
            )
            active = batch.active[:-1]
            torch.testing.assert_close(values[active], stored[:-1][active], rtol=close, atol=close)
            run.give_back(slots)
    finally:
        run.close()


def test_the_mask_shapes_log_probabilities_and_entropy(tmp_path):
    """Forbidden categories have no influence: changing their logits' mask entries changes both, and unmasking breaks
    the identity."""
    run = SamplingRun(busy_config("none"), tmp_path)
    try:
        shake(run)
        batch = run.learner._feed.assemble(run.sample(2))
        unmasked = dataclasses.replace(batch, mask=torch.ones_like(batch.mask))
        assert (run.importance_weights(batch) - 1).abs().max() < 1e-5
        assert run.importance_weights(unmasked).min() < 0.95
        (loss, _), (other_loss, _) = (backward(run.learner, x) for x in (batch, unmasked))
        assert float(loss.entropy) < float(other_loss.entropy) - 0.05
    finally:
        run.close()


def counting_config(env, workers: int = 1, envs_per_worker: int = 4, **kwargs) -> Config:
    # 8 environments in all, however they are split; one segment for each group and batch.
    groups = workers * 2
    batch = 12 * envs_per_worker // 2 * groups
    return Config(
        env=env,
        workers=workers,
        envs_per_worker=envs_per_worker,
        rollout=12,
        batch_size=batch,
        preset="none",
        seed=5,
        **kwargs,
    )


def expected(config: Config, count: int) -> list[list[tuple]]:
    """The transitions of the counting environments, played by hand."""
    from sfactory.envs.seeds import env_seed

    histories = []
    for index in range(8):
        env, history, ended = Counting(), [], True
        for _ in range(count):
            first = ended
            if ended:
                obs, _ = env.reset(seed=env_seed(config.seed, index) if not history else None)
            after, reward, terminated, truncated, _ = env.step(0)
            history.append((tuple(obs.tolist()), reward, terminated, truncated, first))
            obs, ended = after, terminated or truncated
        histories.append(history)
    return histories


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    "env", [Counting, *(vector_of(Counting, mode) for mode in MODES)], ids=["single", *(mode.name for mode in MODES)]
)
def test_trajectories_do_not_depend_on_autoreset_mode_or_number_of_workers(env, workers, tmp_path):
    config = counting_config(env, workers, envs_per_worker=8 // workers)
    histories = transitions(config, tmp_path, rounds=6)
    known = expected(config, 80)
    assert len(histories) == 8
    for history, truth in zip(histories, known, strict=True):
        assert len(history) > 40
        assert history == truth[: len(history)]


@pytest.mark.parametrize(
    "env", [Counting, *(vector_of(Counting, mode) for mode in MODES)], ids=["single", *(mode.name for mode in MODES)]
)
def test_truncated_episodes_are_bootstrapped_with_the_value_of_their_final_observation(env, tmp_path):
    run = SamplingRun(counting_config(env, envs_per_worker=8), tmp_path)
    try:
        shake(run)
        found = 0
        for _ in range(3):
            slots = run.sample(2)
            batch = run.learner._feed.assemble(slots)
            finals = final_values(batch, outputs_of(run.learner, batch).value)
            arena_obs = batch.obs[0]
            for t, column in (batch.truncated & batch.active[:-1]).nonzero().tolist():
                episode, count, length = arena_obs[t, column].tolist()
                final_obs = torch.tensor([[episode, count + 1, length]])
                with torch.no_grad():
                    truth = run.training._model((final_obs,), None)[1]
                torch.testing.assert_close(finals[t, column], truth[0], rtol=1e-5, atol=1e-5)
                found += 1
            run.give_back(slots)
        assert found > 10
    finally:
        run.close()


def test_every_environment_has_its_own_seed(tmp_path):
    config = counting_config(Counting, workers=2)
    first = [
        history[0][0] + history[5][0] + history[11][0] for history in transitions(config, tmp_path / "a", rounds=3)
    ]
    other = dataclasses.replace(config, seed=6)
    second = [
        history[0][0] + history[5][0] + history[11][0] for history in transitions(other, tmp_path / "b", rounds=3)
    ]
    assert len(set(first)) > 5
    assert first != second


def test_slots_are_conserved_and_none_is_torn(tmp_path):
    run = SamplingRun(
        dataclasses.replace(counting_config(Counting, envs_per_worker=8), runtime=RuntimeConfig(groups=2)), tmp_path
    )
    arena = run.wires.arena
    try:
        for _ in range(20):
            slots = run.sample(1)
            states = [int((arena.state == s).sum()) for s in (FREE, FILLING, FINISHED)]
            assert sum(states) == arena.slots
            assert all(arena.state[slot] == FINISHED for slot in slots)
            for slot in slots:
                assert (arena.version[slot] == 0).all()
                # Each row counts on from step to step without a gap: nothing was overwritten by another group.
                for row in range(arena.rows):
                    steps = arena.obs[0][slot, :, row]
                    for t in range(arena.rollout):
                        if arena.active[slot, t, row] and not arena.first[slot, t + 1, row]:
                            assert steps[t + 1, 1] == steps[t, 1] + 1
            run.give_back(slots)
    finally:
        run.close()


def test_seeded_training_in_one_process_repeats_bit_for_bit(tmp_path):
    from sfactory.runtime.runner import train

    def weights(name: str, seed: int):
        from sfactory.runs.checkpoint import CheckpointStore

        config = Config(
            env="CartPole-v1", serial=True, seed=seed, steps=2048, run=str(tmp_path / name), envs_per_worker=8,
            rollout=32,
            batch_size=256, epochs=2,
            optim=OptimConfig(minibatches=2), model=ModelConfig(normalize_obs=True, core="gru", core_size=8),
            loss=LossConfig(normalize_returns=True),
        )  # fmt: skip
        result = train(
            dataclasses.replace(config, log=dataclasses.replace(config.log, display="none", tensorboard=False))
        )
        assert result.status == "completed"
        return CheckpointStore(tmp_path / name / "checkpoints").load_latest().model

    first, again, other = weights("a", 1), weights("b", 1), weights("c", 2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)
