"""What happens when a resumed run's config differs from the saved one, field by field. ``docs/resume.md`` is this
table.

``python -m sfactory.runs.resume_rules`` prints that file.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from sfactory.config import Config
from sfactory.config.env_source import EnvSource
from sfactory.envs.interface import EnvSpec
from sfactory.errors import ConfigError

_log = logging.getLogger(__name__)


class Rule(NamedTuple):
    """What happens to a run whose config has changed in one field.

    Attributes:
        verdict: refused: the saved weights, or what was learned with them, would not fit or would mean something else.
            warned: the run
            goes on, but learns in another way from here on. safe: it goes on as it would have.
        why: For the user.
    """

    verdict: Literal["refused", "warned", "safe"]
    why: str


def _refused(why: str) -> Rule:
    return Rule("refused", why)


def _warned(why: str) -> Rule:
    return Rule("warned", why)


def _safe(why: str) -> Rule:
    return Rule("safe", why)


_WEIGHTS = _refused("the network has other weights")
_UNIT = _refused("the critic's values have another unit")
_LOSS = _warned("another loss from here on")
_STEP = _warned("other optimizer steps from here on; Adam's moments stay")
_PLACE = _safe("where and how fast, not what")
_REPORTS = _safe("reports only")

RULES: dict[str, Rule] = {
    "env": _refused("another task"),
    "env_kwargs": _refused("another task"),
    "env_backend": _warned("another implementation of the game; other spaces are refused"),
    "steps": _safe("the run becomes longer or shorter; with optim.schedule linear the rate is that of the new length"),
    "seed": _warned("from here on the run is neither seed's"),
    "run": _safe("a run folder may be moved"),
    "overwrite": _safe("removes the run, and begins anew"),
    "device": _PLACE,
    "algo": _LOSS,
    "precision": _warned("another rounding from here on; weights and optimizer are kept in float32 anyway"),
    "workers": _safe("environments begin new episodes; the lag's bound follows"),
    "envs_per_worker": _safe("environments begin new episodes; the lag's bound follows"),
    "rollout": _warned("returns are bootstrapped after another number of env steps"),
    "batch_size": _warned("another number of updates for as many env steps"),
    "epochs": _warned("another number of updates for as many env steps"),
    "sync": _warned("another policy lag"),
    "serial": _warned("another policy lag, and the seed no longer reproduces the whole run"),
    "preset": _safe("the fields that it sets are compared, each by its own rule"),
    "model.encoder": _WEIGHTS,
    "model.hidden": _WEIGHTS,
    "model.features": _WEIGHTS,
    "model.activation": _refused("the same weights would compute something else"),
    "model.core": _WEIGHTS,
    "model.core_size": _WEIGHTS,
    "model.core_layers": _WEIGHTS,
    "model.shared_critic": _WEIGHTS,
    "model.adaptive_std": _WEIGHTS,
    "model.initial_log_std": _safe("only a new run begins with it"),
    "model.squash": _refused("the same action samples would mean other actions"),
    "model.model": _WEIGHTS,
    "model.kwargs": _WEIGHTS,
    "model.normalize_obs": _refused("the same weights would see other numbers"),
    "optim.lr": _warned(
        "other optimizer steps from here on; with optim.schedule adaptive_kl the adapted rate goes on instead"
    ),
    "optim.schedule": _STEP,
    "optim.target_kl": _STEP,
    "optim.betas": _STEP,
    "optim.eps": _STEP,
    "optim.max_grad_norm": _STEP,
    "optim.max_skipped": _safe("when to give up"),
    "optim.minibatches": _STEP,
    "optim.compile": _PLACE,
    "loss.gamma": _warned("the critic has learned values of another horizon, and needs time to follow"),
    "loss.lam": _LOSS,
    "loss.rho_bar": _LOSS,
    "loss.c_bar": _LOSS,
    "loss.rho_bar_pg": _LOSS,
    "loss.tv_limit": _LOSS,
    "loss.clip": _LOSS,
    "loss.value_clip": _LOSS,
    "loss.value_coef": _LOSS,
    "loss.entropy_coef": _LOSS,
    "loss.exploration": _LOSS,
    "loss.normalize_advantage": _LOSS,
    "loss.normalize_returns": _UNIT,
    "loss.reward_scale": _UNIT,
    "loss.reward_clip": _UNIT,
    "loss.max_lag": _safe("another bound on the lag, which holds from here on"),
    "runtime.groups": _PLACE,
    "runtime.policy_workers": _PLACE,
    "runtime.inference_device": _PLACE,
    "runtime.kernels": _PLACE,
    "runtime.cuda_graphs": _PLACE,
    "runtime.learner_threads": _PLACE,
    "runtime.inference_threads": _PLACE,
    "runtime.rollout_nice": _PLACE,
    "runtime.env_threads": _PLACE,
    "runtime.spare_batches": _safe("the lag's bound follows"),
    "runtime.spin": _PLACE,
    "runtime.step_timeout_s": _safe("when to give up"),
    "runtime.restarts": _safe("when to give up"),
    "runtime.validate_observations": _safe("what is noticed"),
    "runtime.env_fault_rate": _safe("when to give up"),
    "log.report_every_s": _REPORTS,
    "log.episode_window": _safe("reports, and by which mean the best checkpoint is chosen from here on"),
    "log.tensorboard": _REPORTS,
    "log.display": _REPORTS,
    "log.save_every_s": _safe("when to save"),
    "log.keep": _safe("the next save removes what is beyond it, never the best or milestones"),
    "log.milestone_every": _safe("milestones so far stay"),
}
"""The rule for every field of :class:`Config`."""

_INTRODUCTION = """# Resuming with another configuration

