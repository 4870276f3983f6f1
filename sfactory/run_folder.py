"""The run folder: whose it is, what it was begun with, and whether a config may continue it."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from sfactory.checkpoint import CheckpointStore
from sfactory.config import Config, from_dict, load_yaml, to_dict
from sfactory.envs.group import EnvSpec
from sfactory.errors import CheckpointError, ConfigError
from sfactory.files import TEMPORARY, write_atomically
from sfactory.space_codec import check_spaces, load_spec, save_spec

CONFIG, SPACES, METRICS, SUMMARY = "config.yaml", "spaces.json", "metrics.csv", "summary.json"
CHECKPOINTS, LOCK = "checkpoints", ".lock"
STATUS, REPORTS = "status.json", "stall-*.txt"
TENSORBOARD = "events.out.tfevents.*"

ON_RESUME: dict[str, Literal["refused", "warned", "free"]] = {
    "env": "refused",
    "env_kwargs": "refused",
    "model": "refused",
    "model.initial_log_std": "warned",
    "loss.normalize_returns": "refused",
    "loss.gamma": "warned",
    "loss.reward_scale": "warned",
    "loss.reward_clip": "warned",
    "algo": "warned",
    "seed": "warned",
}
"""What happens when a resumed run's config differs from the saved one in a field. A group's entry stands for all its fields that have
none of their own; fields that are not named are free to change.

- refused: the weights would not fit or would mean something else (another task, network, action scaling or unit of value).
- warned: the run goes on, but its curve is no longer that of one configuration.
"""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunFolder(os.PathLike):
    """A run folder that this process holds until :meth:`close`.

    Attributes:
        path: The folder.
        resumed: Whether it holds an earlier run's reports or checkpoints, which this run continues.
    """

    path: Path
    resumed: bool
    _lock: int

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS

    @property
    def metrics(self) -> Path:
        return self.path / METRICS

    @property
    def summary(self) -> Path:
        return self.path / SUMMARY

    def keep_spec(self, spec: EnvSpec) -> None:
        """Write what the run's policy sees and does, for those who use it without its environment.

        Raises:
            ConfigError: If the run that this one continues had other spaces.
        """
        path = self.path / SPACES
        if self.resumed and path.exists():
            with contextlib.suppress(CheckpointError):
                check_spaces(load_spec(path, spec.action.squash), spec, f"the run in {self.path}", "its environment now")
        save_spec(path, spec)

    def close(self) -> None:
        """Let another process have the folder. Call once."""
        os.close(self._lock)

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __fspath__(self) -> str:
        return str(self.path)


def open_run(config: Config) -> RunFolder:
    """Make or reopen the folder ``config.run_dir``, lock it for this process, and write ``config.yaml``.

    With `overwrite`, the files of an earlier run (never others) are removed first.

    Raises:
        ConfigError: If the folder cannot be made, holds something else than a run, is in use by a living run, or was begun with a config
            that this one cannot continue (:data:`ON_RESUME`); lists every such field.
    """
    path = config.run_dir
    try:
        path.mkdir(parents=True, exist_ok=True)
        _saved_values(path)  # before the lock's file is put into a folder that is not a run's
        lock = _take_lock(path)
    except OSError as error:
        raise ConfigError(f"cannot use the run folder {path}: {error.strerror}; name another one with --run") from error
    try:
        saved = _saved_values(path)
        if saved is not None and config.overwrite:
            _remove_run(path)
        resumed = (path / METRICS).exists() or not CheckpointStore(path / CHECKPOINTS).is_empty()
        if resumed and saved is not None:
            _compare(path, saved, to_dict(config))
        values = to_dict(dataclasses.replace(config, overwrite=False))
        write_atomically(path / CONFIG, yaml.safe_dump(values, sort_keys=False).encode())
    except BaseException:
        os.close(lock)
        raise
    return RunFolder(path, resumed, lock)


def read_config(folder: str | os.PathLike[str]) -> Config:
    """The config of the run in a folder. A callable `env` comes back as its name in angle brackets.

    Raises:
        ConfigError: If the folder holds no run, or one of an sfactory with other fields.
    """
    saved = _saved_values(Path(folder))
    if saved is None:
        raise ConfigError(f"{folder} holds no run (no {CONFIG}); name a run folder with --run")
    return from_dict(saved)


def _saved_values(path: Path) -> dict[str, Any] | None:
    """The saved config, or None where no run has begun in the folder.

    Raises:
        ConfigError: If the folder holds something else.
    """
    if (path / CONFIG).exists():
        values = load_yaml(path / CONFIG)
        if all(f.name in values for f in dataclasses.fields(Config) if f.name in ("env", "steps", "seed", "log")):
            return values
        raise ConfigError(f"{path / CONFIG} is not the config of a run; name another folder with --run")
    if path.is_dir() and any(entry.name != LOCK and not entry.name.startswith(TEMPORARY) for entry in path.iterdir()):
        raise ConfigError(f"the folder {path} is not empty and holds no run (no {CONFIG}); name another one with --run")
    return None


def _take_lock(path: Path) -> int:
    """Lock the folder until the returned descriptor is closed, at the latest when this process ends, however it ends."""
    descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(descriptor, 32).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise ConfigError(
            f"the run folder {path} is in use by a running process (pid {holder}); wait for it, stop it, or name another one with --run"
        ) from None
    except BaseException:
        os.close(descriptor)
        raise
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"{os.getpid()}\n".encode())
    return descriptor


def is_held(folder: str | os.PathLike[str]) -> bool:
    """Whether a living process has the run in a folder."""
    try:
        descriptor = os.open(Path(folder) / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _remove_run(path: Path) -> None:
    """Remove a run's files. The config goes last: until then the folder is still known as a run's."""
    CheckpointStore(path / CHECKPOINTS).clear()
    several = [file for pattern in (REPORTS, TENSORBOARD, f"{TEMPORARY}*") for file in path.glob(pattern)]
    for file in (path / SPACES, path / METRICS, path / SUMMARY, path / STATUS, *several, path / CONFIG):
        file.unlink(missing_ok=True)


def _compare(path: Path, saved: dict[str, Any], asked: dict[str, Any]) -> None:
    refused = []
    for field, (old, new) in _differences(saved, asked).items():
        rule = ON_RESUME.get(field) or ON_RESUME.get(field.partition(".")[0], "free")
        if rule == "refused":
            refused.append(f"  {field}: {old} -> {new}")
        elif rule == "warned":
            _log.warning("the run in %s continues with a changed setting: %s: %s -> %s", path, field, old, new)
    if refused:
        raise ConfigError(
            f"{path} holds a run that cannot continue with other settings (saved -> asked); ask for the saved ones, start anew with "
            "--overwrite, or name another folder with --run:",
            *refused,
        )


def _differences(saved: dict[str, Any], asked: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted field names with the saved and the asked value, where both configs have the field and differ in it."""
    found: dict[str, tuple[Any, Any]] = {}
    groups = {f.name for f in dataclasses.fields(Config) if dataclasses.is_dataclass(getattr(Config(), f.name))}
    for name in asked.keys() & saved.keys():
        old, new = saved[name], asked[name]
        if name in groups:
            found |= {f"{name}.{key}": (old[key], new[key]) for key in new if key in (old or {}) and old[key] != new[key]}
        elif old != new:
            found[name] = (old, new)
    return {name: found[name] for name in sorted(found)}
