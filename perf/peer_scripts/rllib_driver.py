"""RLlib's PPO, APPO and IMPALA, each on its current API: throughput of a workload."""

from __future__ import annotations

import tempfile
from typing import Any

import gymnasium
import ray
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.appo import APPOConfig
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.tune.registry import register_env
from window import Window, request

CONFIGS = {"PPO": PPOConfig, "APPO": APPOConfig, "IMPALA": IMPALAConfig}
NATURE_CNN = [[32, 8, 4], [64, 4, 2], [64, 3, 1]]


def make_pong(config: Any) -> gymnasium.Env:
    """Gymnasium's preprocessing: RLlib's own scales each of the four screens of a step."""
    import ale_py

    gymnasium.register_envs(ale_py)
    game = gymnasium.make("ALE/Pong-v5", frameskip=1, repeat_action_probability=0.0)
    # Its convolutions take floats, and channels last.
    stacked = gymnasium.wrappers.FrameStackObservation(gymnasium.wrappers.AtariPreprocessing(game, scale_obs=True), 4)
    moved = gymnasium.spaces.Box(0.0, 1.0, (84, 84, 4), "float32")
    return gymnasium.wrappers.TransformObservation(stacked, lambda images: images.transpose(1, 2, 0), moved)


def model(setting: dict[str, Any]) -> DefaultModelConfig:
    """One trunk for policy and value: a tanh MLP, for images a Nature CNN."""
    if "hidden" in setting:
        shape = {"fcnet_hiddens": setting["hidden"], "fcnet_activation": "tanh"}
    else:
        shape = {
            "conv_filters": NATURE_CNN,
            "conv_activation": "relu",
            "head_fcnet_hiddens": [512],
            "head_fcnet_activation": "relu",
        }
    return DefaultModelConfig(vf_share_layers=True, **shape)


def build(setting: dict[str, Any]) -> Algorithm:
    register_env("Pong", make_pong)
    runners = setting["workers"] or 1
    config = CONFIGS[setting["algo"]]()
    config.environment(setting["env"])
    config.env_runners(
        num_env_runners=setting["workers"],
        num_envs_per_env_runner=setting["envs"] // runners,
        rollout_fragment_length=setting["rollout"],
        gym_env_vectorize_mode=setting["vectorize"],
    )
    config.learners(num_learners=0)
    config.rl_module(model_config=model(setting))
    config.training(train_batch_size_per_learner=setting["batch_size"], num_epochs=1)
    if setting["algo"] == "PPO":
        config.training(minibatch_size=setting["minibatch_size"])
    config.reporting(
        min_time_s_per_iteration=1, min_sample_timesteps_per_iteration=0, min_train_timesteps_per_iteration=0
    )
    return config.build_algo()


def main() -> None:
    asked = request()
    setting, window = asked["setting"], Window(asked["warmup"], asked["seconds"])
    with tempfile.TemporaryDirectory() as folder:
        ray.init(
            num_cpus=max(2, setting["workers"] + 1), include_dashboard=False, _temp_dir=folder, logging_level="ERROR"
        )
        algorithm = build(setting)
        while not window.closed:
            result = algorithm.train()
            trained = result.get("learners", {}).get("__all_modules__", {}).get("num_env_steps_trained_lifetime", 0)
            if trained:  # at most what was sampled, because what fills minibatches up counts as trained
                window.report(int(min(trained, result["num_env_steps_sampled_lifetime"])))
        algorithm.stop()
        ray.shutdown()


if __name__ == "__main__":
    main()
