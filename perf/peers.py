"""sfactory side by side with other trainers, each in a virtual environment of its own.

    python -m perf.peers --build                                   # once; about 1 GB a peer
    python -m perf.peers [--only NAME ...] [--rounds 3] [--json FILE]
    python -m perf.peers --search --only pong                      # tries the candidate settings of the peers
    python -m perf.peers --to-score [--only cartpole] [--json FILE]

Throughput: every trainer learns the same model with the same rollout length and epochs from the same environment on the CPU. A round runs
each once, in turn (A B C A B C); medians and ranges are over the rounds, ratios are of medians. Env steps are decisions of the agent that
have been trained on, counted over a window of `--seconds` after a warm-up, by perf/peer_scripts/window.py in a peer's driver and from
metrics.csv in sfactory. Rounds that `--json FILE` already holds count too, so that a long measurement can be done in parts.

Each trainer has up to two rows. sfactory's *throughput* row has the setting of perf/fps.py, with bfloat16 for images where the CPU
multiplies in it, and is to be held against the peers' fastest, whatever batches they like best; *same* has float32 and the usual batch of
1024 samples, and is to be held against the peers' *usual* rows, or their only ones.

Time to score: the wall clock from the command to an evaluation (or the mean of the last 20 training episodes) of at least a target.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import selectors
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from perf.fps import WORKLOADS as FPS_WORKLOADS
from perf.fps import settled_after

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = Path(__file__).resolve().parent / "peer_scripts"
START_LIMIT_S = 60.0
"""Longest time from a command to its first report (sfactory: until it has settled), and from the end of its window to its exit."""

PEERS: dict[str, tuple[str, ...]] = {
    # The newest it runs with: it asks for NumPy 1 and Gymnasium 0.29, whose MuJoCo environments end at v4 and need MuJoCo 2.
    "sample-factory": (
        "sample-factory==2.1.1",
        "numpy<2",
        "gymnasium==0.29.1",
        "mujoco<3",
        "imageio",
        "ale-py",
        "vizdoom",
        "opencv-python",
    ),
    "stable-baselines3": ("stable-baselines3==2.9.2", "gymnasium[mujoco]", "ale-py", "opencv-python-headless"),
    "torchrl": ("torchrl==0.14.0", "gymnasium[mujoco]", "ale-py", "opencv-python-headless"),
}
"""What is installed for each peer, after the torch of constraints.txt. PufferLib has no row: see perf/RESULTS.md."""

Setting = dict[str, Any]


class PeerError(Exception):
    """A trainer is not built, failed, or reported nothing."""


@dataclass(frozen=True)
class Tuned:
    """A peer's setting of a workload.

    Attributes:
        fixed: What makes the workload: environment, model, rollout, epochs.
        best: The fastest of `tried`, found with --search.
        tried: Every candidate.
        usual: Of `tried`, one with the batch of 1024 samples that is usual for the environment, where the best has a larger one.
    """

    fixed: Setting
    best: Setting
    tried: tuple[Setting, ...]
    usual: Setting | None = None


@dataclass(frozen=True)
class Workload:
    """What is compared.

    Attributes:
        throughput: sfactory's flags from perf/fps.py.
        same: Flags with the sizes and the precision of the peers' usual settings.
    """

    throughput: str
    same: str
    peers: dict[str, Tuned] = field(default_factory=dict)


def _sf(workers: int, envs: int, splits: int = 2, **more: Any) -> Setting:
    return {"num_workers": workers, "num_envs_per_worker": envs, "worker_num_splits": splits, "batch_size": 1024, **more}


def _vec(envs: int, *, subprocesses: bool = False, batch_size: int = 1024, threads: int = 1) -> Setting:
    return {"envs": envs, "subprocesses": subprocesses, "batch_size": batch_size, "threads": threads}


_SF: Setting = {
    "rollout": 32,
    "num_epochs": 1,
    "num_batches_per_epoch": 1,
    "async_rl": True,
    "use_rnn": False,
    "with_vtrace": False,
    "normalize_input": False,
    "normalize_returns": False,
}
"""The parts of its work that it can leave out are left out."""
_SF_MLP: Setting = {**_SF, "encoder_mlp_layers": [64, 64], "nonlinearity": "tanh"}
_SF_CARTPOLE: Setting = {**_SF_MLP, "env": "CartPole-v1"}
_SF_PONG: Setting = {**_SF, "env": "atari_pong", "kl_loss_coeff": 0.0}
_SF_DOOM: Setting = {
    **_SF,
    "env": "doom_basic",
    "encoder_conv_architecture": "convnet_atari",
    "nonlinearity": "relu",
    "res_w": 128,
    "res_h": 72,
}
_SF_HALFCHEETAH: Setting = {**_SF_MLP, "env": "HalfCheetah-v4", "rollout": 64, "kl_loss_coeff": 0.0}


def _sf_core(kind: str) -> Setting:
    return {"use_rnn": True, "rnn_type": kind, "rnn_size": 128, "recurrence": 32}


_SF_TRIED = (
    _sf(1, 64),
    _sf(1, 32, 1, serial_mode=True, async_rl=False),
    _sf(1, 256, batch_size=8192),
    _sf(1, 256, batch_size=8192, batched_sampling=True),
    _sf(1, 512, batch_size=16384, batched_sampling=True),
    _sf(2, 32),
    _sf(2, 64, batched_sampling=True),
    _sf(2, 128, batch_size=8192, batched_sampling=True),
    _sf(2, 256, batch_size=16384, batched_sampling=True),
)
_SF_TRIED_HALFCHEETAH = (
    _sf(2, 16),
    _sf(2, 32),
    _sf(1, 64, batch_size=4096, batched_sampling=True),
    _sf(2, 32, batch_size=4096, batched_sampling=True),
    _sf(2, 64, batch_size=8192, batched_sampling=True),
    _sf(2, 128, batch_size=16384, batched_sampling=True),
)
_SF_TRIED_IMAGES = (
    _sf(1, 32),
    _sf(2, 16),
    _sf(2, 20),
    _sf(2, 16, 1),
    _sf(2, 32, 1),
    _sf(2, 16, 1, batched_sampling=True),
    _sf(2, 16, set_workers_cpu_affinity=False),
)
_VEC_TRIED = (_vec(32), _vec(64), _vec(64, threads=2), _vec(256), _vec(512, batch_size=16384), _vec(64, subprocesses=True))
_TORCHRL_TRIED = tuple(
    {"envs": envs, "vector": vector, "batch_size": batch_size, "threads": threads}
    for envs, vector, batch_size, threads in (
        (64, True, 1024, 1),
        (64, True, 1024, 2),
        (64, False, 1024, 1),
        (256, True, 1024, 1),
        (256, True, 8192, 1),
        (512, True, 16384, 1),
    )
)
_VEC_TRIED_IMAGES = (
    _vec(32, threads=2, batch_size=256),
    _vec(16),
    _vec(32),
    _vec(32, threads=2),
    _vec(64, threads=2),
    _vec(64, threads=2, batch_size=2048),
    _vec(8, subprocesses=True, threads=2),
    _vec(16, subprocesses=True),
    _vec(16, subprocesses=True, threads=2),
)

_BATCH_OF_PEERS = "--envs-per-worker 1024 --batch-size 16384 --runtime.groups 2 --runtime.spare-batches 1"
_SAME = "--preset none --precision float32 --batch-size 1024"
WORKLOADS: dict[str, Workload] = {
    "cartpole": Workload(
        f"{FPS_WORKLOADS['cartpole']} {_BATCH_OF_PEERS}",
        f"--env CartPole-v1 {_SAME} --rollout 32 --workers 1 --envs-per-worker 64",
        {
            "sample-factory": Tuned(_SF_CARTPOLE, _SF_TRIED[-1], _SF_TRIED, _sf(1, 64)),
            "stable-baselines3": Tuned(
                {"env": "CartPole-v1", "hidden": [64, 64], "rollout": 32}, _vec(512, batch_size=16384), _VEC_TRIED, _vec(64)
            ),
            "torchrl": Tuned({"env": "CartPole-v1", "hidden": [64, 64], "rollout": 32}, _TORCHRL_TRIED[5], _TORCHRL_TRIED),
        },
    ),
    "cartpole-lstm": Workload(
        f"{FPS_WORKLOADS['cartpole-lstm']} {_BATCH_OF_PEERS}",
        f"--env CartPole-v1 {_SAME} --rollout 32 --workers 1 --envs-per-worker 64 --model.core lstm",
        {"sample-factory": Tuned({**_SF_CARTPOLE, **_sf_core("lstm")}, _SF_TRIED[-1], _SF_TRIED, _sf(1, 64))},
    ),
    "cartpole-gru": Workload(
        f"{FPS_WORKLOADS['cartpole-gru']} {_BATCH_OF_PEERS}",
        f"--env CartPole-v1 {_SAME} --rollout 32 --workers 1 --envs-per-worker 64 --model.core gru",
        {"sample-factory": Tuned({**_SF_CARTPOLE, **_sf_core("gru")}, _SF_TRIED[-1], _SF_TRIED, _sf(1, 64))},
    ),
    "pong": Workload(
        FPS_WORKLOADS["pong"],
        f"--env ALE/Pong-v5 {_SAME} --rollout 32 --envs-per-worker 64",
        {
            "sample-factory": Tuned(_SF_PONG, _sf(2, 16, 1), _SF_TRIED_IMAGES),
            "stable-baselines3": Tuned(
                {"env": "PongNoFrameskip-v4", "rollout": 32}, _VEC_TRIED_IMAGES[0], _VEC_TRIED_IMAGES, _vec(32, threads=2)
            ),
        },
    ),
    "pong-lstm": Workload(
        FPS_WORKLOADS["pong-lstm"],
        f"--env ALE/Pong-v5 {_SAME} --rollout 32 --envs-per-worker 64 --model.core lstm",
        {"sample-factory": Tuned({**_SF_PONG, **_sf_core("lstm")}, _sf(2, 16, 1), _SF_TRIED_IMAGES)},
    ),
    "pong-gru": Workload(
        FPS_WORKLOADS["pong-gru"],
        f"--env ALE/Pong-v5 {_SAME} --rollout 32 --envs-per-worker 64 --model.core gru",
        {"sample-factory": Tuned({**_SF_PONG, **_sf_core("gru")}, _sf(2, 16, 1), _SF_TRIED_IMAGES)},
    ),
    "vizdoom-basic": Workload(
        FPS_WORKLOADS["vizdoom-basic"],
        f"--env VizdoomBasic-v1 {_SAME} --rollout 32 --workers 2 --envs-per-worker 16",
        {"sample-factory": Tuned(_SF_DOOM, _sf(1, 32), _SF_TRIED_IMAGES)},
    ),
    "halfcheetah": Workload(
        FPS_WORKLOADS["halfcheetah"],
        f"--env HalfCheetah-v5 {_SAME} --rollout 64 --workers 2 --envs-per-worker 16",
        {
            "sample-factory": Tuned(_SF_HALFCHEETAH, _SF_TRIED_HALFCHEETAH[-1], _SF_TRIED_HALFCHEETAH, _sf(2, 16)),
            "stable-baselines3": Tuned({"env": "HalfCheetah-v5", "hidden": [64, 64], "rollout": 64}, _vec(64, threads=2), _VEC_TRIED),
            "torchrl": Tuned({"env": "HalfCheetah-v5", "hidden": [64, 64], "rollout": 64}, _TORCHRL_TRIED[5], _TORCHRL_TRIED),
        },
    ),
}
"""Sizes that are not here are the same defaults everywhere: two hidden layers of 64 (tanh), the Nature CNN with 512
features, cores of 128 units, one epoch."""


@dataclass(frozen=True)
class Score:
    """A target and how each trainer gets there.

    Attributes:
        evaluated: The score is that of 20 deterministic episodes after the last step, which is timed too; else that of training.
        limit_s: When to give up.
        peers: Each with the settings that its documentation or its zoo has for the environment.
    """

    target: float
    evaluated: bool
    limit_s: float
    sfactory: str
    peers: dict[str, Setting]


SCORES: dict[str, Score] = {
    "cartpole": Score(
        475.0,
        True,
        120.0,
        "--env CartPole-v1 --steps 150000",
        {
            # The command in its sf_examples/train_gym_env.py.
            "sample-factory": {
                "env": "CartPole-v1",
                "use_rnn": False,
                "num_envs_per_worker": 20,
                "policy_workers_per_policy": 2,
                "recurrence": 1,
                "with_vtrace": False,
                "batch_size": 512,
                "reward_scale": 0.1,
                "save_every_sec": 10,
                "experiment_summaries_interval": 10,
                "train_for_env_steps": 300_000,
            },
            # rl-baselines3-zoo, hyperparams/ppo.yml.
            "stable-baselines3": {
                "env": "CartPole-v1",
                "envs": 8,
                "steps": 100_000,
                "linear": ["learning_rate", "clip_range"],
                "ppo": {
                    "n_steps": 32,
                    "batch_size": 256,
                    "gae_lambda": 0.8,
                    "gamma": 0.98,
                    "n_epochs": 20,
                    "ent_coef": 0.0,
                    "learning_rate": 1e-3,
                    "clip_range": 0.2,
                },
            },
        },
    ),
    "halfcheetah": Score(
        2000.0,
        False,
        180.0,
        "--env HalfCheetah-v5 --steps 1000000 --workers 2",
        {
            # Its sf_examples/mujoco/mujoco_params.py, whose 64 environments are spread over the cores that there are.
            "sample-factory": {"env": "HalfCheetah-v4", "num_workers": 2, "num_envs_per_worker": 32},
            # rl-baselines3-zoo, hyperparams/ppo.yml.
            "stable-baselines3": {
                "env": "HalfCheetah-v5",
                "envs": 1,
                "normalize": True,
                "steps": 1_000_000,
                "ppo": {
                    "batch_size": 64,
                    "n_steps": 512,
                    "gamma": 0.98,
                    "learning_rate": 2.0633e-05,
                    "ent_coef": 0.000401762,
                    "clip_range": 0.1,
                    "n_epochs": 20,
                    "gae_lambda": 0.92,
                    "max_grad_norm": 0.8,
                    "vf_coef": 0.58096,
                    "policy_kwargs": {
                        "log_std_init": -2,
                        "ortho_init": False,
                        "activation_fn": "ReLU",
                        "net_arch": {"pi": [256, 256], "vf": [256, 256]},
                    },
                },
            },
        },
    ),
}


def build(peer: str, venvs: Path) -> None:
    """Make the peer's virtual environment. torch comes first, so that no package pulls another build of it."""
    folder = venvs / peer
    pip = [str(folder / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check", "-c", str(ROOT / "constraints.txt")]
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    subprocess.run([*pip, "torch"], check=True)
    subprocess.run([*pip, *PEERS[peer]], check=True)


def run_driver(peer: str, venvs: Path, asked: Setting, limit_s: float) -> tuple[dict[str, float] | None, float]:
    """A driver's answer (None if it gave none in time) and the seconds from its start to the answer; ends all its processes.

    Raises:
        PeerError: If the peer is not built, or its driver failed; with the end of what it printed.
    """
    python = venvs / peer / "bin" / "python"
    if not python.exists():
        raise PeerError(f"{peer} is not built in {venvs}; run python -m perf.peers --build --peers {peer}")
    command = [str(python), str(SCRIPTS / f"{peer.replace('-', '_')}_driver.py"), json.dumps(asked)]
    with tempfile.TemporaryDirectory() as folder, open(f"{folder}/log", "w+b") as log:
        begin = time.monotonic()
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TMPDIR": folder}
        process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=log, start_new_session=True, env=env)
        try:
            answer, seconds, printed = _read_answer(process, begin + limit_s, begin)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(START_LIMIT_S if answer else 0.1)
        finally:
            end_session(process)
        if answer is None and process.returncode not in (0, -signal.SIGKILL):
            log.seek(0)
            raise PeerError(f"{peer} failed: {shlex.join(command)}\n{(log.read() + printed)[-3000:].decode(errors='replace')}")
    return answer, seconds


def _read_answer(process: subprocess.Popen[bytes], deadline: float, begin: float) -> tuple[dict[str, float] | None, float, bytes]:
    """Follow a driver's output to its RESULT line, its end or the deadline: the answer, seconds since `begin`, and the last output."""
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    tail = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while (left := deadline - time.monotonic()) > 0:
            if not selector.select(left):
                break
            chunk = process.stdout.read(1 << 16)
            if chunk == b"":
                break
            tail = (tail + (chunk or b""))[-100_000:]
            for line in tail.split(b"\n")[:-1]:
                if line.startswith(b"RESULT "):
                    return json.loads(line[7:]), time.monotonic() - begin, tail
    return None, time.monotonic() - begin, tail


def end_session(leader: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a driver's process group, and take away the torch shared memory that bears those processes' numbers."""
    group = [p.pid for p in psutil.process_iter() if _group_of(p.pid) == leader.pid]
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader.pid, signal.SIGKILL)
    if leader.stdout:
        leader.stdout.close()
    leader.wait()
    for pid in group:
        for path in Path("/dev/shm").glob(f"torch_{pid}_*"):
            path.unlink(missing_ok=True)


def _group_of(pid: int) -> int | None:
    with contextlib.suppress(ProcessLookupError):
        return os.getpgid(pid)
    return None


@contextlib.contextmanager
def sfactory_run(flags: str, folder: str) -> Iterator[subprocess.Popen[bytes]]:
    """A training run of sfactory in `folder`; interrupted at the end."""
    command = [sys.executable, "-m", "sfactory.train", *shlex.split(flags), "--run", f"{folder}/run", "--device", "cpu"]
    command += ["--log.display", "none", "--log.no-tensorboard"]
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        yield process
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.send_signal(signal.SIGINT)
            process.wait(30)
        if process.poll() is None:
            process.kill()
            process.wait()


def read_metrics(folder: str) -> list[dict[str, float]]:
    """The complete rows of a run's metrics.csv so far."""
    path = Path(folder) / "run" / "metrics.csv"
    if not path.exists():
        return []
    lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(lines)]


def measure_sfactory(flags: str, warmup: float, seconds: float) -> float:
    """Env steps per second, counted as window.py does, with the reports of metrics.csv; the window opens once the run has settled, too."""
    settled = settled_after(flags)
    with tempfile.TemporaryDirectory() as folder, sfactory_run(f"{flags} --steps {10**12} --log.report-every-s 0.5", folder) as process:
        deadline = time.monotonic() + START_LIMIT_S + warmup + seconds
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.5)
            rows = [row for row in read_metrics(folder) if row["env_steps"] > 0]
            warm = (row for row in rows if row["wall_s"] - rows[0]["wall_s"] >= warmup and row["env_steps"] > settled)
            opened = next(warm, None)
            if opened and rows[-1]["wall_s"] - opened["wall_s"] >= seconds:
                return (rows[-1]["env_steps"] - opened["env_steps"]) / (rows[-1]["wall_s"] - opened["wall_s"])
    raise PeerError(f"sfactory ended or reported nothing in time: {flags}")


