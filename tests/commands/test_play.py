"""``sfactory play``: where a policy is shown, and what is said where it cannot be."""

from __future__ import annotations

import re
import signal

import gymnasium
import numpy as np
import pytest
from short_runs import short_run

from sfactory.commands import main, play
from sfactory.commands.play import TerminalScreen, blocks, render_mode
from sfactory.envs.interface import EnvRequest
from sfactory.errors import ConfigError


@pytest.fixture(scope="module")
def cartpole(tmp_path_factory):
    return short_run(tmp_path_factory.mktemp("play") / "run", "CartPole-v1")


@pytest.fixture
def terminal(monkeypatch):
    """The output is a terminal without a display beside it."""
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.setattr(play, "on_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("LINES", "12")


def test_pictures_are_shown_in_the_terminal(cartpole, terminal, capsys):
    assert main(["play", str(cartpole), "--episodes", "1", "--max-steps", "3", "--fps", "0"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("\x1b[H") == 3 and "▀" in shown
    assert "1 episode, returns 3.00" in re.sub(r"\x1b\[[\d;]*m", "", shown)


@pytest.mark.parametrize("flags", [("--episodes", "0"), ("--max-steps", "0"), ("--fps", "-1")])
def test_numbers_that_show_nothing_are_refused(cartpole, terminal, capsys, flags):
    assert main(["play", str(cartpole), *flags]) == 2
    assert "episodes and max-steps must be at least 1, and fps 0 or more" in capsys.readouterr().err


def test_text_is_shown_also_where_the_output_is_no_terminal(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    run = short_run(tmp_path / "run", "FrozenLake-v1")
    assert main(["play", str(run), "--episodes", "1", "--max-steps", "2", "--fps", "0"]) == 0
    shown = capsys.readouterr().out
    assert "FFF" in re.sub(r"\x1b\[[\d;]*m", "", shown) and "\x1b[H" not in shown


def test_an_interrupt_leaves_what_was_shown(cartpole, terminal, capsys, monkeypatch):
    def add(self, image):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(TerminalScreen, "add", add)
    assert main(["play", str(cartpole)]) == 130
    shown = capsys.readouterr()
    assert "1 episode, returns 1.00, mean length 1.0" in re.sub(r"\x1b\[[\d;]*m", "", shown.out)
    assert "interrupted before an episode had ended" in shown.err


def test_videos_are_written_instead(cartpole, tmp_path):
    pytest.importorskip("imageio_ffmpeg")
    assert main(["play", str(cartpole), "--episodes", "2", "--max-steps", "3", "--video", str(tmp_path / "v")]) == 0
    assert [file.name for file in sorted((tmp_path / "v").iterdir())] == ["episode_000.mp4", "episode_001.mp4"]


def test_a_window_is_opened_where_there_is_a_display(cartpole, monkeypatch, capsys):
    pytest.importorskip("pygame")
    monkeypatch.setenv("DISPLAY", ":nowhere")
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")  # a window that nobody sees
    assert render_mode("auto", EnvRequest("CartPole-v1", {})) == "human"
    assert main(["play", str(cartpole), "--episodes", "1", "--max-steps", "3"]) == 0
    assert "returns 3.00" in capsys.readouterr().out


class Invisible(gymnasium.Wrapper):
    metadata = {"render_modes": []}  # noqa: RUF012

    def __init__(self):
        super().__init__(gymnasium.make("CartPole-v1"))


def test_what_cannot_be_shown_is_refused(monkeypatch, terminal):
    assert render_mode("auto", EnvRequest("sfactory/CartPole", {})) == "rgb_array"
    assert render_mode("auto", EnvRequest("FrozenLake-v1", {})) == "ansi"
    with pytest.raises(ConfigError, match="draws neither text nor pictures"):
        render_mode("auto", EnvRequest(Invisible, {}))
    with pytest.raises(ConfigError, match="draws no window"):
        render_mode("window", EnvRequest("sfactory/CartPole", {}))
    with pytest.raises(ConfigError, match="no display to open a window on"):
        render_mode("window", EnvRequest("CartPole-v1", {}))
    with pytest.raises(ConfigError, match="vector environments"):
        render_mode("auto", EnvRequest(lambda: gymnasium.make_vec("CartPole-v1", 2), {}))
    with pytest.raises(ConfigError, match="it must return text, or uint8"):
        TerminalScreen(0).add(None)


class Sized(gymnasium.Wrapper):
    metadata = {"render_modes": ["ansi"]}  # noqa: RUF012

    def __init__(self, size, render_mode=None):
        super().__init__(gymnasium.make("CartPole-v1", render_mode=render_mode))


def test_an_environment_is_asked_with_its_own_arguments(terminal):
    gymnasium.register("Sized-v0", Sized)
    try:
        assert render_mode("auto", EnvRequest("Sized-v0", {"size": 3, "render_mode": "human"})) == "ansi"
    finally:
        gymnasium.registry.pop("Sized-v0")


def test_a_run_with_ids_of_envpool_is_shown_as_pictures(terminal):
    assert render_mode("auto", EnvRequest("Pong-v5", {}, "envpool")) == "rgb_array"


def test_ids_with_arguments_of_training_alone_can_be_shown(terminal):
    pytest.importorskip("ale_py")
    assert render_mode("auto", EnvRequest("PongNoFrameskip-v4", {"noop_max": 3, "episodic_life": True})) == "rgb_array"
    pytest.importorskip("vizdoom")
    assert render_mode("auto", EnvRequest("VizdoomBasic-v1", {"resolution": [60, 80]})) == "rgb_array"


def test_blocks_have_the_colours_of_the_picture():
    image = np.zeros((4, 4, 3), np.uint8)
    image[:2, :, 0] = 200
    image[2:, 2:, 2] = 100
    assert blocks(image, 100, 50).splitlines() == [
        "\x1b[38;2;200;0;0m\x1b[48;2;200;0;0m▀▀▀▀\x1b[0m",
        "\x1b[38;2;0;0;0m\x1b[48;2;0;0;0m▀▀\x1b[38;2;0;0;100m\x1b[48;2;0;0;100m▀▀\x1b[0m",
    ]
    small = blocks(image, 2, 1)
    assert small == "\x1b[38;2;200;0;0m\x1b[48;2;0;0;0m▀\x1b[38;2;200;0;0m\x1b[48;2;0;0;100m▀\x1b[0m"
