"""Peers' settings for the references of perf/references.py, and the scores that perf/peers.py times."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from perf.peer_settings import Setting

_SF_GYM: Setting = {
    "use_rnn": False,
    "num_envs_per_worker": 20,
    "policy_workers_per_policy": 2,
    "recurrence": 1,
    "with_vtrace": False,
    "batch_size": 512,
    "reward_scale": 0.1,
    "save_every_sec": 10,
    "experiment_summaries_interval": 10,
}
"""The command in its sf_examples/train_gym_env.py."""
_SF_MUJOCO: Setting = {"num_workers": 2, "num_envs_per_worker": 32}
"""Its sf_examples/mujoco/mujoco_params.py, whose 64 environments are spread over the cores that there are."""
_SF_DOOM_GAMES: Setting = {"summaries_use_frameskip": False, "num_workers": 2, "num_envs_per_worker": 16}
"""Env steps of four tics each; the 32 games of its documentation on two workers, for two cores."""
_ZOO_MUJOCO: Setting = {
    "log_std_init": -2,
    "ortho_init": False,
    "activation_fn": "ReLU",
    "net_arch": {"pi": [256, 256], "vf": [256, 256]},
}


def _zoo(env: str, envs: int, *, normalize: bool = False, linear: tuple[str, ...] = (), **ppo: Any) -> Setting:
    """A setting of rl-baselines3-zoo's hyperparams/ppo.yml; `linear` names what falls linearly to zero."""
    return {"env": env, "envs": envs, "normalize": normalize, "linear": list(linear), "ppo": ppo}


