"""Worker processes: forked from one server that has imported what they need, heard over one pipe each, and never left
behind.

Each worker has a pipe of its own to the runner. A worker that is killed while it writes can tear its own last message,
nothing else, and the end of a pipe tells at once that its worker is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Collection, Iterator
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil

from sfactory.runtime.temporary import make_temporary_folder, remove_temporary_folder

PRELOAD = "sfactory.runtime.preload"
PIPE_BYTES = 1 << 20
DYING_S = 5.0
"""How long a killed server may take to die."""
RUNNER_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}
_lock = threading.RLock()
_users = 0
_started_here = False


@contextlib.contextmanager
def fork_server() -> Iterator[None]:
    """Keep the server running that worker processes are forked from; it imports what they need while this process goes
    on.

    May be nested, and used by several threads: the last one out stops the server, with every process that it or its
    workers have started. A server that the user's program had started before is used and left alone.
    """
    global _users, _started_here
    with _lock:
        _users += 1
        if _users == 1:
            _started_here = not server_pid()
            _start_server()
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users and _started_here:
                _stop_server()


def server_pid() -> int | None:
    """The process from which workers are forked, where there is one."""
    return forkserver._forkserver._forkserver_pid


def _start_server() -> None:
    """Start the server with the runner's signals blocked, and so its workers, from their first instruction."""
    multiprocessing.get_context("forkserver").set_forkserver_preload([PRELOAD])
    resource_tracker.ensure_running()  # else it would be started, and then the signals unblocked, by the server's start
    before = signal.pthread_sigmask(signal.SIG_BLOCK, RUNNER_SIGNALS)
    try:
        with _no_main_module():
            forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _launch(process: BaseProcess) -> None:
    """Start a process; also where somebody has killed the server, perhaps so lately that it has not quite died."""
    deadline = time.monotonic() + DYING_S
    while True:
        _start_server()
        try:
            with _no_main_module():
                process.start()
            return
        except (EOFError, ConnectionError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def _stop_server() -> None:
    if (pid := server_pid()) is not None:
        # Rather than wait until it has imported everything, or for a child of an environment that keeps its pipe open.
        kill_tree(pid)
        forkserver._forkserver._stop()


def _kill_groups(leaders: set[int]) -> None:
    """Kill the processes of this session that belong to the groups of these processes, and what they have started."""
    session = os.getsid(0)
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(process.pid) in leaders and os.getsid(process.pid) == session:
                kill_tree(process.pid)


def kill_tree(pid: int, spare_root: bool = False) -> None:
    """Kill a process and its descendants. Orphans of killed workers count as the server's children."""
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in (*(() if spare_root else (root,)), *root.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


@contextlib.contextmanager
def _no_main_module() -> Iterator[None]:
    """Keep worker processes from importing the user's main script again: what they need of it comes pickled by
    value."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


class EventSender:
    """A worker process's end of its pipe to the runner. Waits while the pipe is full."""

    def __init__(self, writer: connection.Connection) -> None:
        self._writer = writer

    def put(self, message: Any) -> None:
        self._writer.send(message)


class WorkerProcesses:
    """The worker processes of one run, by name. Each has a folder of its own for temporary files, removed when it has
    ended.

    Attributes:
        gone: Whether they have been there and have ended.
        folders: Where each keeps its temporary files.
    """

    def __init__(self) -> None:
        self.gone = False
        self._processes: dict[str, BaseProcess] = {}
        self._inboxes: dict[str, connection.Connection] = {}
        self.folders: dict[str, Path] = {}
        self._folder: Path | None = None

    def __enter__(self) -> WorkerProcesses:
        return self

    def __exit__(self, *exc: object) -> None:
        self.gone = bool(self._processes)
        self.kill(list(self._processes))
        if self._folder is not None:
            remove_temporary_folder(self._folder)

    def start(self, name: str, main: Callable[..., None], *args: Any) -> None:
        """Start ``main(name, outbox, folder, *args)`` in a process of its own; `folder` is where its temporary files
        belong."""
        self._folder = self._folder or make_temporary_folder()
        folder = self.folders[name] = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self._folder))
        reader, writer = multiprocessing.Pipe(duplex=False)
        with contextlib.suppress(OSError):  # a limit of the system's; a smaller pipe only makes senders wait sooner
            fcntl.fcntl(writer.fileno(), fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        context = multiprocessing.get_context("forkserver")
        process = context.Process(
            target=main, name=f"sfactory-{name}", args=(name, EventSender(writer), str(folder), *args)
        )
        with _lock:
            _launch(process)
        writer.close()
        self._processes[name], self._inboxes[name] = process, reader

    def take(self, timeout: float) -> list[Any]:
        """The messages that are waiting, one of each worker at most; waits up to `timeout` seconds if there is none."""
        messages = []
        for reader in connection.wait(list(self._inboxes.values()), timeout):
            try:
                messages.append(reader.recv())
            except (EOFError, OSError):
                name = next(name for name, inbox in self._inboxes.items() if inbox is reader)
                self._inboxes.pop(name).close()
        return messages

    @property
    def names(self) -> list[str]:
        """Of the workers that have been started and not been killed."""
        return list(self._processes)

    def pids(self) -> dict[str, int]:
        """Process ids of those that have not ended, by name."""
        return {name: process.pid for name, process in self._processes.items() if process.exitcode is None}

    def alive(self) -> set[str]:
        """Names of the workers that have not ended, or whose last messages have not been taken."""
        return {
            name for name, process in self._processes.items() if process.exitcode is None or self._has_messages(name)
        }

    def _has_messages(self, name: str) -> bool:
        return name in self._inboxes and self._inboxes[name].poll()

    def exit_codes(self) -> dict[str, int]:
        """Exit codes of the workers that are not alive, by name; negative: the signal that killed it."""
        alive = self.alive()
        return {name: process.exitcode for name, process in self._processes.items() if name not in alive}

    def resident_bytes(self) -> int:
        """Resident memory of all workers; pages that they share count once for each."""
        total = 0
        for process in self._processes.values():
            with contextlib.suppress(psutil.Error):
                total += psutil.Process(process.pid).memory_info().rss
        return total

    def kill(self, names: Collection[str]) -> None:
        """End workers and forget them; what their environments have started ends too, also if the worker itself is
        gone."""
        processes = [self._processes.pop(name) for name in names]
        for process in processes:
            if process.exitcode is None:
                kill_tree(process.pid)
        _kill_groups({process.pid for process in processes})
        for process in processes:
            process.join()
            process.close()
        for name in names:
            if (inbox := self._inboxes.pop(name, None)) is not None:
                inbox.close()
            shutil.rmtree(self.folders.pop(name), ignore_errors=True)
