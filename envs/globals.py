"""What environments may change of the process that they are in, though it is not theirs."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch

from sfactory.config.sources import working_directory_kept


@contextlib.contextmanager
def globals_kept() -> Iterator[None]:
    """Leave to the caller what environments may change: the working directory, the global random states of Python,
    NumPy and torch, what NumPy does at floating-point errors, and whether torch records gradients."""
    python, numpy = random.getstate(), np.random.get_state()
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with (
            working_directory_kept(),
            torch.random.fork_rng(gpus),
            torch.set_grad_enabled(torch.is_grad_enabled()),
            np.errstate(),
        ):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
