"""``sfactory export``: a policy as a file that needs no sfactory, or as a folder for the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

import sfactory
from sfactory.commands.export.formats import largest_difference, onnx_file, torch_file
from sfactory.commands.export.hub import (
    Score,
    check_folder,
    hub_api,
    make_folder,
    measured,
    push,
    reported,
    video_to_show,
)
from sfactory.commands.export.portable import PortablePolicy
from sfactory.config import ModelConfig, env_name
from sfactory.config.command_line import Switch, flag_as_word
from sfactory.config.fields import Checkpoint
from sfactory.config.policy_options import File, Integer, PolicyOptions
from sfactory.errors import ConfigError, telling_errors
from sfactory.files import is_writable, write_atomically
from sfactory.player import Player
from sfactory.policy import load_policy, load_snapshot
from sfactory.runs.run_files import read_config

DESCRIPTION = """Write the policy of a run as one file, with normalisation, memory and action masks inside: ONNX, or an
archive for torch.export.load. Or as a folder for the Hugging Face Hub: weights, configuration, model card, curve."""
FORMATS = {"onnx": ("policy.onnx", onnx_file), "torch": ("policy.pt2", torch_file)}
"""Of a single file: its name, and what makes it."""
EPISODES = 20
"""Evaluation episodes for a model card."""
HUB_ONLY = ("env", "env_kwargs", "episodes", "video", "push", "private")
"""Options that have an effect with --format hf alone."""


def export(
    run: str | Path,
    format: Literal["onnx", "torch"] = "onnx",
    out: str | Path | None = None,
    checkpoint: Checkpoint = "latest",
    *,
    model: ModelConfig | None = None,
    trust: bool = False,
) -> tuple[Path, float]:
    """Write the policy of a run as one file, and compare what it computes with the policy.

    The file maps named tensors to named tensors: :class:`~sfactory.commands.export.portable.PortablePolicy` lists them.

    Args:
        run: The run folder.
        format: onnx, or torch: an archive for ``torch.export.load``.
        out: The file; None: ``export/policy.onnx`` or ``export/policy.pt2`` in the run folder.
        checkpoint: latest, or best: by evaluation where the run had it, else by the return in training.
        model: As in :func:`sfactory.load_policy`.
        trust: Likewise.

    Returns:
        The file, and the largest relative difference between its outputs and the policy's on random observations.

    Raises:
        ConfigError: If there is no such run or format, `out` is named like a file of the other format, a package is
            missing, or the model cannot be traced.
        SfactoryError: If the file would compute something else than the policy. An earlier one is left as it is.
    """
    if format not in FORMATS:
        raise ConfigError(
            f"format is {format!r}; use {' or '.join(FORMATS)}, or export_folder for the Hugging Face Hub"
        )
    name, make_file = FORMATS[format]
    path = _target(run, out, name)
    suffixes = {Path(usual).suffix: each for each, (usual, _) in FORMATS.items()}
    if (meant := suffixes.get(path.suffix, format)) != format:
        raise ConfigError(
            f"{path} is the name of a file for --format {meant}, and this is --format {format}; say --format {meant}, "
            "or name another file with --out"
        )
    policy = PortablePolicy(load_policy(run, checkpoint, model=model, trust=trust))
    about = {"sfactory": sfactory.__version__, "env": env_name(read_config(run).env), "checkpoint": checkpoint}
    data, played = make_file(policy, about)
    difference = largest_difference(policy, played)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, data)
    return path, difference


def export_folder(
    run: str | Path,
    out: str | Path | None = None,
    checkpoint: Checkpoint = "latest",
    *,
    episodes: int = EPISODES,
    env: Any = None,
    env_kwargs: dict[str, Any] | None = None,
    video: str | Path | None = None,
    repo: str | None = None,
    model: ModelConfig | None = None,
    trust: bool = False,
) -> tuple[Path, Score | None, list[str]]:
    """Write the policy of a run as a folder for the Hugging Face Hub.

    Args:
        run: The run folder.
        out: The folder, new or empty or of an earlier export; None: ``export/huggingface`` in the run folder.
        checkpoint: latest, or best: by evaluation where the run had it, else by the return in training.
        episodes: Evaluation episodes for the model card; 0: it tells the return in training.
        env: Of the evaluation, as in :func:`sfactory.evaluate`.
        env_kwargs: Likewise.
        video: MP4 file for the model card; None: the newest in the run folder, if there is one.
        repo: The repository that the card names, OWNER/NAME. Nothing is uploaded.
        model: As in :func:`sfactory.load_policy`.
        trust: Likewise.

    Returns:
        The folder, the score on its card if one is known, and remarks for the user.

    Raises:
        ConfigError: If there is no such run or video, the folder holds something else, or the evaluation needs what is
            not there.
        OSError: If the folder cannot be written.
    """
    if episodes < 0:
        raise ConfigError(f"episodes is {episodes}; it must be 0 or more")
    path = _target(run, out, "huggingface", folder=True)
    check_folder(Path(run), path)
    found = video_to_show(Path(run), video)
    snapshot = load_snapshot(Path(run), checkpoint)
    policy = load_policy(run, snapshot, model=model, trust=trust)
    if episodes:
        player = Player.of_run(run, env=env, env_kwargs=env_kwargs, checkpoint=snapshot, model=model, trust=trust)
        score: Score | None = measured(player, episodes)
    else:
        score = reported(snapshot)
    return path, score, make_folder(Path(run), path, policy, snapshot, score, found, repo)


def _target(run: str | Path, out: str | Path | None, name: str, folder: bool = False) -> Path:
    """Where to write.

    Args:
        run: The run folder.
        out: As the user says it.
        name: In the run folder, where the user does not.
        folder: Whether it will be a folder.

    Raises:
        ConfigError: If it cannot be written, or is a folder where a file is to be, or a file.
    """
    read_config(run)
    path = Path(run) / "export" / name if out is None else Path(out)
    if path.exists() and path.is_dir() != folder:
        kind = "folder" if folder else "file"
        raise ConfigError(f"the export writes a {kind}, and {path} is none; name another place with --out")
    inside = path if folder else path.parent
    nearest = next(place for place in (inside.absolute(), *inside.absolute().parents) if place.exists())
    if not (nearest.is_dir() and is_writable(nearest)):
        why = "cannot be written to" if nearest.is_dir() else "is a file"
        raise ConfigError(f"cannot write {path}: {nearest} {why}; name another place with --out")
    return path


@dataclass(frozen=True, kw_only=True)
class Options(PolicyOptions):
    """What the command takes. The environment is that of the evaluation (hf)."""

    format: Literal["onnx", "torch", "hf"] = "onnx"
    """onnx: for ONNX runtimes; torch: an archive for torch.export.load; hf: a folder for the Hugging Face Hub."""
    out: Annotated[str | None, tyro.conf.arg(metavar="PATH")] = None
    """File, or with hf folder; unset: in the run folder's export/."""
    episodes: Integer = None
    """Evaluation episodes for the model card (hf); unset: 20; 0: it tells the return in training."""
    video: File = None
    """MP4 file for the model card (hf); unset: the newest in the run folder."""
    push: Annotated[str | None, tyro.conf.arg(metavar="OWNER/NAME")] = None
    """Also upload the folder (hf) to this repository."""
    private: Switch = False
    """A new repository is private."""


