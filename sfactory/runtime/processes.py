"""Worker processes: forked from one server that has already imported what they need, and killed with all descendants.

Each worker sends its events over a pipe of its own to the runner. A worker that is killed while it writes can corrupt
only its own last message, and the end of the pipe shows at once that the worker is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Collection, Iterator
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any, cast

import psutil

from sfactory.errors import ConfigError
from sfactory.files import make_temporary_folder, remove_temporary_folder

PRELOAD = "sfactory.runtime.preload"
SERVER_FOLDER = "SFACTORY_SERVER_FOLDER"
"""Variable that tells a new server which folder to remove when it ends by itself, as after a kill of the runner:
multiprocessing's, which holds the server's socket and the workers' temporary files."""
LONGEST_SOCKET = 107
"""Bytes of the longest path of a socket in a folder, unix(7)."""
PIPE_BYTES = 1 << 20
MEASURE_EVERY = 100
"""Memory is measured again after so many times as long as it took, since the kernel looks at each page: some 7 ms for
each process."""
DYING_S = 5.0
"""Seconds that a killed server may take to die."""
RUNNER_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
_lock = threading.RLock()
_users = 0
_started_here = False


@contextlib.contextmanager
def fork_server() -> Iterator[None]:
    """Keep the server running from which worker processes are forked. It imports its modules in the background.

    May be nested and used by several threads. The last exit stops the server and every process that it or its workers
    have started. A server that the user's program started before is used and left running.

    Raises:
        ConfigError: The folder of temporary files has too long a name for the server's socket.
    """
    global _users, _started_here
    with _lock:
        _check_folder()
        if not _users:
            _started_here = not server_pid()
            _start_server()
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users and _started_here:
                _stop_server()


@contextlib.contextmanager
def not_collecting() -> Iterator[None]:
    """Around imports, which make no garbage worth collecting: 0.2 s less where torch is among them."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def server_pid() -> int | None:
    """Process id of the fork server, or None."""
    server: Any = forkserver._forkserver
    return server._forkserver_pid


def _check_folder() -> None:
    """Check that a socket below the folder of temporary files can have a path. Multiprocessing's own folder there is
    not made for that: until there is a server, nobody removes it."""
    folder = Path(tempfile.gettempdir())
    size = len(os.fsencode(folder / "pymp-12345678" / "listener-12345678"))
    if size > LONGEST_SOCKET:
        raise ConfigError(
            f"{folder} has too long a name for temporary files: a socket of the worker processes would have a "
            f"path of {size} bytes there, and {LONGEST_SOCKET} is the most. Set TMPDIR to a folder with a shorter name"
        )


def _start_server() -> None:
    """Start the server with the runner's signals blocked; workers inherit that from their first instruction."""
    multiprocessing.get_context("forkserver").set_forkserver_preload([PRELOAD])
    before = signal.pthread_sigmask(signal.SIG_BLOCK, RUNNER_SIGNALS)
    try:
        resource_tracker.ensure_running()  # which unblocks SIGINT and SIGTERM
        signal.pthread_sigmask(signal.SIG_BLOCK, RUNNER_SIGNALS)
        os.environ[SERVER_FOLDER] = get_temp_dir()
        with _no_main_module():
            forkserver.ensure_running()
    finally:
        os.environ.pop(SERVER_FOLDER, None)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _launch(process: BaseProcess) -> None:
    """Start a process, with a new server where the old one was killed, even if it is still dying."""
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


def _pid(process: BaseProcess) -> int:
    """Of a process that has been started."""
    return cast(int, process.pid)


def _stop_server() -> None:
    if (pid := server_pid()) is not None:
        # Killed, since it may still be importing, and a child of an environment may keep its pipe open.
        kill_tree(pid)
        server: Any = forkserver._forkserver
        server._stop()


def _kill_groups(leaders: set[int]) -> None:
    """Kill all processes of this session in the process groups of these leaders, with their descendants."""
    session = os.getsid(0)
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(process.pid) in leaders and os.getsid(process.pid) == session:
                kill_tree(process.pid)


def _kill_programs(folders: set[str]) -> None:
    """Kill what has left the session of a dead worker: descendants of the server, which adopts them, whose temporary
    files belong into that worker's folder."""
    if (pid := server_pid()) is None:
        return
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if process.environ().get("TMPDIR") in folders:
                    kill_tree(process.pid)


