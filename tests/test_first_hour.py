"""The mistakes of a first hour: each is answered by one message that says what to do, and no traceback."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from commands import Command
from short_runs import short_run

from sfactory import errors
from sfactory.commands import main
from sfactory.config import Config
from sfactory.errors import ConfigError

SMALL = ["--preset", "none", "--workers", "1", "--envs-per-worker", "2", "--rollout", "2", "--batch-size", "4",
         "--device", "cpu", "--log.no-tensorboard", "--log.display", "plain"]  # fmt: skip


@pytest.fixture
def refused(tmp_path, capsys):
    """Runs a command that must be refused; gives its message."""

    def run(*args: str) -> str:
        capsys.readouterr()
        where = ["--run", str(tmp_path / "run")] if args[0] == "train" and "--run" not in args else []
        assert main([*args, *where]) == 2
        errors = capsys.readouterr().err
        assert errors.startswith("error: ") and "Traceback" not in errors
        assert not (tmp_path / "run").exists(), "nothing was begun"
        return errors

    return run


def test_a_wrong_id_names_those_like_it(refused):
    assert "did you mean CartPole-v1" in refused("train", "CartPol-v1")
    assert "did you mean ALE/Pong-v5" in refused("train", "ALE/Pongg-v5")


def test_a_wrong_preset_names_all_of_them(refused):
    said = refused("train", "CartPole-v1", "--preset", "clasic")
    assert "did you mean classic?" in said and "mujoco" in said


def test_a_missing_extra_comes_with_the_command_that_installs_it(refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "minigrid", None)
    monkeypatch.delitem(__import__("gymnasium").registry, "MiniGrid-Empty-5x5-v0", raising=False)
    said = refused("train", "MiniGrid-Empty-5x5-v0")
    assert "needs the package minigrid" in said and 'pip install -e ".[minigrid]"' in said


def test_an_extra_is_installed_in_the_checkout_or_beside_the_installed_package(tmp_path, monkeypatch):
    assert errors.installing("atari") == 'pip install -e ".[atari]"'
    (tmp_path / "envs").mkdir()
    monkeypatch.setattr(errors, "__file__", str(tmp_path / "errors.py"))
    assert errors.installing("atari") == 'pip install "sfactory[atari]"'


def test_an_action_space_that_is_not_supported_comes_with_those_that_are(refused):
    said = refused("train", "broken:TextActions")
    assert "the action space Text" in said and "use Discrete, MultiDiscrete, MultiBinary, a Box of floats" in said


def test_a_batch_that_is_too_large_for_memory_comes_with_what_to_lower(refused):
    said = refused("train", "CartPole-v1", "--batch-size", str(2**29), "--device", "cpu")
    assert "GiB of memory" in said and "lower envs_per_worker, workers, rollout or batch_size" in said


def test_a_full_disk_is_told_with_the_folder(tmp_path):
    """On a real file system without room, in a namespace of its own."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size=8k none {disk}"
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "sh", "-c", mount]).returncode:
        pytest.skip("this machine lets nobody mount a small disk")
    train = f"{sys.executable} -m sfactory.train CartPole-v1 --serial --steps 3000 --run {disk}/run"
    with Command(
        "-c", f"import os; os.execvp('unshare', ['unshare', '-rm', 'sh', '-c', {f'{mount} && {train}'!r}])"
    ) as c:
        assert c.wait() == 2
    assert "cannot use the run folder" in c.errors and "No space left" in c.errors and "--run" in c.errors
    assert "Traceback" not in c.errors


def test_an_old_run_folder_says_how_to_go_on_or_begin_anew(tmp_path, refused, capsys):
    run = short_run(tmp_path / "old", "CartPole-v1")
    same = [
        "--run",
        str(run),
        "--serial",
        "--preset",
        "none",
        "--device",
        "cpu",
        "--rollout",
        "8",
        "--batch-size",
        "64",
    ]
    small = ["--envs-per-worker", "4", "--steps", "128", "--log.display", "plain", "--log.no-tensorboard"]
    assert main(["train", "CartPole-v1", *same, *small]) == 0
    assert "nothing to do" in (said := capsys.readouterr().out) and "--steps" in said and "--overwrite" in said
    assert "--overwrite" in refused("train", "Acrobot-v1", *same, *small)
    config = run / "config.yaml"
    config.write_text(config.read_text() + "fancy_option: 3\n")
    said = refused("eval", str(run))
    assert "of an sfactory with other fields" in said and "unknown key fancy_option" in said


