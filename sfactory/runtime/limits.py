"""Limits of the system that a run must not exceed: memory, descriptors, processes and disk. Checked before the start.

Trajectories are stored in anonymous memory (:mod:`sfactory.data.shared_memory`), which is limited by the memory of the
container or the machine, not by the size of /dev/shm.
"""

from __future__ import annotations

import logging
import os
import resource
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psutil
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from sfactory.config import devices
from sfactory.config.cgroups import cgroups
from sfactory.config.lag import segments_per_batch
from sfactory.data.arena import arena_bytes, segment_fields
from sfactory.data.examples import example_batch
from sfactory.errors import ConfigError
from sfactory.files import is_writable
from sfactory.model import build_model
from sfactory.model.actor_critic import CORES
from sfactory.model.encoders import KNOWN
from sfactory.model.networks import Outputs, TorchNetwork
from sfactory.runtime.processes import server_pid

if TYPE_CHECKING:
    from sfactory.runtime.plan import Plan

MIB = 2**20
SERVER_MIB = 320 if torch.version.cuda is None else 580
"""Memory of the fork server and of what its children share with it, as measured: torch's libraries take most of it,
and those of a CUDA build are larger (475 MiB in an earlier measurement, and what the other has grown by since)."""
LEARNER_MIB, POLICY_MIB, ROLLOUT_MIB = 75, 16, 16
"""Private memory of each kind of worker besides trajectories, weights and environments, as measured
(docs/decisions/022-faults-and-memory.md)."""
EVALUATOR_MIB = 60
"""The same of the evaluator, with the libraries that only it imports."""
OWN_DESCRIPTORS, DESCRIPTORS_PER_PROCESS = 24, 4
"""Descriptors that the runner opens for a run (shared blocks, reports, the server), and for each process (its pipe, its
sentinel, and two while it starts)."""
SPARE_DESCRIPTORS = 64
"""Descriptors reserved for libraries, environments and callbacks."""
CONTEXT_MIB = 400
"""Memory of a GPU that a process takes before it computes there."""
MEMORY_SHARE = 0.9
"""Share of the free memory that a run may use; the rest is for environments and activations."""
MOST_ONE_HOT = 2**30
"""Bytes of a minibatch's one-hot input, and of the first layer that takes it. So much takes seconds to be multiplied in
each update."""
SHARED_FOLDER = "/dev/shm"
_log = logging.getLogger(__name__)


def check_limits(plan: Plan, model: nn.Module) -> None:
    """Check that the system has the resources of a run. Soft limits that are too low are raised; scarce disk space
    gives a warning.

    Memory and descriptors of the environments are not known in advance and not counted.

    Args:
        plan: Plan of the run.
        model: The actor-critic of the plan.

    Raises:
        ConfigError: If anything does not suffice, with figures and remedies.
    """
    of_model = (check(plan, model) for check in (_memory, _device_memory, _file_size))
    of_processes = (check(plan) for check in (_shared_folder, _descriptors, _processes))
    problems = [problem for problem in (*of_model, *of_processes) if problem is not None]
    if problems:
        raise ConfigError(*problems)
    _warn_of_disk(plan, model)


def check_model(plan: Plan) -> None:
    """Check before the model is made that there is memory for it and that its input is not extremely wide. Parts
    written by the user are not checked.

    Raises:
        ConfigError: If the memory does not suffice or the input is too wide, with figures.
    """
    config = plan.config.model
    if config.model == "none" and config.encoder in KNOWN:
        _check_one_hot(plan)
    if config.model != "none" or not (config.encoder in KNOWN and config.core in ("none", *CORES)):
        return
    try:
        with torch.device("meta"):  # shapes without memory
            model = build_model(plan.env.observation, plan.env.action, config)
        needed = 6 * sum(weights.nbytes for weights in model.parameters())
    except RuntimeError as error:
        raise ConfigError(
            f"a model of these sizes cannot be made: {error}; lower model.hidden, model.features or model.core_size"
        ) from error
    if needed > MEMORY_SHARE * (free := free_memory()).left:
        raise ConfigError(
            f"training the model needs {needed / 2**30:.1f} GiB for weights, gradients and optimizer, and {free.by} "
            f"leaves {max(0, free.left) / 2**30:.1f} GiB; lower model.hidden, model.features or model.core_size, or "
            "make the spaces smaller"
        )


