"""Environments that take their process with them."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from sfactory.data.queues import IndexQueue

_MUTEX = 56
"""Where faster-fifo's mutex lies in its queue's own memory (glibc, x86-64 and arm64)."""


class Dying(gym.Env):
    """Ends its process at one of its steps, `times` times in the whole run, and works well otherwise.

    Args:
        way: kill (at once), locked (holding the locks of all the queues of its process), exit, hang.
        folder: Where the deaths are counted.
        after: Steps before.
    """

    observation_space = spaces.Box(-1, 1, (3,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, way: str, folder: str, times: int = 1, after: int = 100):
        self.way, self.folder, self.times, self.after, self.count = way, Path(folder), times, after, 0

    def reset(self, *, seed=None, options=None):
        return np.zeros(3, np.float32), {}

    def step(self, action):
        self.count += 1
        if self.count == self.after and self._may_die():
            getattr(self, f"_{self.way}")()
        return np.zeros(3, np.float32), 1.0, self.count % 10 == 0, False, {}

    def _may_die(self) -> bool:
        for number in range(self.times):
            try:
                (self.folder / f"death-{number}").touch(exist_ok=False)
                return True
            except FileExistsError:
                continue
        return False

    def _kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def _locked(self) -> None:
        for queue in [thing for thing in gc.get_objects() if isinstance(thing, IndexQueue)]:
            memory = queue._queue.queue_obj_buffer
            assert bytes(memory)[_MUTEX + 16 : _MUTEX + 20] == b"\x80\0\0\0", "no mutex that processes share lies here"
            assert ctypes.CDLL(None).pthread_mutex_lock(ctypes.c_void_p(ctypes.addressof(memory) + _MUTEX)) == 0
        self._kill()

    def _exit(self) -> None:
        os._exit(3)

    def _hang(self) -> None:
        time.sleep(1000)
