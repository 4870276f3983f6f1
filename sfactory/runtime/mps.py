"""NVIDIA's MPS (Multi-Process Service), by which the processes of a run compute on a GPU side by side instead of by
turns: a daemon that the run starts for itself and ends."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from multiprocessing.util import get_temp_dir
from pathlib import Path

import torch

from sfactory.config import Config, devices
from sfactory.errors import RunFailed
from sfactory.files import make_temporary_folder, remove_temporary_folder
from sfactory.runtime.processes import kill_tree

CONTROL = "nvidia-cuda-mps-control"
"""The daemon's program, which also takes commands to it."""
VARIABLES = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
"""By which CUDA and the program find a daemon."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
START_S = QUIT_S = 10.0


def mps_problem(config: Config) -> str | None:
    """Why a run cannot have the daemon that it asks for, or None."""
    if not config.runtime.mps:
        return None
    used = {devices.learner_device(config).type, *(device.type for device in devices.inference_devices(config))}
    if "cuda" not in used:
        return f"runtime.mps is for processes that share a GPU, but the run computes on {', '.join(used)}; leave it out"
    if config.serial:
        return "runtime.mps is for processes that share a GPU, but with serial there is one process; leave one out"
    if shutil.which(CONTROL) is None:
        return (
            f"runtime.mps needs {CONTROL}, which comes with NVIDIA's driver, on the PATH; leave it out or install that"
        )
    return None


@contextlib.contextmanager
def mps_daemon() -> Iterator[dict[str, str]]:
    """Run a daemon of one's own, which ends on exit, or with this process where there is ``setpriv``. Gives the
    environment variables of processes that shall use it.

    Raises:
        RunFailed: If it does not start, with what it said.
    """
    folder = make_temporary_folder("mps-", get_temp_dir())  # which the fork server removes if this process is killed
    variables = dict.fromkeys(VARIABLES, str(folder))
    guard = ["setpriv", "--pdeathsig", "TERM", "--"] if shutil.which("setpriv") else []
    said = folder / "said"
    with said.open("wb") as output:
        daemon = subprocess.Popen(
            [*guard, CONTROL, "-f"],
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        _await_start(daemon, variables, said)
        yield variables | _numbered_anew()
    finally:
        _quit(daemon, variables)
        remove_temporary_folder(folder)


def _numbered_anew() -> dict[str, str]:
    """The variable by which the daemon's clients see GPUs, where the user has set it. The daemon has chosen by it
    already and numbers its GPUs from 0, so that clients must not choose by the user's numbers once more."""
    named = os.environ.get(VISIBLE)
    return {VISIBLE: ",".join(map(str, range(torch.cuda.device_count())))} if named else {}


def _await_start(daemon: subprocess.Popen[bytes], variables: Mapping[str, str], said: Path) -> None:
    deadline = time.monotonic() + START_S
    while not _command("get_server_list", variables):
        if daemon.poll() is not None or time.monotonic() > deadline:
            text = said.read_text(errors="replace").strip() or "it said nothing"
            raise RunFailed(f"{CONTROL} does not start: {text}; leave runtime.mps out, or mend that")
        time.sleep(0.05)


def _quit(daemon: subprocess.Popen[bytes], variables: Mapping[str, str]) -> None:
    """End the daemon and its servers, if need be by force."""
    if daemon.poll() is None:
        _command("quit", variables)
    with contextlib.suppress(subprocess.TimeoutExpired):
        daemon.wait(QUIT_S)
    kill_tree(daemon.pid)
    daemon.wait()


def _command(command: str, variables: Mapping[str, str]) -> bool:
    """Give the daemon a command; says whether it took it."""
    try:
        done = subprocess.run(
            [CONTROL], input=command.encode() + b"\n", env=os.environ | variables, capture_output=True, timeout=QUIT_S
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0
