"""All checks of a machine with a GPU, within a time limit, into one JSON file. perf/gpu.sh prepares a bare machine and
calls this.

    python -m perf.gpu [--device cuda] [--limit 540] [--seconds 10] [--only STAGE ...] [--out FILE]

Every stage is a process of its own with a time limit of its own, so that one that fails or hangs costs nothing but
itself; the file is written anew after each. Stages that the time does not suffice for are left out, the last of the
list first. `--device cpu` runs the same
stages with tiny sizes: a rehearsal of this script, whose figures mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.metadata
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from perf import gpu_checks
from sfactory.config import Config, devices, fitted_anew, from_command_line
from sfactory.eval import evaluate
from sfactory.profiling.bottleneck import find_bottleneck
from sfactory.profiling.ceiling import measure_ceiling
from sfactory.profiling.measure import profile_run
from sfactory.profiling.report import values
from sfactory.runtime.planning import make_plan
from sfactory.runtime.processes import fork_server
from sfactory.runtime.supervisor import run_resolved

ROOT = Path(__file__).resolve().parent.parent
OUT = Path(os.environ.get("OUT", ROOT / "perf" / "out")) / "gpu.json"
Result = dict[str, Any]
NATIVE = (
    "--env sfactory/CartPole --preset none --model.shared-critic True --workers 8 --envs-per-worker 4096 --rollout 32 "
    "--batch-size 131072"
)
PONG = "--env ALE/Pong-v5 --preset none --envs-per-worker 64 --rollout 32 --batch-size 4096"
WORKLOADS = {
    "cartpole-native": NATIVE,
    "pong": PONG,
    "halfcheetah": "--env HalfCheetah-v5 --preset none --model.shared-critic True --envs-per-worker 128 --rollout 64 "
    "--batch-size 16384",
    "vizdoom-basic": "--env VizdoomBasic-v1 --preset none --envs-per-worker 16 --rollout 32 --batch-size 2048",
    "cartpole-native-cpu-inference": f"{NATIVE} --runtime.inference-device cpu",
    "pong-no-graphs": f"{PONG} --runtime.no-cuda-graphs",
    "pong-compile": f"{PONG} --optim.compile",
    "pong-lstm": f"{PONG} --model.core lstm",
}
"""Throughput settings for 16 cores and one GPU; where no number of workers is given there are two fewer than cores."""
BARS = {
    "cartpole-native": ("fps", 4_000_000),
    "pong": ("fraction_of_simulation", 0.85),
    "vizdoom-basic": ("fraction_of_simulation", 0.70),
}
LEARNED = 400.0
"""Mean return on CartPole-v1 that shows that what is learned on the device is right; the preset reaches 475 to 500."""


@dataclass(frozen=True)
class Task:
    """What the stages are given.

    Attributes:
        device: For learner and policy workers.
        seconds: Measured of each workload.
        tiny: A rehearsal.
    """

    device: str
    seconds: float
    tiny: bool


def machine(task: Task) -> Result:
    """What there is: processors, versions, and how fast the host reaches the device."""
    packages = ("numpy", "numba", "gymnasium", "ale-py", "vizdoom", "mujoco", "tyro", "faster-fifo")
    result: Result = {"cores": devices.cores(), "python": platform.python_version(), "torch": torch.__version__}
    result |= {name: _version(name) for name in packages}
    device = devices.resolve_device(task.device)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        result |= {"gpu": properties.name, "gpu_mib": properties.total_memory >> 20, "cuda": torch.version.cuda}
        result |= {
            "capability": f"{properties.major}.{properties.minor}",
            "gib_per_s": _bandwidth(device),
            "wait_us": _wait_us(device),
        }
    return result


def _version(package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def _bandwidth(device: torch.device, size: int = 1 << 26) -> dict[str, float]:
    """GiB/s of copies between pinned memory and the device."""
    host, own = (
        torch.empty(size, dtype=torch.uint8, pin_memory=True),
        torch.empty(size, dtype=torch.uint8, device=device),
    )
    speeds = {}
    for name, (target, source) in {"to device": (own, host), "to host": (host, own)}.items():
        for repeats in (1, 10):  # once to warm up
            torch.cuda.synchronize(device)
            begin = time.perf_counter()
            for _ in range(repeats):
                target.copy_(source, non_blocking=True)
            torch.cuda.synchronize(device)
        speeds[name] = 10 * size / 2**30 / (time.perf_counter() - begin)
    return speeds


def _wait_us(device: torch.device, repeats: int = 500) -> float:
    """Microseconds of a small copy to the device, one back, and the wait for it: the least that a batch of answers can
    take."""
    host, own, event = torch.empty(64, pin_memory=True), torch.empty(64, device=device), torch.cuda.Event()
    begin = time.perf_counter()
    for _ in range(repeats):
        own.copy_(host, non_blocking=True)
        host.copy_(own, non_blocking=True)
        event.record()
        event.synchronize()
    return 1e6 * (time.perf_counter() - begin) / repeats


def answers(task: Task) -> Result:
    """Policy workers' answers against the CPU's, and recorded launches against single ones."""
    sizes = {"rows": 2, "batches": 16} if task.tiny else {}
    return _all_ok(gpu_checks.check_all(gpu_checks.check_answers, devices.resolve_device(task.device), **sizes))


def learner(task: Task) -> Result:
    """The learner's loss, targets, gradients and steps against the CPU's, and that the host waits for nothing
    meanwhile."""
    sizes = {"rows": 2} if task.tiny else {}
    return _all_ok(gpu_checks.check_all(gpu_checks.check_learner, devices.resolve_device(task.device), **sizes))


def _all_ok(checks: dict[str, Result]) -> Result:
    return {"ok": all(check["ok"] for check in checks.values()), "checks": checks}


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
        ceiling = measure_ceiling(profile.plan.config, task.seconds / 2)
    simulation = ceiling.cores / ceiling.simulation_s
    result = values(profile, ceiling.env_steps_per_s, find_bottleneck(profile)) | {
        "simulation": simulation,
        "fraction_of_simulation": profile.fps / simulation,
        "costs": dataclasses.asdict(ceiling),
        "gpu_percent": _mean(readings[-max(1, int(profile.seconds)) :]),
    }
    if name in BARS:
        key, bar = BARS[name]
        result |= {"bar": {key: bar}, "ok": task.tiny or result[key] >= bar}
    return result


def _tiny(config: Config) -> Config:
    """A run of a workload's kind that starts in seconds on any machine."""
    small = dataclasses.replace(config, workers=1, envs_per_worker=4, rollout=8, batch_size=32, precision="float32")
    return fitted_anew(small, 1)


