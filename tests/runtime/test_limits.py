"""Too little of something that a run needs: told before anything starts."""

import dataclasses
import os
import resource
import shlex
import subprocess
import sys
import tempfile
from collections import namedtuple
from pathlib import Path

import gymnasium
import psutil
import pytest
import torch
from cgroup_folders import use_cgroups
from commands import ENVIRONMENT, ROOT
from gymnasium import spaces
from whole_runs import config_for, summary

from sfactory import train
from sfactory.config import ModelConfig, RuntimeConfig
from sfactory.data.batch import Assembler
from sfactory.errors import ConfigError
from sfactory.model import build_model
from sfactory.runtime import limits
from sfactory.runtime.planning import make_plan
from sfactory.runtime.wires import make_wires

SMALL = ["--preset", "none", "--workers", "1", "--envs-per-worker", "8", "--rollout", "16", "--batch-size", "128",
         "--device", "cpu", "--log.no-tensorboard", "--steps", "1024"]  # fmt: skip
GIB = 2**30


def command(folder: Path, *flags: str, before: str = "") -> subprocess.CompletedProcess:
    """The training command, after a line of shell."""
    line = shlex.join(
        [sys.executable, "-m", "sfactory.train", "--env", "CartPole-v1", "--run", str(folder / "run"), *SMALL, *flags]
    )
    return subprocess.run(
        ["bash", "-c", f"{before}\n{line}"], capture_output=True, text=True, env=ENVIRONMENT, cwd=ROOT, timeout=60
    )


def plan_for(folder: Path, **changes):
    plan = make_plan(config_for(folder, "CartPole-v1", **changes))
    return plan, build_model(plan.env.observation, plan.env.action, plan.config.model)


def refusal(plan, model) -> str:
    with pytest.raises(ConfigError) as caught:
        limits.check_limits(plan, model)
    return str(caught.value)


def test_too_few_descriptors_are_told_with_a_number_that_suffices(tmp_path):
    refused = command(tmp_path, before="ulimit -n 64")
    assert refused.returncode == 2
    assert "the limit is 64 (hard limit: 64)" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert not (tmp_path / "run").exists()
    needed = int(refused.stderr.partition("ulimit -n ")[2].partition(",")[0])
    assert 64 < needed < 256
    with_enough = command(tmp_path, before=f"ulimit -n {needed}")
    assert with_enough.returncode == 0, with_enough.stderr


def test_a_soft_limit_on_descriptors_is_raised(tmp_path):
    assert command(tmp_path, before="ulimit -Sn 64").returncode == 0


def can_mount() -> bool:
    return (
        subprocess.run(
            ["unshare", "-m", "mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", "/dev/shm"], check=False
        ).returncode
        == 0
    )


@pytest.mark.skipif(not can_mount(), reason="needs the right to mount a tmpfs")
@pytest.mark.parametrize("option", ["size=16m", "size=4k", "ro"])
def test_a_run_needs_nothing_of_dev_shm_but_that_it_can_be_written(option, tmp_path):
    line = shlex.join(
        [sys.executable, "-m", "sfactory.train", "--env", "CartPole-v1", "--run", str(tmp_path / "run"), *SMALL]
    )
    script = f"mount -t tmpfs -o {option} tmpfs /dev/shm && {line}; status=$?; ls /dev/shm | wc -l; exit $status"
    done = subprocess.run(
        ["unshare", "-m", "bash", "-c", script],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        cwd=ROOT,
        timeout=60,
        check=False,
    )
    if option == "ro":
        assert done.returncode == 2
        assert "/dev/shm is not a folder that can be written to; mount a tmpfs there" in done.stderr
        assert "Traceback" not in done.stderr
        return
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "0"
    assert summary(tmp_path / "run")["status"] == "completed"


