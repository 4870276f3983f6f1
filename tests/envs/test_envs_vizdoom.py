from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from playing import Play

from sfactory import envs
from sfactory.envs.interface import EnvRequest
from sfactory.envs.kernels.resampling import Resampler
from sfactory.errors import ConfigError, EnvironmentFault
from sfactory.files import ELSEWHERE, remove_temporary_folder
from sfactory.runtime.processes import kill_tree

BASIC = "VizdoomBasic-v1"


def shares(source: int, target: int) -> np.ndarray:
    """How much of each output pixel ``[target, source]`` every input pixel covers, by brute force on a common fine
    grid."""
    fine = np.zeros((target, source))
    for i in range(source * target):
        fine[i // source, i // target] += 1 / source
    return fine


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("source", "target"), [((120, 160), (72, 128)), ((48, 64), (24, 16)), ((10, 12), (10, 12)), ((9, 13), (7, 7))]
)
def test_pictures_are_shrunk_by_area(source: tuple[int, int], target: tuple[int, int], channels: int) -> None:
    image = np.random.default_rng(0).integers(0, 256, (*source, channels), dtype=np.uint8)
    out = np.empty((channels, *target), np.uint8)
    Resampler(image.shape, target)(image, out)
    exact = np.einsum("yh,hwc,xw->cyx", shares(source[0], target[0]), image.astype(float), shares(source[1], target[1]))
    assert np.abs(out - exact).max() <= 0.51


def test_label_pictures_keep_their_values() -> None:
    image = np.array([3, 200], np.uint8)[np.random.default_rng(0).integers(0, 2, (24, 32, 1))]
    out = np.empty((1, 9, 10), np.uint8)
    Resampler((24, 32, 1), (9, 10), nearest=True)(image, out)
    rows, columns = ((np.arange(9) + 0.5) * 24 / 9).astype(int), ((np.arange(10) + 0.5) * 3.2).astype(int)
    np.testing.assert_array_equal(out[0], image[rows][:, columns, 0])


vizdoom = pytest.importorskip("vizdoom")


def games() -> list[psutil.Process]:
    return [child for child in psutil.Process().children(recursive=True) if "vizdoom" in child.name()]


def left_behind() -> set[Path]:
    places = (
        Path("/dev/shm").glob("ViZDoom*"),
        Path(tempfile.gettempdir()).glob("sfactory-vizdoom-*"),
        Path.cwd().glob("_vizdoom*"),
    )
    return {path for place in places for path in place}


def test_observations_are_the_small_screen_planar_and_the_game_variables() -> None:
    with Play(BASIC, 1) as play:
        leaves = {leaf.name: leaf for leaf in play.spec.observation.leaves}
        assert {name: (leaf.shape, str(leaf.dtype)) for name, leaf in leaves.items()} == {
            "obs/screen": ((3, 72, 128), "uint8"),
            "obs/gamevariables": ((1,), "float32"),
        }
        assert (play.spec.frameskip, play.spec.family, play.spec.action.sizes) == (4, "vizdoom", (4,))
        play.step(np.array([1]))
        state = play.group._envs[0].unwrapped.state
        assert state.screen_buffer.shape == (120, 160, 3)
        screen, variables = np.empty((3, 72, 128), np.uint8), state.game_variables
        Resampler((120, 160, 3), (72, 128))(state.screen_buffer, screen)
        by_name = dict(zip(leaves, play.buffers.obs, strict=True))
        np.testing.assert_array_equal(by_name["obs/screen"][0], screen)
        np.testing.assert_array_equal(by_name["obs/gamevariables"][0], variables)


@pytest.mark.parametrize(
    ("resolution", "native"),
    [((60, 80), (120, 160)), ((120, 160), (120, 160)), ((84, 84), (120, 160)), ((144, 256), (144, 256))],
)
def test_the_simulator_renders_no_larger_than_it_must(resolution: tuple[int, int], native: tuple[int, int]) -> None:
    with Play(BASIC, 1, {"resolution": list(resolution)}) as play:
        assert play.buffers.obs[1].shape == (1, 3, *resolution)
        assert play.group._envs[0].unwrapped.state.screen_buffer.shape[:2] == native


def test_depth_labels_and_automap_are_leaves_too() -> None:
    kwargs = {
        "depth_buffer_enabled": True,
        "labels_buffer_enabled": True,
        "automap_buffer_enabled": True,
        "frame_skip": 2,
    }
    with Play(BASIC, 1, kwargs) as play:
        shapes = {leaf.name: leaf.shape for leaf in play.spec.observation.leaves}
        assert play.spec.frameskip == 2
        labels = play.buffers.obs[list(shapes).index("obs/labels")]
        assert set(np.unique(labels)) <= set(np.unique(play.group._envs[0].unwrapped.state.labels_buffer))
    assert shapes == {
        "obs/screen": (3, 72, 128),
        "obs/depth": (1, 72, 128),
        "obs/labels": (1, 72, 128),
        "obs/automap": (3, 72, 128),
        "obs/gamevariables": (1,),
    }


