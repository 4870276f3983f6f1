"""A long run at full speed under all faults at once: whether it goes on, stays small and still learns.

    python -m perf.soak [--minutes 30] [--seed 0] [--json FILE]

CartPole-v1 is trained while its environments raise, give NaN, leave their process or hang, and while this program kills
and stops worker processes, the learner and the command itself, asks for saves, takes the folder of checkpoints or the
room for them away and damages the newest checkpoint.
After a kill the same command is given again. All draws come from the seed. It passes if

- env steps rise all the time: no longer than `STALL_S` pass without progress, and no restart falls back by more than
  what was trained since the last checkpoint;
- memory, descriptors and /dev/shm stay flat, and no slot is lost;
- the commands end as they should, leave no process, and the policy at the end is worth at least 475.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from perf import sessions
from perf.runs import exit_at_signals
from perf.sessions import members
from sfactory import evaluate
from sfactory.runs.run_state import read_status

STALL_S = 20.0
"""Longest time without progress: a hanging environment's deadline, a restart, and a machine that is busy with both."""
STORM_S, STORM_EVERY_S = 120.0, 2.0
"""For so long at the beginning a sampling process is killed so often, and nothing else is done to the run."""
SAVE_EVERY_S = 10.0
GROWTH = 1.1
"""Allowed ratio of the last third's memory and descriptors to the first third's."""
FLAGS = [
    "--env", "perf.soak:FaultyCartPole", "--steps", str(10**11), "--workers", "2", "--envs-per-worker", "64",
    "--rollout", "32",
    "--batch-size", "4096", "--epochs", "2", "--optim.lr", "5e-4", "--loss.normalize-returns", "--device", "cpu",
    "--runtime.step-timeout-s", "5", "--log.save-every-s", str(SAVE_EVERY_S), "--log.report-every-s", "1",
    "--log.display", "plain",
]  # fmt: skip
ENV_FAULTS = {"raise in step": 1e-5, "raise in reset": 1e-4, "NaN observation": 1e-5, "infinite reward": 1e-5,
              "wrong shape": 1e-6, "exit": 3e-7, "kill": 3e-7, "hang": 1e-7}  # fmt: skip
"""Probabilities of an environment's faults, per env step (per episode for reset)."""
OUTER_FAULTS = {"kill sampler": 8, "kill learner": 90, "stop worker": 120, "kill command": 240,
                "interrupt command": 400, "ask to save": 30,
                "no folder": 180, "full disk": 180, "damaged checkpoint": 300}  # fmt: skip
"""Mean seconds between the faults that this program makes."""


LOST = "worker process lost: "


class FaultyCartPole(gymnasium.Wrapper):
    """CartPole-v1 with all that environments do to those who use them."""

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(gymnasium.make("CartPole-v1", render_mode=render_mode))
        self._draw = random.Random()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        if seed is not None:
            self._draw.seed(seed)
        if self._draw.random() < ENV_FAULTS["raise in reset"]:
            raise RuntimeError("reset failed")
        return self.env.reset(seed=seed, options=options)

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        drawn = self._draw.random()
        for fault, probability in ENV_FAULTS.items():
            drawn -= probability if fault != "raise in reset" else 0.0
            if drawn < 0:
                observation, reward = self._fail(fault, observation, float(reward))
                break
        return observation, float(reward), terminated, truncated, info

    def _fail(self, fault: str, observation: np.ndarray, reward: float) -> tuple[np.ndarray, float]:
        match fault:
            case "raise in step":
                raise RuntimeError("step failed")
            case "NaN observation":
                observation = np.full_like(observation, np.nan)
            case "infinite reward":
                reward = float("inf")
            case "wrong shape":
                observation = observation[:2]
            case "exit":
                os._exit(7)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                time.sleep(10**6)
        return observation, reward


@dataclass
class Look:
    """One look at the run.

    Attributes:
        seconds: Since the soak began.
        memory_mb: Private and proportional shared memory of all processes.
        descriptors: Of all processes.
        held_slots: Slots that are neither used nor given back; if some were lost, ever more would be.
    """

    seconds: float
    env_steps: int
    processes: int
    memory_mb: float
    descriptors: int
    held_slots: float


