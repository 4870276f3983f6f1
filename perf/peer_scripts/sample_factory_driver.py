"""Sample Factory 2.1.1: throughput of a workload, or training until an agent reaches a score."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import gymnasium
from sample_factory.algo.runners.runner import AlgoObserver, Runner
from sample_factory.algo.utils.misc import ExperimentStatus
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.enjoy import enjoy
from sample_factory.envs.env_utils import register_env
from sample_factory.train import make_runner
from window import KEPT, Curve, Window, answer, recent_mean, request, score_of


def make_gym(name: str, cfg: Any = None, env_config: Any = None, render_mode: str | None = None) -> gymnasium.Env:
    env = gymnasium.make(name, **({} if render_mode is None else {"render_mode": render_mode}))
    discrete = isinstance(env.observation_space, gymnasium.spaces.Discrete)
    return gymnasium.wrappers.FlattenObservation(env) if discrete else env  # its encoders take no category


def make_atari(name: str, cfg: Any = None, env_config: Any = None, render_mode: str | None = None) -> gymnasium.Env:
    from ale_py.registration import register_v0_v4_envs
    from sf_examples.atari.atari_utils import make_atari_env

    register_v0_v4_envs()  # a current ale-py registers its v5 ids only
    return make_atari_env(name, cfg, env_config, render_mode)


def parse(argv: Sequence[str], evaluation: bool = False) -> Any:
    """Sample Factory's configuration, with the overrides that its own example of the environment's family has."""
    parser, partial = parse_sf_args(argv=argv, evaluation=evaluation)
    if partial.env.startswith("atari_"):
        from sf_examples.atari.atari_params import atari_override_defaults

        register_env(partial.env, make_atari)
        atari_override_defaults(partial.env, parser)
    elif partial.env.startswith("doom_"):
        from sf_examples.vizdoom.doom.doom_params import add_doom_env_args, doom_override_defaults
        from sf_examples.vizdoom.train_vizdoom import register_vizdoom_envs

        register_vizdoom_envs()
        add_doom_env_args(parser)
        doom_override_defaults(parser)
    else:
        register_env(partial.env, make_gym)
        if partial.env.startswith(("HalfCheetah", "Hopper", "Walker2d", "Ant")):
            from sf_examples.mujoco.mujoco_params import mujoco_override_defaults

            mujoco_override_defaults(partial.env, parser)
    return parse_full_cfg(parser, argv)


def points_of(env: str) -> float:
    """Points of the game for a point of Sample Factory's, which has a hundredth of these games' rewards (and none taken
    away for the end of health gathering)."""
    return 100.0 if env.startswith(("doom_basic", "doom_health_gathering")) else 1.0


class Counted(AlgoObserver):
    """Ends the run once the window has closed."""

    def __init__(self, window: Window) -> None:
        self._window = window

    def on_training_step(self, runner: Runner, training_iteration_since_resume: int) -> None:
        if runner.env_steps and self._window.report(sum(runner.env_steps.values())):
            runner.cfg.train_for_env_steps = 0  # ends the run in good order: games and shared memory are cleaned up


class Followed(AlgoObserver):
    """Keeps the learning curve, if asked to; answers and ends the run once the score in training reaches a target, if
    there is one."""

    def __init__(self, curve: Curve | None, target: float | None) -> None:
        self._curve, self._target = curve, target

    def on_training_step(self, runner: Runner, training_iteration_since_resume: int) -> None:
        stats = runner.policy_avg_stats
        returns = stats.get("true_objective", stats.get("reward", [[]]))[0]  # the first is without what shapes a reward
        if not returns or runner.stopped:
            return
        points = points_of(runner.cfg.env)
        env_steps = sum(runner.env_steps.values())
        if self._curve:
            self._curve.report(env_steps, points * recent_mean(returns))
        score = score_of(returns)
        if self._target is not None and score is not None and points * score >= self._target:
            answer(score=points * score, env_steps=env_steps)
            runner.cfg.train_for_env_steps = 0


def run(argv: Sequence[str], observer: AlgoObserver | None) -> Runner:
    _, runner = make_runner(parse(argv))
    if observer:
        runner.register_observer(observer)
    status = runner.init()
    if status == ExperimentStatus.SUCCESS:
        status = runner.run()
    if status != ExperimentStatus.SUCCESS:
        sys.exit(f"Sample Factory ended with status {status}")
    return runner


def flags(setting: dict[str, Any]) -> list[str]:
    """Command-line flags of a setting; a list becomes several words."""
    return [
        word
        for name, value in setting.items()
        for word in (f"--{name}", *map(str, value if isinstance(value, list) else [value]))
    ]


def main() -> None:
    asked = request()
    with tempfile.TemporaryDirectory() as folder:
        argv = [
            "--algo=APPO",
            "--experiment=peer",
            f"--train_dir={folder}",
            "--device=cpu",
            "--restart_behavior=overwrite",
        ]
        argv += flags(asked["setting"])
        if "seconds" in asked:
            run([*argv, "--summaries_use_frameskip=False"], Counted(Window(asked["warmup"], asked["seconds"])))
            return
        argv += [f"--stats_avg={KEPT}", f"--seed={asked['seed']}", f"--train_for_env_steps={asked['steps']}"]
        curve = Curve(asked["curve"], asked["begun"]) if "curve" in asked else None
        runner = run(argv, Followed(curve, asked.get("target")))
        if "target" not in asked:
            # its checkpoints hold NumPy scalars, which torch refuses since 2.6
            os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
            evaluated = ["--no_render", f"--max_num_episodes={asked['episodes']}"]
            evaluated += [f"--eval_deterministic={asked['deterministic']}"]
            _, score = enjoy(parse([*argv, *evaluated], evaluation=True))
            answer(score=score * points_of(runner.cfg.env), env_steps=sum(runner.env_steps.values()))


if __name__ == "__main__":
    main()
