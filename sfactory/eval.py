"""``sfactory eval``: play episodes with a trained policy. In Python: :func:`sfactory.evaluate`."""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import tyro
from rich.table import Table
from rich.text import Text

from sfactory.config import ModelConfig
from sfactory.config.command_line import Switch, flag_as_word
from sfactory.config.fields import Checkpoint
from sfactory.config.policy_options import Folder, Integer, PolicyOptions
from sfactory.errors import ConfigError, counted, telling_errors
from sfactory.telemetry.console import new_console

if TYPE_CHECKING:  # what imports torch is imported where an interrupt is handled
    from sfactory.player import Evaluation, Player
    from sfactory.runs.checkpoint import Snapshot

DESCRIPTION = "Play episodes with the policy of a run folder, in fresh environments, and report what they returned."
LONGER = 10
"""Sampled episodes beside greedy ones are cut off at so many times the length of the longest of those."""


def evaluate(
    run: str | os.PathLike[str],
    episodes: int = 20,
    *,
    env: Any = None,
    env_kwargs: dict[str, Any] | None = None,
    deterministic: bool = True,
    seed: int | None = None,
    parallel: int | None = None,
    checkpoint: Checkpoint | Snapshot = "latest",
    device: str = "cpu",
    video: str | os.PathLike[str] | None = None,
    max_steps: int | None = None,
    model: ModelConfig | None = None,
    trust: bool = False,
) -> Evaluation:
    """Play episodes with a trained policy, in environments that training has not seen.

    How many episodes each environment plays is fixed beforehand, so that short ones are not preferred to long ones.

    Args:
        run: The run folder.
        episodes: To play, at least. Several agents play whole games: as many as have so many episodes where all agents
            live, and more of them while there are too few.
        env: Id or callable that takes the place of the saved one; needed where the run was trained with a callable.
        env_kwargs: Its keyword arguments; None: those of the run.
        deterministic: The most probable action; off: draws from the policy.
        seed: Of environments and sampled actions; None: from the run's seed. The same seed plays the same episodes.
        parallel: Environments that step together; None: up to 16, and 1 for a video.
        checkpoint: latest, or best: by evaluation where the run had it, else by the return in training. Or one of the
            run that has been loaded.
        device: auto, cpu, cuda or cuda:N. The precision is float32 everywhere.
        video: Folder for MP4 files, one for each episode.
        max_steps: Env steps after which an episode that still goes on is counted as it stands.
        model: As in :func:`sfactory.load_policy`.
        trust: Import the environment and the classes that the run's config names as ``module:Name``, and use its
            `env_kwargs` also where they may name files. Without it, what a stranger's run folder names is never
            imported, called or opened.

    Raises:
        ConfigError: If the run, its checkpoint, its environment or something that a video needs is not there.
        CheckpointError: If the run's files are damaged.
        EnvironmentFault: If an environment raises or breaks its API.
    """
    from sfactory.player import Player

    _check_numbers(episodes, parallel, max_steps, video)
    player = Player.of_run(
        run, env=env, env_kwargs=env_kwargs, seed=seed, checkpoint=checkpoint, device=device, model=model, trust=trust,
        render_mode=_mode(video),
    )  # fmt: skip
    with player.recorder(video) as recorder:
        return player.play(episodes, deterministic, parallel, max_steps, recorder)


def _mode(video: object) -> str | None:
    """The render_mode of environments."""
    return None if video is None else "rgb_array"


def _check_numbers(episodes: int, parallel: int | None, max_steps: int | None, video: object) -> None:
    for name, value in (("episodes", episodes), ("parallel", parallel), ("max_steps", max_steps)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}; it must be at least 1")
    if video is not None and parallel not in (None, 1):
        raise ConfigError(f"parallel is {parallel}; a video shows one environment, so leave it unset")


@dataclass(frozen=True, kw_only=True)
class Options(PolicyOptions):
    """What the command takes."""

    episodes: int = 20
    """Episodes to play."""
    json: Switch = False
    """Print one line of JSON instead of a table."""
    video: Folder = None
    """Folder for MP4 files, one for each episode."""
    sampled: Switch = False
    """Draw actions from the policy in all episodes. Otherwise each action is the most probable one, and half as many
    more episodes show beside it what drawn actions return."""
    seed: Integer = None
    """Seed of environments and sampled actions; unset: from the run's seed."""
    parallel: Integer = None
    """Environments that step together; unset: up to 16, and 1 for a video."""
    max_steps: Integer = None
    """Env steps after which an episode that still goes on is counted as it stands."""
    device: str = "cpu"
    """auto, cpu, cuda or cuda:N."""


