"""Checkpoints: weights, trainer state and a readable description, written so that a crash at any moment loses none of
the earlier.

A checkpoint is three files with one stem::

    checkpoint_000000200000.safetensors   weights and buffers of the model
    checkpoint_000000200000.opt.pt        the trainer's state: tensors, numbers and strings, read with weights_only=True
    checkpoint_000000200000.json          env steps, return, ..., and the size and SHA-256 of the other two

The JSON is written last, so a checkpoint exists exactly if its JSON does, and it is good if the hashes fit. One that is
only to be played has no trainer state. Nothing is ever unpickled beyond what ``torch.load(weights_only=True)`` allows.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sfactory.errors import CheckpointError
from sfactory.files import TEMPORARY, json_values, sync_folder, temporary_for, write_synced
from sfactory.runs.run_files import DESCRIPTION, STEM, TRAINER, age, newest_first
from sfactory.runs.tensor_file import unpack_tensors

PATIENCE_S = 5.0
"""How long a folder may be away from a run that has to go on from a checkpoint in it."""
FORMAT = 1
"""Version of the files' layout; raised whenever an older reader would misread it."""

_WEIGHTS, _TRAINER, _JSON = ".safetensors", TRAINER, DESCRIPTION
_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Snapshot:
    """All that is needed to go on with a run.

    Attributes:
        model: Weights and buffers by name.
        trainer: Optimizer, normalisers, schedules, RNG states, ...: tensors, numbers, strings and None in nested dicts,
            lists and tuples. Empty where no run can go on from it.
        env_steps: Env steps trained on so far.
        frames: Frames simulated so far: env steps x frameskip.
        updates: Learner updates so far, which is the policy version.
        wall_s: Seconds trained so far, over all resumes.
        episode_return: Mean return of recent episodes; None (or NaN) before a whole window of them has ended, so that a
            few lucky ones at the start of a command do not count. The best checkpoint is chosen by it where there is no
            evaluation.
        eval_return: Mean return of an evaluation of these weights; None if there was none. A checkpoint that has one
            is better than any that has none.
    """

    model: dict[str, Tensor]
    trainer: dict[str, Any]
    env_steps: int
    frames: int
    updates: int
    wall_s: float
    episode_return: float | None
    eval_return: float | None = None

    def frozen(self) -> Snapshot:
        """A copy that training does not change."""
        model = {name: _own_copy(tensor) for name, tensor in self.model.items()}
        return dataclasses.replace(self, model=model, trainer=_plain(self.trainer, "trainer"))


