"""``sfactory check``: an environment that is broken in one way is told so, and cannot break the command."""

from __future__ import annotations

import dataclasses
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import broken
import gymnasium
import numpy as np
import pytest
from environments import MODES, Busy, vector_of
from examples.grid_world import GridWorld
from examples.multi_agent import Rendezvous

from sfactory.commands import check as check_command
from sfactory.commands import main
from sfactory.commands.checks import random_play
from sfactory.commands.checks.advice import advise
from sfactory.commands.checks.findings import Facts, Finding, Spread
from sfactory.commands.checks.inspection import inspect_environment
from sfactory.config import Config, from_dict, resolve
from sfactory.envs import probe
from sfactory.envs.interface import EnvRequest
from sfactory.profiling.measure import Interrupted

SECONDS = 1.5


def inspected(env: object, tmp_path: Path, seconds: float = SECONDS) -> tuple[dict[str, list[Finding]], Facts | None]:
    """The findings by check, without those that are ok, and the facts."""
    output, told = tmp_path / "output", []
    output.touch()
    request = env if isinstance(env, EnvRequest) else EnvRequest(env, {})
    inspect_environment(request, seconds, output, told.append)
    findings = [event for event in told if isinstance(event, Finding) and event.level != "ok"]
    facts = next((event for event in told if isinstance(event, Facts)), None)
    return {check: [f for f in findings if f.check == check] for check in {f.check for f in findings}}, facts


class NumpyEnds(broken.Sound):
    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, np.bool_(terminated), np.bool_(truncated), info


@pytest.mark.parametrize(
    "env",
    [NumpyEnds, GridWorld, Rendezvous, broken.Masked, broken.MaskedPair, Busy]
    + [vector_of(broken.Masked, mode) for mode in MODES],
)
def test_environments_that_train_well_have_no_problem(env, tmp_path):
    findings, facts = inspected(env, tmp_path)
    assert facts is not None
    assert "Gymnasium's checker" not in findings and "PettingZoo's checker" not in findings
    assert not [finding for found in findings.values() for finding in found if finding.level == "problem"]


class PairWithALateOne(broken.Pair):
    """The right agent comes a step after the left one, and step() then tells what it observes alone."""

    def reset(self, seed=None, options=None):
        self.waits, self.late, (observations, infos) = 1, "right", super().reset(seed, options)
        self.agents = ["left"]
        self.first = observations["right"]
        return {"left": observations["left"]}, {"left": infos["left"]}

    def step(self, actions):
        observations, *rest = super().step(actions)
        self.waits -= 1
        if self.waits == 0:
            self.agents.append(self.late)
            observations |= {self.late: self.first}
        return observations, *rest


class PairWithOneThatReturns(PairWithALateOne):
    """The agent that comes late ends at once, and comes again once."""

    def reset(self, seed=None, options=None):
        self.returns = 2
        return super().reset(seed, options)

    def step(self, actions):
        observations, rewards, terminations, *rest = super().step(actions)
        if "right" in actions:
            terminations["right"], self.returns = True, self.returns - 1
            self.agents = [agent for agent in self.agents if agent != "right"]
            self.waits = self.returns
            self.first, _ = self.envs["right"].reset()
        return observations, rewards, terminations, *rest


@pytest.mark.parametrize("env", [PairWithALateOne, PairWithOneThatReturns])
def test_agents_that_come_late_or_again_are_no_problem(env, tmp_path):
    findings, facts = inspected(env, tmp_path)
    assert facts is not None and facts.rows == 2
    assert not [finding for found in findings.values() for finding in found if finding.level == "problem"], findings
    others = [finding.message for finding in findings.get("PettingZoo's checker", [])]
    assert len(others) == (env is PairWithOneThatReturns)
    assert all("agent cannot be revived once dead" in message for message in others)


class Far(broken.Sound):
    """Takes actions from 10 on, which no policy begins with."""

    action_space = gymnasium.spaces.Box(10.0, np.inf, (1,))


