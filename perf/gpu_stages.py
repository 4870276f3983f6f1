"""The stages of perf/gpu.py but the first, which needs no package: checks against the CPU, and whole runs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import shlex
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator

import torch

from perf import gpu_checks
from perf.gpu_task import Result, Task
from sfactory.config import Config, devices, fitted_with_free_batch_size
from sfactory.config.command_line import from_command_line
from sfactory.eval import evaluate
from sfactory.profiling.bottleneck import find_bottleneck
from sfactory.profiling.ceiling import measure_ceiling
from sfactory.profiling.measure import profile_run
from sfactory.profiling.report import values
from sfactory.runtime.planning import make_plan
from sfactory.runtime.processes import fork_server
from sfactory.runtime.runner import run_resolved

NATIVE = (
    "--env sfactory/CartPole --preset none --model.shared-critic True --workers 8 --envs-per-worker 4096 --rollout 32 "
    "--batch-size 131072"
)
TENSORS = (
    "--env sfactory/TensorCartPole --preset none --model.shared-critic True --envs-per-worker 32768 --rollout 16 "
    "--batch-size 524288"
)
PONG = "--env ALE/Pong-v5 --preset none --envs-per-worker 64 --rollout 32 --batch-size 4096"
WORKLOADS = {
    "cartpole-native": NATIVE,
    "cartpole-tensors": TENSORS,
    "pong": PONG,
    "halfcheetah": "--env HalfCheetah-v5 --preset none --model.shared-critic True --envs-per-worker 128 --rollout 64 "
    "--batch-size 16384",
    "vizdoom-basic": "--env VizdoomBasic-v1 --preset none --envs-per-worker 16 --rollout 32 --batch-size 2048",
    "pong-preset": "--env ALE/Pong-v5",
    "cartpole-preset": "--env CartPole-v1",
    "cartpole-native-cpu-inference": f"{NATIVE} --runtime.inference-device cpu",
    "pong-mps": f"{PONG} --runtime.mps",
    "pong-no-graphs": f"{PONG} --runtime.no-cuda-graphs",
    "pong-compile": f"{PONG} --optim.compile",
    "pong-lstm": f"{PONG} --model.core lstm",
}
"""Throughput settings for 16 cores and one GPU, where no number of workers is given there are two fewer than cores;
and presets as they are."""
BARS = {
    "cartpole-native": {"fps": 5_000_000},
    "cartpole-tensors": {"fps": 10_000_000},
    "pong": {"fps": 45_000, "fraction_of_simulation": 0.85},
    "vizdoom-basic": {"fraction_of_simulation": 0.70},
}
REFERENCE_THREADS = 4
"""Of what the CPU computes for comparison."""
LEARNED = 400.0
"""Mean return on CartPole-v1 that shows that what is learned on the device is right; the preset reaches 475 to 500."""


def answers(task: Task) -> Result:
    """Policy workers' answers against the CPU's, and recorded launches against single ones."""
    sizes = {"rows": 2, "batches": 16} if task.tiny else {}
    return _checked(gpu_checks.answer_checks(devices.resolve_device(task.device), **sizes), task)


def learner(task: Task) -> Result:
    """The learner's targets, losses, gradients and steps against the CPU's, and that the host waits for nothing
    meanwhile."""
    sizes = {"rows": 2} if task.tiny else {}
    return _checked(gpu_checks.learner_checks(devices.resolve_device(task.device), **sizes), task)


def _checked(checks: Iterator[tuple[str, Result]], task: Task) -> Result:
    """All results of checks, each kept as it comes."""
    torch.set_num_threads(1 if task.tiny else REFERENCE_THREADS)
    done: dict[str, Result] = {}
    result: Result = {"ok": True, "checks": done}
    for name, check in checks:
        done[name] = check
        result["ok"] = all(found["ok"] for found in done.values())
        task.keep(result)
    return result


def learns(task: Task) -> Result:
    """A run with the preset from the first step to an evaluation."""
    steps = 2_000 if task.tiny else 150_000
    with tempfile.TemporaryDirectory() as folder:
        flags = (
            f"--env CartPole-v1 --steps {steps} --device {task.device} --run {folder}/run --log.display none "
            "--log.no-tensorboard"
        )
        result = run_resolved(from_command_line(shlex.split(flags), "perf/gpu.py"))
        reached = evaluate(f"{folder}/run", episodes=20).return_mean
    enough = task.tiny or reached >= LEARNED
    return {
        "ok": result.status == "completed" and enough,
        "return": reached,
        "env_steps": result.env_steps,
        "seconds": result.wall_s,
    }


def workload(name: str, task: Task) -> Result:
    """A profiled run, what the machine could do at most, and how busy the GPU was."""
    config = from_command_line([*shlex.split(WORKLOADS[name]), "--device", task.device], "perf/gpu.py")
    if task.tiny:
        config = _tiny(config)
    with fork_server():
        with utilisation(task.device) as readings:
            profile = profile_run(make_plan(config), task.seconds)
        within = [
            percent for read_s, percent in readings if 1.0 <= read_s - profile.begin_s <= profile.seconds
        ]  # each reading is of the second before it
        result: Result = {"fps": profile.fps, "gpu_percent": sum(within) / len(within) if within else None}
        task.keep(result)
        if profile.plan.on_device:
            return _held_to(name, result | values(profile, math.nan, find_bottleneck(profile)), task)
        ceiling = measure_ceiling(profile.plan.config, task.seconds / 2, episode_length=profile.episode_length)
    simulating = min(profile.plan.config.workers, ceiling.cores)
    simulation = simulating / ceiling.simulation_s
    result |= values(profile, ceiling.env_steps_per_s, find_bottleneck(profile)) | {
        "simulating_cores": simulating,
        "simulation": simulation,
        "fraction_of_simulation": profile.fps / simulation,
        "costs": dataclasses.asdict(ceiling),
    }
    return _held_to(name, result, task)


def _held_to(name: str, result: Result, task: Task) -> Result:
    """A workload's result beside its bars, if it has any."""
    if bars := BARS.get(name):
        result |= {"bar": bars, "ok": task.tiny or all(result[key] >= bar for key, bar in bars.items())}
    return result


def _tiny(config: Config) -> Config:
    """A run of a workload's kind that starts in seconds on any machine."""
    runtime = dataclasses.replace(config.runtime, mps=False)  # which a rehearsal has no GPU for
    small = dataclasses.replace(
        config, workers=1, envs_per_worker=4, rollout=8, batch_size=32, precision="float32", runtime=runtime
    )
    return fitted_with_free_batch_size(small, 1, images=False)


@contextlib.contextmanager
def utilisation(device: str) -> Iterator[list[tuple[float, float]]]:
    """When, in monotonic seconds, and in what percent of the second before the GPU did anything, as nvidia-smi reports
    it; empty without it, or where it may mean another GPU."""
    readings: list[tuple[float, float]] = []
    name = None if device == "cpu" else devices.name_for_driver(torch.device(device))
    process = None
    if name is not None:
        command = ["nvidia-smi", "-i", name, "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-l", "1"]
        with contextlib.suppress(OSError):
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    if process is None:
        yield readings
        return

    def read() -> None:
        readings.extend((time.monotonic(), float(line)) for line in process.stdout if line.strip().isdigit())

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield readings
    finally:
        process.terminate()
        process.wait()
        reader.join(1.0)


STAGES: dict[str, Callable[[Task], Result]] = {
    "answers": answers,
    "learner": learner,
    "learns": learns,
    **{name: functools.partial(workload, name) for name in WORKLOADS},
}
"""All of :data:`perf.gpu.STAGES` but the first."""
