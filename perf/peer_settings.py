"""What perf/peers.py compares: each trainer's packages, and its settings for each workload."""

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