def test_actions_that_samples_do_not_reach_are_a_problem(tmp_path):
    (finding,) = inspected(Far, tmp_path)[0]["actions"]
    assert finding.level == "problem" and "one bound alone, 10, to which samples are clipped" in finding.message


@pytest.mark.parametrize("named", [False, True])
def test_masks_of_several_components_are_heeded(named, tmp_path):
    def masked_tensors(num_envs: int, device: str) -> broken.MaskedTensors:
        return broken.MaskedTensors(num_envs, named)

    findings, facts = inspected(masked_tensors, tmp_path)
    assert facts is not None
    assert not [finding for found in findings.values() for finding in found if finding.level == "problem"], findings


@pytest.mark.parametrize("env", [broken.Sound, broken.sound_vector, broken.Pair])
def test_nothing_is_found_where_nothing_is_wrong(env, tmp_path):
    findings, facts = inspected(env, tmp_path)
    assert findings == {}
    assert facts is not None
    assert facts.kind == {broken.Sound: "single", broken.sound_vector: "vector", broken.Pair: "parallel"}[env]
    assert facts.episodes > 10 and 5 < facts.episode_length <= 30
    assert 0 < facts.step.median <= facts.step.p95 <= facts.step.most and facts.reset.median > 0


@pytest.mark.parametrize(
    ("env", "check", "says"),
    [
        (broken.WrongShape, "spaces", r"has shape \(1,\)"),
        (broken.WrongDtype, "spaces", "dtype float64; its space has float32"),
        (broken.OutOfBounds, "spaces", "leaves the bounds of its space"),
        (broken.NotFinite, "rewards", "not finite"),
        (broken.NoReset, "episodes", "reset.. does not begin a new episode"),
        (broken.Raises, "random actions", "KeyError: .*mistake in my environment.*broken.py, line"),
        (broken.FourValues, "random actions", "step.. returned .* it must return observation, reward"),
        (broken.GlobalRandomness, "determinism", "two environments with the same seed differ.*global generators"),
        (broken.SeedForgotten, "determinism", "reset with the same seed differs from its first time"),
        (broken.Leaks, "memory", "memory grew steadily"),
        (broken.MistakenPair, "spaces", "shape"),
        (broken.UnpaidPair, "random actions", "agent left: step.. returned no reward of this agent"),
        (broken.PairOfAll, "random actions", "returned terminations of '__all__', which is not in possible_agents"),
        (broken.LateMask, "random actions", "info has an action_mask, though the first reset.. gave none"),
        (broken.MaskAtTimes, "random actions", "info has no action_mask, though the first reset.. gave one"),
        (vector_of(broken.MaskAtTimes, MODES[0]), "random actions", "row .: info has no action_mask, though the first"),
        (broken.MaskOfNothing, "random actions", "the action mask .0 0. allows no action"),
        (broken.PairWithoutLast, "random actions", "no last observation of agent .*, which was truncated"),
        (broken.NoInfo, "random actions", "step.. returned None as info; it must be a dict"),
        (broken.lying_vector, "autoreset", "says NEXT_STEP, but row"),
        (broken.holder, "pickling", "cannot be sent to worker processes"),
        (broken.TextActions, "construction", "action space .* is not supported"),
    ],
)
def test_what_is_broken_is_found(env, check, says, tmp_path):
    findings, _ = inspected(env, tmp_path, 4 if env is broken.Leaks else SECONDS)
    messages = [finding.message for finding in findings.get(check, []) if finding.level == "problem"]
    assert any(re.search(says, message, re.DOTALL) for message in messages), findings


@pytest.mark.parametrize(
    ("env", "check", "says"),
    [
        (broken.Unseeded, "determinism", "the seed makes no difference"),
        (broken.Endless, "episodes", "no episode ended"),
        (broken.Sparse, "rewards", "sparse: the reward was 0"),
        (broken.Slow, "memory", "not judged"),
        (broken.PairOfNewObservationSpaces, "PettingZoo's checker", "the exact same space object"),
        (broken.PairOfNewActionSpaces, "PettingZoo's checker", "the exact same space object"),
    ],
)
def test_what_is_unusual_is_told_as_a_note(env, check, says, tmp_path):
    findings, _ = inspected(env, tmp_path)
    assert [finding.level for finding in findings[check]] == ["note"]
    assert says in findings[check][0].message


