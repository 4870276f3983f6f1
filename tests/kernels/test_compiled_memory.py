"""Compiled passes give back the arrays that they are given: not all code that numba takes does, and that loses memory
at every update."""

import gc

import numba
import numpy as np
import pytest
from numba.core.runtime import _nrt_python, rtsys
from small_plans import small_plan

from sfactory.config import LossConfig, ModelConfig, OptimConfig
from sfactory.profiling.workloads import SIMULATION, TRAINING, inference_workloads, prepare

CASES = {
    "dense": {"env": "sfactory/CartPole"},
    "dense, critic of its own": {
        "env": "sfactory/Pendulum",
        "model": ModelConfig(shared_critic=False, adaptive_std=True),
    },
    "all there is": {
        "env": "sfactory/Pendulum",
        "algo": "ppo",
        "epochs": 2,
        "optim": OptimConfig(minibatches=2),
        "loss": LossConfig(exploration="kl", normalize_returns=True),
        "model": ModelConfig(normalize_obs=True),
    },
    "lstm": {"env": "sfactory/MemoryGrid", "model": ModelConfig(core="lstm")},
    "gru": {"env": "sfactory/CartPole", "model": ModelConfig(core="gru")},
    "images": {"env": "ALE/Pong-v5"},
    "images in bfloat16": {"env": "ALE/Pong-v5", "precision": "bfloat16"},
}


@pytest.fixture(scope="module", autouse=True)
def counted():
    numba.njit(lambda: np.zeros(1))()  # begins numba's memory system
    _nrt_python.memsys_enable_stats()
    yield
    _nrt_python.memsys_disable_stats()


def held() -> int:
    """Arrays that compiled code holds, or has made and Python holds."""
    gc.collect()
    stats = rtsys.get_allocation_stats()
    return stats.mi_alloc - stats.mi_free


def test_an_array_that_is_kept_is_counted():
    make = numba.njit(lambda: np.zeros(1))
    make()
    before = held()
    kept = make()
    assert held() == before + 1
    del kept
    assert held() == before


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES.keys())
def test_nothing_is_lost(settings):
    plan = small_plan(**settings)
    for work in (SIMULATION, *inference_workloads(plan), TRAINING):
        with prepare(plan, work) as piece:
            for _ in range(3):
                piece()
            before = held()
            for _ in range(5):
                piece()
            assert held() <= before, work
