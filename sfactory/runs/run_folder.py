"""The run folder: whose it is, what it was begun with, and whether a config may continue it."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from sfactory.config import Config, changed, to_dict
from sfactory.envs.interface import EnvSpec
from sfactory.errors import CheckpointError, ConfigError
from sfactory.files import TEMPORARY, write_atomically
from sfactory.runs.checkpoint import CheckpointStore
from sfactory.runs.resume_rules import check_environment, check_resume
from sfactory.runs.run_files import (
    CHECKPOINTS,
    CONFIG,
    FILES,
    LOCK,
    METRICS,
    OUTPUT,
    PATTERNS,
    SPACES,
    SUMMARY,
    VIDEOS,
    saved_values,
    try_lock,
)
from sfactory.runs.space_codec import load_spec, save_spec

_log = logging.getLogger(__name__)

LOCK_S = 0.2
"""How long a start waits for the folder: whoever asks whether a run lives there
(:func:`sfactory.runs.run_files.is_held`) holds it for a moment."""


@dataclass
class RunFolder:
    """A run folder that this process holds until :meth:`close`. Nothing in it is changed before :meth:`begin`.

    Attributes:
        path: The folder, absolute: an environment may change the working directory.
        resumed: Whether it holds an earlier run's reports or checkpoints, which this run continues.
        config: The config of this run.
        env: What is known of its environment, or None.
    """

    path: Path
    resumed: bool
    config: Config
    env: EnvSpec | None
    _lock: int

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS

    @property
    def summary(self) -> Path:
        return self.path / SUMMARY

    def begin(self) -> None:
        """Make the folder this run's: from here on it says how this one is configured. With `overwrite`, the files of
        an earlier run (never others) are removed first.

        Raises:
            ConfigError: If it cannot be written to.
        """
        with _telling_of(self.path):
            if self.config.overwrite:
                _remove_run(self.path)
            self.summary.unlink(missing_ok=True)  # how the run ended before
            self._describe()
            (self.path / CHECKPOINTS).mkdir(exist_ok=True)

    def restore(self) -> None:
        """If somebody has removed the folder, make and hold it again; the next reports and checkpoints follow.

        Raises:
            ConfigError: If another process holds what stands there now.
            OSError: For example if the disk is full.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        if not self._is_held():
            lock = _take_lock(self.path)
            os.close(self._lock)
            self._lock = lock
        if not (self.path / CONFIG).exists():
            self._describe()

    def describe_policy(self) -> None:
        """Write what :func:`sfactory.policy.load_policy` builds the policy of.

        Raises:
            ConfigError: If it cannot be written.
        """
        if self.env is not None:
            with _telling_of(self.path):
                save_spec(self.path / SPACES, self.env, self.config.model)

    def _describe(self) -> None:
        """Write the config and the policy's description."""
        self.describe_policy()
        values = to_dict(changed(self.config, overwrite=False))
        write_atomically(self.path / CONFIG, yaml.safe_dump(values, sort_keys=False).encode())

    def _is_held(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._lock), os.stat(self.path / LOCK))
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Let another process have the folder. Call once."""
        os.close(self._lock)

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def open_run(config: Config, env: EnvSpec | None = None) -> RunFolder:
    """Make or reopen the folder ``config.run_dir``, lock it for this process, and check that the run may go on there.

    Args:
        env: What is known of the run's environment; None: it is not compared with that of the run in the folder.

    Raises:
        ConfigError: If the folder cannot be made, holds something else than a run, is in use by a living run, or was
            begun with a config or an environment that this one cannot continue (:mod:`sfactory.runs.resume_rules`);
            lists every such field.
    """
    path = config.run_dir
    with _telling_of(path):
        path.mkdir(parents=True, exist_ok=True)
        saved_values(path)  # before the lock's file is put into a folder that is not a run's
        lock = _take_lock(path)
    try:
        saved = saved_values(path)
        is_run = (path / METRICS).exists() or not CheckpointStore(path / CHECKPOINTS).is_empty()
        resumed = is_run and not config.overwrite
        if resumed and saved is not None:
            for warning in [*check_resume(path, saved, to_dict(config)), *_check_environment(path, env)]:
                _log.warning("%s", warning)
    except BaseException:
        os.close(lock)
        raise
    return RunFolder(path.absolute(), resumed, config, env, lock)


def _check_environment(path: Path, env: EnvSpec | None) -> list[str]:
    """Compare an environment with that of the run in a folder, as far as the folder says it.

    Returns:
        Warnings, where it may be another task.

    Raises:
        ConfigError: If it is another one.
    """
    if env is not None and (path / SPACES).exists():
        with contextlib.suppress(CheckpointError):  # nothing to compare with
            return check_environment(path, load_spec(path / SPACES, env.action.squash, env.observation.reading), env)
    return []


@contextlib.contextmanager
def _telling_of(path: Path) -> Iterator[None]:
    """Turn the system's error about a run folder into one for the user."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot use the run folder {path}: {error.strerror}; name another one with --run") from error


def _take_lock(path: Path) -> int:
    """Lock the folder until the returned descriptor is closed, at the latest when this process ends, however it
    ends."""
    # These are written in place: through a link, a stranger's run folder would have another file changed.
    for name in (LOCK, METRICS, OUTPUT):
        if (path / name).is_symlink():
            raise ConfigError(f"{path / name} is a symbolic link, which sfactory does not write through; remove it")
    descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    deadline = time.monotonic() + LOCK_S
    try:
        while not try_lock(descriptor, exclusive=True):
            if time.monotonic() > deadline:
                holder = os.read(descriptor, 32).decode(errors="replace").strip() or "unknown"
                raise ConfigError(
                    f"the run folder {path} is in use by a running process (pid {holder}); wait for it, stop it, or "
                    "name another one with --run"
                )
            time.sleep(0.01)
    except BaseException:
        os.close(descriptor)
        raise
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"{os.getpid()}\n".encode())
    return descriptor


def _remove_run(path: Path) -> None:
    """Remove a run's files. The config goes last: until then the folder is still known as a run's."""
    CheckpointStore(path / CHECKPOINTS).clear()
    several = [file for pattern in (*PATTERNS, f"{TEMPORARY}*") for file in path.glob(pattern)]
    if not (path / VIDEOS).is_symlink():
        shutil.rmtree(path / VIDEOS, ignore_errors=True)
    for file in (*(path / name for name in FILES), *several, path / CONFIG):
        file.unlink(missing_ok=True)