class CheckpointStore:
    """The checkpoints of one run. Only the process that holds the run folder's lock may save; anyone may load at any
    time.

    Args:
        folder: The run's ``checkpoints`` folder; a save makes it if it is not there.
        keep: Latest checkpoints to keep, at least 1. Milestones are kept besides, and the best: by evaluation
            where the run had it, else by the return in training.
        milestone_every: Env steps between checkpoints that are kept for good; 0: none.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int = 3, milestone_every: int = 0) -> None:
        self.folder = Path(folder)
        self.keep = keep
        self.milestone_every = milestone_every
        self._passed_over: set[str] = set()
        """Stems of those that could not be read at the last load, which count for nothing."""

    def save(self, snapshot: Snapshot, now: int | None = None) -> Path:
        """Write a checkpoint, then remove those that are no longer wanted.

        Args:
            now: Env steps of the run, where the snapshot is an earlier one.

        Returns:
            The checkpoint's JSON file.

        Raises:
            TypeError: If `snapshot.trainer` holds something that could not be loaded again; names the entry.
            OSError: For example if the disk is full; all earlier checkpoints are then untouched and no temporary file
                is left.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        for leftover in self.folder.glob(f"{TEMPORARY}*"):
            leftover.unlink(missing_ok=True)
        stem = self._unused_stem(snapshot.env_steps)
        self._passed_over.discard(stem)  # the file of that name has been removed since
        contents = {_WEIGHTS: _pack_model(snapshot.model)}
        if snapshot.trainer:
            contents[_TRAINER] = _pack_trainer(snapshot.trainer)
        contents[_JSON] = _describe(snapshot, self._is_milestone(snapshot.env_steps), contents)
        finals = {suffix: self._path(stem, suffix) for suffix in contents}
        try:
            for suffix, data in contents.items():
                write_synced(temporary_for(finals[suffix]), data)
            for suffix in contents:
                if suffix != _JSON:
                    os.replace(temporary_for(finals[suffix]), finals[suffix])
            sync_folder(self.folder)
            os.replace(temporary_for(finals[_JSON]), finals[_JSON])
            sync_folder(self.folder)
        except BaseException:
            for final in reversed(finals.values()):
                final.unlink(missing_ok=True)
                temporary_for(final).unlink(missing_ok=True)
            raise
        self._rotate(stem, snapshot.env_steps if now is None else now)
        return finals[_JSON]

    def load_latest(self) -> Snapshot | None:
        """The latest checkpoint that can be read, on the CPU; None if there has never been one.

        Each newer one that cannot be read is reported with ``logging.warning``.

        Raises:
            CheckpointError: If there are checkpoints but none can be read, or one was written by a newer sfactory.
        """
        return self._load_first(lambda: newest_first(self.folder))

    def load_latest_patiently(self) -> Snapshot | None:
        """:meth:`load_latest` within a run, whose folder may be away for a moment: no run begins at 0 again because of
        that.

        Raises:
            CheckpointError: As :meth:`load_latest`; or if for `PATIENCE_S` there is no folder. A run makes it before
                anything else.
        """
        deadline = time.monotonic() + PATIENCE_S
        while (snapshot := self.load_latest()) is None and not self.folder.is_dir():
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"the folder {self.folder} is gone; put it back and give the same command again, or start anew "
                    "with --overwrite"
                )
            time.sleep(0.1)
        return snapshot

    def load_best(self) -> Snapshot | None:
        """The checkpoint with the highest return of an evaluation, or without any the highest in training, the later of
        equals; where no episode had ended, the latest.

        Raises:
            CheckpointError: As :meth:`load_latest`.
        """
        return self._load_first(self._best_first)

    def best_evaluation(self) -> float:
        """The highest return of an evaluation; minus infinity if there was none."""
        described = self._described(self._counting()).values()
        return max((found for each in described if (found := each.get("eval_return")) is not None), default=-math.inf)

    def is_empty(self) -> bool:
        """Whether there is no checkpoint, readable or not."""
        return not newest_first(self.folder)

    def clear(self) -> None:
        """Remove all checkpoints, and the folder itself unless it holds other files."""
        for path in sorted(self.folder.glob("checkpoint_*"), key=lambda path: path.suffix != _JSON):
            if STEM.fullmatch(path.name.partition(".")[0]):
                path.unlink(missing_ok=True)
        for leftover in self.folder.glob(f"{TEMPORARY}*"):
            leftover.unlink(missing_ok=True)
        if self.folder.is_dir() and not self.folder.is_symlink() and not any(self.folder.iterdir()):
            self.folder.rmdir()

    def _path(self, stem: str, suffix: str) -> Path:
        return self.folder / f"{stem}{suffix}"

    def _counting(self) -> list[str]:
        """Stems, newest first, of all but those that could not be read at the last load."""
        return [stem for stem in newest_first(self.folder) if stem not in self._passed_over]

    def _best_first(self) -> list[str]:
        described = self._described(newest_first(self.folder))
        return sorted(described, key=lambda stem: _rank(described[stem]), reverse=True)

    def _unused_stem(self, env_steps: int) -> str:
        """A new name, also where env steps have not advanced since an earlier save: replacing three files is not one
        step."""
        stem = f"checkpoint_{env_steps:012d}"
        taken = [age(other)[1] for other in newest_first(self.folder) if age(other)[0] == env_steps]
        return f"{stem}_{max(taken) + 1}" if taken else stem

    def _is_milestone(self, env_steps: int) -> bool:
        if not self.milestone_every:
            return False
        described = self._described(stem for stem in self._counting() if age(stem)[0] <= env_steps)
        last = next((age(stem)[0] for stem, description in described.items() if description.get("milestone")), 0)
        return env_steps // self.milestone_every > last // self.milestone_every

    def _rotate(self, newest: str, now: int) -> None:
        """Remove what is neither recent, best nor a milestone; the JSON first, so that a crash leaves no half of a
        checkpoint.

        Checkpoints with more env steps than the run has now belong to a future that the run fell back from, for example
        because they could not be read. They count neither as recent nor as best, or they would displace those of the
        run as it is. Those that could not be read do not even once the run has come as far.
        """
        described = self._described(newest_first(self.folder))
        if newest not in described:
            raise FileNotFoundError(
                f"{self._path(newest, _JSON)} has gone since it was written; has somebody moved its folder?"
            )
        past = [stem for stem in described if age(stem)[0] <= now and stem not in self._passed_over]
        kept = {*past[: self.keep], max(past, key=lambda stem: _rank(described[stem]))}
        kept |= {stem for stem, description in described.items() if description.get("milestone")}
        for stem in described.keys() - kept:
            self._path(stem, _JSON).unlink(missing_ok=True)
        for path in self.folder.glob("checkpoint_*"):
            stem, _, suffix = path.name.partition(".")
            if STEM.fullmatch(stem) and f".{suffix}" in (_WEIGHTS, _TRAINER) and stem not in kept:
                path.unlink(missing_ok=True)

    def _described(self, stems: Iterable[str]) -> dict[str, dict[str, Any]]:
        """What the JSON of each checkpoint says; empty where it cannot be read."""
        found: dict[str, dict[str, Any]] = {}
        for stem in stems:
            try:
                found[stem] = _parse_description(self._path(stem, _JSON).read_bytes())
            except (OSError, _Unreadable):
                found[stem] = {}
        return found

    def _load_first(self, ranked: Callable[[], list[str]]) -> Snapshot | None:
        reasons: dict[str, str] = {}
        while candidates := [stem for stem in ranked() if stem not in reasons]:
            stem = candidates[0]
            try:
                snapshot = self._read(stem)
            except _Unreadable as error:
                if not self._path(stem, _JSON).exists():  # a living run has removed it since it was listed
                    continue
                reasons[stem] = str(error)
                _log.warning("checkpoint %s cannot be read: %s; trying the one before", self._path(stem, _JSON), error)
            else:
                self._passed_over = set(reasons)
                return snapshot
        if reasons:
            raise CheckpointError(
                f"no checkpoint in {self.folder} can be read "
                f"({'; '.join(f'{stem}: {why}' for stem, why in reasons.items())}); restore the folder from a copy, or "
                "start anew with --overwrite"
            )
        return None

    def _read(self, stem: str) -> Snapshot:
        try:
            description = _parse_description(self._path(stem, _JSON).read_bytes())
            suffixes = [suffix for suffix in (_WEIGHTS, _TRAINER) if suffix in description["files"]]
            contents = {suffix: self._path(stem, suffix).read_bytes() for suffix in suffixes}
        except OSError as error:
            raise _Unreadable(f"{error.strerror} ({error.filename})") from error
        if description["format"] > FORMAT:
            raise CheckpointError(
                f"{self._path(stem, _JSON)} has format {description['format']}, this sfactory reads up to {FORMAT}; "
                "upgrade sfactory"
            )
        for suffix, data in contents.items():
            expected = description["files"][suffix]
            if len(data) != expected["bytes"]:
                raise _Unreadable(f"{stem}{suffix} has {len(data)} bytes, not {expected['bytes']}")
            if _sha256(data) != expected["sha256"]:
                raise _Unreadable(f"{stem}{suffix} does not have its SHA-256 of {expected['sha256'][:12]}...")
        return Snapshot(
            model=_unpack_model(contents[_WEIGHTS]),
            trainer=_unpack_trainer(contents[_TRAINER]) if _TRAINER in contents else {},
            **{name: description[name] for name in ("env_steps", "frames", "updates", "wall_s", "episode_return")},
            eval_return=description.get("eval_return"),
        )


