"""The bottleneck of a run, and which flags to change."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sfactory.config import changed, devices
from sfactory.profiling.measure import KINDS, Profile

SATURATED = 0.85
"""Busy share from which a kind of worker counts as the one that the others wait for."""
FULL = 0.9
"""Share of the machine's cores in use from which no core counts as spare."""
ONE_THREAD = 0.8
"""Cores used by the learner up to which one thread is enough."""
DISTURBS = 0.2
"""Busy share of the learner from which its threads take time of others."""
NAMES = {"rollout": "environments", "policy": "policy workers", "learner": "learner"}


@dataclass(frozen=True)
class Bottleneck:
    """The bottleneck of a run.

    Attributes:
        name: environments, policy workers, learner; synchronisation: sampling and learning alternate; slots: rollout
            workers wait for a free slot while the learner waits for a batch; latency: everyone waits for messages.
        reason: One sentence with the figures.
        advice: Flags to change, the most promising first.
    """

    name: str
    reason: str
    advice: tuple[str, ...]


def find_bottleneck(profile: Profile) -> Bottleneck:
    """Find the bottleneck of a profiled run.

    Where all cores are in use, it is the kind of worker that uses most of them, since a preempted worker looks busy
    too. Otherwise it is the kind that does not wait, since workers pass their results on through bounded queues. Where
    none is busy all the time, it is the number of slots, or the latency of messages.
    """
    plan = profile.plan
    if plan.on_device:
        return _in_one_process(profile)
    learns = not plan.sample_only
    busy = {kind: profile.busy(kind) for kind in (KINDS if learns else KINDS[:2])}
    heaviest = max(busy, key=profile.cpu)
    if plan.inline_inference:  # simulation and inference take turns in the same processes
        simulates = profile.interval.phases("rollout")["environment"] > busy["policy"]
        heavier, lighter = ("rollout", "policy") if simulates else ("policy", "rollout")
        busy[heavier] += busy.pop(lighter)
        heaviest = heavier if heaviest == lighter else heaviest
    slowest = max(busy, key=busy.__getitem__)
    used = f"{profile.cpu_cores:.1f} of {devices.cores()} cores"
    if plan.config.serial:
        return Bottleneck("synchronisation", "all workers take turns in one process", ("a run without --serial",))
    if learns and plan.config.lag_free and busy[slowest] < SATURATED:
        return Bottleneck(
            "synchronisation", "sampling and learning wait for each other", ("--algo appo, without --sync",)
        )
    if _is_full(profile):
        reason = f"{used} are at work, {profile.cpu(heaviest):.1f} of them here"
        return Bottleneck(NAMES[heaviest], reason, _advice(profile, heaviest))
    if busy[slowest] >= SATURATED:
        return Bottleneck(NAMES[slowest], f"busy {busy[slowest]:.0%} of the time", _advice(profile, slowest))
    shares = profile.interval.phases("rollout")
    reason = f"no worker is busy more than {busy[slowest]:.0%} of the time, and {used} are at work"
    if plan.inline_inference or shares["blocked"] > shares["waiting"]:
        return Bottleneck(
            "slots", f"{reason}; rollout workers wait for free slots", (_raise(profile, "runtime.spare_batches"),)
        )
    advice = (*_inline(profile), _raise(profile, "envs_per_worker"), _raise(profile, "workers"))
    return Bottleneck("latency", f"{reason}; rollout workers wait for actions", advice)


def _in_one_process(profile: Profile) -> Bottleneck:
    """Of environments on the device, which take turns with the learner."""
    shares = profile.interval.phases("learner")
    simulates = shares["environment"] > shares["forward"] + shares["update"]
    reason = f"environments take {shares['environment']:.0%} of the time, the policy and its updates most of the rest"
    fewer = [f"fewer --epochs (now {profile.plan.config.epochs})"] if profile.plan.config.epochs > 1 else []
    advice = (_raise(profile, "envs_per_worker"), *([] if simulates else fewer))
    return Bottleneck(NAMES["rollout" if simulates else "learner"], reason, advice)


def _advice(profile: Profile, kind: str) -> tuple[str, ...]:
    return {"rollout": _for_environments, "policy": _for_policy_workers, "learner": _for_learner}[kind](profile)


def _for_environments(profile: Profile) -> tuple[str, ...]:
    shares = profile.interval.phases("rollout")
    advice = [] if _is_full(profile) else [_raise(profile, "workers")]
    if shares["environment"] < shares["copying"] + shares["queue"]:
        advice.append(_raise(profile, "envs_per_worker"))
    advice += _one_learner_thread(profile)
    if _is_full(profile):
        advice.append(
            f"a faster environment or --env-backend (now {profile.plan.config.env_backend}); no core is to spare for "
            "--workers"
        )
    return tuple(advice)


def _for_policy_workers(profile: Profile) -> tuple[str, ...]:
    plan = profile.plan
    device = devices.inference_device(plan.config)
    advice = [*_inline(profile), _raise(profile, "envs_per_worker"), *_lower_precision(profile, device)]
    if not _is_full(profile):
        advice.append(_raise(profile, "workers" if plan.inline_inference else "runtime.policy_workers"))
        advice += _threads("inference_threads", devices.inference_threads(plan.config), device)
    return tuple(advice)


def _for_learner(profile: Profile) -> tuple[str, ...]:
    config = profile.plan.config
    device = devices.learner_device(config)
    advice = [*_lower_precision(profile, device), _raise(profile, "batch_size")]
    if not _is_full(profile):
        advice += _threads("learner_threads", devices.learner_threads(config), device)
    if config.epochs > 1:
        advice.append(f"fewer --epochs (now {config.epochs}), which changes what is learned")
    return tuple(advice)


def _lower_precision(profile: Profile, device: torch.device) -> list[str]:
    """bfloat16 where it pays and is not used yet."""
    plan = profile.plan
    automatic = changed(plan.config, precision="auto")
    images = plan.env.observation.has_images
    pays = device.type == "cuda" or devices.autocast_dtype(automatic, images, device) is not None
    unused = devices.autocast_dtype(plan.config, images, device) is None
    return ["--precision bfloat16"] if pays and unused and devices.computes_bfloat16(device) else []


def _inline(profile: Profile) -> list[str]:
    """Inference by the rollout workers themselves, where messages to policy workers may cost more than larger batches
    save."""
    config = profile.plan.config
    on_cpu = devices.inference_device(config).type == "cpu"
    return (
        ["--runtime.policy-workers 0, with --workers 2 or more"] if on_cpu and not profile.plan.inline_inference else []
    )


def _threads(name: str, now: int, device: torch.device) -> list[str]:
    return [f"--runtime.{name.replace('_', '-')} {now + 1}"] if device.type == "cpu" and now < devices.cores() else []


def _one_learner_thread(profile: Profile) -> list[str]:
    """On cores that the learner shares with the environments, several threads of it disturb more where one would do."""
    config = profile.plan.config
    threads = devices.learner_threads(config)
    disturbs = devices.learner_device(config).type == "cpu" and profile.busy("learner") > DISTURBS
    enough = disturbs and profile.cpu("learner") < ONE_THREAD
    return (
        [f"--runtime.learner-threads 1 (now {threads})"]
        if threads > 1 and enough and not profile.plan.sample_only
        else []
    )


def _raise(profile: Profile, field: str) -> str:
    value = profile.plan.config
    for part in field.split("."):
        value = getattr(value, part)
    return f"higher --{field.replace('_', '-')} (now {value})"


def _is_full(profile: Profile) -> bool:
    return profile.cpu_cores >= FULL * devices.cores()