def _check_one_hot(plan: Plan) -> None:
    """Categories enter sfactory's encoders one-hot: a matrix of a minibatch's samples by all categories, nearly all of
    it zeros, times the weights of a first layer."""
    config = plan.config
    samples, width = config.batch_size // config.optim.minibatches, next(iter(config.model.hidden), 1)
    most = MOST_ONE_HOT // (4 * max(samples, width))
    problems = [
        f"the observation {leaf.name} has {categories} categories, which enter the network one-hot: "
        f"{4 * samples * categories / 2**30:.1f} GiB for each minibatch of {samples} samples, and "
        f"{4 * width * categories / 2**30:.1f} GiB of weights in a first layer of width {width}. At most {most} "
        f"categories are sensible with these sizes ({MOST_ONE_HOT / 2**30:.0f} GiB for each of the two); let a "
        "gymnasium.ObservationWrapper make fewer categories or coordinates of them, or write a model.encoder with an "
        "embedding"
        for leaf in plan.env.observation.leaves
        if (categories := sum(leaf.sizes)) > most
    ]
    if problems:
        raise ConfigError(*problems)


class Limit(NamedTuple):
    """An amount that is left, and the name of its limit."""

    left: float
    by: str


# Memory


def memory_needed(plan: Plan, model: nn.Module) -> int:
    """Bytes that a run takes besides its environments and activations: trajectories, the learner's batch, weights with
    their gradients and optimizer state, and processes."""
    config = plan.config
    batch = arena_bytes(
        segment_fields(plan.env, model.state_size), segments_per_batch(config, plan.rows), config.rollout, plan.rows
    )
    weights = sum(tensor.nbytes for tensor in model.state_dict().values())
    kept = 7 * plan.evaluates  # published twice, in the evaluator, and a candidate with its optimizer's state
    if config.serial:
        copies, processes = 6 + plan.policies, 0
    else:
        copies = 6 + 2 * plan.policies
        processes = LEARNER_MIB + POLICY_MIB * plan.policies + ROLLOUT_MIB * plan.rollouts
        processes += EVALUATOR_MIB * plan.evaluates
        pid = server_pid()
        processes += max(0, SERVER_MIB - (psutil.Process(pid).memory_info().rss // MIB if pid is not None else 0))
    return trajectory_bytes(plan, model) + batch + (copies + kept) * weights + processes * MIB


def trajectory_bytes(plan: Plan, model: nn.Module) -> int:
    """Bytes of the arena."""
    config = plan.config
    return arena_bytes(segment_fields(plan.env, model.state_size), plan.slots, config.rollout, plan.rows)


def free_memory() -> Limit:
    """Bytes that this process and its children may still take: of the machine, or of the tightest cgroup around
    them."""
    limits = [Limit(psutil.virtual_memory().available, "this machine")]
    for folder in cgroups("memory"):
        for most, used, cache in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            if (limit := _number(folder / most)) is not None and (usage := _number(folder / used)) is not None:
                limits.append(
                    Limit(limit - usage + _statistic(folder / "memory.stat", cache), f"the memory limit of {folder}")
                )
    return min(limits)


def _memory(plan: Plan, model: nn.Module) -> str | None:
    needed, free, config = memory_needed(plan, model), free_memory(), plan.config
    if needed <= MEMORY_SHARE * free.left:
        return None
    slots, trajectories = plan.slots, trajectory_bytes(plan, model)
    return (
        f"the run needs {needed / 2**30:.1f} GiB of memory besides its environments, of which trajectories take "
        f"{trajectories / 2**30:.1f} GiB ({slots} slots of rollout {config.rollout} x {plan.rows} rows), and {free.by} "
        f"leaves {max(0, free.left) / 2**30:.1f} GiB; lower envs_per_worker, workers, rollout or batch_size, or free "
        "some memory"
    )


# A GPU's memory


def saved_bytes(model: nn.Module) -> float:
    """Bytes of activations that a model of the CPU saves for the way back, for each sample, in float32."""
    found = dict[int, int]()
    own = {weights.data_ptr() for weights in model.state_dict().values()}

    def note(x: torch.Tensor) -> torch.Tensor:
        if x.data_ptr() not in own:
            found[x.data_ptr()] = max(x.nbytes, found.get(x.data_ptr(), 0))
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        kept, samples = _example_pass(model)  # an address belongs to one tensor as long as it lives
        total = sum(found.values())
        del kept
    return total / samples


def passing_bytes(model: nn.Module) -> float:
    """Bytes, for each sample, that a pass without a way back through a model of the CPU takes at its widest module, in
    float32."""
    widest = 0

    def note(module: nn.Module, inputs: tuple[object, ...], output: object) -> None:
        nonlocal widest
        if next(module.children(), None) is None:
            widest = max(widest, sum(x.numel() for x in (*inputs, output) if isinstance(x, torch.Tensor)))

    with torch.no_grad(), register_module_forward_hook(note):
        _, samples = _example_pass(model)
    return torch.float32.itemsize * widest / samples


def _example_pass(model: nn.Module) -> tuple[Outputs, int]:
    """What a model of the CPU makes of an example batch, and its number of samples."""
    batch = example_batch(model.observation, model.action, model.state_size)
    network = TorchNetwork(model, torch.device("cpu"), None, compiled=False)
    with torch.random.fork_rng(devices=[]):
        return network.outputs(batch, batch.all_columns), batch.first.numel()


def activation_bytes(model: nn.Module, minibatches: int) -> float:
    """Bytes of activations for each sample of a batch, in float32: of an update, which goes back through a minibatch,
    or of the pass over the whole batch that its targets come from."""
    return max(saved_bytes(model) / minibatches, passing_bytes(model))


def gpu_bytes(plan: Plan, model: nn.Module, batch_size: int) -> float:
    """Bytes of the learner's GPU that a run takes at least: two staging buffers, activations, weights with gradients
    and optimizer, and a context for each process there."""
    config, device = plan.config, devices.learner_device(plan.config)
    segments = batch_size // (config.rollout * plan.rows)
    batch = arena_bytes(segment_fields(plan.env, model.state_size), segments, config.rollout, plan.rows)
    low = 1.0 if config.precision == "float32" else 0.5
    activations = low * activation_bytes(model, config.optim.minibatches) * batch_size
    weights = sum(tensor.nbytes for tensor in model.state_dict().values())
    there = sum(devices.inference_device(config, worker) == device for worker in range(plan.policies))
    return 2 * batch + activations + (5 + there) * weights + CONTEXT_MIB * MIB * (1 + there)


def _device_memory(plan: Plan, model: nn.Module) -> str | None:
    config, device = plan.config, devices.learner_device(plan.config)
    if device.type != "cuda" or plan.sample_only or (state := devices.gpu_state(device)) is None:
        return None
    needed, segment = gpu_bytes(plan, model, config.batch_size), config.rollout * plan.rows
    if needed <= state.free:
        return None
    fixed = gpu_bytes(plan, model, 0)
    unit = (needed - fixed) / (config.batch_size // segment)
    fitting = int(max(0, state.free - fixed) // unit) * segment
    remedy = f"the largest that fits is {fitting}" if fitting else "not even one segment fits; make the model smaller"
    minibatches = config.optim.minibatches
    helps = activation_bytes(model, minibatches + 1) < activation_bytes(model, minibatches)
    return (
        f"batch_size {config.batch_size} needs about {needed / 2**30:.1f} GiB on {device}, of which "
        f"{state.free / 2**30:.1f} GiB of {state.total / 2**30:.1f} GiB are free; {remedy}. "
        f"{'More optim.minibatches or --precision bfloat16 need' if helps else '--precision bfloat16 needs'} less of it"
    )


def _file_size(plan: Plan, model: nn.Module) -> str | None:
    """The limit on the size of files counts for shared memory, too."""
    needed, (soft, hard) = trajectory_bytes(plan, model), resource.getrlimit(resource.RLIMIT_FSIZE)
    if needed <= _finite(soft):
        return None
    return (
        f"the trajectories need a block of {needed} bytes, and the limit on the size of files is {soft} (hard limit: "
        f"{_finite(hard)}); raise it with ulimit -f unlimited, or lower envs_per_worker, workers, rollout or batch_size"
    )


def _shared_folder(plan: Plan) -> str | None:
    """The queues between processes lie in /dev/shm or, where that has no room, in an unlinked file among the temporary
    ones."""
    if plan.config.serial or is_writable(SHARED_FOLDER):
        return None
    return (
        f"{SHARED_FOLDER} is not a folder that can be written to; mount a tmpfs there (1 MiB suffices), or train with "
        "--serial"
    )


# Descriptors and processes


def descriptors_needed(plan: Plan) -> int:
    """Open files that the process with the most of them, the runner, needs in all."""
    needed = len(os.listdir("/proc/self/fd")) + OWN_DESCRIPTORS + SPARE_DESCRIPTORS
    if plan.config.serial:
        return needed
    processes = 1 + plan.policy_processes + plan.rollouts + plan.evaluates
    return needed + DESCRIPTORS_PER_PROCESS * processes


def _descriptors(plan: Plan) -> str | None:
    needed = descriptors_needed(plan)
    return _raise_limit(
        resource.RLIMIT_NOFILE,
        needed,
        f"the run needs about {needed} open files",
        f"ulimit -n {needed}",
        "lower the number of workers",
    )


def threads_needed(plan: Plan) -> int:
    """Threads (the system counts them as processes) that a run adds to the runner's own."""
    config = plan.config
    if config.serial:
        return 1
    learner, policy = 3 + devices.learner_threads(config), 2 + devices.inference_threads(config)
    rollout = 2 + (config.runtime.env_threads if config.runtime.env_threads > 1 else 0) * config.runtime.groups
    return 3 + learner + policy * plan.policies + rollout * plan.rollouts + 3 * plan.evaluates


def _processes(plan: Plan) -> str | None:
    needed = threads_needed(plan)
    for folder in cgroups("pids"):
        if (most := _number(folder / "pids.max")) is not None and needed > (
            left := most - (_number(folder / "pids.current") or 0)
        ):
            return (
                f"the run needs {needed} more processes and threads, and {folder}/pids.max leaves {left:g}; lower the "
                "number of workers"
            )
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft == resource.RLIM_INFINITY or os.geteuid() == 0:
        return None
    running = sum(p.info["num_threads"] or 0 for p in psutil.process_iter(["uids", "num_threads"]) if _is_mine(p))
    told = f"the run needs {needed} more processes and threads besides your {running}"
    return _raise_limit(
        resource.RLIMIT_NPROC, running + needed, told, f"ulimit -u {running + needed}", "lower the number of workers"
    )


def _is_mine(process: psutil.Process) -> bool:
    return process.info["uids"] is not None and process.info["uids"].real == os.getuid()


def _raise_limit(kind: int, needed: int, told: str, command: str, remedy: str) -> str | None:
    """Raise a soft limit to its hard one if it is too low, here and for the workers; the problem in words if that is
    not enough."""
    soft, hard = resource.getrlimit(kind)
    if needed <= _finite(soft):
        return None
    if needed > _finite(hard):
        return f"{told}, and the limit is {soft} (hard limit: {hard}); raise it with {command}, or {remedy}"
    resource.setrlimit(kind, (hard, hard))
    if (pid := server_pid()) is not None:
        resource.prlimit(pid, kind, (hard, hard))
    return None


# Disk


def checkpoint_bytes(model: nn.Module) -> int:
    """Bytes of a checkpoint: weights, buffers, and Adam's two moments."""
    return sum(tensor.nbytes for tensor in model.state_dict().values()) + 2 * sum(
        weights.nbytes for weights in model.parameters()
    )


def _warn_of_disk(plan: Plan, model: nn.Module) -> None:
    """Warn if the checkpoints that are kept at the same time may not fit on the disk. The run works without them."""
    log, size = plan.config.log, checkpoint_bytes(model)
    milestones = plan.config.steps // log.milestone_every if log.milestone_every else 0
    needed = size * (log.keep + milestones + 2)  # the best, and the one that is being written
    folder = next(
        path for path in (plan.config.run_dir.absolute(), *plan.config.run_dir.absolute().parents) if path.exists()
    )
    free, (most, _) = shutil.disk_usage(folder).free, resource.getrlimit(resource.RLIMIT_FSIZE)
    if needed > free:
        _log.warning(
            "the checkpoints may take %.0f MiB, and the disk of %s has %.0f MiB free; free some, or lower log.keep",
            needed / MIB, folder, free / MIB,
        )  # fmt: skip
    elif size > _finite(most):
        _log.warning(
            "a checkpoint takes about %d bytes, and the limit on the size of files is %d (ulimit -f)", size, most
        )


# Reading limits


def _finite(limit: int) -> float:
    return float("inf") if limit == resource.RLIM_INFINITY else limit


def _number(file: Path) -> int | None:
    """The number in a file; None where it says max, or is not there."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _statistic(file: Path, name: str) -> int:
    """One line of a file of names and numbers."""
    try:
        return next(int(line.split()[1]) for line in file.read_text().splitlines() if line.split()[:1] == [name])
    except (OSError, StopIteration):
        return 0