def score_sfactory(score: Score) -> tuple[float | None, float]:
    """(score or None, seconds from the command to it)."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        if score.evaluated:
            with sfactory_run(score.sfactory, folder) as process:
                process.wait(score.limit_s)
            command = [sys.executable, "-m", "sfactory.eval", "--run", f"{folder}/run", "--episodes", "20", "--json"]
            printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
            return json.loads(printed.splitlines()[-1])["return_mean"], time.monotonic() - begin
        with sfactory_run(f"{score.sfactory} --log.report-every-s 0.5 --log.episode-window 20", folder) as process:
            while process.poll() is None and time.monotonic() - begin < score.limit_s:
                time.sleep(0.2)
                returns = [row["episode_return_mean"] for row in read_metrics(folder) if "episode_return_mean" in row]
                if returns and returns[-1] >= score.target:
                    return returns[-1], time.monotonic() - begin
    return None, time.monotonic() - begin


def score_peer(peer: str, venvs: Path, score: Score) -> tuple[float | None, float]:
    """(score or None, seconds from the command to it)."""
    asked = {"setting": score.peers[peer]} | ({} if score.evaluated else {"target": score.target})
    answer, seconds = run_driver(peer, venvs, asked, score.limit_s)
    return (answer["score"] if answer else None), seconds


def measure_peer(peer: str, venvs: Path, setting: Setting, warmup: float, seconds: float) -> float | None:
    """Env steps per second; None if the peer was not done in time."""
    asked = {"setting": setting, "warmup": warmup, "seconds": seconds}
    answer, _ = run_driver(peer, venvs, asked, START_LIMIT_S + warmup + 2 * seconds)
    return answer["fps"] if answer else None


def search(name: str, peer: str, args: argparse.Namespace) -> None:
    """Show how fast every candidate setting of a peer is, the fastest first."""
    tuned = WORKLOADS[name].peers[peer]
    speeds: list[tuple[float | None, Setting]] = []
    for tried in tuned.tried:
        try:
            speeds.append((measure_peer(peer, args.venvs, {**tuned.fixed, **tried}, args.warmup, args.seconds), tried))
        except PeerError as error:  # a setting that the peer refuses
            print(error)
    table = Table("env steps/s", "setting", title=f"{name}, {peer}")
    for speed, tried in sorted(speeds, key=lambda pair: -(pair[0] or 0)):
        table.add_row(f"{speed:,.0f}" if speed else "none in time", " ".join(f"{key}={value}" for key, value in tried.items()))
    Console(width=160).print(table)


def throughput_round(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Each trainer once."""
    workload = WORKLOADS[name]
    speeds: dict[str, float | None] = {"sfactory, same": measure_sfactory(workload.same, args.warmup, args.seconds)}
    for peer in _chosen(workload.peers, args):
        tuned = workload.peers[peer]
        if tuned.usual:
            speeds[f"{peer}, usual"] = measure_peer(peer, args.venvs, {**tuned.fixed, **tuned.usual}, args.warmup, args.seconds)
        speeds[peer] = measure_peer(peer, args.venvs, {**tuned.fixed, **tuned.best}, args.warmup, args.seconds)
    speeds["sfactory, throughput"] = measure_sfactory(workload.throughput, args.warmup, args.seconds)
    return [{"workload": name, "trainer": trainer, "fps": speed} for trainer, speed in speeds.items()]


