"""A dry run of a user's own distribution, batch source, estimator and loss terms on a small chunk of made-up
experience."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from sfactory.config import Config, changed
from sfactory.data.batch import Batch, Samples, column_dim
from sfactory.data.examples import example_batch
from sfactory.distributions import ActionDistribution, Distribution
from sfactory.errors import ConfigError
from sfactory.learner import batch_source, has_one_pass
from sfactory.model import build_uninitialized
from sfactory.model.actor_critic import is_built_in
from sfactory.model.contracts import require_unchanged
from sfactory.model.critic_units import CriticUnits
from sfactory.model.interface import Model
from sfactory.model.networks import TorchNetwork
from sfactory.objective import ESTIMATORS, Estimator, Objective, advantage_estimator
from sfactory.telemetry.metrics import METRICS

T = TypeVar("T")
_CPU = torch.device("cpu")


def check_extensions(config: Config, model: Model, masked: bool) -> None:
    """Try what a configuration names of a user's own code besides the model.

    Args:
        masked: Whether the environment gives action masks.

    Raises:
        ConfigError: With the name of the code, what it gave, and what is expected.
    """
    _check_buffers(config, model)
    if type(model.distribution) is not ActionDistribution:
        _check_distribution(config, model.distribution)
        if masked:
            _check_masks(config, model.distribution)
    if config.batch_source != "none":
        _check_batch_source(config, model)
    loss = config.loss
    if loss.estimator in ("auto", *ESTIMATORS) and loss.terms == "none":
        return
    batch, role = example_batch(model.observation, model.action, model.state_size), f"loss.estimator {loss.estimator}"
    watched = changed(config, loss=changed(loss, estimator=_watched(role, advantage_estimator(config))))
    objective = Objective(watched, model.distribution, CriticUnits(model, normalize=False))
    columns, network = batch.all_columns, TorchNetwork(model, _CPU, None, compiled=False)
    densities = objective.evaluate_actions(network.outputs(batch, columns), batch, columns)
    estimates = _called(role, lambda: objective.estimate(densities, batch, columns))
    _require(role, "value targets", estimates.returns, tuple(batch.reward.shape), "[T, B]")
    _require(role, "advantages", estimates.advantages, tuple(batch.reward.shape), "[T, B]")
    targets, _ = objective.targets([estimates])
    if loss.terms != "none":
        # as Learner makes minibatches of them
        samples = batch.samples(targets, single=model.state_size == 0 and not has_one_pass(config))
        _check_terms(config, objective, samples, network)


def crossed_ends(config: Config) -> list[str]:
    """The ends of episodes, terminations or truncations, that a user's own estimator looks across: what it gives for
    the steps before depends on what comes after."""
    loss, last = config.loss, 2
    if loss.estimator in ("auto", *ESTIMATORS):
        return []
    estimator, steps = advantage_estimator(config), torch.arange(6)[:, None]

    def before_the_end(terminates: bool, later: float) -> Tensor:
        """Value targets and advantages of the steps of an episode, with this number in all that is not of it."""
        after, end = torch.where(steps > last, later, 0.0), steps == last
        ends = (end, end & False) if terminates else (end & False, end)
        final_values = torch.full(end.shape, later if terminates else 0.0)
        outcome = after.clone(), after, after[-1], *ends, final_values
        found = estimator(torch.zeros(end.shape), *outcome, loss.gamma, loss.lam, loss.rho_bar, loss.c_bar)
        return torch.cat(found, 1)[: last + 1]

    return [
        f"{name}s"
        for name, terminates in (("termination", True), ("truncation", False))
        if not torch.allclose(before_the_end(terminates, 0.0), before_the_end(terminates, 1.0), equal_nan=True)
    ]


def _check_buffers(config: Config, model: Model) -> None:
    """Make the model once more and compare the buffers that are not sent to policy workers, as weights and
    floating-point buffers are."""
    buffers = {name: buffer for name, buffer in model.named_buffers() if not buffer.is_floating_point()}
    if is_built_in(config.model) or not buffers:
        return
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(torch.initial_seed() + 1)  # of the CPU alone
        again = dict(build_uninitialized(model.observation, model.action, config.model).named_buffers())
    if differing := [name for name, buffer in buffers.items() if not torch.equal(buffer, again.get(name, buffer))]:
        raise ConfigError(
            f"the buffers {', '.join(differing)} of the model are drawn at random and are no floating-point numbers, "
            "so that each process would have others; draw them with torch.Generator().manual_seed(...)"
        )


def _check_distribution(config: Config, distribution: Distribution) -> None:
    action, rows, role = distribution.action, 2, f"model.distribution {config.model.distribution}"
    params = torch.zeros(rows, distribution.width, requires_grad=True)
    drawn = _called(f"{role}: sample", lambda: distribution.sample(params.detach(), None, torch.Generator()))
    if not isinstance(drawn, tuple) or len(drawn) != 3:
        raise ConfigError(
            f"{role}: sample returned {_described(drawn)}; it must be (categorical, continuous, log_prob)"
        )
    categorical, continuous, log_prob = drawn
    _require(role, "categorical actions of sample", categorical, (rows, len(action.sizes)), "(2, K)", torch.int32)
    _require(role, "continuous actions of sample", continuous, (rows, action.continuous), "(2, D)")
    _require(role, "log_prob of sample", log_prob, (rows,), "(2,)")
    again = _called(f"{role}: log_prob", lambda: distribution.log_prob(params, categorical, continuous, None))
    _require(role, "log_prob", again, (rows,), "(2,)")
    if not torch.allclose(again, log_prob, rtol=1e-4, atol=1e-4):
        raise ConfigError(
            f"{role}: log_prob of what sample drew is {again.tolist()}, but sample said {log_prob.tolist()}; "
            "both must be the same"
        )
    entropy = _called(f"{role}: entropy", lambda: distribution.entropy(params, None))
    _require(role, "entropy", entropy, (rows,), "(2,)")
    if config.loss.exploration == "kl":
        distance = _called(f"{role}: kl_from_uniform", lambda: distribution.kl_from_uniform(params, None))
        _require(role, "kl_from_uniform", distance, (rows,), "(2,)")
    _require_gradient(f"{role}: log_prob", again)
    mode = _called(f"{role}: mode", lambda: distribution.mode(params.detach(), None))
    if not isinstance(mode, tuple) or len(mode) != 2:
        raise ConfigError(f"{role}: mode returned {_described(mode)}; it must be (categorical, continuous)")
    _require(role, "categorical actions of mode", mode[0], (rows, len(action.sizes)), "(2, K)", torch.int32)
    _require(role, "continuous actions of mode", mode[1], (rows, action.continuous), "(2, D)")


def _check_masks(config: Config, distribution: Distribution) -> None:
    """Have the distribution choose where a mask allows one category of each component, the last."""
    action, role = distribution.action, f"model.distribution {config.model.distribution}"
    allowed = torch.tensor([[n - 1 for n in action.sizes]], dtype=torch.int32)
    mask = torch.cat([torch.arange(n) == n - 1 for n in action.sizes])[None]
    params = torch.zeros(1, distribution.width)
    drawn = _called(f"{role}: sample", lambda: distribution.sample(params, mask, torch.Generator()))
    for what, chosen in (("sample", drawn[0]), ("mode", _called(role, lambda: distribution.mode(params, mask))[0])):
        if not torch.equal(chosen, allowed):
            raise ConfigError(
                f"{role}: {what} chose {chosen.tolist()} where the mask allows {allowed.tolist()} alone; what the mask "
                "forbids must have probability 0"
            )
    log_prob = _called(f"{role}: log_prob", lambda: distribution.log_prob(params, allowed, drawn[1], mask))
    if not action.continuous and not torch.allclose(log_prob, torch.zeros(1), atol=1e-4):
        raise ConfigError(
            f"{role}: log_prob of the only action that a mask allows is {log_prob.tolist()}; it must be 0"
        )
    _require(role, "entropy with a mask", _called(role, lambda: distribution.entropy(params, mask)), (1,), "(1,)")


def _check_batch_source(config: Config, model: Model) -> None:
    """Have the source make two batches from the same fresh columns."""
    role, fresh = f"batch_source {config.batch_source}", config.batch_size // config.rollout
    source = _called(role, lambda: batch_source(config))
    columns = _called(role, lambda: source.columns)
    if not isinstance(columns, int) or columns < fresh or columns % fresh:
        raise ConfigError(f"{role}: columns is {columns!r}; it must be a multiple of the {fresh} fresh columns")
    example = example_batch(model.observation, model.action, model.state_size)
    given = example.select(torch.arange(fresh) % example.first.shape[1])
    for _ in range(2):
        made = _called(role, lambda: source(given))
        if not isinstance(made, Batch):
            raise ConfigError(f"{role} returned {_described(made)}; it must return a sfactory.data.batch.Batch")
        found = made.tensors()
        for name, tensor in given.tensors().items():
            dim, shape = column_dim(name), list(tensor.shape)
            shape[dim] = columns
            _require(role, name, found.get(name), tuple(shape), f"of {columns} columns", tensor.dtype, finite=False)
            first = found[name].narrow(dim, 0, fresh)
            if not bool((first.eq(tensor) | (first.ne(first) & tensor.ne(tensor))).all()):
                raise ConfigError(
                    f"{role}: the first {fresh} columns of {name} are not the fresh ones; put others behind"
                )


def _check_terms(config: Config, objective: Objective, samples: Samples, network: TorchNetwork) -> None:
    """Call the loss terms once, and see to what they give."""
    role, shape = f"loss.terms {config.loss.terms}", tuple(samples.first.shape)
    meaning = "[T, B]" if shape[0] > 1 else "[T, B], where T is 1 as the samples of a model without memory are single,"
    columns = slice(0, shape[1])
    densities = objective.evaluate_actions(network.outputs(samples, columns), samples, columns)
    given = [*samples.obs, samples.first, samples.reward, samples.categorical, samples.continuous]
    before = [tensor.clone() for tensor in given]
    terms = _called(role, lambda: objective.terms(densities, samples, samples.targets, columns))
    require_unchanged(role, before, given)
    if not isinstance(terms, Mapping) or not terms or not all(isinstance(name, str) for name in terms):
        raise ConfigError(f"{role} returned {_described(terms)}; it must return a mapping of names to tensors [T, B]")
    for name, term in terms.items():
        if name in {metric.name for metric in METRICS}:
            raise ConfigError(f"{role}: {name} is the name of a metric; choose another one")
        _require(role, name, term, shape, meaning)
        _require_gradient(f"{role}: {name}", term)
    if unknown := config.loss.term_coefs.keys() - terms.keys():
        raise ConfigError(
            f"loss.term_coefs names {', '.join(sorted(unknown))}, but {role} gives {', '.join(terms) or 'no term'}"
        )


def _watched(role: str, estimator: Estimator) -> Estimator:
    """An estimator that may not change what it is given."""

    def watched(*arguments: Any) -> tuple[Tensor, Tensor]:
        given = [argument for argument in arguments if isinstance(argument, Tensor)]
        before = [tensor.clone() for tensor in given]
        found = estimator(*arguments)
        require_unchanged(role, before, given)
        return found

    return watched


def _called(role: str, function: Callable[[], T]) -> T:
    try:
        return function()
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{role} failed on made-up samples: {type(error).__name__}: {error} (docs/extending.md has the contract)"
        ) from error


def _require(
    role: str,
    what: str,
    value: Any,
    shape: tuple[int, ...],
    meaning: str,
    dtype: torch.dtype = torch.float32,
    finite: bool = True,
) -> None:
    """A tensor of a shape and dtype, and finite where it must be."""
    if not isinstance(value, Tensor) or tuple(value.shape) != shape or value.dtype != dtype:
        raise ConfigError(
            f"{role}: {what} is {_described(value)}; it must be a {str(dtype)[6:]} tensor {meaning} = {shape}"
        )
    if finite and not bool(value.isfinite().all()):
        raise ConfigError(f"{role}: {what} is not finite on made-up samples: {value.detach().flatten()[:5].tolist()}")


def _require_gradient(what: str, value: Tensor) -> None:
    if not value.requires_grad:
        raise ConfigError(
            f"{what} carries no gradient; compute it from what has one, and without detach() or no_grad()"
        )


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {str(value.dtype)[6:]} tensor {tuple(value.shape)}"
    return f"a {type(value).__name__}"
