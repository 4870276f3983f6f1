"""What worker processes share from their first moment. Imported by the server that they are forked from, and by nothing
else: the import changes the process.

- All that workers import is imported once.
- One compiled kernel is called, so that numba is initialised once (0.3 s for each process otherwise).
- What has been made so far is kept out of garbage collections, which would unshare 50 MiB in a worker of many
  environments.
- Orphans of a killed worker, such as the programs of its environments, become this process's children, where the runner
  finds them.

Nothing here may start a thread: a fork would leave it behind.
"""

from __future__ import annotations

import ctypes
import gc
import warnings

import numpy as np

from sfactory.envs import general, native  # noqa: F401
from sfactory.envs.families import gymnasium  # noqa: F401
from sfactory.kernels.sampling import sample_rows
from sfactory.runtime import workers  # noqa: F401

PR_SET_CHILD_SUBREAPER = 36

ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
warnings.filterwarnings("ignore", "forkserver: waitpid returned unexpected pid")  # of such an orphan
sample_rows(
    np.zeros((1, 2), np.float32), np.zeros((0, 0), bool), np.full(1, 2, np.int32), np.zeros((1, 1), np.float32),
    np.zeros((1, 0), np.float32), np.zeros((1, 1), np.int32), np.zeros((1, 0), np.float32), np.zeros(1, np.float32),
)  # fmt: skip
gc.collect()
gc.freeze()