@pytest.mark.parametrize("policy_workers", [0, 2])
def test_what_is_planned_for_covers_what_a_run_takes(policy_workers, tmp_path):
    """The figures are measured ones; this notices when they have become wrong."""
    plan, model = plan_for(tmp_path, workers=3, runtime=RuntimeConfig(policy_workers=policy_workers))
    planned = limits.descriptors_needed(plan), limits.threads_needed(plan), limits.memory_needed(plan, model)
    before = psutil.Process().num_threads()
    seen = []

    def look(report):
        processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
        if (
            sum(process.name().startswith("sf-") for process in processes) == 4 + policy_workers
            and report.env_steps > 0
        ):
            descriptors = max(process.num_fds() for process in processes)
            threads = sum(process.num_threads() for process in processes) - before
            seen.append((descriptors, threads, sum(process.memory_full_info().pss for process in processes[1:])))
            return False

    train(dataclasses.replace(plan.config, steps=10**9), [look])
    descriptors, threads, memory = seen[0]
    assert planned[0] - limits.SPARE_DESCRIPTORS >= descriptors
    assert planned[1] >= threads
    assert 0.5 * planned[2] < memory < 1.3 * planned[2]


class Categories(gymnasium.Env):
    """Says one of many categories at each step, or some of them."""

    action_space = spaces.Discrete(2)

    def __init__(self, *sizes: int):
        self.observation_space = spaces.Discrete(sizes[0]) if len(sizes) == 1 else spaces.MultiDiscrete(sizes)

    def reset(self, *, seed=None, options=None):
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 1.0, self.np_random.random() < 0.1, False, {}


class Hashed(torch.nn.Module):
    """An encoder of one's own for many categories."""

    def __init__(self, leaf):
        super().__init__()
        self.embedding, self.out_features = torch.nn.Embedding(64, 8), 8

    def forward(self, x):
        return self.embedding(x.long() % 64)


@pytest.mark.parametrize("sizes", [(10_000_000,), (5_000_000, 5_000_000)])
def test_more_categories_than_make_sense_one_hot_are_refused_with_the_figures_and_the_way_out(sizes, tmp_path):
    config = config_for(tmp_path, lambda: Categories(*sizes))
    with pytest.raises(ConfigError) as caught:
        train(config)
    for part in (
        "the observation obs has 10000000 categories, which enter the network one-hot: 4.8 GiB for each minibatch of "
        "128 samples",
        "2.4 GiB of weights in a first layer of width 64",
        "At most 2097152 categories",
        "ObservationWrapper",
        "model.encoder with an embedding",
    ):
        assert part in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_what_is_said_to_be_sensible_is_accepted_and_more_with_an_encoder_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "MOST_ONE_HOT", 2**20)

    def plan(categories, **model):
        return make_plan(config_for(tmp_path, lambda: Categories(categories), model=ModelConfig(**model)))

    plan(2048)
    with pytest.raises(ConfigError, match="At most 2048 categories"):
        plan(2049)
    with pytest.raises(ConfigError, match=r"first layer of width 512\. At most 512 categories"):
        plan(2048, hidden=(512,))
    own = plan(10_000_000, encoder=Hashed).config
    assert train(dataclasses.replace(own, serial=True, steps=256)).status == "completed"


STAT = "anon 5\ninactive_file 200\ntotal_inactive_file 300\n"


def test_the_tightest_memory_limit_counts_whoever_sets_it(tmp_path, monkeypatch):
    use_cgroups(monkeypatch, tmp_path / "new", "0::/user/job", {
        "user/job/memory.max": "max", "user/job/memory.current": 700,
        "user/memory.max": 1000, "user/memory.current": 900, "user/memory.stat": STAT})  # fmt: skip
    assert limits.free_memory() == (1000 - 900 + 200, f"the memory limit of {tmp_path / 'new' / 'user'}")
    old = {"memory/memory.limit_in_bytes": 2000, "memory/memory.usage_in_bytes": 900, "memory/memory.stat": STAT}
    use_cgroups(monkeypatch, tmp_path / "old", "4:memory:/not/mounted/in/this/container", old)
    assert limits.free_memory() == (2000 - 900 + 300, f"the memory limit of {tmp_path / 'old' / 'memory'}")
    use_cgroups(monkeypatch, tmp_path / "none", "0::/", {})
    assert limits.free_memory().by == "this machine"


@pytest.mark.parametrize("segments", [1, 2, 4])
def test_the_memory_of_a_batch_is_counted_as_far_as_it_has_its_own(segments, tmp_path):
    plan, model = plan_for(tmp_path, serial=True, env_backend="gymnasium", batch_size=64 * segments)
    arena, device = make_wires(plan, local=True).arena, torch.device("cpu")
    held = 0
    if not (assembler := Assembler(arena, segments, device)).is_view:
        held = sum(array.nbytes for array in assembler._kept.arrays)
    weights = sum(tensor.nbytes for tensor in model.state_dict().values())
    counted = limits.memory_needed(plan, model) - limits.trajectory_bytes(plan, model) - 7 * weights
    assert plan.rows == 4 and held <= counted <= 1.5 * held


