"""Preloaded state of worker processes. Only the fork server imports this module: the import changes the process.

- Modules of workers are imported once.
- One compiled kernel is called, which initialises numba once (0.3 s in each process otherwise).
- All objects so far are frozen for the garbage collector, which would otherwise unshare 50 MiB in a worker with many
  environments.
- Orphans of a killed worker, such as programs of its environments, become children of this process, where the runner
  finds them.
- When the runner was killed before it had a worker, this process removes its temporary files.
- When the runner ends, the kernel continues this process, and it its children: a worker that was stopped, by SIGSTOP
  for example, could not notice that end. A worker that has not ended soon after, as in C code that keeps the
  interpreter to itself, is killed.

Nothing here may start a thread: a fork does not copy threads.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import os
import signal
import warnings
from pathlib import Path

import psutil

from sfactory.files import remove_temporary_folder
from sfactory.runtime.processes import SERVER_FOLDER, kill_tree, not_collecting

if (folder := os.environ.pop(SERVER_FOLDER, None)) is not None:  # first, since the imports take long
    atexit.register(remove_temporary_folder, Path(folder))
with not_collecting(), contextlib.suppress(OSError):  # as where nothing compiled can be kept: the runner tells
    from sfactory.envs import general, native  # noqa: F401
    from sfactory.envs.families import gymnasium  # noqa: F401
    from sfactory.kernels import initialize
    from sfactory.runtime import worker_process, workers  # noqa: F401

    initialize()

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
ENDING_S = 5
"""Seconds that workers have to end after the runner."""
_runner = os.getppid()


def _continue_children(*_: object) -> None:
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            child.send_signal(signal.SIGCONT)
    if os.getppid() != _runner:
        signal.signal(signal.SIGALRM, _end)
        signal.alarm(ENDING_S)


def _end(*_: object) -> None:
    kill_tree(os.getpid(), spare_root=True)
    if folder is not None:
        remove_temporary_folder(Path(folder))
    os._exit(1)


signal.signal(signal.SIGCONT, _continue_children)
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)
ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
warnings.filterwarnings("ignore", "forkserver: waitpid returned unexpected pid")  # of such an orphan
gc.collect()
gc.freeze()