def test_a_timeout_truncates_with_a_true_final_observation_at_the_simulators_own_step() -> None:
    kwargs = {"episode_timeout": 23}
    with (
        Play(BASIC, 2, kwargs) as play,
        Play(BASIC, 1, kwargs | {"treat_episode_timeout_as_truncation": False}) as simulator,
    ):
        for _ in range(2):
            for step in range(1, 7):
                outcome, truth = play.step(np.zeros(2)), simulator.step(np.zeros(1))
                assert (outcome.truncated == (step == 6)).all()
                assert not outcome.terminated.any()
                assert truth.terminated[0] == (step == 6)
                assert not truth.truncated.any()
            assert not play.buffers.active.any()
            assert (play.buffers.obs[1].reshape(2, -1).std(axis=1) > 5).all()
            outcome = play.step(np.zeros(2))
            assert play.buffers.first.all()
            assert not outcome.reward.any()


def test_a_killed_monster_terminates_the_episode() -> None:
    rng = np.random.default_rng(0)
    with Play(BASIC, 2) as play:
        killed = np.zeros(2, bool)
        while True:
            outcome = play.step(rng.integers(0, 4, 2))
            killed |= outcome.reward > 50
            if outcome.terminated.any():
                break
            assert not outcome.truncated.any()
        assert (killed == outcome.terminated).all()
        assert (play.buffers.first == outcome.terminated).all()
        assert play.buffers.active.all()


def test_no_black_picture_is_shown_of_an_episodes_end() -> None:
    rng = np.random.default_rng(0)
    with Play(BASIC, 1, render_mode="rgb_array") as play:
        while not play.step(rng.integers(0, 4, 1)).terminated.any():
            assert play.group.render()[0].any()
        assert play.group.last_picture is None
        assert play.group.render()[0].any()


def test_games_differ_by_their_index_in_the_run_and_not_by_their_group() -> None:
    with Play(BASIC, 3) as whole, Play(BASIC, 2, first_index=1) as part:
        for action in (1, 2, 3):
            whole.step(np.full(3, action))
            part.step(np.full(2, action))
            for all_rows, rows in zip(whole.buffers.obs, part.buffers.obs, strict=True):
                np.testing.assert_array_equal(all_rows[1:], rows)
        assert len({row.tobytes() for row in whole.buffers.obs[1]}) == 3


def test_nothing_is_left_of_closed_games(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = left_behind()
    play = Play(BASIC, 2)
    processes = games()
    assert len(processes) == 2
    play.group.close()
    play.group.close()
    assert not psutil.wait_procs(processes, timeout=5)[1]
    assert left_behind() == before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="games can only be bound to their parent by setpriv")
def test_no_game_and_no_shared_memory_outlives_a_killed_worker() -> None:
    script = """
import sys, time
sys.path[:0] = ["tests"]
from playing import Play
play = Play("VizdoomBasic-v1", 2)
print("ready", flush=True)
time.sleep(60)
"""
    before = left_behind()
    worker = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])
    assert worker.stdout.readline() == b"ready\n"
    processes = [child for child in psutil.Process(worker.pid).children(recursive=True) if "vizdoom" in child.name()]
    assert len(processes) == 2
    os.kill(worker.pid, signal.SIGKILL)
    worker.wait()
    assert not psutil.wait_procs(processes, timeout=5)[1]
    left = left_behind() - before
    assert not [path for path in left if path.parent == Path("/dev/shm")]
    for folder in left:
        shutil.rmtree(folder)


def test_the_names_of_a_game_that_was_killed_while_it_started_go_with_its_folder(tmp_path: Path) -> None:
    script = """
from sfactory import envs
from sfactory.envs.interface import EnvRequest
envs.probe(EnvRequest("VizdoomBasic-v1", {}))
"""
    before = left_behind()
    worker = subprocess.Popen([sys.executable, "-c", script], env={**os.environ, "TMPDIR": str(tmp_path)})
    while not any(listing.read_text() for listing in tmp_path.rglob(ELSEWHERE)):
        assert worker.poll() is None
        time.sleep(0.001)
    kill_tree(worker.pid)  # as a run does with its workers
    worker.wait()
    assert left_behind() > before
    remove_temporary_folder(tmp_path)
    assert left_behind() == before


def test_an_engine_that_dies_is_a_fault_and_the_rest_can_be_closed() -> None:
    with Play(BASIC, 2) as play:
        processes = games()
        processes[0].kill()
        time.sleep(0.2)
        with pytest.raises(EnvironmentFault, match=r"environment 0 \(VizdoomBasic-v1\)"):
            play.step(np.zeros(2))
    assert not psutil.wait_procs(processes, timeout=5)[1]


def test_in_training_an_engine_that_dies_is_started_anew() -> None:
    with Play(BASIC, 2, survive_faults=True) as play:
        dead, other = games()
        dead.kill()
        time.sleep(0.2)
        play.step(np.zeros(2))
        (fault,) = play.group.faults
        assert fault.environment.startswith(f"environment {fault.rows[0]} (VizdoomBasic-v1)")
        assert play.buffers.first.tolist() == [row in fault.rows for row in range(2)]
        assert play.obs[fault.rows[0]].any()
        assert len(games()) == 2
        assert other.is_running()
        play.group.faults.clear()
        play.step(np.ones(2))
        assert not play.group.faults


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"resolution": 84}, "a height and a width"),
        ({"resolution": [2000, 2000]}, "at most 1080 x 1920"),
        ({"resolution": [144, 256], "screen_resolution": "RES_160X120"}, "lower one or raise"),
        ({"max_buttons_pressed": -1}, "max_buttons_pressed"),
    ],
)
def test_what_cannot_be_made_is_a_config_error_that_helps(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        envs.probe(EnvRequest(BASIC, kwargs))
