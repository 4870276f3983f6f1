"""All checks of a machine with a GPU, within a time limit, into one JSON file. perf/gpu.sh prepares a bare machine and
calls this.

    python -m perf.gpu [--device cuda] [--limit 540] [--seconds 10] [--only STAGE ...] [--out FILE]

Every stage is a process of its own with a time limit of its own, so that one that fails or hangs costs nothing but
itself; the file is written anew after each, and what a stage had found before it was stopped stands there too. Stages
that lack a package say so, and those that the time does not suffice for are left out, the last of the list first. This
file needs Python alone; `perf/gpu_stages.py` has the stages. `--device cpu` runs the same stages with tiny sizes: a
rehearsal of this script, whose figures mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from perf.gpu_task import Result, Task
from perf.runs import exit_at_signals

ROOT = Path(__file__).resolve().parent.parent
OUT = Path(os.environ.get("OUT", ROOT / "perf" / "out")) / "gpu.json"
STAGES = {
    "machine": 60.0,
    "learner": 120.0,
    "answers": 90.0,
    "pong": 90.0,
    "cartpole-native": 80.0,
    "cartpole-tensors": 60.0,
    "pong-preset": 70.0,
    "learns": 60.0,
    "pong-mps": 70.0,
    "halfcheetah": 80.0,
    "cartpole-preset": 60.0,
    "vizdoom-basic": 100.0,
    "cartpole-native-cpu-inference": 70.0,
    "pong-lstm": 80.0,
    "pong-no-graphs": 70.0,
    "pong-compile": 110.0,
}
"""In the order of what they tell, each with the seconds that it may take."""
NEEDS = {"pong": "ale_py", "halfcheetah": "mujoco", "vizdoom": "vizdoom"}
"""Modules without which stages whose names begin so are left out."""
LEAST_S = 20.0
"""A stage is not begun with less than this left."""
PRESET_SHARE = 0.7
"""Of the speed with throughput settings that a preset must have."""


def machine(task: Task) -> Result:
    """What there is: processors, versions, and how fast the host reaches the device. Needs no package."""
    packages = ("numpy", "numba", "gymnasium", "ale-py", "vizdoom", "mujoco", "tyro", "faster-fifo", "triton")
    result: Result = {"cores": len(os.sched_getaffinity(0)), "python": platform.python_version()}
    result |= {name: _version(name) for name in ("torch", *packages)}
    task.keep(result)
    import torch  # what stands above is known without it

    result["torch"] = torch.__version__
    if task.device == "cpu":
        return result
    device = torch.device(task.device)
    properties = torch.cuda.get_device_properties(device)
    result |= {"gpu": properties.name, "gpu_mib": properties.total_memory >> 20, "cuda": torch.version.cuda}
    result |= {
        "capability": f"{properties.major}.{properties.minor}",
        "matmul_tf32_at_first": torch.backends.cuda.matmul.allow_tf32,
        "gib_per_s": _bandwidth(device),
        "wait_us": _wait_us(device),
    }
    return result


def _version(package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def _bandwidth(device: Any, size: int = 1 << 26) -> dict[str, float]:
    """GiB/s of copies between pinned memory and the device."""
    import torch

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


def _wait_us(device: Any, repeats: int = 500) -> float:
    """Microseconds of a small copy to the device, one back, and the wait for it: the least that a batch of answers can
    take."""
    import torch

    host, own, event = torch.empty(64, pin_memory=True), torch.empty(64, device=device), torch.cuda.Event()
    begin = time.perf_counter()
    for _ in range(repeats):
        own.copy_(host, non_blocking=True)
        host.copy_(own, non_blocking=True)
        event.record()
        event.synchronize()
    return 1e6 * (time.perf_counter() - begin) / repeats


def do_stage(name: str, task: Task) -> Result:
    """A stage in this process; ``left_out`` says why it cannot run here."""
    if name == "machine":
        return machine(task)
    try:
        for module in (module for start, module in NEEDS.items() if name.startswith(start)):
            importlib.import_module(module)
        stages = importlib.import_module("perf.gpu_stages")
    except ImportError as error:
        return {"left_out": f"{type(error).__name__}: {error}"}
    return stages.STAGES[name](task)


def run_stage(name: str, task: Task, limit_s: float) -> Result:
    """A stage in a process of its own: its status (ok, missed, failed, late, left out) and what it gave, or as much as
    it had, and the end of what it printed."""
    command = [sys.executable, "-m", "perf.gpu", "--stage", name, "--device", task.device]
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, open(f"{folder}/log", "w+b") as log:
        answer = Path(folder) / "answer.json"
        process = subprocess.Popen(
            [*command, "--seconds", str(task.seconds), "--out", str(answer)],
            cwd=ROOT, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        try:
            status = "failed" if process.wait(limit_s) else "ok"
        except subprocess.TimeoutExpired:
            status = "late"
        finally:
            end_tree(process)
        log.seek(0)
        printed = log.read()[-3000:].decode(errors="replace")
        result = json.loads(answer.read_text()) if answer.exists() else {}
    if status == "ok" and "left_out" in result:
        status = "left out"
    elif status == "ok" and result.get("ok") is False:
        status = "missed"
    seconds = time.monotonic() - begin
    return {"status": status, "seconds": round(seconds, 1), "result": result} | (
        {"printed": printed} if printed.strip() else {}
    )


def end_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a stage and of all that it has started."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    tree = [process.pid]
    for pid in tree:
        tree += children.get(pid, [])
    for kill, pid in ((os.killpg, process.pid), *((os.kill, pid) for pid in tree[1:])):
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)
    process.wait()


def write(path: Path, content: Result) -> None:
    """A file that is never half written."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps(content, indent=1))
    new.replace(path)


