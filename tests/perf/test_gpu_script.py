"""perf/gpu.py, rehearsed on the CPU: its comparisons hold and would fail, and no stage that breaks costs another
one."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import shlex
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from perf import gpu, gpu_checks, gpu_packages, gpu_stages
from perf.gpu_checks import CASES, PROBLEMS
from sfactory.config import devices
from sfactory.data.batch import Batch
from sfactory.engines.cpu import TorchEngine
from sfactory.engines.graphed import GraphedEngine
from sfactory.learner import Learner
from sfactory.update import Adam
from sfactory.vtrace import unweighted_vtrace

CPU, ROWS = torch.device("cpu"), 2


@functools.cache
def expected(case: str) -> dict[str, torch.Tensor]:
    """What the CPU computes for comparison."""
    config = gpu_checks._config(CASES[case], ROWS)
    return gpu_checks._learned(gpu_checks.reference_learner(config, PROBLEMS[CASES[case].problem], ROWS))


@pytest.mark.parametrize("case", [case for case in CASES if case != "cnn"])  # the other one with pixels has all of it
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_learner_for_a_device_learns_what_the_one_on_the_cpu_does(case: str, precision: str) -> None:
    result = gpu_checks._check_learner(CASES[case], precision, CPU, ROWS, expected(case))
    assert result["ok"], result


def without(learner: Learner, **fields: Any) -> None:
    """Let a learner see its batches with other fields."""
    assemble = learner._feed.assemble

    def changed(slots: list[int]) -> Batch:
        batch = assemble(slots)
        return dataclasses.replace(batch, **{name: value(batch) for name, value in fields.items()})

    learner._feed.assemble = changed
    changed.is_view = False


def reconfigure(learner: Learner, **changes: Any) -> None:
    config = learner._objective.config
    loss = dataclasses.replace(config.loss, **{name: changes.pop(name) for name in [*changes] if name != "algo"})
    learner._objective.config = dataclasses.replace(config, loss=loss, **changes)


def first_minibatch_alone(learner: Learner) -> None:
    minibatches = learner._minibatches
    learner._minibatches = lambda samples: [next(iter(found)) for found in [minibatches(samples)]] * 4


def without_clipping(learner: Learner) -> None:
    learner._update._max_norm = 0.0


SECOND = "mlp, minibatches, rates on the device, normalised returns"
BREAKS: dict[str, tuple[str, Callable[[Learner], Any]]] = {
    "no step": ("mlp", lambda learner: setattr(learner._optimizer, "step", lambda *_: None)),
    "gradients not clipped": ("mlp", without_clipping),
    "observations not normalised": ("mlp", lambda learner: setattr(learner._model, "normalizer", None)),
    "one minibatch again and again": (SECOND, first_minibatch_alone),
    "the rate stays": (SECOND, lambda learner: setattr(learner, "_adapt_learning_rate", lambda _: None)),
    "returns as they are": (SECOND, lambda learner: setattr(learner._units, "_normalize", False)),
    "V-trace for GAE": (
        "masked, ppo, clipped values",
        lambda learner: setattr(learner._objective, "_estimator", unweighted_vtrace),
    ),
    "values not clipped": ("masked, ppo, clipped values", lambda learner: reconfigure(learner, value_clip=0.0)),
    "PPO for IMPALA": ("masked, impala", lambda learner: reconfigure(learner, algo="ppo")),
    "no graphs": ("masked, impala", lambda learner: setattr(learner._recorder, "enabled", False)),
    "no masks": ("masked, impala", lambda learner: without(learner, mask=lambda _: None)),
    "final values lost": (
        "masked, impala",
        lambda learner: without(learner, final_change=lambda batch: torch.full_like(batch.final_change, math.nan)),
    ),
    "states not reset": (
        "mixed gru",
        lambda learner: without(learner, first=lambda batch: torch.zeros_like(batch.first)),
    ),
}
"""What could be wrong on a device, each with a case that must find it out."""


@pytest.mark.parametrize("name", BREAKS)
def test_a_learner_that_is_wrong_on_a_device_is_found_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, spoil = BREAKS[name]
    right = gpu_checks.device_learner

    def wrong(*args: Any) -> Learner:
        learner = right(*args)
        spoil(learner)
        return learner

    monkeypatch.setattr(gpu_checks, "device_learner", wrong)
    for precision in ("float32", "bfloat16"):
        result = gpu_checks._check_learner(CASES[case], precision, CPU, ROWS, expected(case))
        assert not result["ok"], result


def test_an_optimizer_that_steps_nowhere_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Adam, "step", lambda *_: None)
    config = gpu_checks._config(CASES["mlp"], ROWS)
    nothing = gpu_checks._learned(gpu_checks.reference_learner(config, PROBLEMS["mlp"], ROWS))
    assert not gpu_checks._check_learner(CASES["mlp"], "float32", CPU, ROWS, nothing)["ok"]


def few_answers(monkeypatch: pytest.MonkeyPatch, problem: str, batches: int) -> dict[str, dict]:
    monkeypatch.setattr(gpu_checks, "PROBLEMS", {problem: PROBLEMS[problem]})
    return dict(gpu_checks.answer_checks(CPU, rows=ROWS, batches=batches))


@pytest.mark.parametrize("problem", ["mlp", "mixed gru"])
def test_the_engine_for_a_device_answers_as_the_plain_one(problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    results = few_answers(monkeypatch, problem, 24)
    assert len(results) == 2 and all(result["ok"] for result in results.values()), results


def spoiled_answers(self: GraphedEngine, outputs: Any) -> None:
    outputs.tensors[1].mul_(1.1)


def spoiled_states(self: GraphedEngine, outputs: Any) -> None:
    self._states.add_(0.1)


@pytest.mark.parametrize(("problem", "spoil"), [("mlp", spoiled_answers), ("mixed gru", spoiled_states)])
def test_an_engine_that_is_wrong_on_a_device_is_found_out(
    problem: str, spoil: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = GraphedEngine._forward

    def wrong(self, inputs, outputs, copies) -> None:
        right(self, inputs, outputs, copies)
        spoil(self, outputs)

    monkeypatch.setattr(GraphedEngine, "_forward", wrong)
    assert not any(result["ok"] for result in few_answers(monkeypatch, problem, 4).values())


@pytest.mark.parametrize("checks", [gpu_checks.answer_checks, gpu_checks.learner_checks])
def test_a_device_is_prepared_before_anything_is_computed(checks: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else float32 is TF32 there, whose errors of 1e-3 are no fault of anybody."""
    called = []
    monkeypatch.setattr(devices, "prepare_device", lambda *_: called.append("prepare"))
    for kind in (Learner, TorchEngine, GraphedEngine):
        made = kind.__init__

        def noted(self, *args, made=made, **settings) -> None:
            called.append("compute")
            made(self, *args, **settings)

        monkeypatch.setattr(kind, "__init__", noted)
    next(checks(CPU, rows=ROWS))
    assert called[0] == "prepare" and "compute" in called