@contextlib.contextmanager
def utilisation(device: str) -> Iterator[list[float]]:
    """Percent of the time in which the GPU did anything, about once a second, as nvidia-smi reports it; empty without
    it."""
    readings: list[float] = []
    index = device.partition(":")[2] or "0"
    command = ["nvidia-smi", "-i", index, "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-l", "1"]
    try:
        process = (
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            if device != "cpu"
            else None
        )
    except OSError:
        process = None
    try:
        yield readings
    finally:
        if process is not None:
            process.terminate()
            printed, _ = process.communicate()
            readings += [float(line) for line in printed.split("\n") if line.strip().isdigit()]


def _mean(numbers: list[float]) -> float | None:
    return sum(numbers) / len(numbers) if numbers else None


STAGES: dict[str, tuple[Callable[[Task], Result], float]] = {
    "machine": (machine, 60),
    "answers": (answers, 90),
    "learner": (learner, 60),
    "cartpole-native": (lambda task: workload("cartpole-native", task), 90),
    "pong": (lambda task: workload("pong", task), 100),
    "halfcheetah": (lambda task: workload("halfcheetah", task), 90),
    "vizdoom-basic": (lambda task: workload("vizdoom-basic", task), 120),
    "learns": (learns, 60),
    "cartpole-native-cpu-inference": (lambda task: workload("cartpole-native-cpu-inference", task), 80),
    "pong-no-graphs": (lambda task: workload("pong-no-graphs", task), 80),
    "pong-compile": (lambda task: workload("pong-compile", task), 120),
    "pong-lstm": (lambda task: workload("pong-lstm", task), 80),
}
"""In the order of their importance, each with the seconds that it may take."""
REFERENCE_THREADS = 4
"""Of what the CPU computes for comparison."""
LEAST_S = 20.0
"""A stage is not begun with less than this left."""


