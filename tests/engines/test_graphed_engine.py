"""What policy workers and the learner do on CUDA, executed on the CPU: the same answers, and nothing that would wait
for the device."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable

import numpy as np
import pytest
import torch
from environments import Busy, vector_of
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from late_device import LateDevice
from sampling_run import SamplingRun
from tape import OneDevice, Waits
from test_invariants import busy_config, shake
from torch import nn

from perf.learner_numbers import backward
from sfactory import inference
from sfactory.config import Config, LossConfig, ModelConfig, OptimConfig, RuntimeConfig, devices, resolve
from sfactory.config.validation import validate
from sfactory.data import feed
from sfactory.data.arena import Arena, segment_fields
from sfactory.data.batch import Assembler, Batch
from sfactory.data.cuda_graphs import Recorder
from sfactory.data.feed import SlotFeed
from sfactory.data.staging import StagingBuffer
from sfactory.data.weights import FlatWeights, PublishedWeights
from sfactory.engines.cpu import Engine, TorchEngine
from sfactory.engines.graphed import GraphedEngine, padded_sizes
from sfactory.envs.interface import EnvSpec
from sfactory.errors import ConfigError
from sfactory.kernels import Kernels
from sfactory.kernels.modules import exchange, modules_of
from sfactory.kernels.registry import SCANS
from sfactory.learner import Learner
from sfactory.model import Core, build_model
from sfactory.model.networks import TorchNetwork
from sfactory.runtime.planning import make_plan
from sfactory.runtime.wires import make_wires
from sfactory.spaces import ActionSpec, ObservationSpec
from sfactory.telemetry.stopwatch import COLUMNS, Stopwatch

CPU, META = torch.device("cpu"), torch.device("meta")
GROUPS, ROWS, STEPS = 5, 3, 4


class OwnCore(Core):
    """Written without a thought of precision: under autocast its state is bfloat16."""

    def __init__(self, in_features: int, **kwargs: object) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features + 4, 4)
        self.out_features = self.state_size = 4

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        state = torch.tanh(self.linear(torch.cat((x, state), -1)))
        return state, state


CORES = {
    "none": {},
    "gru": {"core": "gru"},
    "own": {"core": OwnCore},
    "lstm, own critic": {"core": "lstm", "core_layers": 2, "shared_critic": False},
}


def make_spec() -> EnvSpec:
    observation = spaces.Dict(
        {"image": spaces.Box(0, 255, (12, 12, 3), np.uint8), "pos": spaces.Box(-1, 1, (3,)), "kind": spaces.Discrete(4)}
    )
    action = spaces.Tuple((spaces.Discrete(3), spaces.Box(-1, 1, (2,))))
    return EnvSpec(ObservationSpec.from_space(observation), ActionSpec.from_space(action))


def make_arena(spec: EnvSpec, state_size: int) -> Arena:
    """Random observations, with episodes that begin everywhere."""
    arena, rng = Arena(segment_fields(spec, state_size), 2 * GROUPS, STEPS, ROWS), np.random.default_rng(1)
    for leaf in arena.obs:
        leaf[...] = rng.integers(0, 4, leaf.shape)
    arena.first[...] = rng.random(arena.first.shape) < 0.3
    return arena


def watch() -> Stopwatch:
    return Stopwatch(np.zeros(len(COLUMNS)))


def make_engines(
    core: str, autocast: torch.dtype | None = None
) -> tuple[Arena, PublishedWeights, TorchEngine, GraphedEngine]:
    """A plain and a graphed engine of one model."""
    spec = make_spec()
    torch.manual_seed(0)
    model = build_model(
        spec.observation, spec.action, ModelConfig(hidden=(8,), features=16, core_size=4, **CORES[core])
    ).eval()
    arena = make_arena(spec, model.state_size)
    published = PublishedWeights(FlatWeights(copy.deepcopy(model)).vector.numel())
    other = copy.deepcopy(model)
    plain = TorchEngine(other, FlatWeights(other), arena, GROUPS, autocast, watch())
    return arena, published, plain, GraphedEngine(copy.deepcopy(model), arena, range(GROUPS), autocast, watch())


def publish_random(published: PublishedWeights, version: int) -> None:
    generator = torch.Generator().manual_seed(version)
    published.publish(torch.randn(published._buffers.array.shape[1], generator=generator) * 0.3, version)


def random_requests(rng: np.random.Generator, steps: list[int]) -> list[tuple[int, int, int, bool]]:
    """Some groups, each at its next step, now and then for values alone."""
    requests = []
    for group in rng.permutation(GROUPS)[: rng.integers(1, GROUPS + 1)].tolist():
        value_only = bool(steps[group] % STEPS and rng.random() < 0.25)
        requests.append((group + GROUPS * (steps[group] // STEPS % 2), group, steps[group] % STEPS, value_only))
        steps[group] += not value_only
    return requests


def answers_of(engine: Engine, arena: Arena, requests: list[tuple[int, int, int, bool]]) -> list[np.ndarray]:
    """Everything that an engine gives and writes, as copies."""
    arena.rnn_state[:] = -7.0
    answers = [(params.copy(), value.copy()) for params, value in engine.answers(requests)]
    return [*map(np.concatenate, zip(*answers, strict=True)), arena.rnn_state.copy()]


@pytest.mark.parametrize("groups", range(1, 18))
def test_sizes_hold_every_number_of_groups(groups: int) -> None:
    sizes = padded_sizes(groups)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == groups
    assert all(b <= 2 * a for a, b in itertools.pairwise(sizes))


def test_an_engine_that_no_group_asks_has_no_pass() -> None:
    assert padded_sizes(0) == []


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("core", CORES)
def test_padded_batches_give_the_answers_and_states_of_plain_ones(core: str, autocast: torch.dtype | None) -> None:
    arena, published, plain, graphed = make_engines(core, autocast)
    rng, steps = np.random.default_rng(0), [0] * GROUPS
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if autocast is None else {"rtol": 5e-2, "atol": 5e-2}
    for turn in range(40):
        if turn % 9 == 0:
            publish_random(published, turn)
            assert plain.refresh(published) == graphed.refresh(published) == turn
        requests = random_requests(rng, steps)
        for expected, got in zip(answers_of(plain, arena, requests), answers_of(graphed, arena, requests), strict=True):
            np.testing.assert_allclose(got, expected, **tolerance)
    assert len(graphed._passes) == len(padded_sizes(GROUPS)), "every size was used"


def test_an_engine_has_no_size_for_the_groups_of_others() -> None:
    arena, _, _, all_groups = make_engines("gru")
    requests = [(4, 4, 0, False), (1, 1, 2, True)]
    expected = answers_of(all_groups, arena, requests)
    engine = GraphedEngine(all_groups._model, arena, (1, 4), None, watch())
    assert engine._sizes == [1, 2] and len(engine._states) == 3
    for own, of_all in zip(answers_of(engine, arena, requests), expected, strict=True):
        np.testing.assert_array_equal(own, of_all)


@pytest.mark.parametrize("eager", [False, True])
def test_the_host_waits_for_what_it_reads_and_overwrites(eager: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a device that does its work at its own time, answers are the same."""
    device = LateDevice(eager)
    arena, published, plain, _ = make_engines("gru")
    monkeypatch.setattr(torch, "get_device_module", lambda *_: device)
    for name in ("upload", "download"):
        original = getattr(StagingBuffer, name)
        monkeypatch.setattr(
            StagingBuffer, name, lambda self, *args, original=original: device.later(original)(self, *args)
        )

    def recorded(work: Callable[[], object], _: object) -> Callable[[], object]:
        return device.later(work)

    model = copy.deepcopy(plain._model)
    graphed = GraphedEngine(model, arena, range(GROUPS), None, watch())
    graphed.recorder = recorded
    vector = graphed._flat.vector
    vector.copy_ = device.later(vector.copy_)
    rng, steps = np.random.default_rng(3), [0] * GROUPS
    for turn in range(30):
        publish_random(published, turn)
        plain.refresh(published)
        graphed.refresh(published)
        requests = random_requests(rng, steps)
        for expected, got in zip(answers_of(plain, arena, requests), answers_of(graphed, arena, requests), strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("core", ["none", "lstm"])
@pytest.mark.parametrize(
    "env", [Busy, vector_of(Busy, AutoresetMode.SAME_STEP)], ids=["single", "final values asked for"]
)
def test_sampling_is_the_same_and_importance_weights_are_one(
    core: str, env: object, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = dataclasses.replace(
        busy_config(core, env), envs_per_worker=9, batch_size=288, runtime=RuntimeConfig(groups=3)
    )
    segments = {}
    for name in ("plain", "graphed"):
        torch.manual_seed(0)
        run = SamplingRun(config, tmp_path / name)
        try:
            shake(run)
            slots = run.sample(6)
            batch = run.learner._feed.assemble(slots)
            assert (run.importance_weights(batch) - 1).abs().max() < 1e-5
            segments[name] = batch
        finally:
            run.close()
        monkeypatch.setattr(
            inference,
            "_engine_for",
            lambda index, model, kernels, plane, watch: GraphedEngine(
                model, plane.arena, range(plane.groups), kernels.autocast, watch
            ),
        )
    for f in dataclasses.fields(Batch):
        plain, graphed = (getattr(segments[name], f.name) for name in ("plain", "graphed"))
        for a, b in zip(plain, graphed, strict=True) if isinstance(plain, tuple) else [(plain, graphed)]:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, equal_nan=True)


class TestRecorder:
    """Recordings stand in for work only where they are right."""

    @staticmethod
    def recorder(monkeypatch: pytest.MonkeyPatch, record: Callable) -> Recorder:
        monkeypatch.setattr("sfactory.data.cuda_graphs.record", record)
        return Recorder(CPU, 1e-3)

    def test_a_right_recording_is_used(self, monkeypatch: pytest.MonkeyPatch) -> None:
        x, y = torch.arange(4.0), torch.zeros(4)

        def work() -> None:
            torch.mul(x, 2, out=y)

        recorded = lambda: work()  # noqa: E731
        assert self.recorder(monkeypatch, lambda *_: recorded)(work, [y]) is recorded

    @pytest.mark.parametrize(
        "replay", [lambda y: None, lambda y: y.mul_(1.1).nan_to_num_(3.0)], ids=["writes nothing", "other numbers"]
    )
    def test_a_wrong_recording_is_not(self, replay: Callable, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
        y = torch.zeros(4)

        def work() -> None:
            y.copy_(torch.arange(4.0))

        recorder = self.recorder(monkeypatch, lambda *_: lambda: replay(y))
        assert recorder(work, [y]) is work
        assert "other numbers" in caplog.records[0].message and caplog.records[0].levelno == logging.WARNING

    def test_after_a_failure_nothing_more_is_recorded(self, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
        tried = []

        def record(work: Callable, *_: object) -> Callable:
            tried.append(work)
            raise RuntimeError("operation not permitted when stream is capturing")

        recorder, y = self.recorder(monkeypatch, record), torch.zeros(1)
        works = [lambda: y.fill_(1.0), lambda: y.fill_(2.0)]
        assert [recorder(work, [y]) for work in works] == works
        assert tried == works[:1] and len(caplog.records) == 1
        assert "not permitted" in caplog.records[0].message

    def test_a_broken_model_says_so_itself(self) -> None:
        def work() -> None:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            Recorder(CPU, 1e-3)(work, [])


# A tensor on the device meta has a shape and no values: whatever would wait for a value raises, as it does in a CUDA
# graph.


@pytest.fixture
def no_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)  # which knows no meta


@pytest.mark.usefixtures("no_autocast")
@pytest.mark.parametrize("encoder", ["auto", "impala_resnet"])
@pytest.mark.parametrize("core", CORES)
def test_no_model_waits_for_the_device(encoder: str, core: str) -> None:
    spec = make_spec()
    config = ModelConfig(
        encoder=encoder, hidden=(8,), features=16, core_size=4, normalize_obs=True, adaptive_std=True, **CORES[core]
    )
    model = build_model(spec.observation, spec.action, config).to(META)
    obs = tuple(
        torch.empty(6, *leaf.shape, dtype=torch.from_numpy(np.empty(0, leaf.dtype)).dtype, device=META)
        for leaf in spec.observation.leaves
    )
    params, value, _ = model(obs, torch.empty(6, model.state_size, device=META))
    assert params.is_meta and value.is_meta


class _Given:
    """Stands in for an assembler, and for a publisher."""

    is_view = False

    def __init__(self, *_: object) -> None:
        self.batch: Batch | None = None

    def __call__(self, _: list[int]) -> Batch:
        return self.batch

    def publish(self, _: int) -> None: ...

    def offer(self, _: int) -> None: ...

    def finish(self, wait: bool = True) -> None: ...


@pytest.mark.usefixtures("no_autocast")
@pytest.mark.parametrize(
    "changes",
    [
        {
            "env": Busy,
            "model": ModelConfig(core="lstm", normalize_obs=True),
            "loss": LossConfig(normalize_returns=True, exploration="kl"),
        },
        {"env": Busy, "algo": "ppo", "epochs": 2, "optim": OptimConfig(minibatches=2, schedule="adaptive_kl")},
        {
            "env": "Pendulum-v1",
            "algo": "impala",
            "model": ModelConfig(core="gru"),
            "loss": LossConfig(reward_clip=1.0, reward_scale=2.0),
        },
        {
            "env": "CartPole-v1",
            "loss": LossConfig(value_clip=0.2),
            "optim": OptimConfig(schedule="linear", max_grad_norm=0.0),
        },
    ],
    ids=["lstm", "ppo", "impala", "appo"],
)
def test_the_learner_never_waits_for_the_device(changes: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "Assembler", _Given)
    monkeypatch.setattr(feed, "WeightPublisher", _Given)
    plan = make_plan(
        resolve(
            Config(preset="none", envs_per_worker=8, rollout=8, batch_size=64, serial=True, device="cpu", **changes)
        )
    )
    wires = make_wires(plan, local=True)
    model = build_model(plan.env.observation, plan.env.action, plan.config.model).to(META)
    watch, kernels = wires.control.stopwatch("learner"), Kernels(plan.config, model, META, None)
    for kernel in SCANS:  # as on a GPU
        exchange(modules_of(model, kernel.plain), kernel.fast)
    learner = Learner(plan.config, model, kernels, SlotFeed(plan.config, wires, META, watch), wires.events, watch)
    learner.start()
    wires.arena.active[:] = True
    batch = Assembler(wires.arena, 2, CPU)([0, 1])

    def on_meta(value: object) -> object:
        return tuple(map(on_meta, value)) if isinstance(value, tuple) else None if value is None else value.to(META)

    learner._feed.assemble.batch = Batch(**{f.name: on_meta(getattr(batch, f.name)) for f in dataclasses.fields(Batch)})
    update = learner._update
    for owner, name in ((learner, "_begin"), (update, "forward"), (update, "gradient"), (update, "step")):
        monkeypatch.setattr(owner, name, on_one_device(getattr(owner, name)))  # what is recorded on a GPU
    learner._train(learner._feed.fresh([0, 1], learner.updates))
    assert learner.updates == plan.config.updates_per_batch
    assert all(statistics.is_meta for statistics in learner._statistics)


def on_one_device(work: Callable) -> Callable:
    """Work that may not bring a number from the host to the device, or back."""

    def watched(*args, **kwargs):
        with OneDevice("meta"):
            return work(*args, **kwargs)

    return watched


def test_numbers_that_come_from_the_host_are_noticed() -> None:
    x, number = torch.zeros(3, device=META), torch.tensor(2.0)
    on_one_device(lambda: torch.where(x > 0, x, 0.0) * 2.0 + 1.0)()
    for wrong in (lambda: torch.where(x > 0, x, number), lambda: x.copy_(number), lambda: number.to(META)):
        with pytest.raises(Waits):
            on_one_device(wrong)()


def test_policy_workers_take_the_devices_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "resolve_device", lambda name, field="device": torch.device(name))
    config = Config(
        env="x", workers=3, device="cuda:0", runtime=RuntimeConfig(policy_workers=3, inference_device="cuda:0,cuda:1")
    )
    validate(config)
    assert [str(devices.inference_device(config, worker)) for worker in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    alone = dataclasses.replace(config, runtime=RuntimeConfig(policy_workers=3))
    assert {str(devices.inference_device(alone, worker)) for worker in range(3)} == {"cuda:0"}
    for wrong in ("cuda:0,", "cuda:0;cuda:1", "gpu"):
        with pytest.raises(ConfigError, match=r"runtime\.inference_device is"):
            validate(dataclasses.replace(config, runtime=RuntimeConfig(inference_device=wrong)))


def test_a_compiled_network_has_the_same_loss_and_gradient(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's own operations in place of generated ones, which take their time to be built."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    config = dataclasses.replace(busy_config("none", optim=OptimConfig(compile=True)), precision="float32")
    run = SamplingRun(config, tmp_path)
    try:
        learner, found = run.learner, []
        batch = learner._feed.assemble(run.sample(1))
        for network in (learner._network, TorchNetwork(learner._model, learner._device, None, compiled=False)):
            learner._network = network
            loss = backward(learner, batch)[0].loss
            found.append((loss, learner._flat.parameters.grad.clone()))
        torch.testing.assert_close(*found)
    finally:
        run.close()
