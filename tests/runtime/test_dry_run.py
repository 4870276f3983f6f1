"""A user's own distribution, estimator and loss terms: tried before anything starts, and then what trains."""

from __future__ import annotations

import dataclasses
import sys
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from examples.estimator import n_step
from torch import Tensor
from whole_runs import config_for

from sfactory import ConfigError
from sfactory.config import Config, LossConfig, ModelConfig
from sfactory.data.batch import Batch
from sfactory.distributions import ActionDistribution, Distribution
from sfactory.model import ActorCritic
from sfactory.objective import on_policy_gae
from sfactory.runtime.dry_run import crossed_ends
from sfactory.runtime.planning import make_plan, notes_on
from sfactory.train import main as train_main
from sfactory.vtrace import unweighted_vtrace


def problem(env: Any = "CartPole-v1", **changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        make_plan(Config(env=env, preset="none", envs_per_worker=8, rollout=16, batch_size=128, **changes))
    return str(caught.value)


class Shuffling(ActorCritic):
    """Has a buffer of integers that is drawn at random.

    Args:
        seed: That of the draw; None: torch's global state.
    """

    def __init__(self, *args: Any, seed: int | None = None) -> None:
        super().__init__(*args)
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        self.register_buffer("order", torch.randperm(64, generator=generator))


def test_integers_that_each_process_would_draw_for_itself_are_refused() -> None:
    assert "the buffers order of the model are drawn at random" in problem(model=ModelConfig(model=Shuffling))
    own = ModelConfig(model=Shuffling, kwargs={"seed": 0})
    before = torch.get_rng_state()
    make_plan(Config(env="CartPole-v1", preset="none", envs_per_worker=8, rollout=16, batch_size=128, model=own))
    assert torch.equal(torch.get_rng_state(), before)


def with_terms(terms: Any, **settings: Any) -> str:
    return problem(loss=LossConfig(terms=terms, **settings))


TERMS = {
    "takes one argument": (lambda samples: {}, "TypeError"),
    "returns a tensor": (lambda samples, config: samples.value, "it must return a mapping"),
    "returns nothing": (lambda samples, config: {}, "it must return a mapping"),
    "returns a mean": (lambda samples, config: {"x": samples.value.mean()}, "x is a float32 tensor (); it must be"),
    "of another dtype": (lambda samples, config: {"x": samples.value.double()}, "x is a float64 tensor (3, 4)"),
    "not finite": (lambda samples, config: {"x": samples.value / 0}, "x is not finite"),
    "without a gradient": (lambda samples, config: {"x": samples.value.detach()}, "x carries no gradient"),
    "of a metric's name": (lambda samples, config: {"kl": samples.value}, "kl is the name of a metric"),
    "in place": (lambda samples, config: {"x": samples.value - samples.reward.clamp_(-1e-3, 1e-3)}, "in place"),
    "of an output that is not": (lambda samples, config: {"x": samples.auxiliary["head"]}, "KeyError: 'head'"),
}


@pytest.mark.parametrize(("terms", "said"), TERMS.values(), ids=TERMS)
def test_loss_terms_that_break_their_contract(terms: Any, said: str) -> None:
    text = with_terms(terms)
    assert said in text
    assert text.startswith("loss.terms")


def smoothness(samples: Any, config: Config) -> dict[str, Tensor]:
    """Of the value along time."""
    change = (samples.value[1:] - samples.value[:-1]).square()
    return {"smoothness": torch.cat((change, 0 * change[-1:]))}


def test_a_term_over_time_is_told_that_samples_without_memory_are_single() -> None:
    """Else it would be summed over no samples, and be 0."""
    for loss, epochs in (LossConfig(terms=smoothness), 2), (LossConfig(terms=smoothness, normalize_returns=True), 1):
        text = problem(loss=loss, epochs=epochs)
        assert "smoothness is a float32 tensor (0, 12); it must be" in text and "single, = (1, 12)" in text
    model = ModelConfig(core="gru")
    with_memory = Config(env="CartPole-v1", preset="none", loss=LossConfig(terms=smoothness), epochs=2, model=model)
    assert make_plan(with_memory).config.epochs == 2


def test_a_coefficient_needs_its_term() -> None:
    text = with_terms(lambda samples, config: {"near": samples.value}, term_coefs={"far": 2.0})
    assert "loss.term_coefs names far" in text and "gives near" in text


ESTIMATORS = {
    "takes two arguments": (lambda values, rewards: (values, rewards), "TypeError"),
    "returns one": (lambda *inputs: inputs[2], "failed on made-up samples"),
    "of another shape": (lambda *inputs: (inputs[2][0], inputs[2]), "value targets is a float32 tensor (4,)"),
    "of another dtype": (lambda *inputs: (inputs[2], inputs[2].double()), "advantages is a float64 tensor"),
    "not finite": (lambda *inputs: (inputs[2], inputs[2] / 0), "advantages is not finite"),
    "in place": (lambda *inputs: (inputs[0].exp_(), inputs[2]), "in place"),
}


def test_an_estimator_that_is_misspelt_is_told_the_built_in_ones() -> None:
    text = problem(loss=LossConfig(estimator="v_trace"))
    assert "unknown loss.estimator 'v_trace'; known: auto, vtrace, gae, or a callable" in text


@pytest.mark.parametrize(("estimator", "said"), ESTIMATORS.values(), ids=ESTIMATORS)
def test_estimators_that_break_their_contract(estimator: Any, said: str) -> None:
    text = problem(loss=LossConfig(estimator=estimator))
    assert said in text
    assert text.startswith("loss.estimator")


class Wide(ActionDistribution):
    @property
    def width(self):
        return "two"


class Lying(ActionDistribution):
    def sample(self, params, mask=None, generator=None):
        categorical, continuous, log_prob = super().sample(params, mask, generator)
        return categorical, continuous, log_prob + 1


class Long(ActionDistribution):
    def sample(self, params, mask=None, generator=None):
        categorical, continuous, log_prob = super().sample(params, mask, generator)
        return categorical.long(), continuous, log_prob


class Constant(ActionDistribution):
    def log_prob(self, params, categorical, continuous, mask=None):
        return super().log_prob(params, categorical, continuous, mask).detach()


class Bare(Distribution):
    width = 2


class Unmeasured(Distribution):
    pass


@pytest.mark.parametrize(
    ("distribution", "said"),
    [
        (Wide, "it must be a positive integer"),
        (Lying, "both must be the same"),
        (Long, "categorical actions of sample is a int64 tensor (2, 1); it must be a int32 tensor"),
        (Constant, "log_prob carries no gradient"),
        (Bare, "NotImplementedError"),
        (Unmeasured, "NotImplementedError"),
        (dict, "model.distribution"),
    ],
)
def test_distributions_that_break_their_contract(distribution: Any, said: str) -> None:
    text = problem(model=ModelConfig(distribution=distribution))
    assert said in text
    assert text.startswith("model.distribution")


class Masked(gymnasium.Env):
    observation_space, action_space = gymnasium.spaces.Box(-1, 1, (3,)), gymnasium.spaces.MultiDiscrete([2, 3])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {"action_mask": (np.ones(2, bool), np.ones(3, bool))}

    def step(self, action):
        observation, info = self.reset()
        return observation, 0.0, False, True, info


class Unmasked(ActionDistribution):
    """Does not look at the mask."""

    def sample(self, params, mask=None, generator=None):
        return super().sample(params, None, generator)


class Greedy(ActionDistribution):
    def mode(self, params, mask=None):
        return super().mode(params, None)


class Unsure(ActionDistribution):
    def log_prob(self, params, categorical, continuous, mask=None):
        return super().log_prob(params, categorical, continuous, None)


@pytest.mark.parametrize(
    ("distribution", "said"),
    [
        (Unmasked, "sample chose "),
        (Greedy, "mode chose [[0, 0]] where the mask allows [[1, 2]] alone"),
        (Unsure, "log_prob of the only action that a mask allows is "),
    ],
)
def test_distributions_that_do_not_heed_the_mask(distribution: Any, said: str) -> None:
    text = problem(Masked, model=ModelConfig(distribution=distribution))
    assert said in text
    assert text.startswith("model.distribution")


def test_exploration_by_a_divergence_that_an_own_distribution_lacks() -> None:
    class Plain(ActionDistribution):
        kl_from_uniform = Distribution.kl_from_uniform

    text = problem(model=ModelConfig(distribution=Plain), loss=LossConfig(exploration="kl", entropy_coef=0.01))
    assert "loss.exploration kl needs Plain.kl_from_uniform; use entropy" in text


class Source:
    def __init__(self, fresh: int, config: Config) -> None:
        self.columns = fresh


class WithoutCall(Source):
    pass


class Odd(Source):
    def __init__(self, fresh: int, config: Config) -> None:
        self.columns = fresh + 1


class Short(Source):
    def __init__(self, fresh: int, config: Config) -> None:
        self.columns = 2 * fresh

    def __call__(self, fresh: Batch) -> Batch:
        return fresh


class Backwards(Short):
    def __call__(self, fresh: Batch) -> Batch:
        return dataclasses.replace(fresh, reward=fresh.reward + 1).beside(fresh)


class Wider(Short):
    def __call__(self, fresh: Batch) -> Batch:
        both = fresh.beside(fresh)
        return dataclasses.replace(both, reward=both.reward.double())


class AsNumbers(Source):
    def __call__(self, fresh: Batch) -> dict:
        return vars(fresh)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (lambda fresh: None, "TypeError"),
        (WithoutCall, "not callable"),
        (Odd, "columns is 9; it must be a multiple of the 8 fresh columns"),
        (Short, "it must be a float32 tensor of 16 columns"),
        (Backwards, "the first 8 columns of reward are not the fresh ones"),
        (Wider, "reward is a float64 tensor (3, 16); it must be a float32 tensor of 16 columns"),
        (AsNumbers, "returned a dict; it must return a sfactory.data.batch.Batch"),
    ],
)
def test_batch_sources_that_break_their_contract(source: Any, said: str) -> None:
    text = problem(batch_source=source)
    assert said in text
    assert text.startswith("batch_source")


