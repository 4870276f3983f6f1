"""A folder for the Hugging Face Hub: what ``load_policy`` needs, and a model card."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from sfactory.commands import plot
from sfactory.config import Config, changed, to_dict
from sfactory.envs.interface import EnvSpec
from sfactory.errors import ConfigError, SfactoryError, installing
from sfactory.files import write_atomically
from sfactory.player import Player
from sfactory.policy import ROLES, Policy, is_foreign
from sfactory.runs.checkpoint import CheckpointStore, Snapshot
from sfactory.runs.run_files import CHECKPOINTS, CONFIG, SPACES, exported, read_config, videos_of

CARD, CURVE, VIDEO = "README.md", "curve.png", "replay.mp4"
"""Files of the folder beside those of a run. The names of the card and the video are the Hub's."""

LIBRARY = "library_name: sfactory"
"""Line of a card's header that says what has written it."""


class Score(NamedTuple):
    """What the card says of the policy.

    Attributes:
        value: Mean return, with its standard deviation over episodes where that is known.
        how: How it was measured.
    """

    value: str
    how: str

    def __str__(self) -> str:
        return f"return {self.value} ({self.how})"


def measured(player: Player, episodes: int) -> Score:
    """The score of so many evaluation episodes; errors are those of :func:`sfactory.evaluate`."""
    result = player.play(episodes, deterministic=True, parallel=None, max_steps=None)
    how = f"mean of {result.episodes} evaluation episodes with the most probable actions"
    return Score(f"{result.return_mean:.2f} +/- {result.return_std:.2f}", how)


def reported(snapshot: Snapshot) -> Score | None:
    """The score that a checkpoint had in training; None before enough episodes had ended."""
    value = snapshot.episode_return
    return None if value is None else Score(f"{value:.2f}", "mean of recent episodes in training, sampled actions")


def check_folder(run: Path, out: Path) -> None:
    """Check that a folder may be written: it is new, empty, or of an earlier export.

    Args:
        run: What will be exported.
        out: The folder.

    Raises:
        ConfigError: If it holds something else, which would be lost, or is what will be exported.
    """
    if out.is_dir() and out.samefile(run):
        raise ConfigError(f"out is {out}, the folder that is exported; name another one with --out")
    if out.is_dir() and any(out.iterdir()) and not (exported(out) and _has_card(out)):
        raise ConfigError(f"the folder {out} is not empty and holds no model card of an export; name another --out")


def _has_card(folder: Path) -> bool:
    """Whether a folder has a model card that :func:`make_folder` has written."""
    card = folder / CARD
    return card.is_file() and LIBRARY in card.read_text(errors="replace").splitlines()


def make_folder(
    run: Path,
    out: Path,
    policy: Policy,
    snapshot: Snapshot,
    score: Score | None,
    video: Path | None,
    repo: str | None,
) -> list[str]:
    """Write the folder: a run folder with one checkpoint and no trainer state, a model card, and pictures.

    Args:
        out: A folder that :func:`check_folder` finds fit.
        policy: Of the run.
        snapshot: What it was made of.
        score: Of this checkpoint, if there is one.
        video: What :func:`video_to_show` has found.
        repo: Where it will be uploaded, if that is known.

    Returns:
        Remarks for the user.

    Raises:
        OSError: If it cannot be written.
    """
    out.mkdir(parents=True, exist_ok=True)
    (out / CURVE).unlink(missing_ok=True)
    config = read_config(run)
    saved = yaml.safe_dump(to_dict(changed(config, run="")), sort_keys=False)
    write_atomically(out / CONFIG, saved.encode())
    write_atomically(out / SPACES, (run / SPACES).read_bytes())
    store = CheckpointStore(out / CHECKPOINTS, keep=1)
    store.clear()
    store.save(dataclasses.replace(snapshot, model=policy.model.state_dict(), trainer={}))
    if video is None:
        (out / VIDEO).unlink(missing_ok=True)
    else:
        write_atomically(out / VIDEO, video.read_bytes())
    remarks = draw_curve(run, out / CURVE)
    write_atomically(out / CARD, model_card(out, config, policy.spec, snapshot.env_steps, score, repo).encode())
    return remarks