def kill_tree(pid: int, spare_root: bool = False) -> None:
    """Kill a process and its descendants. The fork server adopts orphans of killed workers, so they count as its
    children. Programs of another user, as those that sudo has started, are left."""
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in (*(() if spare_root else (root,)), *root.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                process.kill()


@contextlib.contextmanager
def _no_main_module() -> Iterator[None]:
    """Keep worker processes from importing the user's main script again: what they need of it is pickled by value."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


class EventSender:
    """A worker's end of its pipe to the runner."""

    def __init__(self, writer: connection.Connection) -> None:
        self._writer = writer

    def put(self, event: Any) -> None:
        """Send an event; waits while the pipe is full."""
        self._writer.send(event)


class WorkerProcesses:
    """The worker processes of one run, by name. Each has a folder of its own for temporary files, removed at its end.

    Attributes:
        ended: Whether processes were started and all of them have ended.
        folders: Folder of each worker's temporary files.
    """

    def __init__(self) -> None:
        self.ended = False
        self._processes: dict[str, BaseProcess] = {}
        self._readers: dict[str, connection.Connection] = {}
        self._resident, self._measure_at = 0, -math.inf
        self.folders: dict[str, Path] = {}

    def __enter__(self) -> WorkerProcesses:
        return self

    def __exit__(self, *exc: object) -> None:
        self.ended = bool(self._processes)
        self.kill(list(self._processes))

    def start(self, name: str, main: Callable[..., None], *args: Any) -> None:
        """Start ``main(name, events, folder, *args)`` in a process of its own.

        Args:
            name: Name of the worker.
            main: Main function. Its `events` is an :class:`EventSender`, its `folder` is for temporary files.
            args: Further arguments of `main`.
        """
        folder = self.folders[name] = make_temporary_folder(f"{name}-", get_temp_dir())
        reader, writer = multiprocessing.Pipe(duplex=False)
        with contextlib.suppress(OSError):  # beyond the system's limit senders only wait sooner
            fcntl.fcntl(writer.fileno(), fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        context = multiprocessing.get_context("forkserver")
        process = context.Process(
            target=main, name=f"sfactory-{name}", args=(name, EventSender(writer), str(folder), *args)
        )
        with _lock:
            _launch(process)
        writer.close()
        self._processes[name], self._readers[name] = process, reader

    def take(self, timeout: float) -> list[Any]:
        """Waiting events, at most one of each worker. Waits up to `timeout` seconds if there is none."""
        events = []
        ready = connection.wait(list(self._readers.values()), timeout)
        for name, reader in list(self._readers.items()):
            if reader not in ready:
                continue
            try:
                events.append(reader.recv())
            except (EOFError, OSError):
                self._readers.pop(name).close()
        return events

    @property
    def names(self) -> list[str]:
        """Names of the workers that have been started and not been killed."""
        return list(self._processes)

    def pids(self) -> dict[str, int]:
        """Process ids of the workers that have not ended, by name."""
        return {name: _pid(process) for name, process in self._processes.items() if process.exitcode is None}

    def alive(self) -> set[str]:
        """Names of the workers that have not ended, or whose last events have not been taken."""
        return {name for name, process in self._processes.items() if process.exitcode is None or self._has_events(name)}

    def _has_events(self, name: str) -> bool:
        return name in self._readers and self._readers[name].poll()

    def exit_codes(self) -> dict[str, int]:
        """Exit codes of the workers that are not alive, by name; negative: the signal that killed the process."""
        alive = self.alive()
        codes = {name: process.exitcode for name, process in self._processes.items() if name not in alive}
        return {name: code for name, code in codes.items() if code is not None}

    def resident_bytes(self) -> int:
        """Resident memory of this process, the server and all workers in bytes, as last measured. What several of them
        share counts once."""
        if (begin := time.monotonic()) >= self._measure_at:
            self._resident = 0
            for pid in {os.getpid(), server_pid() or os.getpid(), *self.pids().values()}:
                with contextlib.suppress(psutil.Error):
                    self._resident += psutil.Process(pid).memory_full_info().pss
            self._measure_at = begin + MEASURE_EVERY * (time.monotonic() - begin)
        return self._resident

    def kill(self, names: Collection[str]) -> None:
        """Kill workers, with everything that their environments have started, and remove them from this collection. A
        worker may have died before."""
        processes = [self._processes.pop(name) for name in names]
        for process in processes:
            if process.exitcode is None:
                kill_tree(_pid(process))
        _kill_groups(set(map(_pid, processes)))
        _kill_programs({str(self.folders[name]) for name in names})
        for process in processes:
            process.join()
            process.close()
        for name in names:
            if (reader := self._readers.pop(name, None)) is not None:
                reader.close()
            remove_temporary_folder(self.folders.pop(name))
