"""Every worker of every run has random numbers of its own."""

from sfactory.config import Config, resolve
from sfactory.runtime.planning import make_plan
from sfactory.runtime.workers import worker_seeds


def test_no_two_workers_of_runs_with_neighbouring_seeds_draw_the_same_numbers() -> None:
    plans = [make_plan(resolve(Config(env="CartPole-v1", seed=seed))) for seed in range(4)]
    seeds = [
        seed
        for plan in plans
        for generation in (0, 2048)
        for kind in range(4)
        for worker in range(16)
        for seed in worker_seeds(plan, generation, kind, worker)
    ]
    assert len(set(seeds)) == len(seeds) == 4 * 2 * 4 * 16 * 4
