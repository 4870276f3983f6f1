"""The ceiling of this machine for a run: the speed of simulation, inference and training, each measured alone on all
cores, and the speed of a run that follows from them.

Each is measured with every core busy with the same workload, because a core is slower while its neighbours work.
Simulation has as many processes as the run has rollout workers, if these are more: of environments that wait, many
share a core. The data plane is left out: no queues, no waiting, no copies between workers.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch

from sfactory.config import Config, changed, devices
from sfactory.data.shared_memory import SharedArray
from sfactory.errors import RunFailed
from sfactory.profiling.workloads import (
    TRAINING,
    Repetition,
    Workload,
    device_of,
    inference_workloads,
    prepare,
    torch_threads,
)
from sfactory.runtime import worker_process
from sfactory.runtime.allocator import keep_freed_memory
from sfactory.runtime.plan import PickledPlan, Plan
from sfactory.runtime.planning import make_plan
from sfactory.runtime.processes import WorkerProcesses, fork_server
from sfactory.runtime.watchdog import HINT
from sfactory.runtime.wires import Wires, make_wires
from sfactory.telemetry.events import Failure


@dataclass(frozen=True)
class Ceiling:
    """Costs of an env step, and the ceiling of env steps per second that follows.

    Attributes:
        simulation_s: Core seconds per env step of the environment alone, with random actions. Single environments are
            reset as often as in the run, if that is known and is more often than these actions end an episode.
        inference_s: Core seconds (on a GPU: seconds) per env step of inference, at the cheapest batch size tried.
        training_s: Core seconds (on a GPU: seconds) per env step of training, over all epochs.
        cores: Cores that the run may use: one in serial mode.
        batch_size: Samples of a training batch.
        precision: Precision of the learner, float32 or bfloat16.
        inference_device, learner_device: Device types of the measurements.
    """

    simulation_s: float
    inference_s: float
    training_s: float
    cores: int
    batch_size: int
    precision: str
    inference_device: str
    learner_device: str

    @property
    def env_steps_per_s(self) -> float:
        """``cores / (simulation + inference + training)``; what runs on a GPU does not count."""
        on_cores = self.simulation_s
        on_cores += self.inference_s if self.inference_device == "cpu" else 0.0
        on_cores += self.training_s if self.learner_device == "cpu" else 0.0
        return self.cores / on_cores


def measure_ceiling(
    config: Config,
    seconds: float,
    tell: Callable[[str], object] = str,
    episode_length: float = math.inf,
) -> Ceiling:
    """Measure the ceiling of this machine for a run.

    Args:
        config: Configuration of the run, resolved (:func:`sfactory.config.resolve`).
        seconds: Seconds for all measurements together; starting processes takes additional time.
        tell: Is told how far it is.
        episode_length: Mean env steps of an episode of the run; infinite where nobody knows.

    Raises:
        ConfigError: If the configuration cannot work.
        RunFailed: If a measuring process fails, for example because an environment raises.
    """
    with fork_server():
        plan = with_threads(make_plan(config), 1)
        config, share = plan.config, seconds / 3
        cores = 1 if config.serial else devices.cores()
        inference = inference_workloads(plan)
        simulation = Workload("simulation", episode_length=episode_length)
        workloads = [simulation, *inference, TRAINING]
        processes = {w: cores if device_of(plan, w).type == "cpu" else 1 for w in workloads}
        processes[simulation] = max(cores, plan.rollout_workers)
        speeds: dict[Workload, float] = {}
        for number in sorted(set(processes.values())):
            lengths = {
                w: share / len(inference) if w in inference else share for w in workloads if processes[w] == number
            }
            tell(f"ceiling: {', '.join(sorted({w.kind for w in lengths}))}, for {sum(lengths.values()):.0f} s")
            speeds |= zip(lengths, measure(plan, lengths, number), strict=True)
        costs = {workload: min(cores, processes[workload]) / speed for workload, speed in speeds.items()}
        best = min(inference, key=costs.__getitem__)
        places = device_of(plan, best), device_of(plan, TRAINING)
    return Ceiling(
        costs[simulation], costs[best], costs[TRAINING], cores, config.batch_size,
        precision_of(plan, places[1]), places[0].type, places[1].type,
    )  # fmt: skip


def precision_of(plan: Plan, device: torch.device) -> str:
    """float32 or bfloat16: what a plan's network computes in."""
    lower = devices.autocast_dtype(plan.config, plan.env.observation.has_images, device)
    return "float32" if lower is None else "bfloat16"