def test_without_a_display_a_window_is_refused_with_what_else_there_is(tmp_path, refused, monkeypatch):
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    run = short_run(tmp_path / "done", "CartPole-v1")
    for flags in (["--where", "window"], []):  # the output of a test is no terminal either
        said = refused("play", str(run), *flags)
        assert "there is no display" in said and "--video FOLDER" in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_told_with_the_flag_for_the_cpu(refused):
    assert "shows 0 CUDA devices" in (said := refused("train", "CartPole-v1", "--device", "cuda"))
    assert "use --device cpu" in said
    said = refused("train", "CartPole-v1", "--device", "cpu", "--runtime.inference-device", "cuda:1")
    assert "runtime.inference_device is cuda:1" in said and "use --runtime.inference-device cpu" in said


@pytest.mark.usefixtures("nothing_is_left")
def test_an_environment_that_prints_is_found_by_the_check(capfd):
    assert main(["check", "broken:Prints", "--seconds", "1", "--no-speed"]) == 1
    shown = " ".join(capfd.readouterr().out.split())
    assert "it printed" in shown and "remove the print" in shown


@pytest.mark.timeout(120)
def test_an_environment_of_two_seconds_a_step_is_told_how_long_a_batch_takes(tmp_path):
    arguments = ["broken:VerySlow", "--steps", "8", "--run", str(tmp_path / "run"), *SMALL, "--batch-size", "2"]
    with Command("-m", "sfactory.train", *arguments, "--serial", "--envs-per-worker", "2", "--rollout", "2") as command:
        assert command.wait(100) == 0, command.errors
    assert "an env step takes 2 s" in command.output
    assert "raise --workers" in command.output and "--batch-size" in command.output


@pytest.mark.timeout(120)
def test_a_script_without_the_main_guard_trains_once(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import gymnasium, sfactory\n"
        "class Mine(gymnasium.Wrapper):\n"
        "    def __init__(self):\n"
        "        super().__init__(gymnasium.make('CartPole-v1'))\n"
        "print('script begins')\n"
        f"sfactory.train(sfactory.Config(env=Mine, steps=256, run={str(tmp_path / 'run')!r}, workers=1, device='cpu',\n"
        "    preset='none', envs_per_worker=4, rollout=8, batch_size=64))\n"
    )
    with Command(str(script)) as command:
        assert command.wait(100) == 0, command.errors
        assert command.left_after(2) == []
    assert command.output.count("script begins") == 1
    assert (tmp_path / "run" / "summary.json").exists()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("env: 'lambda: MyEnv()'", "write it into a module and name it there, as my_module:make_env"),
        ("env: <lambda>", "write it into a module and name it there, as my_module:make_env"),
        ("env: !!python/name:my.Env", "code is named as module:Name"),
        ("env: CartPole-v1\nmodel: {encoder: 'lambda leaf: 3'}", "write it as module:Name"),
    ],
)
def test_a_lambda_in_yaml_is_told_where_code_belongs(text, says, tmp_path, refused):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    assert says in refused("train", "--config", str(file))


@pytest.mark.parametrize(("platform", "remedy"), [("darwin", "a Linux container"), ("win32", "WSL 2")])
def test_another_system_than_linux_is_told_in_one_sentence(platform, remedy, monkeypatch, refused, tmp_path):
    import sfactory.train

    monkeypatch.setattr(sys, "platform", platform)
    for command in ("train", "eval", "check", "status"):
        said = refused(command)
        assert said.count("\n") == 1 and f"sfactory runs on Linux, and this is {platform}" in said and remedy in said
    with pytest.raises(ConfigError, match="runs on Linux"):
        sfactory.train(Config(env="CartPole-v1", run=str(tmp_path / "run")))
    assert not Path(tmp_path / "run").exists()
