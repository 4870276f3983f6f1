"""Stop and resume a run: the same config again continues in the run folder, with its weights, optimizer, step count and
schedules.

    python examples/resume.py

On the command line it is the same: Ctrl-C saves and stops, the same command again goes on, and a higher --steps trains
longer.
"""

import argparse
import dataclasses

from sfactory import Config, LogConfig, train

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--run", default="runs/resumed")
    args = parser.parse_args()

    # A callback sees every report, here five a second; one that returns False ends the run, saved, as Ctrl-C would.
    config = Config(env="CartPole-v1", steps=args.steps, run=args.run, log=LogConfig(report_every_s=0.2))
    first = train(
        dataclasses.replace(config, overwrite=True), callbacks=[lambda report: report.env_steps < args.steps // 2]
    )
    print(f"{first.status} after {first.env_steps} env steps")

    second = train(config)
    print(f"{second.status} after {second.env_steps} env steps, mean return {second.episode_return_mean:.1f}")

    longer = train(dataclasses.replace(config, steps=2 * args.steps))
    print(f"{longer.status} after {longer.env_steps} env steps, mean return {longer.episode_return_mean:.1f}")
