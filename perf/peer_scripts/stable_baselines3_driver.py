"""Stable-Baselines3's PPO: throughput of a workload, or training until an agent reaches a score."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_atari_env, make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv, VecFrameStack, VecNormalize
from window import KEPT, Curve, Window, answer, recent_mean, request, score_of


class SharedMLP(BaseFeaturesExtractor):
    """One tanh MLP for policy and value, as the other trainers have."""

    def __init__(self, observation_space: gymnasium.spaces.Box, hidden: list[int]) -> None:
        super().__init__(observation_space, hidden[-1])
        sizes = [observation_space.shape[0], *hidden]
        layers = [layer for i, o in itertools.pairwise(sizes) for layer in (torch.nn.Linear(i, o), torch.nn.Tanh())]
        self.layers = torch.nn.Sequential(*layers)

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        return self.layers(observations)


class Counted(BaseCallback):
    """Ends the run once the window has closed; counts when an update is over and sampling begins again."""

    def __init__(self, window: Window) -> None:
        super().__init__()
        self._window = window

    def _on_rollout_start(self) -> None:
        self._window.report(self.num_timesteps)

    def _on_step(self) -> bool:
        return not self._window.closed


class Followed(BaseCallback):
    """Keeps the learning curve, if asked to, and ends the run once the score in training reaches a target, if there is
    one."""

    def __init__(self, curve: Curve | None, target: float | None) -> None:
        super().__init__()
        self._curve, self._target = curve, target
        self.reached: float | None = None

    def _on_rollout_end(self) -> None:
        if self._curve and self.model.ep_info_buffer:
            self._curve.report(self.num_timesteps, recent_mean(self._returns()))

    def _on_step(self) -> bool:
        if self._target is not None:
            score = score_of(self._returns())
            self.reached = score if score is not None and score >= self._target else None
        return self.reached is None

    def _returns(self) -> list[float]:
        return [episode["r"] for episode in self.model.ep_info_buffer]


class FromGymnasium(VecEnv):
    """A vector environment of Gymnasium's, which resets a row in the step that ends its episode."""

    def __init__(self, env: gymnasium.vector.VectorEnv) -> None:
        super().__init__(env.num_envs, env.single_observation_space, env.single_action_space)
        self._env, self._returns, self._lengths = env, np.zeros(env.num_envs), np.zeros(env.num_envs, int)

    def reset(self) -> np.ndarray:
        return self._env.reset(seed=1)[0]

    def step_async(self, actions: np.ndarray) -> None:
        self._actions = actions

    def step_wait(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[dict]]:
        obs, rewards, terminated, truncated, info = self._env.step(self._actions)
        self._returns += rewards
        self._lengths += 1
        infos: list[dict] = [{} for _ in range(self.num_envs)]
        for row in np.flatnonzero(terminated | truncated):
            infos[row] = {
                "terminal_observation": info["final_obs"][row],
                "TimeLimit.truncated": bool(truncated[row]),
                "episode": {"r": self._returns[row], "l": self._lengths[row]},
            }
            self._returns[row] = self._lengths[row] = 0
        return obs, rewards, terminated | truncated, infos

    def close(self) -> None:
        self._env.close()

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        return [getattr(self._env, attr_name, None)] * self.num_envs

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        raise NotImplementedError

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        raise NotImplementedError

    def env_is_wrapped(self, wrapper_class: type, indices: Any = None) -> list[bool]:
        return [False] * self.num_envs


def make_spread(setting: dict[str, Any]) -> VecEnv:
    import supersuit
    from mpe2 import simple_spread_v3

    envs = supersuit.pettingzoo_env_to_vec_env_v1(simple_spread_v3.parallel_env())
    processes = 2 if setting.get("subprocesses") else 1
    return supersuit.concat_vec_envs_v1(envs, setting["envs"], processes, base_class="stable_baselines3")


def make_envs(setting: dict[str, Any], seed: int = 1) -> VecEnv:
    kind = SubprocVecEnv if setting.get("subprocesses") else DummyVecEnv
    if setting["env"] == "perf.newcomers:Chase":
        from perf.newcomers import Chase

        return FromGymnasium(Chase(setting["envs"]))
    if setting["env"].startswith("mpe2.simple_spread"):
        return make_spread(setting)
    if setting["env"] == "PongNoFrameskip-v4":
        return VecFrameStack(make_atari_env(make_pong, setting["envs"], seed=seed, vec_env_cls=kind), 4)
    envs = make_vec_env(setting["env"], setting["envs"], seed=seed, vec_env_cls=kind)
    return VecNormalize(envs) if setting.get("normalize") else envs


def make_pong(**kwargs: Any) -> gymnasium.Env:
    from ale_py.registration import register_v0_v4_envs

    register_v0_v4_envs()  # a current ale-py registers its v5 ids only, and each process needs its own registration
    return gymnasium.make("PongNoFrameskip-v4", **kwargs)


def measure(setting: dict[str, Any], window: Window) -> None:
    """One epoch over each batch, with the model of the workload, or the policy's own."""
    policy, policy_kwargs = setting.get("policy", "CnnPolicy"), {"net_arch": []}
    if "policy" in setting:
        policy_kwargs = {}
    elif "hidden" in setting:
        policy = "MlpPolicy"
        policy_kwargs |= {
            "features_extractor_class": SharedMLP,
            "features_extractor_kwargs": {"hidden": setting["hidden"]},
        }
    envs = make_envs(setting)
    sizes = {
        "n_steps": setting["rollout"],
        "batch_size": min(setting["batch_size"], setting["rollout"] * envs.num_envs),
        "n_epochs": 1,
    }
    PPO(policy, envs, device="cpu", policy_kwargs=policy_kwargs, **sizes).learn(10**12, Counted(window))
    envs.close()


def linear(start: float) -> Callable[[float], float]:
    return lambda progress_remaining: progress_remaining * start


def score(asked: dict[str, Any]) -> None:
    """Train with the given hyperparameters for a number of env steps and evaluate, or until the training return reaches
    a target."""
    setting, seed, target = asked["setting"], asked["seed"], asked.get("target")
    envs = make_envs(setting, seed)
    values = {
        name: linear(value) if name in setting.get("linear", ()) else value for name, value in setting["ppo"].items()
    }
    if "activation_fn" in values.get("policy_kwargs", {}):
        values["policy_kwargs"]["activation_fn"] = getattr(torch.nn, values["policy_kwargs"]["activation_fn"])
    followed = Followed(Curve(asked["curve"], asked["begun"]) if "curve" in asked else None, target)
    values.setdefault("policy", "MlpPolicy")
    model = PPO(env=envs, device="cpu", stats_window_size=KEPT, seed=seed, **values)
    model.learn(asked["steps"], followed)
    if target is None:
        fresh = make_envs(setting | {"envs": 1}, seed=1000 + seed)
        if isinstance(fresh, VecNormalize):
            fresh.training = fresh.norm_reward = False
            fresh.obs_rms = envs.obs_rms
        episodes = {"n_eval_episodes": asked["episodes"], "deterministic": asked["deterministic"]}
        followed.reached, _ = evaluate_policy(model, fresh, **episodes)
    envs.close()
    if followed.reached is not None:
        answer(score=float(followed.reached), env_steps=model.num_timesteps)


def main() -> None:
    asked = request()
    torch.set_num_threads(asked["setting"].get("threads", 1))
    if "seconds" in asked:
        measure(asked["setting"], Window(asked["warmup"], asked["seconds"]))
    else:
        score(asked)


if __name__ == "__main__":
    main()