@telling_errors
def main(args: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        The exit status: 0 done, 1 failed, 2 bad configuration, 130 interrupted.
    """
    args = flag_as_word("--run", args)
    options = tyro.cli(Options, args=args, prog="sfactory export", description=DESCRIPTION)
    if options.format == "hf":
        _export_folder(options)
    else:
        _export_file(options)
    return 0


def _export_file(options: Options) -> None:
    if given := options.given(HUB_ONLY):
        raise ConfigError(
            f"{given}: only with --format hf, a folder for the Hugging Face Hub; this is --format "
            f"{options.format}, a file that has no place for it"
        )
    assert options.format != "hf"
    path, difference = export(options.run, options.format, options.out, options.checkpoint, trust=options.trust)
    print(f"{path}: largest difference from the policy on random observations {difference:.1g}")


def _export_folder(options: Options) -> None:
    if options.private and options.push is None:
        raise ConfigError("--private: only with --push OWNER/NAME, the repository to upload to")
    api = None if options.push is None else hub_api()
    path, score, remarks = export_folder(
        options.run, options.out, options.checkpoint,
        episodes=EPISODES if options.episodes is None else options.episodes,
        env=options.env, env_kwargs=options.env_kwargs,
        video=options.video, repo=options.push, trust=options.trust,
    )  # fmt: skip
    for line in (*remarks, f"{path}: {score or 'its return is not known'}"):
        print(line)
    if options.push is not None:
        print(push(api, path, options.push, options.private))