TASKS: dict[str, dict[str, Setting]] = {
    "cartpole": {
        "sample-factory": {"env": "CartPole-v1", **_SF_GYM},
        "stable-baselines3": _zoo(
            "CartPole-v1", 8, linear=("learning_rate", "clip_range"), n_steps=32, batch_size=256, gae_lambda=0.8,
            gamma=0.98, n_epochs=20, ent_coef=0.0, learning_rate=1e-3, clip_range=0.2,
        ),
    },
    "acrobot": {
        "sample-factory": {"env": "Acrobot-v1", **_SF_GYM},
        "stable-baselines3": _zoo(
            "Acrobot-v1", 16, normalize=True, n_steps=256, gae_lambda=0.94, gamma=0.99, n_epochs=4, ent_coef=0.0
        ),
    },
    "mountaincar": {
        "sample-factory": {"env": "MountainCar-v0", **_SF_GYM},
        "stable-baselines3": _zoo(
            "MountainCar-v0", 16, normalize=True, n_steps=16, gae_lambda=0.98, gamma=0.99, n_epochs=4, ent_coef=0.0
        ),
    },
    "pendulum": {
        "sample-factory": {"env": "Pendulum-v1", **_SF_GYM},
        "stable-baselines3": _zoo(
            "Pendulum-v1", 4, n_steps=1024, gae_lambda=0.95, gamma=0.9, n_epochs=10, ent_coef=0.0, learning_rate=1e-3,
            clip_range=0.2, use_sde=True, sde_sample_freq=4,
        ),
    },
    "lunarlander": {
        "sample-factory": {"env": "LunarLander-v2", **_SF_GYM},
        "stable-baselines3": _zoo(
            "LunarLander-v3", 16, n_steps=1024, batch_size=64, gae_lambda=0.98, gamma=0.999, n_epochs=4, ent_coef=0.01
        ),
    },
    "bipedalwalker": {
        "sample-factory": {"env": "BipedalWalker-v3", **_SF_GYM},
        "stable-baselines3": _zoo(
            "BipedalWalker-v3", 32, normalize=True, n_steps=2048, batch_size=64, gae_lambda=0.95, gamma=0.999,
            n_epochs=10, ent_coef=0.0, learning_rate=3e-4, clip_range=0.18,
        ),
    },
    "hopper": {
        "sample-factory": {"env": "Hopper-v4", **_SF_MUJOCO},
        "stable-baselines3": _zoo(
            "Hopper-v5", 1, normalize=True, batch_size=32, n_steps=512, gamma=0.999, learning_rate=9.80828e-05,
            ent_coef=0.00229519, clip_range=0.2, n_epochs=5, gae_lambda=0.99, max_grad_norm=0.7, vf_coef=0.835671,
            policy_kwargs=_ZOO_MUJOCO,
        ),
    },
    "walker2d": {
        "sample-factory": {"env": "Walker2d-v4", **_SF_MUJOCO},
        "stable-baselines3": _zoo(
            "Walker2d-v5", 1, normalize=True, batch_size=32, n_steps=512, gamma=0.99, learning_rate=5.05041e-05,
            ent_coef=0.000585045, clip_range=0.1, n_epochs=20, gae_lambda=0.95, max_grad_norm=1, vf_coef=0.871923,
        ),
    },
    "halfcheetah": {
        "sample-factory": {"env": "HalfCheetah-v4", **_SF_MUJOCO},
        "stable-baselines3": _zoo(
            "HalfCheetah-v5", 1, normalize=True, batch_size=64, n_steps=512, gamma=0.98, learning_rate=2.0633e-05,
            ent_coef=0.000401762, clip_range=0.1, n_epochs=20, gae_lambda=0.92, max_grad_norm=0.8, vf_coef=0.58096,
            policy_kwargs=_ZOO_MUJOCO,
        ),
    },
    "ant": {
        "sample-factory": {"env": "Ant-v4", **_SF_MUJOCO},
        "stable-baselines3": _zoo("Ant-v5", 1, normalize=True),
    },
    "pong-classic": {
        # The 8 games of its documentation on two workers, for two cores.
        "sample-factory": {
            "env": "atari_pong", "summaries_use_frameskip": False, "num_workers": 2, "num_envs_per_worker": 4,
        },
        "stable-baselines3": _zoo(
            "PongNoFrameskip-v4", 8, linear=("learning_rate", "clip_range"), policy="CnnPolicy", n_steps=128,
            n_epochs=4, batch_size=256, learning_rate=2.5e-4, clip_range=0.1, vf_coef=0.5, ent_coef=0.01,
        ) | {"threads": 2},
    },
    "vizdoom-basic": {"sample-factory": {"env": "doom_basic", **_SF_DOOM_GAMES}},
    "vizdoom-gathering": {"sample-factory": {"env": "doom_health_gathering", **_SF_DOOM_GAMES}},
}  # fmt: skip
"""What the documentation or the zoo of each peer has for a reference of perf/references.py, by the reference's name.
Sample Factory has no command for single tasks of Gymnasium besides CartPole-v1; that one is taken for them all. It runs
with Gymnasium 0.29, whose versions of some environments are older."""


@dataclass(frozen=True)
class Score:
    """A target of a reference, on the clock.

    Attributes:
        evaluated: The score is that of 20 deterministic episodes after the last step, which is timed too; else that of
            the last 20 episodes of training, 100 more having ended. sfactory's is over all that have ended since its
            last report, half a second before, where those are more.
        limit_s: When to give up.
        steps: Env steps of a trainer that are not those of the reference, as its documentation has them.
    """

    target: float
    evaluated: bool = False
    limit_s: float = 180.0
    steps: dict[str, int] = field(default_factory=dict)


SCORES: dict[str, Score] = {
    "cartpole": Score(475.0, True, 120.0, {"sample-factory": 300_000}),
    "acrobot": Score(-90.0, limit_s=240.0),
    "mountaincar": Score(-115.0, limit_s=400.0),
    "pendulum": Score(-200.0),
    "lunarlander": Score(200.0, limit_s=600.0),
    "hopper": Score(2000.0, limit_s=600.0),
    "walker2d": Score(2000.0, limit_s=600.0),
    "halfcheetah": Score(2000.0),
    "pong-classic": Score(0.0, limit_s=1800.0, steps={"sample-factory": 10_000_000, "stable-baselines3": 10_000_000}),
    "vizdoom-basic": Score(75.0, limit_s=1200.0),
}
"""By the reference's name. What limits a run is the reference's number of env steps, or the seconds."""
