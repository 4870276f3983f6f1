from __future__ import annotations

import json
import math

import numpy as np
import pytest
from gymnasium import spaces

from sfactory.config import ModelConfig
from sfactory.envs.interface import EnvSpec
from sfactory.errors import CheckpointError, ConfigError
from sfactory.runs.space_codec import check_spaces, decode_space, encode_space, load_model_config, load_spec, save_spec
from sfactory.spaces import ActionSpec, ObservationSpec

SPACES = [
    spaces.Box(-1, 1, (3,)),
    spaces.Box(0, 255, (84, 84, 3), np.uint8),
    spaces.Box(-np.inf, np.inf, (), np.float64),
    spaces.Box(np.array([-np.inf, 0.1, -0.3], np.float32), np.array([1, np.inf, 3e38], np.float32)),
    spaces.Box(np.array([[-(2**63) + 5, 3]]), np.array([[2**62 + 1, 7]]), dtype=np.int64),
    spaces.Box(0, 1, (3,), bool),
    spaces.Discrete(4, start=-2),
    spaces.MultiDiscrete([[2, 3], [4, 5]], start=[[1, 0], [0, 2]]),
    spaces.MultiDiscrete([2, 3], dtype=np.int32),
    spaces.MultiBinary(5),
    spaces.MultiBinary([2, 3]),
    spaces.Dict(
        [
            ("z", spaces.Discrete(2)),
            ("a", spaces.Tuple((spaces.Box(0, 1, (1,)), spaces.Dict({"x": spaces.MultiBinary(2)})))),
        ]
    ),
]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_a_space_survives_json_exactly(space):
    again = decode_space(json.loads(json.dumps(encode_space(space), allow_nan=False)))
    assert again == space
    assert again.dtype == space.dtype
    if isinstance(space, spaces.Box):
        np.testing.assert_array_equal([again.low, again.high], [space.low, space.high])
    if isinstance(space, spaces.Dict):
        assert list(again) == list(space)


def spec(observation, action=None, **known) -> EnvSpec:
    return EnvSpec(
        ObservationSpec.from_space(observation), ActionSpec.from_space(action or spaces.Discrete(2), "tanh"), **known
    )


def test_a_spec_survives_its_file(tmp_path):
    observation = spaces.Dict(
        mission=spaces.Text(9), image=spaces.Box(0, 255, (7, 7, 3), np.uint8), action_mask=spaces.MultiBinary(2)
    )
    before = spec(observation, agents=3, frameskip=4, masked=True, family="multiagent", render_fps=12.5, protocol="v5")
    model = ModelConfig(hidden=(32,), core="lstm", squash="tanh", kwargs={"bound": math.inf, "sizes": [1, 2]})
    save_spec(tmp_path / "spaces.json", before, model)
    assert load_model_config(tmp_path / "spaces.json") == model
    after = load_spec(tmp_path / "spaces.json", "tanh")
    assert after == before
    assert after.observation.ignored == ("mission",)


@pytest.mark.parametrize(
    "damage",
    [
        lambda described: described.pop("action"),
        lambda described: described["observation"].update(type="Graph"),
        lambda described: described["observation"].update(dtype="object"),
        lambda described: described["observation"].update(shape=[10**6, 10**6]),
        lambda described: described["observation"].update(low=[1, 2]),
        lambda described: described.update(format=99),
        lambda described: described.update(protocol=5),
        lambda described: described.pop("model"),
        lambda described: described["model"].update(hidden="wide"),
        lambda described: described["model"].update(unheard_of=5),
    ],
)
def test_a_damaged_or_hostile_file_is_refused(tmp_path, damage):
    path = tmp_path / "spaces.json"
    save_spec(path, spec(spaces.Box(-1, 1, (3,))), ModelConfig())
    described = json.loads(path.read_text())
    damage(described)
    path.write_text(json.dumps(described))
    with pytest.raises(CheckpointError, match=r"spaces\.json"):
        load_spec(path, load_model_config(path).squash)


def test_spaces_that_differ_are_named():
    check_spaces(spec(spaces.Box(-1, 1, (3,))), spec(spaces.Box(-2, 2, (3,))), "a", "b")
    with pytest.raises(ConfigError, match=r"a has the observation space .*\(3,\).* b has .*\(4,\)"):
        check_spaces(spec(spaces.Box(-1, 1, (3,))), spec(spaces.Box(-1, 1, (4,))), "a", "b")
    with pytest.raises(ConfigError, match="action space"):
        check_spaces(spec(spaces.Discrete(3)), spec(spaces.Discrete(3), spaces.Discrete(3)), "a", "b")
