"""Times the estimators and the loss: the compiled kernels against plain NumPy and torch operations, on one thread.

python -m perf.kernels [--device cuda] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from sfactory.config import LossConfig
from sfactory.gae import gae, gae_torch
from sfactory.losses import Targets, total_loss, total_loss_torch
from sfactory.vtrace import vtrace, vtrace_torch

SHAPES = [(32, 64), (32, 512), (128, 1024)]
GAMMA, LAM = 0.99, 0.95


@dataclass(frozen=True)
class Timing:
    """One row of the table: the best mean time of a call, and the same for each of its steps x rows samples."""

    kernel: str
    implementation: str
    steps: int
    rows: int
    microseconds: float
    nanoseconds_per_sample: float


def vtrace_numpy(
    log_ratios: np.ndarray,
    rewards: np.ndarray,
    values: np.ndarray,
    bootstrap_value: np.ndarray,
    terminated: np.ndarray,
    truncated: np.ndarray,
    final_values: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """V-trace as NumPy operations on one time step after the other."""
    weights = np.minimum(np.exp(log_ratios), 1.0)
    decay = np.where(terminated | truncated, 0.0, GAMMA * LAM).astype(values.dtype)
    following = np.where(truncated, final_values, np.concatenate((values[1:], bootstrap_value[None])))
    delta = rewards + GAMMA * np.where(terminated, 0.0, following).astype(values.dtype) - values
    vs, advantages = np.empty_like(values), np.empty_like(values)
    correction = np.zeros_like(bootstrap_value)
    for t in range(len(values) - 1, -1, -1):
        advantage = weights[t] * (delta[t] + decay[t] * correction)
        correction = advantage
        vs[t], advantages[t] = values[t] + correction, advantage
    return vs, advantages


def gae_numpy(rewards: np.ndarray, *others: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """GAE as :func:`vtrace_numpy` with an importance weight of 1, which it equals."""
    returns, advantages = vtrace_numpy(np.zeros_like(rewards), rewards, *others)
    return advantages, returns


def best_time(call: Callable[[], object], device: torch.device, seconds: float = 0.1, repeats: int = 5) -> float:
    """The least of several mean times of a call, in seconds; the first call, which compiles, does not count."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def mean_time(calls: int) -> float:
        wait()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        wait()
        return (time.perf_counter() - start) / calls

    call()
    calls = max(1, int(seconds / mean_time(3)))
    return min(mean_time(calls) for _ in range(repeats))


def cases(steps: int, rows: int, device: torch.device) -> dict[tuple[str, str], Callable[[], object]]:
    """The calls to time, by kernel and implementation, on random float32 segments with a few ends of episodes."""
    rng = np.random.default_rng(0)
    ends = rng.random((steps, rows))
    log_ratios, rewards, values, final_values = rng.normal(0, 0.5, (4, steps, rows)).astype(np.float32)
    arrays = (log_ratios, rewards, values, values[0].copy(), ends < 0.01, ends > 0.99, final_values)
    tensors = tuple(torch.from_numpy(array).to(device) for array in arrays)
    inputs = tuple(tensor.clone().requires_grad_() for tensor in tensors[:3])
    targets = Targets(*(tensors[i].clone() for i in (1, 6, 2, 0)), valid=~tensors[5])
    config = LossConfig(entropy_coef=0.01)
    return {
        ("vtrace", "numba"): lambda: vtrace(*arrays, GAMMA, LAM),
        ("vtrace", "numpy"): lambda: vtrace_numpy(*arrays),
        ("vtrace", f"torch {device}"): lambda: vtrace_torch(*tensors, GAMMA, LAM),
        ("gae", "numba"): lambda: gae(*arrays[1:], GAMMA, LAM),
        ("gae", "numpy"): lambda: gae_numpy(*arrays[1:]),
        ("gae", f"torch {device}"): lambda: gae_torch(*tensors[1:], GAMMA, LAM),
        ("loss and gradients", "total_loss"): lambda: torch.autograd.grad(total_loss(config, "appo", *inputs, targets)[0], inputs),
        ("loss and gradients", "total_loss_torch"): lambda: torch.autograd.grad(
            total_loss_torch(config, "appo", *inputs, targets)[0], inputs
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", type=torch.device, help="device of the torch implementations")
    parser.add_argument("--json", type=Path, help="write the timings to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    timings = []
    for steps, rows in SHAPES:
        for (kernel, implementation), call in cases(steps, rows, args.device).items():
            seconds = best_time(call, args.device)
            timings.append(Timing(kernel, implementation, steps, rows, 1e6 * seconds, 1e9 * seconds / (steps * rows)))
    table = Table("kernel", "implementation", "steps x rows", "us a call", "ns a sample")
    for timing in sorted(timings, key=lambda timing: (timing.kernel, timing.steps * timing.rows)):
        shape = f"{timing.steps} x {timing.rows}"
        table.add_row(timing.kernel, timing.implementation, shape, f"{timing.microseconds:.0f}", f"{timing.nanoseconds_per_sample:.1f}")
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps([asdict(timing) for timing in timings], indent=1))


if __name__ == "__main__":
    main()