def test_agents_that_stay_listed_when_all_have_ended_begin_another_episode(tmp_path):
    _, facts = inspected(broken.PairThatEndsTogether, tmp_path)
    assert facts.episodes > 10 and facts.episode_length > 3


@pytest.mark.parametrize(
    "request_",
    [
        EnvRequest("PongNoFrameskip-v4", {"noop_max": 9, "episodic_life": True}),
        EnvRequest("ALE/Pong-v5", {"img_height": 42}),
        EnvRequest("PongNoFrameskip-v4", {}, "vector"),
    ],
)
def test_atari_games_are_played_as_training_plays_them(request_, tmp_path):
    pytest.importorskip("ale_py")
    findings, facts = inspected(request_, tmp_path)
    assert facts.kind == "atari" and facts.rows == 1
    assert not [finding for found in findings.values() for finding in found if finding.level == "problem"], findings


@pytest.mark.parametrize("env", ["Pong-v5", "CartPole-v1"])
def test_the_environments_of_envpool_are_its_own(env, tmp_path):
    pytest.importorskip("envpool")
    findings, facts = inspected(EnvRequest(env, {}, "envpool"), tmp_path)
    assert facts.kind == "envpool"
    assert not [finding for found in findings.values() for finding in found if finding.level == "problem"], findings


def test_games_of_vizdoom_are_played_as_training_plays_them_and_leave_nothing_behind(tmp_path, monkeypatch):
    pytest.importorskip("vizdoom")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    before = set(Path("/dev/shm").glob("ViZDoom*"))
    findings, facts = inspected(EnvRequest("VizdoomBasic-v1", {"resolution": [60, 80]}), tmp_path)
    assert facts.kind == "vizdoom" and 1 < facts.episode_length <= 76, "env steps of 4 frames"
    assert not [finding for found in findings.values() for finding in found if finding.level == "problem"], findings
    assert not list(Path().iterdir()) and set(Path("/dev/shm").glob("ViZDoom*")) <= before


def test_the_environment_for_the_checker_of_its_package_is_closed(tmp_path):
    _Closing.living = 0
    inspected(_Closing, tmp_path)
    assert _Closing.living == 0


class _Closing(broken.Sound):
    living = 0

    def __init__(self):
        type(self).living += 1
        self.open = True

    def close(self):
        type(self).living -= self.open
        self.open = False


def test_a_step_takes_as_long_as_it_computes_where_other_programs_have_the_processor(tmp_path, monkeypatch):
    monkeypatch.setattr(random_play, "processor_wait_s", lambda: 0.9 * time.monotonic())
    _, facts = inspected(broken.Sound, tmp_path)
    assert facts.running_share == pytest.approx(0.1, rel=0.1) and facts.cpu_share == 1
    resets = facts.reset.mean / facts.episode_length
    assert facts.env_step_s == pytest.approx((facts.step.mean + resets) * facts.running_share)


def test_a_step_that_waits_by_itself_takes_that_time_too(tmp_path, monkeypatch):
    monkeypatch.setattr(random_play, "processor_wait_s", lambda: 0.0)
    _, facts = inspected(broken.Slow, tmp_path)
    assert facts.cpu_share < 1 and facts.env_step_s >= facts.step.mean


class Elsewhere(broken.Sound):
    """Has a program that computes for 20 ms in each step."""

    def step(self, action):
        program = "import time\nwhile time.process_time() < 0.02: pass"
        subprocess.run([sys.executable, "-S", "-c", program], check=True)
        return super().step(action)


def test_a_step_that_a_program_computes_does_not_wait(tmp_path):
    _, facts = inspected(Elsewhere, tmp_path)
    worked = facts.cpu_share * facts.step.mean * facts.running_share
    assert facts.cpu_share == 1 or worked >= 0.02