The same command again resumes a run. Every field that differs from the saved one (`config.yaml` in the run folder)
follows its rule:

- **refused**: exit status 2, nothing is changed. The saved weights, or what was learned with them, would not fit or
  would mean something else. Ask for the saved value, start anew with `--overwrite`, or name another folder.
- **warned**: the run goes on and says so. It learns in another way from here on, so its curve is not that of one
  configuration.
- **safe**: the run goes on as it would have.

The environment itself is compared, too, as far as `spaces.json` in the run folder tells it. **Refused** are other
spaces, an environment of another class, other values that a callable carries (in a closure, a partial, a default, or
read from its module), and another lambda. **Warned** of is edited code of a class or of a function that makes
environments.

All refused fields are named at once. This file is printed by `python -m sfactory.runs.resume_rules`.

| field | rule | why |
|---|---|---|
"""


def check_resume(path: Path, saved: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """Compare the configs, as nested plain values, with which a run was begun and is to be continued; warn where the
    rules say so.

    Args:
        path: The run folder.

    Raises:
        ConfigError: With every field that must not change.
    """
    refused = []
    for field, (old, new) in _differences(saved, asked).items():
        verdict, why = RULES[field]
        if verdict == "refused":
            refused.append(f"  {field}: {old} -> {new} ({why})")
        elif verdict == "warned":
            _log.warning("the run in %s continues with a changed setting: %s: %s -> %s: %s", path, field, old, new, why)
    if refused:
        raise ConfigError(
            f"{path} holds a run that cannot continue with other settings (saved -> asked); ask for the saved ones, "
            "start anew with "
            "--overwrite, or name another folder with --run:",
            *refused,
        )


def check_environment(path: Path, saved: EnvSpec, now: EnvSpec) -> None:
    """Compare what is known of the environments with which a run was begun and is to be continued; warn where it may
    have changed.

    Refused is what is another task: other spaces, another class, other values that a callable carries (as other
        env_kwargs are), and
    another lambda, whose code is hardly more than the arguments that it passes. The code of a function or a class may
    be edited: who mends a bug or adds a figure to info wants to go on, and who makes another game of it is warned. A
    callable that is the same in all this and makes an environment of another class may choose among several, and is
    warned of, too.

    Args:
        path: The run folder.

    Raises:
        ConfigError: With everything that differs.
    """
    spaces, refused, noticed = _space_differences(saved, now), [], []
    if saved.source is not None and now.source is not None:
        refused, noticed = _source_differences(saved.source, now.source)
    remedy = "name another folder with run= (--run), or start anew with overwrite (--overwrite)"
    if spaces or refused:
        exception = (
            ""
            if spaces
            else ". If it is the same task for all that, remove spaces.json, which tells them apart, from the folder"
        )
        problem = f"{path} holds a run of another environment (saved -> now); {remedy}{exception}:"
        raise ConfigError(problem, *(f"  {difference}" for difference in (*spaces, *refused)))
    if noticed:
        _log.warning(
            "the environment of the run in %s has changed since (saved -> now), and the run goes on with it; if it is "
            "another task, %s: %s",
            path, remedy, "; ".join(noticed),
        )  # fmt: skip


def _space_differences(saved: EnvSpec, now: EnvSpec) -> list[str]:
    """The bounds of observations may differ."""
    pairs = {what: (getattr(saved, what), getattr(now, what)) for what in ("observation", "action")}
    return [f"{what} space: {old.space} -> {new.space}" for what, (old, new) in pairs.items() if old != new]


def _source_differences(saved: EnvSource, now: EnvSource) -> tuple[list[str], list[str]]:
    """What makes it another environment; and what else has changed."""
    made = [f"what is made: {saved.made} -> {now.made}"] if saved.made != now.made else []
    same_python = saved.code.partition(" ")[0] == now.code.partition(" ")[0]  # else bytecode tells nothing
    edited = ["the code of what makes it has changed"] if same_python and saved.code != now.code else []
    names = (
        saved.values.keys() & now.values.keys() if saved.code != now.code else saved.values.keys() | now.values.keys()
    )
    pairs = {name: (saved.values.get(name, "none"), now.values.get(name, "none")) for name in sorted(names)}
    values = [f"{name}: {old} -> {new}" for name, (old, new) in pairs.items() if old != new]
    if made and (edited or saved.values != now.values or not now.code):
        return [*made, *values], []
    if edited and (saved.anonymous or now.anonymous):
        return [*values, "the code of its lambda has changed"], []
    return values, [*made, *edited]


def _differences(saved: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted field names with the saved and the asked value, where both configs have the field and differ in it."""
    found: dict[str, tuple[Any, Any]] = {}
    groups = {f.name for f in dataclasses.fields(Config) if dataclasses.is_dataclass(getattr(Config(), f.name))}
    for name in asked.keys() & saved.keys():
        old, new = saved[name], asked[name]
        if name in groups and isinstance(old, Mapping):
            found |= {f"{name}.{key}": (old[key], new[key]) for key in new if key in old and old[key] != new[key]}
        elif name not in groups and old != new:
            found[name] = (old, new)
    return {name: found[name] for name in sorted(found)}


def markdown() -> str:
    """The table for people."""
    return _INTRODUCTION + "".join(f"| `{field}` | {rule.verdict} | {rule.why} |\n" for field, rule in RULES.items())


if __name__ == "__main__":
    print(markdown(), end="")
