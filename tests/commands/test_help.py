"""The help of the commands, their names in messages, and the configuration that `train --show-config` prints."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from commands import ENVIRONMENT, ROOT
from torch import Tensor, nn

from sfactory.commands import COMMANDS, MODULES, WITH_ALL_FLAGS, main
from sfactory.commands.completion import flags_of
from sfactory.config import Config, to_dict
from sfactory.config.command_line import from_command_line
from sfactory.config.declaring import settings_of
from sfactory.config.short_help import TOPICS
from sfactory.runtime.planning import make_plan
from sfactory.spaces import Leaf


def page_of(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(args)
    assert ended.value.code == 0
    return " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_the_help_of_train_is_short_and_by_topic(capsys):
    page = page_of(capsys, "train", "--help")
    flags = set(re.findall(r"--[\w.-]+", page)) - {"--help-all", "--overwrite", "--show-config", "--config"}
    assert 12 <= len(flags) <= 20
    assert all(topic in page for topic in ("this command", *TOPICS))
    assert "Learning rate of Adam. (0.001)" in page
    assert "--help-all shows every flag" in page


def test_the_help_shows_the_defaults_of_the_environment_that_is_named(capsys):
    page = page_of(capsys, "train", "ALE/Pong-v5", "--help")
    assert "Learning rate of Adam. (0.00025)" in page and "of the preset atari" in page


def test_the_whole_help_has_every_field(capsys):
    page = page_of(capsys, "train", "--help-all")
    missing = [name for name in settings_of(Config) if f"--{name.replace('_', '-')}" not in page]
    assert missing == []


def test_the_short_help_tells_of_run_folders_where_one_is_made(capsys):
    assert "--overwrite" in page_of(capsys, "train", "--help")
    assert not {"--run", "--overwrite"} & {*page_of(capsys, "profile", "--help").split()}
    assert not {"--run", "--overwrite"} & {*page_of(capsys, "check", "--help").split()}


@pytest.mark.parametrize("name", sorted({*COMMANDS} - {*WITH_ALL_FLAGS}))
def test_help_says_what_a_flag_takes_in_words(name, capsys):
    page = page_of(capsys, name, "--help")
    assert "{None}" not in page and "{{" not in page and "[STR" not in page


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_that_names_it(name, capsys):
    assert f"sfactory {name}" in page_of(capsys, name, "--help")


@pytest.mark.parametrize("name", MODULES)
def test_messages_name_the_program_as_it_was_called(name, capsys):
    with pytest.raises(SystemExit):
        main([name, "--nonsense"])
    assert f"sfactory {name} --help" in capsys.readouterr().err
    as_module = subprocess.run(
        [sys.executable, "-m", f"sfactory.{name}", "--nonsense"], capture_output=True, text=True, env=ENVIRONMENT,
        cwd=ROOT, timeout=60,
    )  # fmt: skip
    assert as_module.returncode == 2
    assert f"python -m sfactory.{name} --help" in as_module.stderr


@pytest.mark.parametrize(
    ("mistyped", "meant"),
    [
        (["train", "--lr", "3"], "--optim.lr"),
        (["train", "--optim.lrr", "3"], "--optim.lr"),
        (["train", "--envs_per_wrker", "3"], "--envs-per-worker"),
        (["train", "--confg", "x.yaml"], "--config"),
        (["train", "--shwo-config"], "--show-config"),
        (["train", "--entropy-coef", "0"], "--loss.entropy-coef"),
        (["profile", "--secnds", "3"], "--seconds"),
        (["check", "--tiemout", "3"], "--timeout"),
        (["eval", "--run", "x", "--epsodes", "3"], "--episodes"),
    ],
)
def test_a_mistyped_flag_suggests_the_right_one(mistyped, meant, capsys):
    with pytest.raises(SystemExit) as ended:
        main(mistyped)
    assert ended.value.code == 2
    assert f"{meant} " in capsys.readouterr().err.replace("│", " ")


def test_underscores_and_hyphens_are_the_same():
    for flag in ("--batch-size", "--batch_size"):
        assert from_command_line(["--env", "x", flag, "77"], "test").batch_size == 77
    for flag in ("--loss.entropy-coef", "--loss.entropy_coef"):
        assert from_command_line(["--env", "x", flag, "0.5"], "test").loss.entropy_coef == 0.5


def test_the_first_word_is_the_environment():
    assert from_command_line(["CartPole-v1", "--seed", "3"], "test").env == "CartPole-v1"
    assert from_command_line(["CartPole-v1", "--seed", "3"], "test").preset == "classic"


# --show-config


def shown_config(capsys, *args: str) -> tuple[dict, dict[str, str]]:
    """The values, and the remark of each by dotted name."""
    assert main(["train", *args, "--show-config"]) == 0
    text = capsys.readouterr().out
    remarks, group = {}, ""
    for line in text.splitlines():
        entry, _, remark = line.partition("  # ")
        name = entry.strip().partition(":")[0]
        if not remark:
            group = name
        else:
            remarks[f"{group}.{name}" if entry.startswith(" ") else name] = remark
    return yaml.safe_load(text), remarks


def test_every_value_says_where_it_comes_from(capsys, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("seed: 4\noptim: {eps: 1e-6}\nloss: {clip: 0.3}\n")
    run = tmp_path / "run"
    args = ["CartPole-v1", "--config", str(file), "--run", str(run), "--loss.clip", "0.4", "--no-sync",
            "--envs-per-worker", "6"]  # fmt: skip
    values, remarks = shown_config(capsys, *args)
    assert remarks.keys() == settings_of(Config).keys()
    for name, origin in {
        "env": "flag", "loss.clip": "flag", "sync": "flag", "seed": str(file), "optim.eps": str(file),
        "optim.lr": "preset classic", "epochs": "preset classic", "preset": "by the environment",
        "loss.lam": "default", "workers": "this machine", "batch_size": "fitted to the environment",
    }.items():  # fmt: skip
        assert remarks[name] == origin, name
    assert (values["loss"]["clip"], values["seed"], values["batch_size"] % (32 * 3)) == (0.4, 4, 0)
    assert not run.exists(), "nothing was started"


class Mixed(nn.Module):
    """An encoder with a mapping as its argument."""

    def __init__(self, leaf: Leaf, weights: dict[str, list[int]]) -> None:
        super().__init__()
        self.out_features = sum(weights["of"])
        self.linear = nn.Linear(math.prod(leaf.shape), self.out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.flatten(1).float())


def test_the_shown_config_is_read_again_as_it_is(capsys, tmp_path):
    own = "--model.encoder", "test_help:Mixed", "--model.kwargs", "{weights: {of: [1, 2]}}"
    values, _ = shown_config(capsys, "sfactory/MemoryGrid", "--model.core", "gru", *own)
    file = tmp_path / "shown.yaml"
    file.write_text(yaml.safe_dump(values))
    planned = make_plan(from_command_line(["--config", str(file)], "test")).config
    assert to_dict(planned) == values


def test_a_configuration_that_cannot_work_is_refused(capsys):
    assert main(["train", "CartPole-v1", "--show-config", "--batch-size", "1000"]) == 2
    assert "batch_size 1000 is not a multiple" in capsys.readouterr().err


# Completion


def test_a_completion_script_has_every_command_and_flag(capsys, tmp_path):
    pytest.importorskip("shtab")
    for shell in ("bash", "zsh"):
        assert main(["completion", shell]) == 0
        script = capsys.readouterr().out
        for part in (*COMMANDS, "--optim.lr", "--episodes", "--seconds", "impala"):
            assert part in script, (shell, part)
    assert ("--algo", ["appo", "impala", "ppo"]) in list(flags_of("train"))


def test_bash_completes_with_the_script(tmp_path):
    pytest.importorskip("shtab")
    script = Path(tmp_path / "sfactory.bash")
    made = subprocess.run(
        [sys.executable, "-c", "from sfactory.commands import main; main(['completion', 'bash'])"],
        capture_output=True, text=True, check=True, env=ENVIRONMENT, cwd=ROOT, timeout=60,
    )  # fmt: skip
    script.write_text(made.stdout)

    def completed(*words: str) -> set[str]:
        line = (
            f"source {script}; COMP_WORDS=({' '.join(map(repr, words))}); COMP_CWORD={len(words) - 1}; "
            "$(complete -p sfactory | sed 's/.*-F \\([^ ]*\\).*/\\1/'); echo ${COMPREPLY[@]}"
        )
        shell = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=20, cwd=tmp_path)
        return set(shell.stdout.split())

    assert "train" in completed("sfactory", "tr")
    assert "--optim.lr" in completed("sfactory", "train", "--optim.l")
    assert completed("sfactory", "train", "--algo", "im") == {"impala"}
    assert completed("sfactory", "completion", "") >= {"bash", "zsh", "tcsh"}
    assert completed("sfactory", "train", "--model.core", "") == {"none", "gru", "lstm"}
    assert completed("sfactory", "check", "--preset", "mujoco_l") == {"mujoco_low_noise"}
    assert completed("sfactory", "train", "--model.encoder", "nat") == {"nature_cnn"}
    assert completed("sfactory", "train", "--log.loggers", "wa") == {"wandb"}
    (tmp_path / "space.yaml").touch()
    (tmp_path / "runs" / "cartpole").mkdir(parents=True)
    for words in (("sweep",), ("plot", "runs"), ("train", "--config"), ("eval", "run", "--video")):
        assert completed("sfactory", *words, "sp") == {"space.yaml"}, words
    assert completed("sfactory", "status", "runs/ca") == {"runs/cartpole"}
