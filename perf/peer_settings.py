"""What perf/peers.py compares: each trainer's packages, and its settings for each workload and each score."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from typing import Any

from perf.fps import WORKLOADS as FPS_WORKLOADS

PEERS: dict[str, tuple[str, ...]] = {
    # The newest it runs with: it asks for NumPy 1 and Gymnasium 0.29, whose MuJoCo environments end at v4 and need
    # MuJoCo 2.
    "sample-factory": (
        "sample-factory==2.1.1",
        "numpy<2",
        "gymnasium==0.29.1",
        "mujoco<3",
        "box2d",
        "pygame",
        "imageio",
        "ale-py",
        "vizdoom",
        "opencv-python",
    ),
    "stable-baselines3": (
        "stable-baselines3==2.9.2",
        "gymnasium[mujoco]",
        "box2d",
        "pygame",
        "ale-py",
        "opencv-python-headless",
        "mpe2",
        "supersuit",
    ),
    "torchrl": ("torchrl==0.14.0", "gymnasium[mujoco]", "ale-py", "opencv-python-headless"),
    # Built from source; as Sample Factory's.
    "pufferlib": ("pufferlib==3.0.0", "numpy<2", "mujoco<3", "ale-py", "opencv-python"),
    "rllib": ("ray[rllib]==2.60.0", "gymnasium[mujoco]", "ale-py", "opencv-python-headless"),
}
"""What is installed for each peer, after the torch of constraints.txt."""

Setting = dict[str, Any]


@dataclass(frozen=True)
class Tuned:
    """A peer's setting of a workload.

    Attributes:
        fixed: What makes the workload: environment, model, rollout, epochs.
        best: The fastest of `tried`, found with --search.
        tried: Every candidate.
        usual: Of `tried`, one with the batch of 1024 samples that is usual for the environment, where the best has a
            larger one.
    """

    fixed: Setting
    best: Setting
    tried: tuple[Setting, ...]
    usual: Setting | None = None


@dataclass(frozen=True)
class Workload:
    """What is compared.

    Attributes:
        throughput: sfactory's flags from perf/fps.py.
        same: Flags with the sizes and the precision of the peers' usual settings.
    """

    throughput: str
    same: str
    peers: dict[str, Tuned] = field(default_factory=dict)


def _sf(workers: int, envs: int, splits: int = 2, **more: Any) -> Setting:
    return {
        "num_workers": workers,
        "num_envs_per_worker": envs,
        "worker_num_splits": splits,
        "batch_size": 1024,
        **more,
    }


def _vec(envs: int, *, subprocesses: bool = False, batch_size: int = 1024, threads: int = 1) -> Setting:
    return {"envs": envs, "subprocesses": subprocesses, "batch_size": batch_size, "threads": threads}


def _puf(
    envs: int, workers: int = 0, groups: int = 1, batch_size: int = 1024, threads: int = 1, **more: Any
) -> Setting:
    """No workers: all environments in the trainer's own process. `vector=True` takes CartPole-v1 in Gymnasium's vector
    environment."""
    return {"envs": envs, "workers": workers, "groups": groups, "batch_size": batch_size, "threads": threads, **more}


def _rl(algo: str, envs: int, workers: int, batch_size: int, vectorize: str = "sync", **more: Any) -> Setting:
    """No workers: as in :func:`_puf`."""
    return {"algo": algo, "envs": envs, "workers": workers, "batch_size": batch_size, "vectorize": vectorize, **more}


_SF: Setting = {
    "rollout": 32,
    "num_epochs": 1,
    "num_batches_per_epoch": 1,
    "async_rl": True,
    "use_rnn": False,
    "with_vtrace": False,
    "normalize_input": False,
    "normalize_returns": False,
}
"""The parts of its work that it can leave out are left out."""
_SF_MLP: Setting = {**_SF, "encoder_mlp_layers": [64, 64], "nonlinearity": "tanh"}
_SF_CARTPOLE: Setting = {**_SF_MLP, "env": "CartPole-v1"}
_SF_PONG: Setting = {**_SF, "env": "atari_pong", "kl_loss_coeff": 0.0}
_SF_DOOM: Setting = {
    **_SF,
    "env": "doom_basic",
    "encoder_conv_architecture": "convnet_atari",
    "nonlinearity": "relu",
    "res_w": 128,
    "res_h": 72,
}
_SF_HALFCHEETAH: Setting = {**_SF_MLP, "env": "HalfCheetah-v4", "rollout": 64, "kl_loss_coeff": 0.0}


def _sf_core(kind: str) -> Setting:
    return {"use_rnn": True, "rnn_type": kind, "rnn_size": 128, "recurrence": 32}


_SF_TRIED = (
    _sf(1, 64),
    _sf(1, 32, 1, serial_mode=True, async_rl=False),
    _sf(1, 256, batch_size=8192),
    _sf(1, 256, batch_size=8192, batched_sampling=True),
    _sf(1, 512, batch_size=16384, batched_sampling=True),
    _sf(2, 32),
    _sf(2, 64, batched_sampling=True),
    _sf(2, 128, batch_size=8192, batched_sampling=True),
    _sf(2, 256, batch_size=16384, batched_sampling=True),
)
_SF_TRIED_HALFCHEETAH = (
    _sf(2, 16),
    _sf(2, 32),
    _sf(1, 64, batch_size=4096, batched_sampling=True),
    _sf(2, 32, batch_size=4096, batched_sampling=True),
    _sf(2, 64, batch_size=8192, batched_sampling=True),
    _sf(2, 128, batch_size=16384, batched_sampling=True),
)
_SF_TRIED_IMAGES = (
    _sf(1, 32),
    _sf(2, 16),
    _sf(2, 20),
    _sf(2, 16, 1),
    _sf(2, 32, 1),
    _sf(2, 16, 1, batched_sampling=True),
    _sf(2, 16, set_workers_cpu_affinity=False),
)
_VEC_TRIED = (
    _vec(32),
    _vec(64),
    _vec(64, threads=2),
    _vec(256),
    _vec(512, batch_size=16384),
    _vec(64, subprocesses=True),
)
_TORCHRL_TRIED = tuple(
    {"envs": envs, "vector": vector, "batch_size": batch_size, "threads": threads}
    for envs, vector, batch_size, threads in (
        (64, True, 1024, 1),
        (64, True, 1024, 2),
        (64, False, 1024, 1),
        (256, True, 1024, 1),
        (256, True, 8192, 1),
        (512, True, 16384, 1),
    )
)
_VEC_TRIED_IMAGES = (
    _vec(32, threads=2, batch_size=256),
    _vec(16),
    _vec(32),
    _vec(32, threads=2),
    _vec(64, threads=2),
    _vec(64, threads=2, batch_size=2048),
    _vec(8, subprocesses=True, threads=2),
    _vec(16, subprocesses=True),
    _vec(16, subprocesses=True, threads=2),
)

_PUF_TRIED = (
    _puf(64),
    _puf(512, batch_size=16384),
    _puf(512, batch_size=16384, threads=2),
    _puf(512, batch_size=16384, compile=True),
    _puf(64, 2),
    _puf(512, 1, batch_size=16384),
    _puf(512, 2, batch_size=16384),
    _puf(512, 2, 2, batch_size=16384),
    _puf(1024, 2, 2, batch_size=32768),
)
_PUF_TRIED_CARTPOLE = (
    *_PUF_TRIED,
    _puf(512, batch_size=16384, threads=2, vector=True),
    _puf(1024, batch_size=16384, threads=2, vector=True),
    _puf(2048, batch_size=8192, threads=2, vector=True),
    _puf(2048, batch_size=16384, threads=2, vector=True),
    _puf(2048, batch_size=65536, threads=2, vector=True),
    _puf(4096, batch_size=32768, threads=2, vector=True),
)
_PUF_TRIED_IMAGES = (
    _puf(32),
    _puf(32, threads=2),
    _puf(32, 1, threads=2),
    _puf(32, 2),
    _puf(32, 2, threads=2),
    _puf(64, 2, 2),
    _puf(64, 2, 2, batch_size=256),
)
_RL_TRIED = (
    _rl("PPO", 64, 0, 2048, minibatch_size=1024),
    _rl("PPO", 64, 2, 2048, minibatch_size=1024),
    _rl("PPO", 512, 0, 16384, minibatch_size=16384),
    _rl("PPO", 512, 2, 16384, minibatch_size=16384),
    _rl("PPO", 512, 2, 16384, "vector_entry_point", minibatch_size=16384),
    _rl("APPO", 64, 1, 1024),
    _rl("APPO", 128, 2, 4096),
    _rl("IMPALA", 64, 2, 1024),
    _rl("IMPALA", 256, 2, 8192),
)
_RL_TRIED_HALFCHEETAH = (
    _rl("PPO", 32, 0, 2048, minibatch_size=1024),
    _rl("PPO", 32, 2, 2048, minibatch_size=1024),
    _rl("PPO", 128, 2, 8192, minibatch_size=8192),
    _rl("PPO", 128, 2, 8192, "async", minibatch_size=8192),
    _rl("APPO", 32, 1, 1024),
    _rl("APPO", 64, 2, 4096),
    _rl("IMPALA", 64, 2, 4096),
)
_RL_TRIED_IMAGES = (
    _rl("PPO", 32, 0, 1024, minibatch_size=1024),
    _rl("PPO", 32, 2, 1024, minibatch_size=1024),
    _rl("PPO", 32, 2, 1024, "async", minibatch_size=1024),
    _rl("APPO", 32, 1, 1024),
    _rl("APPO", 32, 2, 1024),
    _rl("IMPALA", 32, 2, 1024),
)

_VEC_TRIED_ONE_BY_ONE = (
    _vec(16),
    _vec(32),
    _vec(64),
    _vec(32, threads=2),
    _vec(8, subprocesses=True),
    _vec(32, subprocesses=True),
)
_VEC_TRIED_ROWS = (
    _vec(100),
    _vec(100, threads=2),
    _vec(100, batch_size=1600),
    _vec(100, batch_size=1600, threads=2),
    _vec(100, batch_size=3200),
    _vec(100, batch_size=3200, threads=2),
)
_VEC_TRIED_GAMES = (
    _vec(8),
    _vec(11),
    _vec(11, threads=2),
    _vec(32),
    _vec(32, batch_size=3072),
    _vec(32, subprocesses=True),
)

_BATCH_OF_PEERS = "--envs-per-worker 1024 --batch-size 16384 --runtime.groups 2 --runtime.spare-batches 1"
_SAME = "--preset none --model.shared-critic True --precision float32 --batch-size 1024"


def _newcomers(
    name: str, tried: tuple[Setting, ...], best: Setting, policy: str = "MlpPolicy", sample_factory: Tuned | None = None
) -> Workload:
    """An environment that no trainer knows: sfactory with its defaults alone, and with one epoch as the peers have."""
    flags = FPS_WORKLOADS[name]
    env = shlex.split(flags)[1]
    peers = {"stable-baselines3": Tuned({"env": env, "policy": policy, "rollout": 32}, best, tried)}
    if sample_factory is not None:
        peers["sample-factory"] = sample_factory
    return Workload(flags, f"{flags} --epochs 1 --optim.minibatches 1 --precision float32", peers)


WORKLOADS: dict[str, Workload] = {
    "cartpole": Workload(
        f"{FPS_WORKLOADS['cartpole']} {_BATCH_OF_PEERS}",
        f"--env CartPole-v1 {_SAME} --rollout 32 --workers 1 --envs-per-worker 64",
        {
            "sample-factory": Tuned(_SF_CARTPOLE, _SF_TRIED[-1], _SF_TRIED, _sf(1, 64)),
            "stable-baselines3": Tuned(
                {"env": "CartPole-v1", "hidden": [64, 64], "rollout": 32},
                _vec(512, batch_size=16384),
                _VEC_TRIED,
                _vec(64),
            ),
            "torchrl": Tuned(
                {"env": "CartPole-v1", "hidden": [64, 64], "rollout": 32}, _TORCHRL_TRIED[5], _TORCHRL_TRIED
            ),
            "pufferlib": Tuned(
                {"env": "CartPole-v1", "hidden": [64, 64], "rollout": 32},
                _PUF_TRIED_CARTPOLE[-4],
                _PUF_TRIED_CARTPOLE,
                _puf(64),
            ),
            "rllib": Tuned({"env": "CartPole-v1", "hidden": [64, 64], "rollout": 32}, _RL_TRIED[2], _RL_TRIED),
        },
    ),
    "cartpole-lstm": Workload(
        f"{FPS_WORKLOADS['cartpole-lstm']} {_BATCH_OF_PEERS}",
        f"--env CartPole-v1 {_SAME} --rollout 32 --workers 1 --envs-per-worker 64 --model.core lstm",
        {
            "sample-factory": Tuned({**_SF_CARTPOLE, **_sf_core("lstm")}, _SF_TRIED[-1], _SF_TRIED, _sf(1, 64)),
            "pufferlib": Tuned(
                {"env": "CartPole-v1", "hidden": [64, 64], "rollout": 32, "rnn_type": "lstm", "rnn_size": 128},
                _PUF_TRIED_CARTPOLE[-2],
                _PUF_TRIED_CARTPOLE,
                _puf(64),
            ),
        },
    ),
    "cartpole-gru": Workload(
        f"{FPS_WORKLOADS['cartpole-gru']} {_BATCH_OF_PEERS}",
        f"--env CartPole-v1 {_SAME} --rollout 32 --workers 1 --envs-per-worker 64 --model.core gru",
        {"sample-factory": Tuned({**_SF_CARTPOLE, **_sf_core("gru")}, _SF_TRIED[-1], _SF_TRIED, _sf(1, 64))},
    ),
    "pong": Workload(
        FPS_WORKLOADS["pong"],
        f"--env ALE/Pong-v5 {_SAME} --rollout 32 --envs-per-worker 64",
        {
            "sample-factory": Tuned(_SF_PONG, _sf(2, 16, 1), _SF_TRIED_IMAGES),
            "stable-baselines3": Tuned(
                {"env": "PongNoFrameskip-v4", "rollout": 32},
                _VEC_TRIED_IMAGES[0],
                _VEC_TRIED_IMAGES,
                _vec(32, threads=2),
            ),
            "pufferlib": Tuned({"env": "PongNoFrameskip-v4", "rollout": 32}, _puf(32, threads=2), _PUF_TRIED_IMAGES),
            "rllib": Tuned({"env": "Pong", "rollout": 32}, _RL_TRIED_IMAGES[-1], _RL_TRIED_IMAGES),
        },
    ),
    "pong-lstm": Workload(
        FPS_WORKLOADS["pong-lstm"],
        f"--env ALE/Pong-v5 {_SAME} --rollout 32 --envs-per-worker 64 --model.core lstm",
        {"sample-factory": Tuned({**_SF_PONG, **_sf_core("lstm")}, _sf(2, 16, 1), _SF_TRIED_IMAGES)},
    ),
    "pong-gru": Workload(
        FPS_WORKLOADS["pong-gru"],
        f"--env ALE/Pong-v5 {_SAME} --rollout 32 --envs-per-worker 64 --model.core gru",
        {"sample-factory": Tuned({**_SF_PONG, **_sf_core("gru")}, _sf(2, 16, 1), _SF_TRIED_IMAGES)},
    ),
    "vizdoom-basic": Workload(
        FPS_WORKLOADS["vizdoom-basic"],
        f"--env VizdoomBasic-v1 {_SAME} --rollout 32 --workers 2 --envs-per-worker 16",
        {"sample-factory": Tuned(_SF_DOOM, _sf(1, 32), _SF_TRIED_IMAGES)},
    ),
    "halfcheetah": Workload(
        FPS_WORKLOADS["halfcheetah"],
        f"--env HalfCheetah-v5 {_SAME} --rollout 64 --workers 2 --envs-per-worker 16",
        {
            "sample-factory": Tuned(_SF_HALFCHEETAH, _SF_TRIED_HALFCHEETAH[-1], _SF_TRIED_HALFCHEETAH, _sf(2, 16)),
            "stable-baselines3": Tuned(
                {"env": "HalfCheetah-v5", "hidden": [64, 64], "rollout": 64}, _vec(64, threads=2), _VEC_TRIED
            ),
            "torchrl": Tuned(
                {"env": "HalfCheetah-v5", "hidden": [64, 64], "rollout": 64}, _TORCHRL_TRIED[5], _TORCHRL_TRIED
            ),
            "pufferlib": Tuned(
                {"env": "HalfCheetah-v4", "hidden": [64, 64], "rollout": 64},
                _puf(512, batch_size=16384),
                _PUF_TRIED,
                _puf(64),
            ),
            "rllib": Tuned(
                {"env": "HalfCheetah-v5", "hidden": [64, 64], "rollout": 64},
                _RL_TRIED_HALFCHEETAH[2],
                _RL_TRIED_HALFCHEETAH,
            ),
        },
    ),
    "gridworld": _newcomers(
        "gridworld",
        _VEC_TRIED_ONE_BY_ONE,
        _vec(64),
        policy="MultiInputPolicy",
        sample_factory=Tuned({**_SF_MLP, "env": "examples.grid_world:GridWorld-v0"}, _SF_TRIED[-1], _SF_TRIED),
    ),
    "taxi": _newcomers(
        "taxi",
        _VEC_TRIED_ONE_BY_ONE,
        _vec(64),
        sample_factory=Tuned({**_SF_MLP, "env": "Taxi-v3"}, _SF_TRIED[-1], _SF_TRIED),
    ),
    "computing": _newcomers("computing", _VEC_TRIED_ONE_BY_ONE, _vec(32, subprocesses=True)),
    "waiting": _newcomers("waiting", _VEC_TRIED_ONE_BY_ONE, _vec(32, subprocesses=True)),
    "chase": _newcomers("chase", _VEC_TRIED_ROWS, _vec(100, batch_size=3200, threads=2)),
    "spread": _newcomers("spread", _VEC_TRIED_GAMES, _vec(32, subprocesses=True)),
}
"""Sizes that are not here are the same defaults everywhere: two hidden layers of 64 (tanh), the Nature CNN with 512
features, cores of 128 units, one epoch. Those of newcomers' environments (:data:`perf.results.NEWCOMERS`) are each
trainer's own defaults, with the defaults' epochs in sfactory and one in the others."""


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
