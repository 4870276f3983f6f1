"""What environments may change of the process that they are in, though it is not theirs."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator

import numpy as np
import torch


@contextlib.contextmanager
def globals_kept() -> Iterator[None]:
    """Leave to the caller what environments may change: the working directory, the global random states of Python,
    NumPy and torch, what NumPy does at floating-point errors, and whether torch records gradients."""
    folder, python, numpy = _working_directory(), random.getstate(), np.random.get_state()
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(gpus), torch.set_grad_enabled(torch.is_grad_enabled()), np.errstate():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        with contextlib.suppress(OSError):  # it has been removed
            os.chdir(folder)


def _working_directory() -> str:
    try:
        return os.getcwd()
    except OSError:  # it has been removed
        return os.curdir
