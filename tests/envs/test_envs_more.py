"""Packages of environments that work by their ids alone; those that are not installed are left out."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import gymnasium
import numpy as np
import pytest
from playing import Play

from sfactory.envs import EnvRequest, probe
from sfactory.errors import ConfigError

ENVIRONMENTS = [
    ("minigrid", "MiniGrid-DoorKey-6x6-v0", 1),
    ("minigrid", "BabyAI-GoToRedBall-v0", 1),
    ("Box2D", "LunarLander-v3", 1),
    ("Box2D", "CarRacing-v3", 1),
    ("mpe2", "mpe2.simple_spread_v3:parallel_env", 3),
    ("Box2D", "pettingzoo.sisl.multiwalker_v9:parallel_env", 3),
    ("pettingzoo", "pettingzoo.sisl.pursuit_v5:parallel_env", 8),
    ("pettingzoo", "pettingzoo.butterfly.knights_archers_zombies_v11:parallel_env", 4),
    ("pymunk", "pettingzoo.butterfly.pistonball_v6:parallel_env", 20),
    ("nle", "NetHackScore-v0", 1),
    ("minihack", "MiniHack-Room-5x5-v0", 1),
    ("crafter", "CrafterReward-v1", 1),
    ("dm_control", "dm_control/cheetah-run-v0", 1),
]


@pytest.mark.parametrize(("package", "env", "agents"), ENVIRONMENTS)
def test_an_id_is_all_that_is_needed(package: str, env: str, agents: int) -> None:
    pytest.importorskip(package)
    with Play(env, 1, seed=101) as play:
        assert play.spec.agents == agents
        assert play.buffers.first.all()
        for _ in range(3):
            play.step(np.zeros(agents))
        assert np.isfinite(play.outcome.reward).all()
        assert any(leaf.any() for leaf in play.buffers.obs)


@pytest.mark.parametrize(
    ("missing", "env", "extra"),
    [
        ("minigrid", "MiniGrid-None-v0", "minigrid"),
        ("nle", "NetHackNone-v0", "nethack"),
        ("crafter", "CrafterNone-v0", "crafter"),
        ("shimmy", "dm_control/none-v0", "dm-control"),
        ("mpe2", "mpe2.simple_spread_v3:parallel_env", "multiagent"),
    ],
)
def test_a_missing_package_is_told_with_its_extra(
    missing: str, env: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [*sys.modules]:
        if name.partition(".")[0] == missing or name == "sfactory.envs.crafter":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [_Without(missing), *sys.meta_path])
    with pytest.raises(ConfigError, match=rf'pip install -e "\.\[{extra}\]"'):
        probe(EnvRequest(env, {}))


class _Without:
    """Finds no module of a package."""

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] == self._package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_another_version_of_a_game_is_suggested() -> None:
    pytest.importorskip("pettingzoo")
    importlib.import_module("pettingzoo.butterfly")
    with pytest.raises(ConfigError, match=r"did you mean pettingzoo\.butterfly\.pistonball_v"):
        probe(EnvRequest("pettingzoo.butterfly.pistonball_v5:parallel_env", {}))


def test_a_module_of_a_game_is_named_with_what_makes_the_game() -> None:
    pytest.importorskip("mpe2")
    importlib.import_module("mpe2.simple_spread_v3")
    with pytest.raises(ConfigError, match=r"write mpe2\.simple_spread_v3:parallel_env"):
        probe(EnvRequest("mpe2:simple_spread_v3", {}))


def test_crafter_ends_and_tells_what_was_achieved() -> None:
    pytest.importorskip("crafter")
    import sfactory.envs.crafter

    env = gymnasium.make("CrafterReward-v1", length=3)
    first, _ = env.reset(seed=5)
    assert first.shape == (64, 64, 3) and first.dtype == np.uint8
    assert (env.reset(seed=5)[0] == first).all()
    assert not (env.reset()[0] == first).all()
    ends = [env.step(0)[2:] for _ in range(3)]
    assert [end[:2] for end in ends] == [(False, False), (False, False), (False, True)]
    assert ends[0][2] == {} and ends[-1][2]["achievements"] == 0 and ends[-1][2]["achievement/collect_wood"] == 0
    env.close()

    env = sfactory.envs.crafter.Crafter()
    env.reset(seed=5)
    env._game._player.health = 0
    assert env.step(0)[2:4] == (True, False)


def test_crafters_seed_decides_everything() -> None:
    pytest.importorskip("crafter")
    from sfactory.envs.crafter import Crafter

    one, other = Crafter(area=(32, 32)), Crafter(area=(32, 32))
    for env in (one, other):
        env.reset(seed=3)
    rng = np.random.default_rng(0)
    for action in rng.integers(0, 17, 40):
        one.step(action)
        other.step(action)
        np.testing.assert_array_equal(one._game._world._obj_map, other._game._world._obj_map)
    assert one._game._world.random.random() == other._game._world.random.random()
