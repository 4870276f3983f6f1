"""The files of a run folder by name, and what a reader asks of it: its config, and whether a run lives in it."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from pathlib import Path
from typing import Any, TypeGuard

from sfactory.config import Config, check_types, from_dict, load_yaml
from sfactory.errors import ConfigError
from sfactory.files import EVENTS, LOGGER_ID, METRICS_FILE, TEMPORARY

CONFIG, SPACES, SUMMARY = "config.yaml", "spaces.json", "summary.json"
CHECKPOINTS, LOCK = "checkpoints", ".lock"
TRAINER = ".opt.pt"
"""Suffix of a checkpoint's trainer state, under which the description of the checkpoint has it."""
DESCRIPTION = ".json"
"""Suffix of that description."""
STEM = re.compile(r"checkpoint_(\d{12,})(?:_(\d+))?")
"""Name of a checkpoint's files without their suffixes: its env steps, and the number of saves at the same ones before
it."""
STATUS, STACKS = "status.json", "stall-*.txt"
METRICS, TENSORBOARD, LOGGER_IDS = METRICS_FILE, f"{EVENTS}.*", LOGGER_ID.format("*")
PAGE, EVALUATION, VIDEOS, OUTPUT = "report.html", "evaluation.json", "videos", "output.log"
FILES = (SPACES, METRICS, SUMMARY, STATUS, PAGE, EVALUATION, OUTPUT)
"""What a run writes beside its config, folders, and the lock."""
PATTERNS = (STACKS, TENSORBOARD, LOGGER_IDS)
"""Of what it may write several times."""


def require_run(folder: str | os.PathLike[str]) -> Path:
    """The path of a run folder.

    Raises:
        ConfigError: If the folder holds no run.
    """
    path = Path(folder)
    if not (path / CONFIG).exists():
        raise ConfigError(f"{path} holds no run (no {CONFIG}); name a run folder, for example runs/cartpole")
    return path


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty if there is no such file, or none that can be read."""
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value of a JSON file, which anyone may have edited, is a finite number that a float can be."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def exported(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """What an exported policy says of itself: the description of its newest checkpoint, which has no trainer state for
    a run to go on with; empty if the folder holds no such policy, but a run."""
    description = newest_checkpoint(folder)
    files = description.get("files")
    return description if isinstance(files, dict) and TRAINER not in files else {}


def videos_of(run: Path, *kinds: str) -> list[Path]:
    """The videos in a run folder with these suffixes, the newest first. Links are left out: in a stranger's folder they
    may lead to any file."""
    found = [path for kind in kinds for path in (run / VIDEOS).rglob(f"*{kind}") if not path.is_symlink()]
    return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)


def newest_checkpoint(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """What the newest checkpoint in a run folder says of itself; empty if there is none."""
    checkpoints = Path(folder) / CHECKPOINTS
    return next((read_json(checkpoints / f"{stem}{DESCRIPTION}") for stem in newest_first(checkpoints)), {})


def newest_first(checkpoints: Path) -> list[str]:
    """Stems of all checkpoints in a folder of them."""
    stems = [path.name.removesuffix(DESCRIPTION) for path in checkpoints.glob(f"checkpoint_*{DESCRIPTION}")]
    return sorted(filter(STEM.fullmatch, stems), key=age, reverse=True)


def age(stem: str) -> tuple[int, int]:
    """Env steps of a checkpoint, and then the order of saves at the same ones."""
    match = STEM.fullmatch(stem)
    assert match is not None, stem
    return int(match[1]), int(match[2] or 0)


def read_config(folder: str | os.PathLike[str]) -> Config:
    """The config of the run in a folder. A callable `env` comes back as its name in angle brackets.

    Raises:
        ConfigError: If the folder holds no run, or one of an sfactory with other fields, or has been tampered with.
    """
    saved = _read_values(require_run(folder))
    try:
        config = from_dict(saved)
        check_types(config)
    except ConfigError as error:
        raise ConfigError(
            f"{Path(folder) / CONFIG} is of an sfactory with other fields; use that version, or correct the file:",
            *(f"  {problem}" for problem in error.problems),
        ) from None
    if not isinstance(config.env, str):
        raise ConfigError(f"env is {config.env!r} in {Path(folder) / CONFIG}; it must be a string")
    return config


def saved_values(path: Path) -> dict[str, Any] | None:
    """The saved config, or None where no run has begun in the folder.

    Raises:
        ConfigError: If the folder holds something else.
    """
    if (path / CONFIG).exists():
        return _read_values(path)
    if path.is_dir() and any(entry.name != LOCK and not entry.name.startswith(TEMPORARY) for entry in path.iterdir()):
        raise ConfigError(f"the folder {path} is not empty and holds no run (no {CONFIG}); name another one with --run")
    return None


def _read_values(path: Path) -> dict[str, Any]:
    """The saved config of a run folder."""
    values = load_yaml(path / CONFIG)
    if isinstance(runtime := values.get("runtime"), dict):
        runtime.pop("spin", None)  # of version 0.1, where it had no effect
    if all(f.name in values for f in dataclasses.fields(Config) if f.name in ("env", "steps", "seed", "log")):
        return values
    raise ConfigError(f"{path / CONFIG} is not the config of a run; name another folder with --run")


def is_held(folder: str | os.PathLike[str]) -> bool:
    """Whether a living process has the run in a folder."""
    try:
        descriptor = os.open(Path(folder) / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return not try_lock(descriptor, exclusive=False)
    finally:
        os.close(descriptor)


def try_lock(descriptor: int, exclusive: bool) -> bool:
    """Lock a file if no other process holds it; says whether it is locked."""
    import fcntl  # here, so that a policy is loaded without it on Windows

    try:
        fcntl.flock(descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
