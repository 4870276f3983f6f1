"""A run folder belongs to one environment: what it is called, and when a run in it may go on."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from commands import ENVIRONMENT
from environments import Counting
from gymnasium.wrappers import TimeLimit
from short_runs import short_run
from whole_runs import saved_steps

from sfactory import Config
from sfactory.config.env_source import env_name, folder_name
from sfactory.errors import ConfigError


class Sized(Counting):
    """The same spaces as :class:`Counting`."""


class Maker:
    """An object that makes environments, and counts them."""

    def __init__(self, longest: int) -> None:
        self.longest, self.made = longest, 0

    def __call__(self) -> Counting:
        self.made += 1
        return Counting(self.longest)

    def another(self) -> Counting:
        return Counting(self.longest)


def wrapped(make):
    """As PettingZoo makes the ``parallel_env`` of every game."""

    def parallel(**kwargs):
        return make(**kwargs)

    return parallel


def with_longest(longest: int):
    def make():
        return Counting(longest)

    return make


def test_a_callable_is_reported_by_a_name_that_tells_something():
    assert env_name(Counting) == env_name(functools.partial(Counting, length=3)) == "Counting"
    assert env_name(wrapped(Counting)) == "environments:Counting"
    assert env_name("CartPole-v1") == "CartPole-v1"


def local_class(size: int):
    class Local(Counting):
        longest_of_all = size

    return Local


def steps_of(run: Path) -> int:
    return saved_steps(run)


def refusal(run: Path, env, **changes) -> str:
    before = {file.name: file.read_bytes() for file in run.iterdir() if file.is_file() and file.name != ".lock"}
    with pytest.raises(ConfigError) as caught:
        short_run(run, env, steps=256, **changes)
    assert {file.name: file.read_bytes() for file in run.iterdir() if file.is_file() and file.name != ".lock"} == before
    return str(caught.value)


DIFFERENT = {
    "lambdas": (lambda: Counting(), lambda: Sized()),
    "arguments of lambdas": (lambda: Counting(5), lambda: Counting(6)),
    "defaults": tuple((lambda longest=longest: Counting(longest)) for longest in (5, 6)),
    "closures": (with_longest(5), with_longest(6)),
    "wrapped": (wrapped(Counting), wrapped(Sized)),
    "wrapped functions": (wrapped(with_longest(5)), wrapped(with_longest(6))),
    "partials": (functools.partial(Counting, 5), functools.partial(Counting, longest=6)),
    "objects": (Maker(5), Maker(6)),
    "methods": (Maker(5).another, Maker(6).another),
    "local classes": (local_class(5), local_class(6)),
    "sets": tuple((lambda names=names: Counting(len(names))) for names in ({"a", "b"}, {"a", "c"})),
}


@pytest.mark.parametrize("kind", DIFFERENT)
def test_callables_that_differ_have_their_own_folders_and_refuse_one_another(kind, tmp_path):
    one, other = DIFFERENT[kind]
    assert folder_name(one) != folder_name(other)
    assert folder_name(one) == folder_name(one)
    run = short_run(tmp_path / "run", one)
    said = refusal(run, other)
    assert (
        "holds a run of another environment (saved -> now); name another folder with run= (--run), or start anew with "
        "overwrite" in said
    )
    assert short_run(run, one, steps=256) == run
    assert steps_of(run) >= 256
    short_run(run, other, overwrite=True)
    assert 128 <= steps_of(run) < 256


def test_the_variable_of_a_loop_in_a_script_tells_its_environments_apart_in_every_process_alike(tmp_path):
    script = tmp_path / "many.py"
    script.write_text(
        "from sfactory import Config\n"
        "from environments import Busy, Counting\n"
        "for Env in (Busy, Counting):\n"
        "    print(Config(env=lambda: Env()).run_dir)\n"
        "for longest in (5, 6):\n"
        "    print(Config(env=lambda: Counting(longest)).run_dir)\n"
        "def make(): return Counting()\n"
        "print(Config(env=lambda: Counting(len({'a', 'b', 'c'}))).run_dir)\n"
        "print(Config(env=make).run_dir)\n"
        "print(Config(env=Counting).run_dir)\n"
    )
    names = [
        subprocess.run(
            [sys.executable, str(script)],
            capture_output=True,
            text=True,
            check=True,
            env={**ENVIRONMENT, "PYTHONHASHSEED": seed},
        ).stdout.splitlines()
        for seed in ("1", "2")
    ]
    assert names[0] == names[1]
    assert len(set(names[0])) == 7
    assert all(name.startswith("runs/many.lambda-") for name in names[0][:5])
    assert names[0][5:] == ["runs/many.make-0", "runs/environments.Counting-0"]


@pytest.mark.parametrize(
    ("env", "name"),
    [
        ("CartPole-v1", "CartPole-v1"), ("ALE/Pong-v5", "ALE-Pong-v5"), ("my_package.envs:MyEnv-v0",
        "my_package.envs-MyEnv-v0"),
        (Counting, "environments.Counting"), (with_longest, "test_env_source.with_longest"),
    ],
)  # fmt: skip
def test_plain_names_stay_readable(env, name):
    assert Config(env=env, seed=3).run_dir == Path("runs") / f"{name}-3"


def test_what_a_callable_wraps_gives_it_its_name():
    assert folder_name(wrapped(Sized)).startswith("test_env_source.Sized-")
    assert folder_name(functools.partial(Sized, 5)).startswith("test_env_source.Sized-")
    assert folder_name(Maker(5)).startswith("test_env_source.Maker-")


def test_two_callables_of_one_script_train_in_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        for make in (lambda: Counting(), lambda: Sized()):
            short_run("", make)
    assert sorted(map(steps_of, (tmp_path / "runs").iterdir())) == [steps_of(next((tmp_path / "runs").iterdir()))] * 2


def defined(code: str):
    """A function of a module, after an edit."""
    scope = {"Counting": Counting, "Sized": Sized, "TimeLimit": TimeLimit, "__name__": "edited"}
    exec(code, scope)
    return scope["make"]


def test_an_edited_function_goes_on_with_a_warning(tmp_path, caplog):
    run = short_run(tmp_path / "run", defined("def make():\n    return Counting()"))
    short_run(run, defined("def make():\n    return TimeLimit(Counting(), 5)"), steps=256)
    assert "the code of what makes it has changed" in caplog.text
    assert steps_of(run) >= 256
    assert "edited:make" not in refusal(run, defined("def make():\n    return Sized()"))


def test_an_edited_function_that_makes_another_environment_is_refused(tmp_path):
    run = short_run(tmp_path / "run", defined("def make():\n    return Counting()"))
    assert "what is made: environments:Counting -> test_env_source:Sized" in refusal(
        run, defined("def make():\n    return Sized()")
    )


def test_a_refused_environment_is_not_said_to_continue_first(tmp_path, caplog):
    run = short_run(tmp_path / "run", defined("def make():\n    return Counting()"))
    another = defined("def make():\n    return Sized()")
    assert "what is made" in refusal(run, another, rollout=4)  # which alone is warned of
    assert caplog.text == ""


def test_an_edited_class_goes_on_with_a_warning(tmp_path, caplog):
    code = "class make(Counting):\n    def render(self):\n        return {}\n"
    run = short_run(tmp_path / "run", defined(code.format(1)))
    short_run(run, defined("# a line above\n" + code.format(1)), steps=256)
    assert caplog.text == ""
    short_run(run, defined(code.format(2)), steps=384)
    assert "the code of what makes it has changed" in caplog.text


def test_a_callable_that_chooses_among_several_goes_on_with_a_warning(tmp_path, caplog):
    kinds = [Counting, Sized]
    run, choose = tmp_path / "run", lambda: kinds[0]()
    short_run(run, choose)
    kinds.reverse()
    short_run(run, choose, steps=256)
    assert "what is made: environments:Counting -> test_env_source:Sized" in caplog.text
    assert steps_of(run) >= 256


def test_what_making_an_environment_changes_tells_nothing(tmp_path, caplog):
    made, count = [], 0

    def make():
        nonlocal count
        count += 1
        made.append(Counting())
        return made[-1]

    for maker in (make, Maker(5)):
        name = folder_name(maker)
        run = short_run(tmp_path / name, maker)
        short_run(run, maker, steps=256)
        assert folder_name(maker) == name
        assert steps_of(run) >= 256
    assert made
    assert caplog.text == ""


def test_an_id_that_means_another_environment_is_refused(tmp_path):
    def register(entry_point):
        gymnasium.registry.pop("Own-v0", None)
        gymnasium.register("Own-v0", entry_point)

    try:
        register(Counting)
        run = short_run(tmp_path / "run", "Own-v0")
        register("environments:Counting")
        short_run(run, "Own-v0", steps=256)
        register(Sized)
        assert "what is made: environments:Counting -> test_env_source:Sized" in refusal(run, "Own-v0")
    finally:
        gymnasium.registry.pop("Own-v0", None)


def test_callables_among_the_arguments_are_compared(tmp_path):
    def make(inner):
        return inner()

    run = short_run(tmp_path / "run", make, env_kwargs={"inner": with_longest(5)})
    assert "env_kwargs inner: test_env_source:with_longest.<locals>.make(longest=5)" in refusal(
        run, make, env_kwargs={"inner": with_longest(6)}
    )


@pytest.mark.parametrize(
    ("one", "other"), [(Path("/a"), Path("/b")), (np.arange(3), np.arange(3) * 2), (np.zeros(2), np.zeros((1, 2)))]
)
def test_paths_and_arrays_among_the_arguments_are_compared(one, other, tmp_path):
    def make(thing):
        return Counting()

    run = short_run(tmp_path / "run", make, env_kwargs={"thing": one})
    short_run(run, make, steps=256, env_kwargs={"thing": one})
    assert "env_kwargs thing: " in refusal(run, make, env_kwargs={"thing": other})


class Wider(Counting):
    observation_space = gymnasium.spaces.Box(0, 1e6, (4,), np.float32)

    def _observation(self):
        return np.append(super()._observation(), np.float32(0))


def test_other_spaces_are_refused_with_the_way_out(tmp_path):
    def making(kind):
        return lambda: kind()

    run = short_run(tmp_path / "run", making(Counting))
    said = refusal(run, making(Wider))
    for part in (
        f"observation space: {Counting.observation_space} -> {Wider.observation_space}",
        "--run",
        "--overwrite",
    ):
        assert part in said
    assert "remove spaces.json" not in said


@pytest.mark.parametrize("source", [None, "absent", {"made": 5}, 7, {"other": "x"}])
def test_a_folder_that_does_not_say_where_its_environment_comes_from_is_resumed(source, tmp_path, caplog):
    run = short_run(tmp_path / "run", lambda: Counting())
    described = json.loads((run / "spaces.json").read_text()) | {"source": source}
    if source == "absent":
        del described["source"]
    (run / "spaces.json").write_text(json.dumps(described))
    short_run(run, lambda: Sized(), steps=256)
    assert steps_of(run) >= 256
    assert caplog.text == ""


def test_the_way_out_that_an_error_names_is_one(tmp_path):
    run = short_run(tmp_path / "run", lambda: Counting(5))
    assert "the code of its lambda has changed" in (said := refusal(run, lambda: Counting(6)))
    assert "remove spaces.json" in said
    (run / "spaces.json").unlink()
    short_run(run, lambda: Counting(6), steps=256)
    assert steps_of(run) >= 256
