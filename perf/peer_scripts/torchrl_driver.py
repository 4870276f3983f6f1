"""TorchRL's PPO (ClipPPOLoss with GAE, as in its sota-implementations/ppo): throughput of a workload."""

from __future__ import annotations

from typing import Any

import gymnasium
import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import Categorical
from torchrl.envs import DoubleToFloat, EnvBase, SerialEnv, TransformedEnv
from torchrl.envs.libs.gym import GymEnv, GymWrapper
from torchrl.modules import MLP, ActorValueOperator, NormalParamExtractor, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value.advantages import GAE
from window import Window, request


def make_envs(setting: dict[str, Any]) -> EnvBase:
    """Gymnasium's vector environment, or TorchRL's own batch of environments, both in this process."""
    if setting["vector"]:
        resets = {"autoreset_mode": gymnasium.vector.AutoresetMode.DISABLED}  # what TorchRL prefers
        vector = gymnasium.make_vec(setting["env"], setting["envs"], vectorization_mode="sync", vector_kwargs=resets)
        envs = GymWrapper(vector, categorical_action_encoding=True)
    else:
        envs = SerialEnv(setting["envs"], lambda: GymEnv(setting["env"], categorical_action_encoding=True))
    return (
        TransformedEnv(envs, DoubleToFloat()) if envs.observation_spec["observation"].dtype == torch.float64 else envs
    )


def make_model(envs: EnvBase, hidden: list[int]) -> ActorValueOperator:
    """One tanh MLP for policy and value."""
    action = envs.action_spec_unbatched
    inputs = envs.observation_spec_unbatched["observation"].shape[-1]
    common = MLP(inputs, hidden[-1], num_cells=hidden[:-1], activation_class=nn.Tanh, activate_last_layer=True)
    if isinstance(action, Categorical):
        head = TensorDictModule(nn.Linear(hidden[-1], action.n), ["hidden"], ["logits"])
        actor = ProbabilisticActor(
            head, ["logits"], spec=action, distribution_class=torch.distributions.Categorical, return_log_prob=True
        )
    else:
        layers = nn.Sequential(nn.Linear(hidden[-1], 2 * action.shape[-1]), NormalParamExtractor())
        bounds = {"low": action.space.low, "high": action.space.high, "tanh_loc": False}
        head = TensorDictModule(layers, ["hidden"], ["loc", "scale"])
        actor = ProbabilisticActor(
            head,
            ["loc", "scale"],
            spec=action,
            distribution_class=TanhNormal,
            distribution_kwargs=bounds,
            return_log_prob=True,
        )
    return ActorValueOperator(
        TensorDictModule(common, ["observation"], ["hidden"]),
        actor,
        ValueOperator(nn.Linear(hidden[-1], 1), in_keys=["hidden"]),
    )


def main() -> None:
    asked = request()
    setting, window = asked["setting"], Window(asked["warmup"], asked["seconds"])
    torch.set_num_threads(setting["threads"])
    envs = make_envs(setting)
    model = make_model(envs, setting["hidden"])
    actor, critic = model.get_policy_operator(), model.get_value_operator()
    frames = setting["envs"] * setting["rollout"]
    collector = Collector(envs, actor, frames_per_batch=frames, total_frames=-1, device="cpu")
    advantages = GAE(gamma=0.99, lmbda=0.95, value_network=critic, average_gae=True)
    loss = ClipPPOLoss(actor, critic, clip_epsilon=0.2, entropy_coeff=0.0, critic_coeff=0.5)
    optimizer = torch.optim.Adam(loss.parameters(), lr=3e-4)
    for updates, batch in enumerate(collector):
        if window.report(updates * frames):
            break
        with torch.no_grad():
            flat = advantages(batch).reshape(-1)
        for minibatch in flat[torch.randperm(len(flat))].split(min(setting["batch_size"], len(flat))):
            losses = loss(minibatch)
            optimizer.zero_grad()
            (losses["loss_objective"] + losses["loss_critic"]).backward()
            nn.utils.clip_grad_norm_(loss.parameters(), 0.5)
            optimizer.step()
    collector.shutdown()


if __name__ == "__main__":
    main()
