"""What a run reports: the declarations of its metrics."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sfactory.telemetry.events import TERM

REQUIRED: Any = dataclasses.MISSING
"""Default of a metric that every report has."""


class Metric(NamedTuple):
    """A figure that a run reports.

    Attributes:
        name: Its column in metrics.csv and field in :class:`Report`.
        source: Where :meth:`Report.gathered` finds it.
        unit: What it counts or measures; empty for a plain number.
        section: TensorBoard's group of charts.
        tensorboard: Whether TensorBoard shows it.
        label: Its name on the live display, which has a row for it then.
    """

    name: str
    source: str
    unit: str
    section: str
    tensorboard: bool
    label: str | None

    @property
    def tag(self) -> str:
        """Its name in TensorBoard."""
        return f"{self.section}/{self.name}"


def metric(
    source: str,
    unit: str = "",
    default: Any = math.nan,
    *,
    section: str | None = None,
    tensorboard: bool = True,
    label: str | None = None,
) -> Any:
    """Declare a field of :class:`Report`; metrics.csv, TensorBoard and the display follow.

    Args:
        source: ``source.name`` in the arguments of :meth:`Report.gathered`; the name is the field's own if left out.
        unit: See :class:`Metric`, as for the rest.
        default: Where the source does not know it; NaN: an empty cell.
        section: Unset: the source.
    """
    group = source.partition(".")[0]
    declared = {"source": source, "unit": unit, "section": section or group, "tensorboard": tensorboard}
    return field(default=default, metadata=declared | {"label": label})


@dataclass(frozen=True, kw_only=True)
class Report:
    """One row of metrics.csv, in the order of its columns. NaN: not known in this interval.

    A new metric is one declaration here, as long as its source knows it, as the learner knows the weights::

        weight_max: float = metric("losses", section="lag")
    """

    wall_s: float = metric("speed", "s", REQUIRED, section="progress")
    """Seconds that the run has taken so far, over all resumes. They end with its last batch."""
    env_steps: int = metric("progress", "env steps", REQUIRED, tensorboard=False)
    """Env steps trained on so far; the horizontal axis of TensorBoard's charts. They count when their batch is done."""
    frames: int = metric("totals", "frames", REQUIRED, section="progress")
    """Simulated frames so far: env steps x frameskip."""
    fps: float = metric("speed", "env steps/s", label="env steps/s")
    """Env steps trained on per second since the last report."""
    frames_per_s: float = metric("speed", "frames/s", label="frames/s")
    """Frames per second since the last report."""
    episodes: int = metric("episodes", "episodes", 0, section="episode")
    """Episodes that ended since the last report."""
    episode_return_mean: float = metric("episodes.return_mean", section="episode", label="return")
    """Mean return over the recent episodes; the next three columns use the same window."""
    episode_return_min: float = metric("episodes.return_min", section="episode", label="")
    """Lowest return."""
    episode_return_max: float = metric("episodes.return_max", section="episode")
    """Highest return."""
    episode_length_mean: float = metric("episodes.length_mean", "env steps", section="episode", label="length")
    """Mean length."""
    eval_env_steps: float = metric("evaluation.env_steps", "env steps", section="eval", tensorboard=False)
    """Env steps of the weights whose evaluation came in since the last report; the next five columns describe it.
    TensorBoard and loggers show them over these env steps."""
    eval_return_mean: float = metric("evaluation.return_mean", section="eval", label="evaluation")
    """Mean return of an evaluation's episodes."""
    eval_return_std: float = metric("evaluation.return_std", section="eval")
    """Their standard deviation."""
    eval_return_min: float = metric("evaluation.return_min", section="eval")
    """Lowest return."""
    eval_return_max: float = metric("evaluation.return_max", section="eval")
    """Highest return."""
    eval_length_mean: float = metric("evaluation.length_mean", "env steps", section="eval")
    """Mean length."""
    policy_lag_mean: float = metric("progress.lag_mean", "updates", section="lag", label="policy lag")
    """Mean policy lag at the first update on each batch since the last report."""
    policy_lag_max: float = metric("progress.lag_max", "updates", section="lag")
    """Highest policy lag, at the last update on a batch."""
    learner_updates: int = metric("progress.updates", "updates", 0, label="updates")
    """Gradient steps so far."""
    skipped_updates: int = metric("progress.skipped", "updates", 0)
    """Gradient steps so far that changed nothing, because the gradient was not finite."""
    loss: float = metric("losses", section="learner")
    """What is minimised, as a mean since the last report; so are all losses."""
    policy_loss: float = metric("losses", section="learner")
    """Policy's part of the loss."""
    value_loss: float = metric("losses", section="learner")
    """Value loss before its coefficient."""
    entropy: float = metric("losses", "nats", section="learner")
    """Entropy of the policy, or its KL divergence from the uniform policy with loss.exploration kl."""
    kl: float = metric("losses", "nats", section="learner")
    """KL divergence of the new policy from the one with which its batch was begun (the proximal policy)."""
    behaviour_kl: float = metric("losses", "nats", section="lag")
    """KL divergence of the proximal policy from the behaviour policy, which sampled: what the policy lag amounts to."""
    clip_fraction: float = metric("losses", "share", section="learner")
    """Share of samples whose ratio, of the new policy to the proximal one, is further than loss.clip from 1."""
    valid_fraction: float = metric("losses", "share", section="learner")
    """Share of a batch's samples that are learned from. Those of dead agents and of rows that rest are not."""
    explained_variance: float = metric("losses", section="learner")
    """1 - Var(return - value) / Var(return)."""
    grad_norm: float = metric("losses", section="learner")
    """Norm of the gradient before clipping."""
    lr: float = metric("progress", section="learner")
    """Learning rate."""
    rollout_busy: float = metric("load", "share", label="rollout busy")
    """Share of their time that the rollout workers did not wait."""
    policy_busy: float = metric("load", "share", label="policy busy")
    """Share of their time that the policy workers did not wait."""
    learner_busy: float = metric("load", "share", label="learner busy")
    """Share of its time that the learner did not wait."""
    batch_fill: float = metric("load", "rows", label="batch fill")
    """Mean rows of an inference batch."""
    free_slots: int = metric("load", "slots", 0, label="free slots")
    """Slots waiting to be filled, at the time of the report. Those that the learner holds back are not among them."""
    finished_slots: int = metric("load", "slots", 0, label="finished")
    """Slots waiting for the learner."""
    queue_full_waits: int = metric("load", "", 0)
    """Times a full queue blocked a sender, since the command."""
    restarts: int = metric("load", "", 0)
    """Times that worker processes were lost and started anew, since the command."""
    env_faults: int = metric("load", "", 0)
    """Faults of environments that the run has survived since the command."""
    rss_mb: float = metric("load", "MiB", label="memory")
    """Resident memory of all processes; what they share counts once."""
    extras: Mapping[str, float] = field(default_factory=dict)
    """Means of the numeric entries of ``info`` at episode ends, and of a user's own loss terms (``term/NAME``)."""

    @classmethod
    def gathered(cls, extras: Mapping[str, float], **sources: Any) -> Report:
        """A report of what its sources know.

        Args:
            extras: See the field.
            sources: Objects and mappings by the names that the metrics declare. An empty mapping knows nothing; any
                other has all its metrics.
        """
        values = {}
        for each in METRICS:
            name, _, key = each.source.partition(".")
            source, key = sources[name], key or each.name
            if not isinstance(source, Mapping):
                values[each.name] = getattr(source, key)
            elif source:
                values[each.name] = source[key]
        return cls(extras=extras, **values)

    def after(self, before: Report | None) -> Report:
        """This report with the last known figures where it has none of its own.

        Args:
            before: The report before, with such figures, too; None: this is the first.
        """
        if before is None:
            return self
        unknown = [each.name for each in METRICS if math.isnan(getattr(self, each.name))]
        known = {name: getattr(before, name) for name in unknown}
        return dataclasses.replace(self, extras={**before.extras, **self.extras}, **known)


