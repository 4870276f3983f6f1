"""Settings that a user has changed and that have no effect in a run."""

from __future__ import annotations

import operator
from collections.abc import Iterator

from sfactory.config import Config, given_values
from sfactory.config.presets import preset_for
from sfactory.distributions import make_distribution, parametrized_as_built_in
from sfactory.envs.interface import EnvSpec
from sfactory.model.actor_critic import CORES
from sfactory.model.encoders import IMAGE_ENCODERS, KNOWN
from sfactory.model.normalizer import PixelNormalizer
from sfactory.objective import ALGOS
from sfactory.runtime.plan import Plan


def notes_on_idle_settings(plan: Plan) -> list[str]:
    """A note for each such setting, which says why it has no effect."""
    config = plan.config
    idle = (*_idle_in_model(config, plan.env), *_idle_in_learning(config))
    return [
        f"{name} {operator.attrgetter(name)(config)} has no effect, since {reason}"
        for reason, names in idle
        for name in names
        if _is_changed(config, name)
    ]


def _is_changed(config: Config, name: str) -> bool:
    """Whether the user has given a field another value than it has by the preset or by itself."""
    group, field = name.split(".")
    own = given_values(getattr(config, group))
    preset = preset_for(config.preset, config.env, config.algo, config.model.core)[1].get(group, {})
    return field in own and own[field] != preset.get(field, getattr(getattr(Config(), group), field))


def _idle_in_model(config: Config, env: EnvSpec) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Reasons, and the fields of the model that have no effect for them. A whole model of one's own may read all."""
    model = config.model
    if model.model == "none" and model.core not in (*CORES,):
        yield "model.core is neither gru nor lstm", ("model.core_size", "model.core_layers")
    if not env.observation.has_floats:
        yield "the observation has no floats", ("model.normalize_obs",)
    if not any(map(PixelNormalizer.fits, env.observation.leaves)):
        yield "the observation has no image of pixels", ("model.normalize_images",)
    elif model.model == "none" and model.encoder not in ("auto", *IMAGE_ENCODERS):
        yield "model.encoder takes pixels as they are stored", ("model.normalize_images",)
    if model.model == "none" and model.encoder in KNOWN:
        if all(leaf.is_image for leaf in env.observation.leaves):
            yield "all parts of the observation are images", ("model.hidden", "model.activation")
        if not env.observation.has_images:
            yield "the observation has no image", ("model.features",)
    gaussian = "model.adaptive_std", "model.initial_log_std"
    if not env.action.continuous:
        yield "actions are not continuous", ("model.squash", *gaussian)
    elif not parametrized_as_built_in(make_distribution(env.action, model.distribution)):
        yield "model.distribution is not the Gaussian one", gaussian


def _idle_in_learning(config: Config) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Reasons, and the fields of the loss and the optimizer that have no effect for them."""
    loss, algo, schedule = config.loss, ALGOS[config.algo], config.optim.schedule
    if schedule != "linear":
        yield f"optim.schedule is {schedule}, not linear", ("optim.hold",)
    if schedule != "adaptive_kl":
        yield f"optim.schedule is {schedule}, not adaptive_kl", ("optim.target_kl",)
    if not algo.surrogate:
        yield f"algo is {config.algo}, whose loss has no clip", ("loss.clip",)
    if not algo.bounded:
        yield f"algo is {config.algo}, not appo", ("loss.tv_limit",)
    if algo.on_policy:
        yield f"algo is {config.algo}, which has no importance weights", ("loss.rho_bar_pg",)
    estimator = ("gae" if algo.on_policy else "vtrace") if loss.estimator == "auto" else loss.estimator
    if estimator == "gae":
        yield "loss.estimator is GAE, which has no importance weights", ("loss.rho_bar", "loss.c_bar")
    if not loss.entropy_coef:
        yield "loss.entropy_coef is 0", ("loss.exploration",)
    if config.updates_per_batch == 1:
        yield "a batch has one update, which begins at the values that it clips around", ("loss.value_clip",)
