"""Devices, precision and threads: which hardware each kind of worker uses."""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from sfactory.config.cgroups import cpu_quota
from sfactory.config.declaring import given_names
from sfactory.config.fields import Config
from sfactory.errors import ConfigError


def resolve_device(name: str, field: str = "device") -> torch.device:
    """The device of a name; auto is the first GPU if there is one.

    Args:
        field: Where the name comes from, as the error says it.

    Raises:
        ConfigError: If the GPU is not there, or the name is of no CPU and no GPU.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ConfigError(f"{field} is {name!r}; use auto, cpu, cuda or cuda:N")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ConfigError(
                f"{field} is {name}, but this machine shows {count} CUDA devices to torch {torch.__version__}; use "
                f"--{field.replace('_', '-')} cpu"
            )
        device = torch.device("cuda", device.index or 0)
    return device


BFLOAT16_SINCE = (8, 0)
"""Compute capability from which on GPUs multiply in bfloat16."""
MOST_WAITING = 64
"""Rollout workers whose env steps wait, at most; each takes about 50 MiB."""
SMALL_DENSE = 1 << 18
"""Weights of a network of dense layers up to which cores train faster than a GPU, which would wait for launches: two
cores reach 1,490,000 env steps/s on CartPole-v1."""


class DeviceChoice(NamedTuple):
    """The device that ``auto`` stands for, and why."""

    name: str
    reason: str


def suited_device(
    config: Config, images: bool, dense_weights: int | None, tensors: bool = False
) -> DeviceChoice | None:
    """The device on which a model trains faster, where `device` leaves that open and there is a choice.

    Args:
        tensors: Whether environments step on the learner's device.
        images: Whether observations have images.
        dense_weights: Weights of the model; None where it has more than dense layers.
    """
    if config.device != "auto" or not torch.cuda.is_available():
        return None
    if tensors:
        return DeviceChoice("cuda", "its environments are tensors there")
    if images:
        return DeviceChoice("cuda", "observations have images")
    if dense_weights is None:
        return DeviceChoice("cuda", "the model has more than dense layers")
    size = f"the model has {dense_weights:,} weights in dense layers"
    if dense_weights > SMALL_DENSE:
        return DeviceChoice("cuda", size)
    return DeviceChoice("cpu", f"{size}, which a GPU would spend its time launching")


def learner_device(config: Config) -> torch.device:
    return resolve_device(config.device)


def inference_devices(config: Config) -> list[torch.device]:
    """Devices that the policy workers take in turn."""
    names = config.runtime.inference_device
    if not names:
        return [learner_device(config)]
    return [resolve_device(name, "runtime.inference_device") for name in names.split(",")]


def inference_device(config: Config, worker: int = 0) -> torch.device:
    """Device of one of the policy workers."""
    devices = inference_devices(config)
    return devices[worker % len(devices)]


def rollout_processes(config: Config, images: bool, together: bool = False, own_rows: int | None = None) -> int:
    """The number of rollout workers for this machine.

    Environments with images take most of the time of a machine without a GPU, so there every core steps them. Otherwise
    one core is left to the learner and the policy workers, more on large machines: more workers would be faster, and
    their samples older. Of two cores both step environments, since most learners leave half of their core to that, but
    not environments that step together, which take little time.

    Args:
        images: Whether observations have images.
        together: Whether the environments of a group step together.
        own_rows: Environments that a vector environment has by itself, of which there are few enough to keep the run
            near the preset's number, unless envs_per_worker is given; None where a run decides.
    """
    if config.workers is not None:
        return config.workers
    if own_rows is not None and "envs_per_worker" not in given_names(config):
        most = config.envs_per_worker // max(1, own_rows * config.runtime.groups)
        return max(1, min(rollout_processes(config, images, together), most))
    if config.serial:
        return 1
    if images and _computes_on_cpu(config):
        return cores()
    if cores() == 2:
        return 1 if together else 2
    return max(1, cores() - (1 if cores() <= 4 else 2))


def waiting_processes(config: Config, groups: int, computing: float = 0.0) -> int:
    """The number of rollout workers where env steps mostly wait, for a simulator of their own or a network, so that
    many have room on a core: as many as have a group of one environment each, and where they do, twice as many.

    Args:
        config: With `workers` and `envs_per_worker`.
        groups: Of a worker.
        computing: Share of an env step, 0 to 1, that computes; there are no more workers than keep all cores busy.
    """
    workers = config.workers or 1
    room = MOST_WAITING if computing == 0 else min(MOST_WAITING, math.ceil(cores() / computing))
    return min(max(workers * config.envs_per_worker // groups, 2 * workers), room)


def _computes_on_cpu(config: Config) -> bool:
    """Whether no GPU is asked for, or wanted and there."""
    names = f"{config.device},{config.runtime.inference_device or config.device}".split(",")
    return all(name == "cpu" or (name == "auto" and not torch.cuda.is_available()) for name in names)


def policy_processes(config: Config) -> int:
    """Processes that do nothing but inference; 0: it is inline, in the rollout workers.

    On the CPU inline inference saves messages and waiting, and every core samples. A GPU is better used by few
    processes with large batches, so each device that is named has one. Beside a single rollout worker a policy worker
    is what keeps a second core busy.

    Args:
        config: With `workers` set.
    """
    if config.runtime.policy_workers is not None:
        return config.runtime.policy_workers
    if config.serial:
        return 1
    there = inference_devices(config)
    if any(device.type != "cpu" for device in there):
        return len(there)
    return 1 if config.workers == 1 else 0


def prepare_device(device: torch.device, config: Config) -> None:
    """Make a GPU this process's own, and choose how it computes."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.init()
        # Batches have few sizes, so that it pays to try out convolutions; but the fastest need not be the same in two
        # runs.
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = not config.serial, config.serial
        # Precision float32 means that the learner's and the policy's numbers agree to 1e-5; containers set TF32 on.
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False