METRICS = tuple(Metric(f.name, **f.metadata) for f in dataclasses.fields(Report) if f.metadata)
"""All metrics, in the order of the columns of metrics.csv."""
_OF_EVALUATIONS = {each.tag for each in METRICS if each.section == "eval"}


def scalars(report: Report) -> list[tuple[str, float]]:
    """The tags and values that TensorBoard and loggers show: what is known."""
    named = {each.tag: getattr(report, each.name) for each in METRICS if each.tensorboard}
    return [(tag, value) for tag, value in (named | extras_by_name(report)).items() if not math.isnan(value)]


def scalars_by_steps(report: Report) -> dict[int, list[tuple[str, float]]]:
    """The scalars by the env steps over which TensorBoard and loggers show them: first an evaluation's by those of its
    weights, then all others by the report's."""
    found: dict[int, list[tuple[str, float]]] = {}
    for tag, value in sorted(scalars(report), key=lambda entry: entry[0] not in _OF_EVALUATIONS):
        steps = int(report.eval_env_steps) if tag in _OF_EVALUATIONS else report.env_steps
        found.setdefault(steps, []).append((tag, value))
    return found


def extras_by_name(report: Report) -> dict[str, float]:
    """Extras by names that no metric has: ``extra/NAME``, or ``term/NAME`` for a loss term."""
    return {name if name.startswith(TERM) else f"extra/{name}": value for name, value in report.extras.items()}