def with_threads(plan: Plan, threads: int) -> Plan:
    """A plan whose learner and whose only policy worker have so many threads."""
    runtime = changed(plan.config.runtime, learner_threads=threads, inference_threads=threads, policy_workers=1)
    return dataclasses.replace(plan, config=changed(plan.config, runtime=runtime))


def measure(plan: Plan, seconds: Mapping[Workload, float], processes: int) -> list[float]:
    """Env steps per second of all processes together, for each of some workloads.

    Args:
        plan: Plan of the run.
        seconds: Seconds for each workload. They are measured one after the other, each in all processes at the same
            time.
        processes: Number of processes.

    Raises:
        RunFailed: If a process fails.
    """
    flags = SharedArray((len(seconds) + 1, processes), np.int8)
    wires = make_wires(plan, local=True)  # the processes share nothing of it but the control block
    with fork_server(), WorkerProcesses() as children:
        for process in range(processes):
            given = PickledPlan(plan), wires, flags, process, dict(seconds)
            children.start(f"measure-{process}", worker_process.process_main, _measure_main, *given)
        timeout = plan.config.runtime.step_timeout_s + sum(seconds.values())
        return np.sum(_results(children, processes, timeout), 0).tolist()


def _results(children: WorkerProcesses, processes: int, timeout: float) -> list[list[float]]:
    """The results of all processes.

    Raises:
        RunFailed: If a process fails, ends or takes longer than `timeout` seconds.
    """
    results: list[list[float]] = []
    begin = time.monotonic()
    while len(results) < processes:
        for message in children.take(0.1):
            if isinstance(message, Failure):
                raise RunFailed(f"{message.process}: {message.message}\n{message.traceback}".rstrip())
            results.append(message)
        if len(ended := children.exit_codes()) > len(results):
            raise RunFailed(f"measuring processes ended by themselves, with these exit codes: {ended}")
        if time.monotonic() - begin > timeout:
            raise RunFailed(
                f"{processes - len(results)} of {processes} measuring processes are not done after "
                f"{timeout:.0f} s; {HINT}"
            )
    return results


def _measure_main(
    plan: Plan, wires: Wires, flags: SharedArray, process: int, seconds: Mapping[Workload, float]
) -> None:
    """Measure at the same time as the other processes: all begin when all are ready, and none stops working while
    another still measures. After the last workload they are killed at work: a repetition may take seconds."""
    keep_freed_memory()

    def meet(stage: int, meanwhile: Callable[[], object]) -> None:
        flags.array[stage, process] = 1
        while not flags.array[stage].all():
            meanwhile()

    torch.set_num_threads(1)  # threads of several processes would wait for one another's cores
    with ExitStack() as stack:
        repetitions = {workload: stack.enter_context(prepare(plan, workload, process)) for workload in seconds}
        for workload, repeat in repetitions.items():
            torch.set_num_threads(torch_threads(plan, workload))
            repeat()  # compiles kernels and takes memory
        meet(0, lambda: time.sleep(0.001))
        speeds = []
        for stage, (workload, repeat) in enumerate(repetitions.items(), 1):
            torch.set_num_threads(torch_threads(plan, workload))
            speeds.append(_speed(repeat, seconds[workload], device_of(plan, workload)))
            if stage == len(seconds):
                wires.events.put(speeds)
            meet(stage, repeat)


def _speed(repeat: Repetition, seconds: float, device: torch.device) -> float:
    """Env steps per second of a repeated workload, including all of its work on a GPU."""
    steps, begin = 0, _time_on(device)
    while time.perf_counter() - begin < seconds:
        steps += repeat()
    return steps / (_time_on(device) - begin)


def _time_on(device: torch.device) -> float:
    """The time in seconds once a device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