def run_stage(name: str, task: Task, limit_s: float) -> Result:
    """A stage in a process of its own: its status (ok, missed, failed, late) and what it gave, or the end of what it
    printed."""
    command = [
        sys.executable,
        "-m",
        "perf.gpu",
        "--stage",
        name,
        "--device",
        task.device,
        "--seconds",
        str(task.seconds),
    ]
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, open(f"{folder}/log", "w+b") as log:
        answer = Path(folder) / "answer.json"
        process = subprocess.Popen(
            [*command, "--out", str(answer)], cwd=ROOT, stdout=log, stderr=log, start_new_session=True
        )
        try:
            status = "failed" if process.wait(limit_s) else "ok"
        except subprocess.TimeoutExpired:
            status = "late"
        finally:
            end_tree(process)
        log.seek(0)
        printed = log.read()[-3000:].decode(errors="replace")
        result = json.loads(answer.read_text()) if status == "ok" else {}
    status = "missed" if result.get("ok") is False else status
    seconds = time.monotonic() - begin
    return {"status": status, "seconds": round(seconds, 1), "result": result} | (
        {"printed": printed} if printed.strip() else {}
    )


def end_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a stage and of all that it has started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_all(names: list[str], task: Task, limit_s: float, out: Path) -> Result:
    """All stages in turn, as long as the time lasts; what is known is in the file after each."""
    begin, report = time.monotonic(), {"device": task.device, "rehearsal": task.tiny, "stages": {}}
    out.parent.mkdir(parents=True, exist_ok=True)
    for name in names:
        left = limit_s - (time.monotonic() - begin)
        if left < LEAST_S:
            report["stages"][name] = {"status": "left out"}
        else:
            report["stages"][name] = run_stage(name, task, min(left, STAGES[name][1]))
        print(f"{name}: {_line(report['stages'][name])}", flush=True)
        out.write_text(json.dumps(report | {"seconds": round(time.monotonic() - begin, 1)}, indent=1))
    return report


def _line(stage: Result) -> str:
    shown = {
        key: stage.get("result", {}).get(key) for key in ("fps", "fraction_of_simulation", "gpu_percent", "return")
    }
    return ", ".join([stage["status"], *(f"{key} {value:,.3g}" for key, value in shown.items() if value is not None)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--limit", type=float, default=540, help="seconds for all stages together")
    parser.add_argument("--seconds", type=float, help="measured of each workload; 10, on the CPU 0.5")
    parser.add_argument("--only", nargs="*", choices=STAGES)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--stage", choices=STAGES, help="run this one here, and write what it gives to --out")
    args = parser.parse_args()
    tiny = args.device == "cpu"
    task = Task(args.device, args.seconds or (0.5 if tiny else 10.0), tiny)
    if args.stage:
        torch.set_num_threads(1 if tiny else REFERENCE_THREADS)
        args.out.write_text(json.dumps(STAGES[args.stage][0](task)))
        return 0
    report = run_all([name for name in STAGES if not args.only or name in args.only], task, args.limit, args.out)
    print(f"written to {args.out}")
    return 0 if all(stage["status"] == "ok" for stage in report["stages"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