def one_step(
    log_weights: Tensor, rewards: Tensor, values: Tensor, bootstrap_value: Tensor, terminated: Tensor,
    truncated: Tensor, final_values: Tensor, gamma: float, *others: float, heeds: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Temporal differences that heed ends of some kinds alone."""
    following = torch.cat((values[1:], bootstrap_value[None]))
    if "truncations" in heeds:
        following = torch.where(truncated, final_values, following)
    if "terminations" in heeds:
        following = following.masked_fill(terminated, 0.0)
    targets = rewards + gamma * following
    return targets, targets - values


@pytest.mark.parametrize("heeds", ["terminations and truncations", "terminations", "truncations", ""])
def test_an_estimator_that_looks_across_ends_of_episodes_is_told_so(heeds: str) -> None:
    config = Config(env="CartPole-v1", preset="none", loss=LossConfig(estimator=partial(one_step, heeds=heeds)))
    notes = [note for note in notes_on(make_plan(config)) if note.startswith("loss.estimator")]
    crossed = [kind for kind in ("terminations", "truncations") if kind not in heeds]
    assert len(notes) == bool(crossed)
    assert all(f"steps before {' and '.join(crossed)} what depends on" in note for note in notes)


def test_the_built_in_estimators_and_the_example_look_across_no_end() -> None:
    for estimator in (unweighted_vtrace, on_policy_gae, n_step):
        assert crossed_ends(Config(env="CartPole-v1", loss=LossConfig(estimator=estimator))) == []


@pytest.mark.parametrize("flag", ["--batch-source", "--loss.terms", "--loss.estimator", "--model.distribution"])
def test_a_name_that_is_not_there_ends_the_command_with_status_2(flag: str, tmp_path: Path, capsys) -> None:
    assert train_main(["--env", "CartPole-v1", "--run", str(tmp_path / "run"), flag, "nowhere:Thing"]) == 2
    assert f"{flag[2:].replace('-', '_')} 'nowhere:Thing'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("kernels_on")
def test_what_they_say_is_what_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels step aside; V-trace passed as one's own estimator learns what the built-in one does, plain."""
    from sfactory import train

    (tmp_path / "mine.py").write_text(
        "def terms(samples, config):\n    return {'pull': (samples.value - 5.0).square()}\n"
        "def nothing(log_weights, rewards, values, *rest):\n    return values.clone(), values * 0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    reports: dict[str, list] = {}

    def run(name: str, loss: LossConfig) -> Any:
        config = config_for(tmp_path / name, "CartPole-v1", serial=True, loss=loss)
        return train(config, [reports.setdefault(name, []).append])

    assert run("terms", LossConfig(terms="mine:terms", term_coefs={"pull": 0.1})).kernels["learner"] == [
        "dense network"
    ]
    pulls = [report.extras["term/pull"] for report in reports["terms"] if "term/pull" in report.extras]
    assert pulls[-1] < 25, "the value is pulled to 5"
    assert run("estimator", LossConfig(estimator="mine:nothing")).kernels["learner"] == ["dense network"]
    assert abs(reports["estimator"][-1].policy_loss) < 1e-6
    del sys.modules["mine"]


def test_own_terms_are_masked_weighted_and_averaged() -> None:
    from sfactory.data.batch import Samples
    from sfactory.model import build_model
    from sfactory.model.critic_units import CriticUnits
    from sfactory.model.networks import Outputs
    from sfactory.objective import Objective

    plan = make_plan(Config(env="CartPole-v1", preset="none", envs_per_worker=8, rollout=16, batch_size=128))
    model = build_model(plan.env.observation, plan.env.action, ModelConfig())
    from sfactory.data.examples import example_batch

    batch = example_batch(model.observation, model.action, 0)
    outputs = Outputs(torch.zeros(4, 4, 2), torch.ones(4, 4))

    def of_value(loss: LossConfig) -> tuple[Tensor, Tensor, Samples]:
        config = Config(env="x", loss=loss)
        objective = Objective(config, model.distribution, CriticUnits(model, normalize=False))
        columns = batch.all_columns
        evaluation = objective.evaluate_actions(outputs, batch, columns)
        targets, _ = objective.targets([objective.estimate(evaluation, batch, columns)])
        totals = objective.totals(evaluation, targets, columns)
        found = objective.gradients(evaluation, batch, targets, columns, totals)
        return found.value, found.sums, targets

    def square(samples: Any, config: Config) -> dict[str, Tensor]:
        return {"square": torch.where(samples.targets.valid, samples.value.square(), torch.nan)}

    without, _, targets = of_value(LossConfig())
    with_terms, sums, _ = of_value(LossConfig(terms=square, term_coefs={"square": 3.0}))
    valid = targets.valid
    expected = torch.where(valid, 3.0 * 2.0 / valid.sum(), 0.0)
    torch.testing.assert_close(with_terms[:-1] - without[:-1], expected)
    assert sums[-1] == valid.sum()


def test_vtrace_as_an_own_estimator_gives_the_same_numbers() -> None:
    from sfactory.data.examples import example_batch
    from sfactory.model import build_model
    from sfactory.model.critic_units import CriticUnits
    from sfactory.model.networks import Outputs
    from sfactory.objective import Objective

    plan = make_plan(Config(env="CartPole-v1", preset="none", envs_per_worker=8, rollout=16, batch_size=128))
    model = build_model(plan.env.observation, plan.env.action, ModelConfig())
    batch = example_batch(model.observation, model.action, 0)
    found = []
    for estimator in ("auto", unweighted_vtrace):
        config = Config(env="x", loss=LossConfig(estimator=estimator))
        objective = Objective(config, model.distribution, CriticUnits(model, normalize=False))
        evaluation = objective.evaluate_actions(
            Outputs(torch.zeros(4, 4, 2), torch.ones(4, 4)), batch, batch.all_columns
        )
        found.append(objective.estimate(evaluation, batch, batch.all_columns))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