FACTS = Facts(
    "single", 1, 1, 1000, Spread.of([1e-5]), Spread.of([1e-5]), 1.0, 50, 20.0, 1.0, 1.0, 0.0, 1.0, -1.0, 1.0, 0.0, 0.5,
    1.0, 1.0,
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"step": Spread.of([0.1]), "cpu_share": 0.05}, "--workers"),
        ({"step": Spread.of([0.1])}, "every core should step"),
        ({}, "--envs-per-worker 64"),
        ({"reward_share": 0.001}, "--loss.entropy-coef 0.02"),
        ({"reward_max": 1e6}, "--loss.reward-scale 1e-06"),
        ({"episode_length": 900.0}, "--loss.gamma 0.999"),
        ({"reset": Spread.of([0.01])}, "make reset() cheaper"),
    ],
)
def test_the_advice_follows_from_what_was_measured(changes, says):
    spec = probe(EnvRequest(broken.Sound, {}))
    sentences = advise(resolve(Config(env=broken.Sound)), dataclasses.replace(FACTS, **changes), spec, None)
    assert any(says in sentence for sentence in sentences), sentences
    assert sentences[0].startswith("preset default: ")


@pytest.mark.parametrize(
    ("changes", "flag", "given"),
    [
        ({"step": Spread.of([0.1]), "cpu_share": 0.05}, "--workers", {"workers": 64}),
        ({"step": Spread.of([0.1])}, "--workers 3", {"workers": 3}),
        ({"step": Spread.of([0.1])}, "--workers", {"workers": 3, "envs_per_worker": 4}),
        ({"step": Spread.of([0.1])}, "--workers", {"serial": True}),
        ({"step": Spread.of([20.0])}, "--runtime.step-timeout-s", {"runtime": {"step_timeout_s": 300.0}}),
        ({}, "--envs-per-worker", {"envs_per_worker": 64}),
        ({"reward_share": 0.001}, "--rollout", {"rollout": 128}),
        ({"reward_share": 0.001}, "--loss.entropy-coef", {"loss": {"entropy_coef": 0.02}}),
        ({"reward_max": 1e6}, "--loss.reward-scale", {"loss": {"reward_scale": 1e-6, "normalize_returns": True}}),
        ({"episode_length": 2000.0}, "--loss.gamma 0.999", {"loss": {"gamma": 0.999}}),
    ],
)
def test_nothing_is_advised_that_is_so_already(changes, flag, given, monkeypatch):
    monkeypatch.setattr("sfactory.config.devices.cores", lambda: 3)
    facts, spec = dataclasses.replace(FACTS, **changes), probe(EnvRequest(broken.Sound, {}))
    config = from_dict({"env": "x", **given})
    without = advise(resolve(Config(env="x")), facts, spec, None)
    assert any(flag in sentence for sentence in without) or flag == "--runtime.step-timeout-s"
    assert not any(flag in sentence.partition(":")[0] for sentence in advise(resolve(config), facts, spec, None))


def test_a_vector_environment_that_has_its_own_number_is_not_told_another():
    spec = dataclasses.replace(probe(EnvRequest(broken.Sound, {})), own_rows=20)
    facts = dataclasses.replace(FACTS, kind="vector")
    sentences = advise(resolve(Config(env=broken.Sound)), facts, spec, None)
    assert not any("--envs-per-worker" in sentence for sentence in sentences)


def test_the_wait_for_the_processor_is_a_clock_that_goes_on():
    first = random_play.processor_wait_s()
    assert 0 <= first <= random_play.processor_wait_s()


def test_other_programs_make_no_advice():
    facts = dataclasses.replace(FACTS, step=Spread.of([0.01]), reset=Spread.of([0.01]), running_share=0.001)
    config, spec = resolve(Config(env=broken.Sound)), probe(EnvRequest(broken.Sound, {}))
    sentences = advise(config, facts, spec, None)
    assert any("--envs-per-worker 64: steps are quick" in sentence for sentence in sentences)
    assert not any("every core" in sentence or "resets take" in sentence for sentence in sentences)