class _Unreadable(Exception):
    """One checkpoint is torn, corrupted or holds what it may not; the message says which file and how."""


def _rank(description: Mapping[str, Any]) -> tuple[float, float]:
    """Sort key: the return of an evaluation, then that in training."""
    evaluated, trained = description.get("eval_return"), description.get("episode_return")
    return -math.inf if evaluated is None else evaluated, -math.inf if trained is None else trained


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _seal(description: Mapping[str, Any]) -> str:
    """The description's own hash, by which a flipped digit in the JSON is noticed."""
    return _sha256(json.dumps({k: v for k, v in description.items() if k != "sha256"}, sort_keys=True).encode())


def _describe(snapshot: Snapshot, milestone: bool, contents: Mapping[str, bytes]) -> bytes:
    description = {
        "format": FORMAT,
        "env_steps": int(snapshot.env_steps),
        "frames": int(snapshot.frames),
        "updates": int(snapshot.updates),
        "episode_return": json_values(snapshot.episode_return),
        "eval_return": json_values(snapshot.eval_return),
        "wall_s": float(snapshot.wall_s),
        "milestone": milestone,
        "files": {suffix: {"bytes": len(data), "sha256": _sha256(data)} for suffix, data in contents.items()},
    }
    return (json.dumps(description | {"sha256": _seal(description)}, indent=2) + "\n").encode()


def _parse_description(data: bytes) -> dict[str, Any]:
    try:
        description = json.loads(data)
    except ValueError as error:
        raise _Unreadable(f"its JSON is torn: {error}") from error
    if not isinstance(description, dict) or description.get("sha256") != _seal(description):
        raise _Unreadable("its JSON does not have its own SHA-256")
    return description


def _pack_model(model: Mapping[str, Tensor]) -> bytes:
    import safetensors.torch  # here, so that a policy is loaded without it

    return safetensors.torch.save({name: _own_copy(tensor) for name, tensor in model.items()})


def _unpack_model(data: bytes) -> dict[str, Tensor]:
    try:
        return unpack_tensors(data)
    except Exception as error:
        raise _Unreadable(f"its weights are not a safetensors file: {error}") from error


def _pack_trainer(trainer: Mapping[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(_plain(trainer, "trainer"), buffer)
    return buffer.getvalue()


def _unpack_trainer(data: bytes) -> dict[str, Any]:
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load has no common base for what a malformed or forbidden file raises
        raise _Unreadable(f"its trainer state is refused: {str(error).splitlines()[0]}") from error


def _own_copy(tensor: Tensor) -> Tensor:
    """The values alone: a view of a shared flat buffer would otherwise drag the whole buffer into the file."""
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def _plain(value: Any, where: str) -> Any:
    """A copy made only of what ``torch.load(weights_only=True)`` accepts."""
    if isinstance(value, Tensor):
        return _own_copy(value)
    if isinstance(value, Mapping):
        for key in value:
            if type(key) not in (str, int):
                raise TypeError(f"{where} has the key {key!r}; a checkpoint's keys are strings and ints")
        return {key: _plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise TypeError(
        f"{where} is a {type(value).__qualname__}; a checkpoint holds tensors, numbers, strings and None, in dicts, "
        "lists and tuples"
    )