def test_too_little_memory_is_told_with_the_figures(tmp_path, monkeypatch):
    plan, model = plan_for(tmp_path, serial=True, envs_per_worker=200_000, batch_size=16 * 100_000, steps=16 * 100_000)
    limits.check_limits(plan, model)
    use_cgroups(monkeypatch, tmp_path / "cgroups", "0::/", {"memory.max": GIB, "memory.current": GIB - 2**20})
    said = refusal(plan, model)
    assert f"{limits.memory_needed(plan, model) / GIB:.1f} GiB" in said
    assert (
        f"slots of rollout 16 x 100000 rows), and the memory limit of {tmp_path / 'cgroups'} leaves 0.0 GiB; lower "
        "envs_per_wor" in said
    )


def test_a_run_that_never_fits_is_refused_before_anything_is_made(tmp_path):
    refused = command(tmp_path, "--envs-per-worker", "2000000000", "--batch-size", "16000000000")
    assert refused.returncode == 2
    assert "GiB" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert not (tmp_path / "run").exists()


def test_a_limit_on_files_that_shared_memory_would_break_is_told(tmp_path):
    refused = command(tmp_path, before="ulimit -f 8")
    assert refused.returncode == 2
    assert "the limit on the size of files is 8192" in refused.stderr
    assert "ulimit -f unlimited" in refused.stderr
    assert not (tmp_path / "run").exists()


def test_too_few_processes_are_told(tmp_path, monkeypatch):
    plan, model = plan_for(tmp_path, workers=50)
    needed = limits.threads_needed(plan)
    assert needed > 100
    use_cgroups(
        monkeypatch, tmp_path / "cgroups", "8:pids:/job", {"pids/job/pids.max": 150, "pids/job/pids.current": 60}
    )
    assert f"needs {needed} more processes and threads, and {tmp_path}/cgroups/pids/job/pids.max leaves 90" in refusal(
        plan, model
    )
    use_cgroups(monkeypatch, tmp_path / "cgroups", "8:pids:/job", {"pids/job/pids.max": 1000})
    limits.check_limits(plan, model)
    original = resource.getrlimit
    monkeypatch.setattr(limits.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(
        limits.resource, "getrlimit", lambda kind: (50, 60) if kind == resource.RLIMIT_NPROC else original(kind)
    )
    assert "the limit is 50 (hard limit: 60); raise it with ulimit -u" in refusal(plan, model)


def test_a_disk_that_will_be_full_is_warned_of(tmp_path, monkeypatch, caplog):
    plan, model = plan_for(tmp_path)
    limits.check_limits(plan, model)
    assert caplog.text == ""
    size = limits.checkpoint_bytes(model)
    monkeypatch.setattr(limits.shutil, "disk_usage", lambda folder: namedtuple("Usage", "free")(4 * size))
    limits.check_limits(plan, model)
    assert "MiB free; free some, or lower log.keep" in caplog.text
    result = train(dataclasses.replace(plan.config, serial=True, steps=256))
    written = [file.stat().st_size for file in (result.run_dir / "checkpoints").iterdir()]
    assert size <= sum(written) < 2 * size + 20_000
    assert os.path.isdir(result.run_dir)


@pytest.mark.parametrize("excess", [0, 1])
def test_temporary_files_may_be_in_a_folder_with_a_long_name(excess, tmp_path):
    """Up to 107 bytes with the socket's own name, "/pymp-12345678/listener-12345678"."""
    with tempfile.TemporaryDirectory() as folder:
        name = 107 - 32 + excess - len(os.fsencode(folder)) - 1
        longest = Path(folder, "ö" * (name // 2) + "o" * (name % 2))
        longest.mkdir()
        done = command(tmp_path, before=f"export TMPDIR={shlex.quote(str(longest))}")
        assert os.listdir(longest) == []
    if excess:
        assert done.returncode == 2
        assert done.stderr.startswith(f"error: {longest} has too long a name")
        assert "of 108 bytes there, and 107 is the most. Set TMPDIR" in done.stderr
        assert not (tmp_path / "run").exists()
    else:
        assert done.returncode == 0, done.stderr
