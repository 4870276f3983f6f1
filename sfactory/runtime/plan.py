"""The plan of a run: the checked configuration together with its environment, and the numbers that follow from them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import cloudpickle
import gymnasium
import numpy as np

from sfactory.config import Config, changed
from sfactory.config.lag import slot_count
from sfactory.envs.interface import TENSORS, EnvSpec
from sfactory.errors import ConfigError

EVALUATOR = "evaluator"
"""Name of the worker that evaluates beside training."""


@dataclass(frozen=True)
class Plan:
    """Description of a run from which every process builds its workers.

    Attributes:
        config: Configuration of the run, resolved and valid, with `device`, `workers` and `runtime.policy_workers`
            set.
        env: Spaces and properties of the environment.
        env_source: The environment itself: an id or a callable.
        device_reason: Why the run has its device, where that was left open and there is a choice; else empty.
        workers_reason: Why it has more workers than suit steps that compute; else empty.
        sample_only: Sample without learning; finished segments are released at once.
        trace: Folder in which every process leaves its trace, or None.
    """

    config: Config
    env: EnvSpec
    env_source: Any
    device_reason: str = ""
    workers_reason: str = ""
    sample_only: bool = False
    trace: Path | None = None

    @property
    def on_device(self) -> bool:
        """Whether environments are tensors on the learner's device, which samples by itself."""
        return self.env.family == TENSORS and not self.sample_only

    @property
    def rollout_workers(self) -> int:
        """Number of rollout workers."""
        return 0 if self.on_device else cast(int, self.config.workers)

    @property
    def slots(self) -> int:
        """Slots of the arena."""
        return 0 if self.on_device else slot_count(self.config, self.rows)

    @property
    def rows(self) -> int:
        """Agent rows of a group."""
        return self.config.envs_per_group * self.env.agents

    @property
    def groups(self) -> int:
        """Number of groups of the whole run."""
        return self.rollout_workers * self.config.runtime.groups

    @property
    def inline_inference(self) -> bool:
        """Whether every rollout worker has a policy worker of its own in its process."""
        return self.config.runtime.policy_workers == 0 or self.on_device

    @property
    def policy_workers(self) -> int:
        """Number of policy workers, in processes of their own or inline."""
        return self.rollout_workers if self.inline_inference else cast(int, self.config.runtime.policy_workers)

    @property
    def policy_processes(self) -> int:
        """Processes that do nothing but inference."""
        return 0 if self.inline_inference else self.policy_workers

    @property
    def evaluates(self) -> bool:
        """Whether there is evaluation beside training."""
        return self.config.eval.every > 0 and not self.sample_only

    @property
    def worker_names(self) -> list[str]:
        """Names of all workers, in the order of the control block's rows."""
        policies = (f"policy-{i}" for i in range(self.policy_workers))
        rollouts = (f"rollout-{i}" for i in range(self.rollout_workers))
        return ["learner", *policies, *rollouts, *([EVALUATOR] if self.evaluates else [])]

    def rollout_worker_of(self, group: int) -> int:
        """Number of the rollout worker that steps a group."""
        return group // self.config.runtime.groups

    def policy_worker_of(self, group: int) -> int:
        """Number of the policy worker that serves a group."""
        return self.rollout_worker_of(group) if self.inline_inference else group % self.policy_workers

    def seed(self, generation: int) -> int:
        """Seed of the workers that start at a generation: the run's own seed at the start of the run (0), else another
        one, so that new environments do not repeat old episodes.

        Args:
            generation: Env steps so far plus restarts of sampling.
        """
        seed = self.config.seed
        return seed if generation == 0 else int(np.random.SeedSequence((seed, generation)).generate_state(1)[0])


class PickledPlan:
    """A plan pickled by value for another process, so that lambdas and classes of ``__main__`` or a notebook arrive
    complete.

    Environments that the user's program has registered with Gymnasium by their class or a function travel with it.

    Raises:
        ConfigError: If something that it carries cannot be pickled.
    """

    def __init__(self, plan: Plan) -> None:
        registered = [
            spec
            for spec in gymnasium.registry.values()
            if callable(spec.entry_point) or callable(spec.vector_entry_point)
        ]
        without_loggers = changed(plan.config, log=changed(plan.config.log, loggers=()))  # they work in the runner
        try:
            self._data = cloudpickle.dumps((dataclasses.replace(plan, config=without_loggers), registered))
        except Exception as error:
            raise ConfigError(
                f"the run cannot be sent to its worker processes: {type(error).__name__}: {error}. Something that its "
                "environment, env_kwargs or another part carries cannot be pickled: let the environment make locks, "
                "open files and connections itself, tell it a file's name in place of a multiprocessing.Value, or "
                "train in one process (serial)"
            ) from error

    def open(self) -> Plan:
        """Unpickle the plan and register its environments with Gymnasium in this process."""
        plan, registered = cloudpickle.loads(self._data)
        for spec in registered:
            gymnasium.registry.setdefault(spec.id, spec)
        return plan