def score_round(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Each trainer once, from its command to its score."""
    score = SCORES[name]
    results = {"sfactory": score_sfactory(score)} | {peer: score_peer(peer, args.venvs, score) for peer in _chosen(score.peers, args)}
    return [
        {"workload": name, "trainer": trainer, "seconds": seconds, "score": reached, "target": score.target}
        for trainer, (reached, seconds) in results.items()
    ]


def _chosen(peers: Iterable[str], args: argparse.Namespace) -> list[str]:
    return [peer for peer in peers if not args.peers or peer in args.peers]


def throughput_table(measurements: Sequence[dict[str, Any]]) -> Table:
    """Medians, ranges, and how many times as fast as each peer sfactory is in its two settings."""
    table = Table("workload", "trainer", "env steps/s", "range", "rounds", "sfactory same", "sfactory throughput")
    for name in dict.fromkeys(m["workload"] for m in measurements):
        speeds: dict[str, list[float]] = {}
        for m in measurements:
            if m["workload"] == name and m["fps"] is not None:
                speeds.setdefault(m["trainer"], []).append(m["fps"])
        medians = {trainer: statistics.median(values) for trainer, values in speeds.items()}
        for trainer, values in speeds.items():
            own = [medians.get(f"sfactory, {kind}") for kind in ("same", "throughput")]
            ratios = [f"{speed / medians[trainer]:.1f} x" if speed else "" for speed in own]
            spread = f"{min(values):,.0f} to {max(values):,.0f}"
            table.add_row(name, trainer, f"{medians[trainer]:,.0f}", spread, str(len(values)), *ratios)
    return table


def score_table(measurements: Sequence[dict[str, Any]]) -> Table:
    """Seconds to the target, with the scores; a run that missed it is shown as such."""
    table = Table("workload", "trainer", "target", "seconds by round", "scores")
    for name, trainer in dict.fromkeys((m["workload"], m["trainer"]) for m in measurements):
        rows = [m for m in measurements if (m["workload"], m["trainer"]) == (name, trainer)]
        seconds = [f"{m['seconds']:.1f}" + ("" if (m["score"] or -1e9) >= m["target"] else " (missed)") for m in rows]
        scores = ["none" if m["score"] is None else f"{m['score']:,.0f}" for m in rows]
        table.add_row(name, trainer, f"{rows[0]['target']:g}", ", ".join(seconds), ", ".join(scores))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=WORKLOADS, help="workloads; all")
    parser.add_argument("--peers", nargs="*", choices=PEERS, help="peers; all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warmup", type=float, default=4.0, help="seconds between a trainer's first report and its window")
    parser.add_argument("--seconds", type=float, default=15.0, help="length of a window")
    parser.add_argument("--venvs", type=Path, default=Path.home() / ".cache" / "sfactory-peers")
    parser.add_argument("--json", type=Path, help="keeps the measurements; those that it holds count too")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--build", action="store_true", help="make the virtual environments")
    kind.add_argument("--search", action="store_true", help="try the candidate settings of the peers")
    kind.add_argument("--to-score", action="store_true", help="wall time to a score instead of throughput")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that trainers are ended with it
    if args.build:
        for peer in _chosen(PEERS, args):
            build(peer, args.venvs)
        return
    names = [name for name in (SCORES if args.to_score else WORKLOADS) if not args.only or name in args.only]
    if args.search:
        for name in names:
            for peer in _chosen(WORKLOADS[name].peers, args):
                search(name, peer, args)
        return
    one_round, table = (score_round, score_table) if args.to_score else (throughput_round, throughput_table)
    measurements = json.loads(args.json.read_text()) if args.json and args.json.exists() else []
    for _ in range(args.rounds):
        for name in names:
            measurements += one_round(name, args)
            if args.json:
                args.json.write_text(json.dumps(measurements, indent=2))
    Console(width=160).print(table(measurements))


if __name__ == "__main__":
    main()