def test_a_check_that_breaks_is_not_ok_and_leaves_the_others_their_results(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> dict:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(gpu_checks, "device_learner", broken)
    monkeypatch.setattr(gpu_checks, "CASES", {name: CASES[name] for name in ("mlp", "masked, impala")})
    kept: list[int] = []
    task = gpu.Task("cpu", 0.1, True, lambda result: kept.append(len(result["checks"])))
    threads = torch.get_num_threads()
    try:
        result = gpu_stages.learner(task)
    finally:
        torch.set_num_threads(threads)
    assert not result["ok"] and kept == [1, 2, 3, 4]
    assert all("illegal memory access" in check["error"] for check in result["checks"].values())


def test_stages_that_fail_hang_or_come_too_late_leave_the_others_their_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each stage is a process; here a small program stands in for perf.gpu."""
    (tmp_path / "perf").mkdir()
    (tmp_path / "perf" / "gpu.py").write_text(
        "import json, os, pathlib, subprocess, sys, time\n"
        "name, out = (sys.argv[sys.argv.index(flag) + 1] for flag in ('--stage', '--out'))\n"
        "if name == 'machine': sys.exit('no driver')\n"
        "if name == 'learner':\n"
        "    json.dump({'checks': {'mlp': {'ok': True}}}, open(out, 'w'))\n"
        "    child = subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
        "    pathlib.Path('child').write_text(str(child.pid)); time.sleep(60)\n"
        "if name == 'halfcheetah': json.dump({'left_out': 'no mujoco'}, open(out, 'w')); sys.exit()\n"
        "json.dump({'ok': name != 'pong', 'fps': {'pong': 5.0, 'pong-preset': 2.0}.get(name, 1.0)}, open(out, 'w'))\n"
    )
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    names = ["machine", "answers", "learner", "pong", "pong-preset", "halfcheetah"]
    monkeypatch.setattr(gpu, "STAGES", dict.fromkeys([*names, "learns"], 2.0))
    out = tmp_path / "out" / "gpu.json"
    gpu.run_all(names, gpu.Task("cuda", 0.1, False), 60.0, out)
    stages = json.loads(out.read_text())["stages"]
    assert {name: stages[name]["status"] for name in names} == {
        "machine": "failed",
        "answers": "ok",
        "learner": "late",
        "pong": "missed",
        "pong-preset": "missed",
        "halfcheetah": "left out",
    }
    assert "no driver" in stages["machine"]["printed"]
    assert stages["learner"]["result"]["checks"], "what it had found before it was stopped"
    assert stages["pong-preset"]["result"]["of_throughput"] == 0.4, "too little"
    with contextlib.suppress(psutil.NoSuchProcess):  # what a stage has started must end with it
        assert psutil.Process(int((tmp_path / "child").read_text())).status() == psutil.STATUS_ZOMBIE
    late = gpu.run_all(["learns"], gpu.Task("cpu", 0.1, True), 5.0, out)
    assert late["stages"]["learns"]["status"] == "left out"


def test_every_stage_is_there_and_the_most_telling_ones_come_first() -> None:
    assert [*gpu.STAGES][:2] == ["machine", "learner"]
    assert gpu.STAGES.keys() - {"machine"} == gpu_stages.STAGES.keys()
    assert set(gpu_stages.BARS) <= set(gpu_stages.WORKLOADS)


@pytest.mark.parametrize("name", gpu_stages.WORKLOADS)
def test_workloads_are_valid(name: str) -> None:
    flags = [*gpu_stages.shlex.split(gpu_stages.WORKLOADS[name]), "--device", "cpu"]
    config = gpu_stages.from_command_line(flags, "test")
    if not name.endswith("preset"):  # whose sizes are fitted when its environment is known
        assert config.batch_size % (config.rollout * config.envs_per_group) == 0


def test_the_simulation_that_a_run_is_held_against_has_its_workers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not all cores: two of sixteen do not step environments."""

    @dataclasses.dataclass
    class Costs:
        simulation_s: float = 1e-3
        cores: int = 16
        env_steps_per_s: float = 16e3

    config = dataclasses.replace(gpu_stages.from_command_line(["--env", "CartPole-v1"], "test"), workers=14)
    plan = SimpleNamespace(config=config, on_device=False)
    profile = SimpleNamespace(plan=plan, fps=7e3, seconds=4.0, episode_length=9.0, begin_s=100.0)
    readings = [(99.0, 0.0), (101.5, 80.0), (103.9, 90.0), (104.5, 0.0)]  # while it starts, runs, and shuts down
    for name, value in {
        "make_plan": lambda config: config,
        "profile_run": lambda *_: profile,
        "measure_ceiling": lambda *_, episode_length: Costs(),
        "values": lambda *_: {},
        "find_bottleneck": lambda _: None,
        "utilisation": lambda _: contextlib.nullcontext(readings),
    }.items():
        monkeypatch.setattr(gpu_stages, name, value)
    result = gpu_stages.workload("pong", gpu.Task("cpu", 4.0, False))
    assert result["fraction_of_simulation"] == pytest.approx(0.5)
    assert result["gpu_percent"] == 85.0
    assert not result["ok"], "below its bar"


def readings_of(device: str) -> list[float]:
    with gpu_stages.utilisation(device) as readings:
        deadline = time.monotonic() + 30
        while len(readings) < 2 and devices.name_for_driver(torch.device(device)) and time.monotonic() < deadline:
            time.sleep(0.01)
    return [percent for _, percent in readings]


def test_the_gpu_that_is_watched_is_the_one_that_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program in the place of nvidia-smi, on a machine with different GPUs, which it numbers by their place."""
    (tmp_path / "nvidia-smi").write_text(
        "#!/bin/sh\ncase \"$*\" in *query-gpu=name*) printf 'GT 1030\nH100\n'; exit;; "
        "*'-i 1 '*|*'-i GPU-5 '*) busy=80;; *) busy=3;; esac\n"
        "while sleep 0.01; do echo $busy; done\n"
    )
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)
    assert readings_of("cpu") == readings_of("cuda") == [], "CUDA begins with the fastest"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-5")
    assert set(readings_of("cuda")) == {80.0}
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,1")
    assert set(readings_of("cuda:1")) == {80.0}


@pytest.mark.parametrize("name", gpu_stages.WORKLOADS)
def test_the_rehearsal_of_a_workload_is_a_small_run_that_can_be_made(name: str) -> None:
    arguments = [*shlex.split(gpu_stages.WORKLOADS[name]), "--device", "cpu"]
    plan = gpu_stages.make_plan(gpu_stages._tiny(gpu_stages.from_command_line(arguments, "test")))
    assert (plan.config.workers, plan.rows, plan.config.rollout) == (1, 4 if plan.on_device else 2, 8)


def test_a_stage_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys, "argv", ["gpu", "--device", "cpu", "--stage", "machine", "--out", str(tmp_path / "answer.json")]
    )
    monkeypatch.setattr(gpu, "exit_at_signals", lambda: None)  # the tests' own process goes on
    assert gpu.main() == 0
    assert json.loads((tmp_path / "answer.json").read_text())["torch"] == torch.__version__


# The bare machine


def wheel_of(package: str, folder: Path) -> None:
    """A wheel of an installed package without compiled parts, half of it as data, as some wheels have it."""
    distribution = metadata.distribution(package)
    stem = f"{package.replace('-', '_')}-{distribution.version}"
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        for number, path in enumerate(distribution.files):
            if path.suffix == ".py":
                wheel.write(path.locate(), f"{stem}.data/purelib/{path}" if number % 2 else str(path))
        wheel.writestr(f"{stem}.dist-info/METADATA", f"Name: {package}\nVersion: {distribution.version}\n")


def test_a_machine_with_python_alone_and_no_network_gets_what_there_is(tmp_path: Path) -> None:
    """Neither pip nor ensurepip nor torch: packages come from wheels, and the rest is left out by name."""
    (tmp_path / "wheels").mkdir()
    for package in ("typeguard", "typing-extensions"):
        wheel_of(package, tmp_path / "wheels")
    (tmp_path / "wheels" / "psutil-7.0.0-cp39-cp39-manylinux_2_17_x86_64.whl").write_text("for another Python")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    command = ["perf/gpu.sh", "--device", "cpu", "--only", "machine", "learner"]
    if subprocess.run(["unshare", "-rn", "true"], capture_output=True).returncode == 0:
        command = ["unshare", "-rn", *command]
    places = {"PYTHON": tmp_path / "bare/bin/python", "WHEELS": tmp_path / "wheels", "OUT": tmp_path / "out"}
    run = subprocess.run(
        command, env={"PATH": os.environ["PATH"], **{name: str(path) for name, path in places.items()}},
        capture_output=True, text=True,
    )  # fmt: skip
    lacking = [line.split()[2] for line in run.stdout.splitlines() if line.startswith("not there")]
    assert "psutil:" in lacking and "gymnasium:" in lacking, run
    assert "typeguard:" not in lacking and "typing_extensions:" not in lacking
    stages = json.loads((tmp_path / "out/gpu.json").read_text())["stages"]
    assert stages["machine"]["result"]["cores"] >= 1 and stages["machine"]["status"] == "failed"
    assert "No module named" in stages["learner"]["result"]["left_out"] and stages["learner"]["status"] == "left out"


def test_a_package_in_two_parts_is_fetched_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As mujoco: the folder of the first part comes whole with the second."""
    pytest.importorskip("pip")
    parts = {"whole": {"both/__init__.py": ""}, "core": {"both/__init__.py": "", "both/core.py": ""}}
    for name, files in parts.items():
        info = f"{name}-1.0.dist-info"
        files |= {f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"}
        files |= {f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"}
        with zipfile.ZipFile(tmp_path / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            for path, text in files.items():
                wheel.writestr(path, text)
            wheel.writestr(f"{info}/RECORD", "".join(f"{path},,\n" for path in (*files, f"{info}/RECORD")))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    for name in parts:
        gpu_packages.fetch(tmp_path / "site", name)
    assert (tmp_path / "site" / "both" / "core.py").exists()


WITH_THE_TABLE_ALONE = """
import re, shlex, sys
from importlib import metadata
from perf.gpu_packages import PACKAGES

def plain(name): return re.sub("[-_.]+", "-", name).lower()

def with_needs(name):
    found = {plain(name)}
    for line in metadata.requires(name) or ():
        if "extra ==" not in line and plain(need := re.match("[\\w.-]+", line)[0]) not in found:
            found |= with_needs(need)
    return found

there = {"sfactory", *with_needs("torch"), *with_needs("numpy")}
there |= {plain(name) for modules in PACKAGES.values() for names in modules.values() for name in names}
found = metadata.packages_distributions()

class Bare:
    def find_spec(name, path=None, target=None):
        owners = found.get(name.partition(".")[0], ())
        if owners and not there & set(map(plain, owners)):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Bare)
from perf.gpu_stages import from_command_line, make_plan
make_plan(from_command_line(sys.argv[1:], "test"))
"""
"""Plans a run where nothing but torch, NumPy and the packages of the table can be imported."""


@pytest.mark.parametrize("name", ["pong", "halfcheetah", "vizdoom-basic", "cartpole-native"])
def test_the_table_names_all_that_a_workload_needs(name: str) -> None:
    flags = [*shlex.split(gpu_stages.WORKLOADS[name]), "--device", "cpu"]
    environment = {**os.environ, "PYTHONPATH": str(gpu.ROOT)}
    run = subprocess.run(
        [sys.executable, "-c", WITH_THE_TABLE_ALONE, *flags], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-2000:]


def test_a_wheel_is_gathered_in_the_version_that_another_one_asks_for() -> None:
    assert gpu_packages.pinned("another-one", ["Requires-Dist: another-one (==2.5)"]) == "another-one==2.5"
    assert gpu_packages.pinned("another-one", ["Requires-Dist: another-one >=2.5"]) == "another-one"