def computes_bfloat16(device: torch.device) -> bool:
    """Whether bfloat16 is faster than float32 there: GPUs of the newer kinds, tiles (AMX), and AMD's vectors, which
    multiply it at twice the rate of float32. Intel's vectors do not: on a Xeon without tiles it is 0.7 times as fast
    (docs/decisions/009)."""
    if device.type == "cuda":
        if torch.cuda.is_initialized():
            return torch.cuda.get_device_capability(device) >= BFLOAT16_SINCE
        found = gpu_state(device)  # a process that does not compute there makes no context of its own
        return found is not None and found.capability >= BFLOAT16_SINCE
    if torch.backends.cpu.get_cpu_capability() == "AVX2":  # also where ATEN_CPU_CAPABILITY holds torch to it
        return False
    return bool(torch.cpu._is_amx_tile_supported() or (torch.cpu._is_avx512_bf16_supported() and _is_amd()))


def _is_amd() -> bool:
    """Whether the processor is AMD's."""
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


class GpuState(NamedTuple):
    """What the driver says of a GPU.

    Attributes:
        free, total: Bytes of memory.
        capability: Of its processors, as (9, 0).
    """

    free: int
    total: int
    capability: tuple[int, ...]


def gpu_state(device: torch.device) -> GpuState | None:
    """The state of a GPU, asked without a context in this process, which would take hundreds of MiB of its memory; None
    where the driver's program does not answer, or may mean another GPU by that number."""
    if (name := name_for_driver(device)) is None:
        return None
    try:
        said = _ask_driver("-i", name, "--query-gpu=memory.free,memory.total,compute_cap")
        free, total, capability = (part.strip() for part in said[0].split(","))
        return GpuState(int(free) << 20, int(total) << 20, tuple(map(int, capability.split("."))))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def name_for_driver(device: torch.device) -> str | None:
    """A GPU's number or identifier for the driver's program; None where that is not there, or may mean another GPU by
    the number."""
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    index = device.index or 0
    name = visible[index] if index < len(visible) else str(index)
    try:
        return name if not name.isdigit() or _counts_as_cuda() else None
    except (OSError, subprocess.SubprocessError):
        return None


def _counts_as_cuda() -> bool:
    """Whether the driver's program, which numbers GPUs by their place on the bus, has CUDA's numbers: CUDA begins with
    the fastest one, unless it is told otherwise."""
    return os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({*_ask_driver("--query-gpu=name")}) == 1


def _ask_driver(*query: str) -> list[str]:
    """The lines of the driver's program's answer."""
    asked = ["nvidia-smi", *query, "--format=csv,noheader,nounits"]
    return subprocess.run(asked, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()


def autocast_dtype(config: Config, images: bool, device: torch.device) -> torch.dtype | None:
    """The dtype to compute in under autocast, or None for plain float32."""
    if config.precision == "float32":
        return None
    if config.precision == "bfloat16":
        return torch.bfloat16
    return torch.bfloat16 if images and computes_bfloat16(device) else None


def cores() -> int:
    """Cores that this process may use; of a container with less time than that, so many as fill its time."""
    return math.ceil(min(len(os.sched_getaffinity(0)), cpu_quota()))


def learner_threads(config: Config) -> int:
    """Threads of the learner: up to four cores, and half of more than eight, where it computes on them; few where it
    feeds a GPU.

    Serial mode has one, because the order in which several add up a gradient is not reproducible.
    """
    if config.serial:
        return 1
    if config.runtime.learner_threads is not None:
        return config.runtime.learner_threads
    return max(min(4, cores()), cores() // 2) if learner_device(config).type == "cpu" else min(4, max(1, cores() // 4))


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let torch use so many threads in this process, and afterwards as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def learner_torch_threads(config: Config) -> int:
    """Threads inside the learner's tensor operations: one on the CPU, where the learner's threads work on different
    chunks."""
    return 1 if learner_device(config).type == "cpu" else learner_threads(config)


def inference_threads(config: Config) -> int:
    """torch threads of each policy worker."""
    if config.runtime.inference_threads is not None:
        return config.runtime.inference_threads
    policies = policy_processes(config)
    if policies == 0 or inference_device(config).type != "cpu":
        return 1
    return max(1, cores() // (8 * policies))
