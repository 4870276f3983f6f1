"""Errors of devices: which they are, and what the learner's tells the user to do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from sfactory.config import Config
from sfactory.errors import RunFailed

DEVICE_ERRORS = (
    "CUDA error", "CUDNN_STATUS", "CUBLAS_STATUS", "CUDA driver error", "Triton Error [CUDA]",
    "unable to find an engine to execute this computation",  # of cuDNN, often for want of memory
)  # fmt: skip
"""What errors of libraries on a device say."""


def is_device_error(error: BaseException) -> bool:
    """Whether a device has failed or run out of memory, not the program."""
    if isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError):
        return True
    return isinstance(error, RuntimeError) and any(name in str(error) for name in DEVICE_ERRORS)


@contextlib.contextmanager
def explaining(config: Config) -> Iterator[None]:
    """Around the learner's work: an error of its device is raised as one that says what to do."""
    try:
        yield
    except BaseException as error:
        if (told := explained(error, config)) is error:
            raise
        raise told from error


def explained(error: BaseException, config: Config) -> BaseException:
    """An error of the learner's device as one that says what to do; others as they are."""
    if not is_device_error(error):
        return error
    said = str(error).strip().partition("\n")[0]
    if isinstance(error, torch.OutOfMemoryError):
        return RunFailed(
            f"the learner's device has too little memory: {said}; what was learned so far is saved. Lower batch_size "
            f"(now {config.batch_size}), raise optim.minibatches (now {config.optim.minibatches}), use --precision "
            "bfloat16, make the model smaller, or let nothing else use the device (--runtime.inference-device cpu)"
        )
    return RunFailed(
        f"the learner's device failed: {said}; what was learned so far is saved, as far as it can still be read. The "
        "same command goes on from the last checkpoint; CUDA_LAUNCH_BLOCKING=1 shows where it happens"
    )