@dataclass
class Soak:
    """The run and what has been seen of it."""

    folder: Path
    draw: random.Random
    begin: float = field(default_factory=time.monotonic)
    looks: list[Look] = field(default_factory=list)
    made: Counter = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    commands: int = 0

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begin

    def start(self) -> None:
        """Give the command, the same each time."""
        self.commands += 1
        with (self.folder / "output").open("ab") as output:
            command = [sys.executable, "-m", "sfactory.train", *FLAGS, "--run", str(self.run)]
            self.command = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        self.started, self.progressed, self.steps = self.seconds, self.seconds, 0

    def workers(self, *kinds: str) -> list[psutil.Process]:
        """Living worker processes of these kinds."""
        found = []
        for process in members(self.command.pid):
            with contextlib.suppress(psutil.Error):
                if process.name().startswith(tuple(f"sf-{kind}" for kind in kinds)):
                    found.append(process)
        return found

    def signal_worker(self, number: signal.Signals, *kinds: str) -> bool:
        found = self.workers(*kinds)
        if found:
            with contextlib.suppress(psutil.Error):
                self.draw.choice(found).send_signal(number)
        return bool(found)

    def end(self, number: signal.Signals, status: int) -> None:
        """End the command by a signal and look at what is left of it."""
        self.command.send_signal(number)
        try:
            ended = self.command.wait(30)
        except subprocess.TimeoutExpired:
            self.problems.append(f"{self.seconds:.0f} s: still there 30 s after {number.name}")
            self.command.kill()
            ended = self.command.wait()
        if ended != status:
            self.problems.append(f"{self.seconds:.0f} s: status {ended} after {number.name}")
        deadline = time.monotonic() + 5
        while (left := members(self.command.pid)) and time.monotonic() < deadline:
            time.sleep(0.05)
        for process in left:
            self.problems.append(f"{self.seconds:.0f} s: left after {number.name}: {process}")
        sessions.end(self.command.pid)

    def restart(self, number: signal.Signals, status: int, before: Callable[[], None] = lambda: None) -> bool:
        """End the command, once it has trained for a while, and give it again."""
        if self.seconds - self.started < 2 * SAVE_EVERY_S or not self.steps:
            return False
        self.end(number, status)
        before()
        self.start()
        return True

    def damage(self) -> None:
        """Flip bytes of the newest checkpoint's weights."""
        newest = max(
            (self.run / "checkpoints").glob("*.safetensors"), key=lambda path: path.stat().st_mtime, default=None
        )
        if newest is not None:
            data = bytearray(newest.read_bytes())
            for _ in range(8):
                data[self.draw.randrange(len(data))] ^= 0xFF
            newest.write_bytes(data)

    def hide_checkpoints(self) -> bool:
        """Put a file in the place of the checkpoints for the time of a save."""
        place, aside = self.run / "checkpoints", self.folder / "aside"
        if not place.is_dir() or not self.steps:
            return False
        place.rename(aside)
        place.write_bytes(b"")
        time.sleep(1.5)
        self.command.send_signal(signal.SIGUSR1)
        time.sleep(1.5)
        place.unlink(missing_ok=True)
        aside.rename(place)
        return True

    def fill_disk(self) -> bool:
        """Let the learner write no file for the time of a save."""
        learner = self.workers("learner")
        if not learner or not self.steps:
            return False
        with contextlib.suppress(psutil.Error):
            _, hard = learner[0].rlimit(psutil.RLIMIT_FSIZE)
            learner[0].rlimit(psutil.RLIMIT_FSIZE, (1000, hard))
            self.command.send_signal(signal.SIGUSR1)
            time.sleep(1.5)
            learner[0].rlimit(psutil.RLIMIT_FSIZE, (hard, hard))
        return True

    def make(self, fault: str) -> bool:
        """Make a fault; whether it could be made now."""
        match fault:
            case "kill sampler":
                return self.signal_worker(signal.SIGKILL, "rollout", "policy")
            case "kill learner":
                return bool(self.steps) and self.signal_worker(signal.SIGKILL, "learner")
            case "stop worker":
                return bool(self.steps) and self.signal_worker(signal.SIGSTOP, "rollout")
            case "kill command":
                return self.restart(signal.SIGKILL, -signal.SIGKILL)
            case "interrupt command":
                return self.restart(signal.SIGTERM, 128 + signal.SIGTERM)
            case "damaged checkpoint":
                return self.restart(signal.SIGKILL, -signal.SIGKILL, self.damage)
            case "ask to save":
                if self.seconds - self.started < 1:  # Python itself is starting
                    return False
                self.command.send_signal(signal.SIGUSR1)
                return True
            case "no folder":
                return self.hide_checkpoints()
            case "full disk":
                return self.fill_disk()
        raise ValueError(fault)

    def _check_fall(self, steps: int) -> None:
        """A restart may fall back to the checkpoint before, or where that one was damaged on purpose, to the one before
        it."""
        since = [look.env_steps for look in self.looks if look.seconds > self.seconds - 4 * SAVE_EVERY_S - STALL_S]
        if steps < self.steps and since and steps < min(since[: 1 + len(since) // 2]):
            self.problems.append(f"{self.seconds:.0f} s: env steps fell from {self.steps} to {steps}")

    def look(self) -> None:
        """Take down how the run is, and what is wrong with it."""
        if self.command.poll() is not None:
            self.problems.append(
                f"{self.seconds:.0f} s: the command ended by itself with status {self.command.returncode}"
            )
            self.start()
        processes, memory, descriptors = members(self.command.pid), 0, 0
        for process in processes:
            with contextlib.suppress(psutil.Error):
                memory += process.memory_full_info().pss
                descriptors += process.num_fds()
        state = read_status(self.run)
        held = math.inf if state is None else state.slots["held"]
        steps = int(last_report(self.run / "metrics.csv").get("env_steps", 0))
        self.looks.append(Look(self.seconds, steps, len(processes), memory / 2**20, descriptors, held))
        if steps != self.steps:
            self._check_fall(steps)
            self.steps, self.progressed = steps, self.seconds
        elif self.seconds - self.progressed > STALL_S:
            self.problems.append(f"{self.seconds:.0f} s: no progress for {self.seconds - self.progressed:.0f} s")
            self.progressed = self.seconds


def last_report(metrics: Path) -> dict[str, str]:
    """The newest row of metrics.csv, empty without one."""
    with contextlib.suppress(OSError):
        lines = metrics.read_text().splitlines()
        if len(lines) > 1:
            return dict(zip(lines[0].split(","), lines[-1].split(","), strict=False))
    return {}


def soak(folder: Path, minutes: float, seed: int) -> Soak:
    """Train and make faults for so many minutes, then interrupt the run."""
    state = Soak(folder, random.Random(seed))
    due = {fault: STORM_S + state.draw.expovariate(1 / mean) for fault, mean in OUTER_FAULTS.items()}
    due["kill sampler"] = 0.0
    state.start()
    try:
        while state.seconds < 60 * minutes:
            for fault, mean in OUTER_FAULTS.items():
                if state.seconds >= due[fault]:
                    state.made[fault] += state.make(fault)
                    due[fault] = state.seconds + (
                        STORM_EVERY_S if state.seconds < STORM_S else state.draw.expovariate(1 / mean)
                    )
            state.look()
            time.sleep(1.0)
        state.end(signal.SIGINT, 130)
    finally:
        sessions.end(state.command.pid)
    return state


def judge(state: Soak) -> dict[str, float]:
    """Figures of the whole soak; what is wrong with them is added to its problems."""
    third = len(state.looks) // 3
    # The first minutes still fill caches.
    first, last = (
        state.looks[third // 2 : third + third // 2],
        state.looks[-third:],
    )
    figures: dict[str, float] = {"env_steps": state.looks[-1].env_steps, "commands": state.commands}
    for name in ("memory_mb", "descriptors"):
        before, after = (statistics.median(getattr(look, name) for look in looks) for looks in (first, last))
        figures |= {f"{name}_first": before, f"{name}_last": after}
        if after > GROWTH * before:
            state.problems.append(f"{name} grew from {before:.0f} to {after:.0f}")
    held = [min(look.held_slots for look in looks) for looks in (first, last)]
    figures |= {"least_held_slots_first": held[0], "least_held_slots_last": held[1]}
    if held[1] > held[0] + 1:
        state.problems.append(f"the least number of held slots grew from {held[0]} to {held[1]}: some are lost")
    figures["return_mean"] = evaluate(state.run, episodes=20, env="CartPole-v1").return_mean
    if figures["return_mean"] < 475:
        state.problems.append(f"CartPole is not solved at the end: {figures['return_mean']:.0f}")
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    exit_at_signals()
    shared = set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory() as folder:
        state = soak(Path(folder), args.minutes, args.seed)
        figures = judge(state)
        state.problems += [f"left in /dev/shm: {name}" for name in set(os.listdir("/dev/shm")) - shared]
        said = (Path(folder) / "output").read_text(errors="replace")
    figures |= {f"made: {fault}": count for fault, count in state.made.items()}
    lost = Counter(
        line.removeprefix(LOST).split(":")[0].split("-")[0] for line in said.splitlines() if line.startswith(LOST)
    )
    figures |= {f"restarts for a lost {kind} process": count for kind, count in lost.items()}
    table = Table("what", "value", title=f"{args.minutes:g} minutes, seed {args.seed}")
    for name, value in figures.items():
        table.add_row(name, f"{value:,.4g}" if isinstance(value, float) else f"{value:,}")
    Console().print(table)
    for problem in state.problems:
        print("PROBLEM", problem)
    if args.json:
        record = {"figures": figures, "problems": state.problems, "looks": [asdict(look) for look in state.looks]}
        args.json.write_text(json.dumps(record, indent=2))
    sys.exit(bool(state.problems))


if __name__ == "__main__":
    main()
