"""Use a trained policy in a plain Gymnasium loop.

    python examples/evaluate.py

`load_policy` needs only the run folder; it starts no process and makes no environment. Statistics over many episodes,
in parallel and with videos, come from `sfactory.evaluate` and ``python -m sfactory.eval``.
"""

import argparse
from pathlib import Path

import gymnasium

from sfactory import Config, load_policy, train

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", default="runs/cartpole", help="of CartPole-v1; trained first if it is not there")
    parser.add_argument("--steps", type=int, default=100_000, help="to train it for")
    args = parser.parse_args()

    if not Path(args.run).exists():
        train(Config(env="CartPole-v1", steps=args.steps, run=args.run))

    policy = load_policy(args.run)
    env = gymnasium.make("CartPole-v1")
    for episode in range(5):
        obs, info = env.reset(seed=episode)
        state, total, over = None, 0.0, False  # the state is what a recurrent policy remembers
        while not over:
            action, state = policy.act(obs, state)
            obs, reward, terminated, truncated, info = env.step(action)
            total += reward
            over = terminated or truncated
        print(f"episode {episode}: return {total:.0f}")
    env.close()
