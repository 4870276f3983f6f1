"""Limits of the system that a run must not exceed: memory, descriptors, processes and disk. Checked before the start.

Trajectories are stored in anonymous memory (:mod:`sfactory.data.shared_memory`), which is limited by the memory of the
container or the machine, not by the size of /dev/shm.
"""

from __future__ import annotations

import logging
import os
import resource
import shutil
from typing import TYPE_CHECKING

import psutil
import torch

from sfactory.config import devices
from sfactory.config.cgroups import Limit, memory_limits, process_limits
from sfactory.config.lag import segments_per_batch
from sfactory.data.arena import arena_bytes, segment_fields
from sfactory.errors import ConfigError
from sfactory.files import is_writable
from sfactory.model import build_model
from sfactory.model.actor_critic import is_built_in
from sfactory.model.encoders import KNOWN
from sfactory.model.interface import Model
from sfactory.runtime.gpu_memory import too_large_batch
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
MEMORY_SHARE = 0.9
"""Share of the free memory that a run may use; the rest is for environments and activations."""
MOST_ONE_HOT = 2**30
"""Bytes of a minibatch's one-hot input, and of the first layer that takes it. So much takes seconds to be multiplied in
each update."""
SHARED_FOLDER = "/dev/shm"
_log = logging.getLogger(__name__)


def check_limits(plan: Plan, model: Model) -> None:
    """Check that the system has the resources of a run. Soft limits that are too low are raised; scarce disk space
    gives a warning.

    Memory and descriptors of the environments are not known in advance and not counted.

    Args:
        plan: Plan of the run.
        model: The actor-critic of the plan.

    Raises:
        ConfigError: If anything does not suffice, with figures and remedies.
    """
    of_model = (check(plan, model) for check in (_memory, too_large_batch, _file_size))
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
    if not is_built_in(config):
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


# Memory


def memory_needed(plan: Plan, model: Model) -> int:
    """Bytes that a run takes besides its environments and activations: trajectories, the learner's batch, weights with
    their gradients and optimizer state, and processes."""
    config, segments = plan.config, segments_per_batch(plan.config, plan.rows)
    on_gpu = devices.learner_device(config).type == "cuda"
    batches = int(not on_gpu) if plan.on_device else 2 if on_gpu else int(segments > 1)  # else it is a view of its slot
    batch = arena_bytes(segment_fields(plan.env, model.state_size), batches * segments, config.rollout, plan.rows)
    weights = sum(tensor.nbytes for tensor in model.state_dict().values())
    kept = 7 * plan.evaluates  # published twice, in the evaluator, and a candidate with its optimizer's state
    if config.serial:
        copies, processes = 6 + plan.policy_workers, 0
    else:
        copies = 6 + 2 * plan.policy_workers
        processes = LEARNER_MIB + POLICY_MIB * plan.policy_workers + ROLLOUT_MIB * plan.rollout_workers
        processes += EVALUATOR_MIB * plan.evaluates
        pid = server_pid()
        processes += max(0, SERVER_MIB - (psutil.Process(pid).memory_info().rss // MIB if pid is not None else 0))
    return trajectory_bytes(plan, model) + batch + (copies + kept) * weights + processes * MIB


def trajectory_bytes(plan: Plan, model: Model) -> int:
    """Bytes of the arena."""
    config = plan.config
    return arena_bytes(segment_fields(plan.env, model.state_size), plan.slots, config.rollout, plan.rows)


def free_memory() -> Limit:
    """Bytes that this process and its children may still take: of the machine, or of the tightest cgroup around
    them."""
    return min([Limit(psutil.virtual_memory().available, "this machine"), *memory_limits()])


def _memory(plan: Plan, model: Model) -> str | None:
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


# Files


def _file_size(plan: Plan, model: Model) -> str | None:
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
    processes = 1 + plan.policy_processes + plan.rollout_workers + plan.evaluates
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
    return 3 + learner + policy * plan.policy_workers + rollout * plan.rollout_workers + 3 * plan.evaluates


def _processes(plan: Plan) -> str | None:
    needed = threads_needed(plan)
    for limit in process_limits():
        if needed > limit.left:
            return (
                f"the run needs {needed} more processes and threads, and {limit.by} leaves {limit.left:g}; lower the "
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


def checkpoint_bytes(model: Model) -> int:
    """Bytes of a checkpoint: weights, buffers, and Adam's two moments."""
    return sum(tensor.nbytes for tensor in model.state_dict().values()) + 2 * sum(
        weights.nbytes for weights in model.parameters()
    )


def _warn_of_disk(plan: Plan, model: Model) -> None:
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


def _finite(limit: int) -> float:
    return float("inf") if limit == resource.RLIM_INFINITY else limit