@telling_errors
def main(args: Sequence[str] | None = None, prog: str = "python -m sfactory.eval") -> int:
    """Run the command.

    Args:
        args: The command line; None: the process's own.
        prog: The command, as messages name it.

    Returns:
        The exit status: 0 done, 1 failed, 2 bad configuration; 130 or 143 interrupted, after what had been played.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    options = tyro.cli(Options, args=flag_as_word("--run", args), prog=prog, description=DESCRIPTION)
    _check_numbers(options.episodes, options.parallel, options.max_steps, options.video)
    from sfactory.player import Player

    player = Player.of_run(
        options.run, env=options.env, env_kwargs=options.env_kwargs, seed=options.seed, checkpoint=options.checkpoint,
        device=options.device, trust=options.trust, render_mode=_mode(options.video),
    )  # fmt: skip
    from sfactory.runtime.interrupts import stopping  # here, since only Linux has the modules of a run

    with stopping(player.stop) as signals:
        result, sampled = _measured(options, player)
    if result.episodes:
        _show(options, result, sampled)
    if args is None:
        gc.freeze()  # as in sfactory.runtime.interrupts.as_program
    return exit_status(player, result, signals)


def exit_status(player: Player, result: Evaluation, signals: Sequence[int]) -> int:
    """The exit status after episodes; if an interrupt has ended them, says on standard error which of them count."""
    if not signals:
        return 0
    if not result.episodes:
        print("interrupted before the first env step", file=sys.stderr)
    elif player.counts_unfinished:
        print("interrupted before an episode had ended: those that went on count as they stood", file=sys.stderr)
    else:
        print("interrupted: the episodes that had ended count", file=sys.stderr)
    return 128 + signals[0]


def _show(options: Options, result: Evaluation, sampled: Evaluation | None) -> None:
    """Print what episodes returned."""
    if options.json:
        values = {name: getattr(result, name) for name in ("episodes", "return_mean", "return_std", "length_mean")}
        if sampled is not None:
            values |= {"sampled_return_mean": sampled.return_mean, "sampled_return_std": sampled.return_std}
        if result.protocol:
            values["protocol"] = result.protocol
        print(json.dumps(values))
    else:
        new_console().print(_table(options, result, sampled))


def _measured(options: Options, player: Player) -> tuple[Evaluation, Evaluation | None]:
    """What was asked for, and beside greedy episodes at most half as many with sampled actions; None where that leaves
    none.

    Those are cut off at :data:`LONGER` times the length of the longest greedy one: a sampled policy may take very long
    to end an episode.
    """
    with player.recorder(options.video) as recorder:
        result = player.play(options.episodes, not options.sampled, options.parallel, options.max_steps, recorder)
    beside = result.episodes // player.agents // 2 * player.agents
    if options.sampled or not beside or player.stopped:
        return result, None
    sampled = player.play(beside, False, options.parallel, options.max_steps or LONGER * max(result.lengths))
    return result, sampled if sampled.episodes else None


def _table(options: Options, result: Evaluation, sampled: Evaluation | None) -> Table:
    protocol = f"protocol {result.protocol}" if result.protocol else None
    title = Text(f"{options.run}: {counted(result.episodes, 'episode')}")
    table = Table("", "mean", "std", "min", "max", title=title, caption=protocol)

    def add_returns(name: str, of: Evaluation) -> None:
        table.add_row(
            name, *(f"{value:.2f}" for value in (of.return_mean, of.return_std, of.return_min, of.return_max))
        )

    add_returns("return, sampled" if options.sampled else "return", result)
    if sampled is not None:
        add_returns(f"return, sampled ({counted(sampled.episodes, 'episode')})", sampled)
    lengths = np.array(result.lengths)
    table.add_row(
        "length", *(f"{value:.1f}" for value in (result.length_mean, lengths.std(), lengths.min(), lengths.max()))
    )
    for name, value in sorted(result.extras.items()):
        table.add_row(Text(name), f"{value:.3g}")
    return table


if __name__ == "__main__":
    sys.exit(main())