def video_to_show(run: Path, given: str | Path | None) -> Path | None:
    """The MP4 file to show: the given one, or the newest of the run's own videos, if there is one.

    Raises:
        ConfigError: If there is no such file as the given one.
    """
    if given is None:
        return next(iter(videos_of(run, ".mp4")), None)
    if not Path(given).is_file():
        raise ConfigError(f"video is {given}, which is no file; name an MP4 file, for example one of eval --video")
    return Path(given)


def draw_curve(run: Path, out: Path) -> list[str]:
    """Draw the return in training against env steps, if matplotlib and reports are there.

    Returns:
        Remarks for the user.
    """
    try:
        plot.plot(plot.Options((str(run),), out=str(out)))
    except ConfigError as error:
        return [f"no curve: {error}"]
    return []


def model_card(
    folder: Path, config: Config, spec: EnvSpec, env_steps: int, score: Score | None, repo: str | None
) -> str:
    """The text of the model card, with the header that the Hub reads.

    Args:
        folder: Pictures that lie in it are shown.
        config: Of the run.
    """
    env, algo = config.env.strip("<>"), config.algo
    header: dict[str, Any] = {
        "library_name": "sfactory",
        "pipeline_tag": "reinforcement-learning",
        "tags": ["reinforcement-learning", "deep-reinforcement-learning", "sfactory", env],
    }
    returned = ""
    if score is not None:
        metric = {"type": "mean_reward", "name": "mean_reward", "value": score.value, "verified": False}
        task = {"type": "reinforcement-learning", "name": "reinforcement-learning"}
        result = {"task": task, "dataset": {"name": env, "type": env}, "metrics": [metric]}
        header["model-index"] = [{"name": f"sfactory {algo}", "results": [result]}]
        returned = f" Its return is **{score.value}**: {score.how}."
    curve = f"\n![Return in training against env steps]({CURVE})\n" if (folder / CURVE).exists() else ""
    video = f"\nAn episode: [{VIDEO}]({VIDEO})\n" if (folder / VIDEO).exists() else ""
    own = {role: name for role in ROLES if is_foreign(name := getattr(config.model, role))}
    imported = ", ".join(("ModelConfig", "load_policy") if own else ("load_policy",))
    passed = f", model=ModelConfig({', '.join(f'{role}=...' for role in own)})" if own else ""
    mask = ', action_mask=info["action_mask"]' if spec.masked and spec.observation.mask_path is None else ""
    missing = f"\nNot in this folder is the code of {', '.join(f'`{name}`' for name in own.values())}.\n" if own else ""
    return f"""---
{yaml.safe_dump(header, sort_keys=False)}---

# {env}, {algo}

A policy for `{env}`, trained with sfactory for {env_steps:,} env steps.{returned}
{curve}{video}
## Use

    from huggingface_hub import snapshot_download
    from sfactory import {imported}

    policy = load_policy(snapshot_download({repo or "OWNER/NAME"!r}){passed})
    state = None  # at an episode's begin
    action, state = policy.act(observation, state{mask})
{missing}
`{CONFIG}` is the whole configuration of the run, `{SPACES}` describes what the policy sees and does and how it is
built, and `{CHECKPOINTS}/` has the weights as safetensors.
"""


def hub_api() -> Any:
    """What uploads folders.

    Raises:
        ConfigError: If huggingface_hub is not installed.
    """
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise ConfigError(f"--push needs {error.name}; {installing('hub')}") from error
    return HfApi()


def push(api: Any, folder: Path, repo: str, private: bool) -> str:
    """Upload a folder; makes the repository if there is none.

    Args:
        api: From :func:`hub_api`.
        folder: The folder.
        repo: OWNER/NAME.
        private: Whether a new repository is.

    Returns:
        Its address.

    Raises:
        SfactoryError: If the upload fails.
    """
    try:
        address = api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(folder_path=folder, repo_id=address.repo_id, commit_message="A policy of sfactory")
    except Exception as error:  # of the network, of the token, of the name
        raise SfactoryError(
            f"{folder} is complete, but cannot be uploaded to {repo}: {str(error).strip() or type(error).__name__}; "
            "log in with `hf auth login`, and give the same command again"
        ) from error
    return str(address)