@pytest.mark.parametrize(
    ("preset", "told"), [("auto", "tuned for environments like this one"), ("none", "--preset auto")]
)
@pytest.mark.parametrize("step_s", [1e-5, 1.0])
def test_the_advice_for_an_environment_on_the_device_speaks_of_rows(preset, told, step_s):
    env = "sfactory/TensorCartPole"
    config = resolve(Config(env=env, preset=preset))
    facts = dataclasses.replace(FACTS, kind="vector", step=Spread.of([step_s]))
    sentences = advise(config, facts, probe(EnvRequest(env, {})), None)
    assert told in sentences[0]
    assert f"--envs-per-worker above {config.envs_per_worker:,}" in sentences[1]
    assert not any("--workers" in sentence for sentence in sentences)


# The command, in processes of its own


def checked(capfd, *args: str) -> tuple[int, dict]:
    status = main(["check", *args, "--json"])
    output = capfd.readouterr().out
    line = output.splitlines()[-1]  # the tests' fork server keeps its own output
    return status, json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.parametrize(
    ("env", "status", "says"),
    [
        ("HangsInConstructor", 2, "it hangs"),
        ("HangsInStep", 1, "it hangs"),
        ("RaisesInConstructor", 2, "no simulator"),
        ("Exits", 1, "exit code 7"),
        ("Missing", 2, "no environment is called"),
        ("Prints", 1, "it printed"),
        ("NotFinite", 1, "not finite"),
    ],
)
def test_an_environment_cannot_break_the_command(env, status, says, capfd):
    timeout = "6" if "Hangs" in env else "60"
    got, values = checked(capfd, f"broken:{env}", "--seconds", "1", "--timeout", timeout, "--no-speed")
    assert got == status
    assert says in values["findings"][-1]["message"] + str(values["findings"])
    assert values["makeable"] == (status != 2)


@pytest.mark.usefixtures("nothing_is_left")
def test_a_sound_environment_comes_with_its_speed_and_advice(capfd):
    status, values = checked(capfd, "broken:PrintsInConstructor", "--seconds", "2", "--device", "cpu")
    assert status == values["problems"] == 0
    assert values["expectation"]["env_steps_per_s"] > 10
    assert sum(values["expectation"]["shares"].values()) == pytest.approx(1)
    assert values["expectation"]["limit"] in ("simulation", "inference", "training")
    assert values["preset"] == "default" and values["advice"][0].startswith("preset default")
    assert any("--loss.reward-scale" in sentence for sentence in values["advice"])
    assert main(["check", "broken:Sound", "--seconds", "1", "--no-speed"]) == 0
    shown = capfd.readouterr().out
    assert "no problems" in shown and "determinism" in shown and "95 % below" in shown


@pytest.mark.usefixtures("nothing_is_left")
def test_the_speed_of_an_environment_on_the_device_is_that_of_a_short_run(capfd):
    status, values = checked(capfd, "sfactory/TensorCartPole", "--seconds", "1", "--device", "cpu")
    assert status == values["problems"] == 0
    assert values["expectation"]["env_steps_per_s"] > 1000 and values["expectation"]["ceiling"] is None


def test_its_module_checks_when_it_runs_by_itself():
    """Where it is ``__main__``, of which its process knows nothing."""
    command = [sys.executable, "-m", "sfactory.commands.check", "CartPole-v1", "--seconds", "0.2", "--no-speed"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "no problems" in done.stdout, done.stderr


def test_an_interrupt_is_no_problem_of_the_environment(monkeypatch, tmp_path):
    def interrupted(*_):
        raise Interrupted(signal.SIGINT)

    monkeypatch.setattr(check_command, "expect", interrupted)
    assert main(["check", "CartPole-v1", "--seconds", "0.5"]) == 130


def test_an_environment_must_be_named(capsys):
    assert main(["check"]) == 2
    assert "env is not set" in capsys.readouterr().err
