"""perf/gpu.py, rehearsed on the CPU: its comparisons hold and would fail, and no stage that breaks costs another
one."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

import psutil
import pytest
import torch

from perf import gpu, gpu_checks
from perf.gpu_checks import PROBLEMS, check_answers, check_learner
from sfactory.engines.graphed import GraphedEngine

CPU = torch.device("cpu")


@pytest.mark.parametrize("problem", ["mlp", "mixed gru"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_code_for_a_device_computes_what_the_plain_code_does(problem: str, precision: str) -> None:
    answers = check_answers(PROBLEMS[problem], precision, CPU, rows=2, batches=24)
    assert answers["ok"], answers
    learner = check_learner(PROBLEMS[problem], precision, CPU, rows=2)
    assert learner["ok"], learner


def test_a_wrong_device_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    right = GraphedEngine._forward

    def wrong(self, inputs, outputs) -> None:
        right(self, inputs, outputs)
        outputs.tensors[1].mul_(1.1)

    monkeypatch.setattr(GraphedEngine, "_forward", wrong)
    assert not check_answers(PROBLEMS["mlp"], "float32", CPU, rows=2, batches=4)["ok"]


def test_a_check_that_breaks_is_not_ok() -> None:
    def broken(*_: object) -> dict:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    results = gpu_checks.check_all(broken, CPU)
    assert len(results) == 2 * len(PROBLEMS)
    assert all(not result["ok"] and "illegal memory access" in result["error"] for result in results.values())


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
        "    child = subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
        "    pathlib.Path('child').write_text(str(child.pid)); time.sleep(60)\n"
        "json.dump({'ok': name != 'pong', 'fps': 5.0}, open(out, 'w'))\n"
    )
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    monkeypatch.setattr(gpu, "STAGES", dict.fromkeys(["machine", "answers", "learner", "pong", "learns"], (None, 2.0)))
    out, names = tmp_path / "out" / "gpu.json", ["machine", "answers", "learner", "pong"]
    gpu.run_all(names, gpu.Task("cpu", 0.1, True), 60.0, out)
    stages = json.loads(out.read_text())["stages"]
    assert {name: stages[name]["status"] for name in names} == {
        "machine": "failed",
        "answers": "ok",
        "learner": "late",
        "pong": "missed",
    }
    assert "no driver" in stages["machine"]["printed"]
    assert stages["answers"]["result"]["fps"] == 5.0
    with contextlib.suppress(psutil.NoSuchProcess):  # what a stage has started must end with it
        assert psutil.Process(int((tmp_path / "child").read_text())).status() == psutil.STATUS_ZOMBIE
    assert gpu.run_all(["learns"], gpu.Task("cpu", 0.1, True), 5.0, out)["stages"] == {"learns": {"status": "left out"}}


@pytest.mark.parametrize("name", gpu.WORKLOADS)
def test_workloads_are_valid_for_their_bars(name: str) -> None:
    config = gpu.from_command_line([*gpu.shlex.split(gpu.WORKLOADS[name]), "--device", "cpu"], "test")
    segment = config.rollout * config.envs_per_group
    assert config.batch_size % segment == 0
    assert name in gpu.STAGES
    assert set(gpu.BARS) <= set(gpu.WORKLOADS)


def test_a_stage_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys, "argv", ["gpu", "--device", "cpu", "--stage", "machine", "--out", str(tmp_path / "answer.json")]
    )
    threads = torch.get_num_threads()
    try:
        assert gpu.main() == 0
    finally:
        torch.set_num_threads(threads)
    assert json.loads((tmp_path / "answer.json").read_text())["torch"] == torch.__version__