def run_all(names: list[str], task: Task, limit_s: float, out: Path) -> Result:
    """All stages in turn, as long as the time lasts; what is known is in the file after each."""
    begin, stages = time.monotonic(), {}
    report = {"device": task.device, "rehearsal": task.tiny, "stages": stages}
    out.parent.mkdir(parents=True, exist_ok=True)
    for name in names:
        left = limit_s - (time.monotonic() - begin)
        if left < LEAST_S:
            stages[name] = {"status": "left out", "result": {"left_out": f"{left:.0f} s were left"}}
        else:
            stages[name] = run_stage(name, task, min(left, STAGES[name]))
            compare_preset(name, stages, task.tiny)
        print(f"{name}: {_line(stages[name])}", flush=True)
        write(out, report | {"seconds": round(time.monotonic() - begin, 1)})
    return report


def compare_preset(name: str, stages: dict[str, Result], tiny: bool) -> None:
    """Put into the result of a preset what share of the speed with throughput settings it has."""
    base = {"pong-preset": "pong", "cartpole-preset": "cartpole-native"}.get(name)
    own, other = (stages.get(which or "", {}).get("result", {}).get("fps") for which in (name, base))
    if own and other:
        stages[name]["result"]["of_throughput"] = own / other
        if own / other < PRESET_SHARE and not tiny:
            stages[name]["status"] = "missed"


def _line(stage: Result) -> str:
    result = stage.get("result", {})
    shown = {
        key: result.get(key) for key in ("fps", "fraction_of_simulation", "of_throughput", "gpu_percent", "return")
    }
    figures = [f"{key} {value:,.3g}" for key, value in shown.items() if value is not None]
    wrong = [name for name, check in result.get("checks", {}).items() if not check["ok"]]
    return ", ".join([stage["status"], *([result["left_out"]] if "left_out" in result else []), *figures, *wrong])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--limit", type=float, default=540, help="seconds for all stages together")
    parser.add_argument("--seconds", type=float, help="measured of each workload; 10, on the CPU 0.5")
    parser.add_argument("--only", nargs="*", choices=STAGES)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--stage", choices=STAGES, help="run this one here, and write what it gives to --out")
    args = parser.parse_args()
    exit_at_signals()
    tiny = args.device == "cpu"
    task = Task(args.device, args.seconds or (0.5 if tiny else 10.0), tiny, lambda result: write(args.out, result))
    if args.stage:
        write(args.out, do_stage(args.stage, task))
        return 0
    report = run_all([name for name in STAGES if not args.only or name in args.only], task, args.limit, args.out)
    print(f"written to {args.out}")
    return 0 if all(stage["status"] in ("ok", "left out") for stage in report["stages"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
