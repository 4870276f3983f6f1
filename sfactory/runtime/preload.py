"""Preloaded state of worker processes. Only the fork server imports this module: the import changes the process.

- Modules of workers are imported once.
- One compiled kernel is called, which initialises numba once (0.3 s in each process otherwise).
- All objects so far are frozen for the garbage collector, which would otherwise unshare 50 MiB in a worker with many
  environments.
- Orphans of a killed worker, such as programs of its environments, become children of this process, where the runner
  finds them.

Nothing here may start a thread: a fork does not copy threads.
"""

from __future__ import annotations

import ctypes
import gc
import warnings

from sfactory.runtime.processes import not_collecting

with not_collecting():
    from sfactory.envs import general, native  # noqa: F401
    from sfactory.envs.families import gymnasium  # noqa: F401
    from sfactory.kernels import initialize
    from sfactory.runtime import workers  # noqa: F401

    initialize()

PR_SET_CHILD_SUBREAPER = 36

ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
warnings.filterwarnings("ignore", "forkserver: waitpid returned unexpected pid")  # of such an orphan
gc.collect()
gc.freeze()
