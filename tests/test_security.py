"""A run folder from a stranger is data; a run opens no socket and writes nowhere else."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml
from commands import ENVIRONMENT, abandoned_shared_memory, wait_until
from short_runs import short_run
from whole_runs import config_for

from sfactory import evaluate, load_policy, train
from sfactory.commands import main
from sfactory.config.importing import is_harmless
from sfactory.errors import CheckpointError, ConfigError, SfactoryError
from sfactory.eval import main as evaluate_command
from sfactory.train import main as train_command

SERIAL = ["--serial", "--preset", "none", "--device", "cpu", "--envs-per-worker", "4", "--rollout", "8", "--batch-size",
          "64", "--steps", "256", "--log.no-tensorboard"]  # fmt: skip


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    return short_run(tmp_path_factory.mktemp("security") / "run", "CartPole-v1")


@pytest.fixture
def stranger(honest, tmp_path, monkeypatch):
    """A copy of a run folder, and a module on the path whose import, like every payload, would leave a file called
    `touched`."""
    run = tmp_path / "run"
    shutil.copytree(honest, run)
    touched = tmp_path / "touched"
    (tmp_path / "payload.py").write_text(f"open({str(touched)!r}, 'w')\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield run
    assert not touched.exists()
    assert "payload" not in sys.modules


def tamper(run: Path, **values: object) -> None:
    """Change the saved config, `model` and other groups entry by entry, and the model wherever else it is described."""
    config = yaml.safe_load((run / "config.yaml").read_text())
    for name, value in values.items():
        config[name] = config[name] | value if isinstance(config[name], dict) and name != "env_kwargs" else value
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    described = json.loads((run / "spaces.json").read_text())
    (run / "spaces.json").write_text(json.dumps(described | {"model": config["model"]}))


def payloads(touched: Path) -> dict[str, dict]:
    popen = {"args": ["touch", str(touched)]}
    return {
        "environment called": {"env": "os:system", "env_kwargs": {"command": f"touch {touched}"}},
        "environment imported": {"env": "payload:make"},
        "environment registered": {"env": "payload:CartPole-v1"},
        "encoder called": {"model": {"encoder": "subprocess:Popen", "kwargs": popen}},
        "core called": {"model": {"core": "subprocess:Popen", "kwargs": popen}},
        "model imported": {"model": {"model": "payload:Model"}},
        "a file opened": {"env_kwargs": {"config_file": str(touched.parent / "payload.py")}},
        "an environment that makes another": {
            "env": "GymV21Environment-v0",
            "env_kwargs": {"env_id": "payload:CartPole-v1"},
        },
    }


@pytest.mark.parametrize("name", payloads(Path()))
def test_nothing_that_a_strangers_config_names_is_imported_called_or_opened(name, stranger, tmp_path, capsys):
    tamper(stranger, **payloads(tmp_path / "touched")[name])
    assert evaluate_command(["--run", str(stranger), "--episodes", "1"]) == 2
    said = capsys.readouterr().err
    assert "--trust" in said
    assert "Traceback" not in said
    if "model" in payloads(tmp_path)[name]:
        with pytest.raises(ConfigError, match="not imported unasked"):
            load_policy(stranger)
    else:
        load_policy(stranger)
    assert train_command(["--env", "CartPole-v1", "--run", str(stranger), *SERIAL]) == 2


@pytest.mark.parametrize("command", ["report", "runs", "status", "plot", "export"])
@pytest.mark.parametrize("preset", ["auto", "default"])
def test_no_command_imports_a_strangers_environment(command, preset, stranger, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where plots are put
    tamper(stranger, env="payload:make", preset=preset)
    assert main([command, str(stranger.parent if command == "runs" else stranger)]) == 0


def test_the_users_own_environment_does_not_get_a_strangers_files(stranger, tmp_path, capsys):
    tamper(stranger, env_kwargs={"config_file": "/etc/passwd"})
    assert evaluate_command(["--run", str(stranger), "--episodes", "1", "--env", "CartPole-v1"]) == 2
    assert "--env-kwargs" in capsys.readouterr().err
    assert evaluate_command(["--run", str(stranger), "--episodes", "1", "--env-kwargs", "{}"]) == 0
    tamper(stranger, env_kwargs={"max_episode_steps": 3})
    assert evaluate(stranger, 2).lengths == (3, 3)


def test_plain_words_and_numbers_are_harmless_and_names_of_files_are_not(tmp_path, monkeypatch):
    assert is_harmless({"mode": "rgb_array", "sizes": [1, 2.5, None, True], "map-name": "4x4", "empty": ""})
    for value in (
        "a/b",
        "a.cfg",
        "module:Name",
        "..",
        "a\\b",
        "~",
        "$HOME",
        {"a/b": 1},
        [["x.xml"]],
        object(),
        "a\n/etc/passwd",
    ):
        assert not is_harmless(value), value
    monkeypatch.chdir(tmp_path)
    assert is_harmless("payload")
    (tmp_path / "payload").touch()
    assert not is_harmless("payload")


BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))
TEXTS = {
    "python": "env: !!python/object/apply:os.system ['touch FILE']\n",
    "bomb": BOMB,
    "circle": "a: &a [*a]\n",
    "deep": "[" * 5000,
    "date": "env: 2020-13-45\n",
    "bytes": b"\xff\xfe\x00",
    "number": f"env: {'9' * 5000}\n",
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_config_that_is_no_plain_yaml_is_refused(name, stranger, tmp_path, capsys):
    text = TEXTS[name]
    data = text if isinstance(text, bytes) else text.replace("FILE", str(tmp_path / "touched")).encode()
    (stranger / "config.yaml").write_bytes(data)
    assert evaluate_command(["--run", str(stranger)]) == 2
    assert train_command(["--env", "CartPole-v1", "--run", str(stranger), *SERIAL]) == 2
    assert train_command(["--config", str(stranger / "config.yaml"), *SERIAL, "--run", str(tmp_path / "new")]) == 2
    assert "config.yaml" in capsys.readouterr().err


@pytest.mark.parametrize(
    "values",
    [
        {"env": 5}, {"env": None}, {"env_kwargs": [1]}, {"env_kwargs": {5: 1}}, {"steps": "many"},
        {"model": {"hidden": [-1]}},
        {"model": {"hidden": [2**62]}}, {"model": {"encoder": 5}}, {"model": {"core": ["gru"]}},
        {"model": {"kwargs": {1: 2}}},
        {"device": 7}, {"seed": -5},
    ],
)  # fmt: skip
def test_a_tampered_config_ends_in_one_clear_error(values, stranger):
    tamper(stranger, **values)
    with pytest.raises(SfactoryError):
        evaluate(stranger, 1)


@pytest.mark.parametrize("space", [
    {"type": "Discrete", "n": 10**15, "start": 0, "dtype": "int64"}, {"type": "Discrete", "n": "2", "start": 0,
    "dtype": "int64"},
    {"type": "Box", "shape": [2**40], "dtype": "float32", "low": 0, "high": 1}, {"type": "system"}, {"type": ["Box"]},
    [], 7,
])  # fmt: skip
def test_tampered_spaces_end_in_one_clear_error(space, stranger):
    described = json.loads((stranger / "spaces.json").read_text())
    for which in ("observation", "action"):
        (stranger / "spaces.json").write_text(json.dumps(described | {which: space}))
        with pytest.raises((CheckpointError, ConfigError)):
            load_policy(stranger)


@pytest.mark.parametrize("name", [".lock", "metrics.csv", "output.log"])
def test_a_run_folder_does_not_write_through_links(name, stranger, tmp_path, capsys):
    victim = tmp_path / "victim"
    victim.write_text("mine\n")
    (stranger / name).unlink(missing_ok=True)
    (stranger / name).symlink_to(victim)
    assert train_command(["--env", "CartPole-v1", "--run", str(stranger), *SERIAL]) == 2
    assert "symbolic link" in capsys.readouterr().err
    assert victim.read_text() == "mine\n"


def test_videos_are_neither_read_nor_written_through_links(stranger, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine\n")
    (stranger / "videos" / "final").mkdir(parents=True)
    (link := stranger / "videos" / "final" / "episode_000.mp4").symlink_to(victim)
    hub = stranger / "export" / "huggingface"
    arguments = ["export", str(stranger), "--format", "hf", "--episodes", "0"]
    assert main(arguments) == 0
    assert not (hub / "replay.mp4").exists(), "which --push would publish"
    for name in ("replay.mp4", "spaces.json"):
        (hub / name).unlink(missing_ok=True)
        (hub / name).symlink_to(victim)
    assert main(["report", str(stranger), "--video", "--max-steps", "3"]) == 0
    assert link.read_bytes() != b"mine\n" and not link.is_symlink()
    assert main(arguments) == 0
    assert (hub / "replay.mp4").read_bytes() == link.read_bytes()
    assert victim.read_text() == "mine\n"


@pytest.mark.parametrize("command", ["runs", "status", "report", "plot", "export"])
def test_a_command_in_a_strangers_folder_imports_nothing_from_there(command, stranger):
    """The console script, which has no current folder on its path by itself."""
    for name in ("yaml", "rich", "tyro", "torch", "matplotlib"):
        (stranger / f"{name}.py").write_text("import payload\n")
    program = "import sys; sys.path.append(sys.argv.pop(1)); from sfactory.commands import main; sys.exit(main())"
    words = [command, ".", *(["--format", "torch"] if command == "export" else [])]
    subprocess.run(
        [sys.executable, "-P", "-c", program, str(stranger.parent), *words], cwd=stranger, env=ENVIRONMENT, check=True,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip


def test_a_running_run_listens_to_no_network(tmp_path):
    def sockets_of(process: psutil.Process) -> list:
        connections = process.net_connections("inet")
        return [c for c in connections if c.status == psutil.CONN_LISTEN or (c.type == socket.SOCK_DGRAM and c.laddr)]

    before = sockets_of(psutil.Process())
    seen: list[tuple[int, list]] = []

    def look(report):
        children = psutil.Process().children(recursive=True)
        seen.append((len(children), [c for process in (psutil.Process(), *children) for c in sockets_of(process)]))
        return report.env_steps < 1000

    train(config_for(tmp_path, "CartPole-v1", steps=10**9), [look])
    assert max(count for count, _ in seen) >= 4
    assert all(found == before for _, found in seen)


def files_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.parametrize("way", ["completed", "interrupted", "interrupted twice"])
def test_files_are_made_in_the_run_folder_only(way, tmp_path_factory):
    """Compiled kernels go to __pycache__ beside sfactory's own files, or where NUMBA_CACHE_DIR says; they are left out
    here."""
    root = tmp_path_factory.mktemp("files")  # tmp_path is too long for a socket
    home, temporary, here = (root / name for name in ("home", "tmp", "here"))
    for folder in (home, temporary, here):
        folder.mkdir()
    shared = abandoned_shared_memory()
    steps = "20000" if way == "completed" else "1000000000"
    small = [flag for flag in SERIAL if flag not in ("--serial", "--log.no-tensorboard")]
    arguments = [
        "--env",
        "CartPole-v1",
        "--run",
        "my/run",
        *small,
        "--workers",
        "2",
        "--log.report-every-s",
        "0.2",
        "--steps",
        steps,
    ]
    environment = ENVIRONMENT | {"HOME": str(home), "TMPDIR": str(temporary), "XDG_CACHE_HOME": str(home / ".cache")}
    run = here / "my" / "run"
    with subprocess.Popen(
        [sys.executable, "-m", "sfactory.train", *arguments], cwd=here, env=environment, stdout=subprocess.DEVNULL
    ) as process:
        if way != "completed":
            assert wait_until(lambda: (run / "metrics.csv").exists() or process.poll() is not None)
            process.send_signal(signal.SIGINT)
        if way == "interrupted twice":
            time.sleep(0.01)
            process.send_signal(signal.SIGINT)
        assert process.wait(30) == (0 if way == "completed" else 130)
    assert files_below(home) == set()
    assert files_below(temporary) == set()
    assert abandoned_shared_memory() <= shared
    assert {path for path in files_below(here) if not path.startswith("my/run/")} == {"my", "my/run"}
    killed = {"status.json"} if way == "interrupted twice" else set()  # it ends at once, as if killed
    assert {path.name for path in run.iterdir()} <= killed | {
        ".lock", "config.yaml", "spaces.json", "metrics.csv", "summary.json", "report.html", "checkpoints",
        "evaluation.json", "videos",  # of a run that has taken long enough
        *(p.name for p in run.glob("events.out.*")),
    }  # fmt: skip
