"""TensorBoard's event files. TensorBoard's own writer leaves the disk to a thread, which could only print that it is
full."""

from __future__ import annotations

import io
import itertools
import os
import platform
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from sfactory.errors import ConfigError
from sfactory.files import EVENTS, append_whole

_numbers = itertools.count()


class EventFile:
    """A file of scalars, which begins with the first of them.

    Args:
        folder: Where to put it.
        env_steps: Where the run goes on, or begins anew: TensorBoard hides what earlier files hold beyond.

    Raises:
        ConfigError: If TensorBoard is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str], env_steps: int = 0) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError as error:
            raise ConfigError(
                f"log.tensorboard is on and {error.name or 'tensorboard'} is not installed; pip install tensorboard, "
                "or turn it off with --log.no-tensorboard"
            ) from error
        self._event, self._summary, self._record_writer = Event, Summary, RecordWriter
        name = f"{EVENTS}.{int(time.time()):010d}.{platform.node()}.{os.getpid()}.{next(_numbers)}"
        self._path = Path(folder) / name
        start = SessionLog(status=SessionLog.START)  # hides what is there from its step on, unless it is the first one
        self._begin = self._record(file_version="brain.Event:2") + self._record(step=env_steps + 1, session_log=start)

    def write(self, scalars: Mapping[int, Iterable[tuple[str, float]]]) -> None:
        """Add values by their env steps and tags; they are in the file when this returns.

        Raises:
            OSError: For example if the disk is full; the file is then as it was.
        """
        records = b""
        for env_steps, tagged in scalars.items():
            values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in tagged]
            records += self._record(step=env_steps, summary=self._summary(value=values))
        append_whole(self._path, records, self._begin)

    def _record(self, **contents: object) -> bytes:
        buffer = io.BytesIO()
        self._record_writer(buffer).write(self._event(wall_time=time.time(), **contents).SerializeToString())
        return buffer.getvalue()
