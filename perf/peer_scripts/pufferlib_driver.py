"""PufferLib 3.0.0's PuffeRL: throughput of a workload."""

from __future__ import annotations

import itertools
import tempfile
from typing import Any

import gymnasium
import numpy as np
import pufferlib.vector
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from pufferlib.emulation import GymnasiumPufferEnv
from pufferlib.models import LSTMWrapper
from pufferlib.pufferl import PuffeRL
from torch import Tensor, nn
from window import Window, request


def make_env(name: str, buf: Any = None, seed: int = 0) -> GymnasiumPufferEnv:
    """One environment of Gymnasium's; games with the usual preprocessing."""
    if name == "PongNoFrameskip-v4":
        from ale_py.registration import register_v0_v4_envs

        register_v0_v4_envs()  # a current ale-py registers its v5 ids only, and each process needs its own registration
        env = gymnasium.wrappers.FrameStack(gymnasium.wrappers.AtariPreprocessing(gymnasium.make(name)), 4)
    else:
        env = gymnasium.make(name)
    return GymnasiumPufferEnv(env=env, buf=buf, seed=seed)


class CartPoles(pufferlib.PufferEnv):
    """Gymnasium's vector environment of CartPole-v1, as PufferLib wants environments that step many rows at once."""

    def __init__(self, count: int, buf: Any = None, seed: int = 0) -> None:
        self.envs = CartPoleVectorEnv(count)
        self.single_observation_space, self.single_action_space = (
            self.envs.single_observation_space,
            self.envs.single_action_space,
        )
        self.num_agents = count
        super().__init__(buf)

    def reset(self, seed: int | None = None) -> tuple[np.ndarray, list[dict[str, Any]]]:
        self.observations[:], _ = self.envs.reset(seed=seed)
        return self.observations, []

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        self.observations[:], self.rewards[:], self.terminals[:], self.truncations[:], _ = self.envs.step(actions)
        return self.observations, self.rewards, self.terminals, self.truncations, []

    def close(self) -> None:
        self.envs.close()


class Policy(nn.Module):
    """A tanh MLP, or for images a Nature CNN, with heads for the policy and the value; `features` are what the heads
    take."""

    def __init__(self, envs: Any, hidden: list[int] | None, features: int) -> None:
        super().__init__()
        shape, action = envs.single_observation_space.shape, envs.single_action_space
        self.is_continuous = isinstance(action, gymnasium.spaces.Box)
        self.scale = 1.0 if hidden else 1.0 / 255.0
        if hidden:
            layers = [
                layer for i, o in itertools.pairwise([shape[0], *hidden]) for layer in (nn.Linear(i, o), nn.Tanh())
            ]
        else:
            kernels = (shape[0], 32, 8, 4), (32, 64, 4, 2), (64, 64, 3, 1)
            layers = [layer for kernel in kernels for layer in (nn.Conv2d(*kernel), nn.ReLU())]
            layers += [nn.Flatten(), nn.Linear(3136, 512), nn.ReLU()]
        self.encoder = nn.Sequential(*layers)
        self.policy = nn.Linear(features, action.shape[0] if self.is_continuous else int(action.n))
        self.log_std = nn.Parameter(torch.zeros(action.shape[0])) if self.is_continuous else None
        self.value = nn.Linear(features, 1)

    def encode_observations(self, observations: Tensor, state: Any = None) -> Tensor:
        return self.encoder(observations.float() * self.scale)

    def decode_actions(self, hidden: Tensor) -> tuple[Any, Tensor]:
        outputs = self.policy(hidden)
        if self.log_std is not None:
            outputs = torch.distributions.Normal(outputs, self.log_std.exp().expand_as(outputs))
        return outputs, self.value(hidden)

    def forward(self, observations: Tensor, state: Any = None) -> tuple[Any, Tensor]:
        return self.decode_actions(self.encode_observations(observations))

    forward_eval = forward


def main() -> None:
    asked = request()
    setting, window = asked["setting"], Window(asked["warmup"], asked["seconds"])
    torch.set_num_threads(setting["threads"])
    vector = {"backend": "Serial"}
    if setting["workers"]:
        vector = {
            "backend": "Multiprocessing",
            "num_workers": setting["workers"],
            "batch_size": setting["envs"] // setting["groups"],
        }
    if setting.get("vector"):
        envs = pufferlib.vector.make(CartPoles, env_args=[setting["envs"]], num_envs=1, **vector)
    else:
        envs = pufferlib.vector.make(make_env, env_args=[setting["env"]], num_envs=setting["envs"], **vector)
    hidden, core = setting.get("hidden"), setting.get("rnn_size")
    encoded = hidden[-1] if hidden else 512
    policy = Policy(envs, hidden, core or encoded)
    if core:
        policy = LSTMWrapper(envs, policy, input_size=encoded, hidden_size=core)
    samples = setting["envs"] * setting["rollout"]
    with tempfile.TemporaryDirectory() as folder:
        # The rest as in its config/default.ini.
        trainer = PuffeRL(
            {
                "env": setting["env"], "data_dir": folder, "device": "cpu", "seed": 1, "torch_deterministic": True,
                "cpu_offload": False,
                "batch_size": samples, "bptt_horizon": setting["rollout"], "update_epochs": 1, "use_rnn": bool(core),
                "minibatch_size": min(setting["batch_size"], samples), "max_minibatch_size": 32768,
                "optimizer": "adam", "learning_rate": 3e-4, "anneal_lr": False, "adam_beta1": 0.9, "adam_beta2": 0.999,
                "adam_eps": 1e-8,
                "precision": "float32", "compile": setting.get("compile", False), "compile_mode": "default",
                "compile_fullgraph": False,
                "total_timesteps": 10**12, "checkpoint_interval": 10**9, "gamma": 0.99, "gae_lambda": 0.95,
                "clip_coef": 0.2,
                "vf_coef": 0.5, "vf_clip_coef": 0.2, "max_grad_norm": 0.5, "ent_coef": 0.001, "vtrace_rho_clip": 1.0,
                "vtrace_c_clip": 1.0,
                "prio_alpha": 0.8, "prio_beta0": 0.2,
            },
            envs,
            policy,
        )  # fmt: skip
        while not window.report(trainer.global_step):
            trainer.evaluate()
            trainer.train()
        trainer.close()


if __name__ == "__main__":
    main()
