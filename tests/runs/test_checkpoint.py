"""What a user would lose: hours of training, to a kill, a full disk, a flipped bit, or a second process in the same
folder."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import logging
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from short_runs import begun_run, short_run

from sfactory.config import Config, LogConfig, LossConfig, ModelConfig, OptimConfig
from sfactory.errors import CheckpointError, ConfigError
from sfactory.runs import checkpoint as checkpoint_module
from sfactory.runs.checkpoint import CheckpointStore, Snapshot
from sfactory.runs.run_files import CHECKPOINTS, METRICS, newest_checkpoint, read_config
from sfactory.runs.run_folder import open_run

SUFFIXES = (".safetensors", ".opt.pt", ".json")


def snapshot(env_steps: int, episode_return: float | None = None) -> Snapshot:
    generator = torch.Generator().manual_seed(env_steps)
    return Snapshot(
        model={"weight": torch.randn(4, 3, generator=generator), "count": torch.tensor(env_steps)},
        trainer={
            "optimizer": {
                "state": {0: {"step": torch.tensor(1.0)}},
                "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999)}],
            }
        },
        env_steps=env_steps,
        frames=4 * env_steps,
        updates=env_steps // 10,
        wall_s=1.5,
        episode_return=episode_return,
    )


def saved_steps(folder: Path) -> list[int]:
    steps = [int(path.name[11:23]) for path in folder.glob("checkpoint_*.json")]
    for suffix in SUFFIXES:
        assert len(list(folder.glob(f"*{suffix}"))) == len(steps)
    return sorted(steps)


def assert_same(left: Snapshot, right: Snapshot) -> None:
    assert left.env_steps == right.env_steps
    assert left.model.keys() == right.model.keys()
    assert all(torch.equal(left.model[name], right.model[name]) for name in left.model)


def test_round_trip_continues_training_exactly(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), amsgrad=True)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    numpy_state = np.random.default_rng(3).bit_generator.state
    trainer = {
        "optimizer": optimizer.state_dict(),
        "rng": torch.get_rng_state(),
        "numpy": numpy_state,
        "plain": [None, True, 2, 2.5, "x", (1, (2,)), {1: {"a": []}}, np.float32(0.5), np.int64(7)],
        "bfloat16": torch.arange(3).bfloat16(),
    }
    store = CheckpointStore(tmp_path / "checkpoints")
    path = store.save(Snapshot(model.state_dict(), trainer, 128, 512, 7, 3.25, 19.5))
    loaded = CheckpointStore(tmp_path / "checkpoints").load_latest()

    assert path.name == "checkpoint_000000000128.json" and saved_steps(path.parent) == [128]
    assert (loaded.env_steps, loaded.frames, loaded.updates, loaded.wall_s, loaded.episode_return) == (
        128,
        512,
        7,
        3.25,
        19.5,
    )
    assert all(torch.equal(loaded.model[name], tensor) for name, tensor in model.state_dict().items())
    assert loaded.trainer["numpy"] == numpy_state
    assert loaded.trainer["plain"] == [None, True, 2, 2.5, "x", (1, (2,)), {1: {"a": []}}, 0.5, 7]
    assert torch.equal(loaded.trainer["rng"], trainer["rng"])
    assert loaded.trainer["bfloat16"].dtype == torch.bfloat16
    again = torch.optim.Adam(model.parameters(), amsgrad=True)
    again.load_state_dict(loaded.trainer["optimizer"])
    assert torch.equal(again.state_dict()["state"][0]["exp_avg_sq"], optimizer.state_dict()["state"][0]["exp_avg_sq"])


def test_views_of_one_flat_buffer_and_strided_weights_are_saved_as_their_values(tmp_path: Path) -> None:
    flat = torch.arange(1_000_000.0)
    image = torch.arange(48.0).reshape(2, 3, 4, 2).to(memory_format=torch.channels_last)
    model = {"a": flat[:6].view(2, 3), "b": flat[6:8], "tied": flat[6:8], "image": image, "t": flat[:6].view(2, 3).t()}
    store = CheckpointStore(tmp_path)
    store.save(Snapshot(model, {"view": flat[:2]}, 1, 1, 1, 0.0, None))
    loaded = store.load_latest()
    assert all(torch.equal(loaded.model[name], tensor) for name, tensor in model.items())
    assert max(path.stat().st_size for path in tmp_path.iterdir()) < 20_000


@pytest.mark.parametrize("value", [np.zeros(2), object(), {"a": {1, 2}}, b"x", [lambda: 0]])
def test_state_that_could_not_be_loaded_is_refused_when_saved(tmp_path: Path, value: object) -> None:
    with pytest.raises(TypeError, match=r"trainer\['rms'\]"):
        CheckpointStore(tmp_path).save(Snapshot({}, {"rms": value}, 1, 1, 1, 0.0, None))
    assert list(tmp_path.iterdir()) == []


def test_rotation_keeps_the_latest_the_best_and_milestones(tmp_path: Path) -> None:
    returns = {100: 1.0, 200: 9.0, 300: 3.0, 400: None, 500: float("nan"), 600: 2.0}
    for env_steps, value in returns.items():
        CheckpointStore(tmp_path, keep=2).save(snapshot(env_steps, value))
    assert saved_steps(tmp_path) == [200, 500, 600]
    assert CheckpointStore(tmp_path).load_best().env_steps == 200
    CheckpointStore(tmp_path, keep=2).save(snapshot(700, 9.0))
    assert saved_steps(tmp_path) == [600, 700]
    assert CheckpointStore(tmp_path).load_best().env_steps == 700


def test_a_folder_that_goes_right_after_a_save_is_a_failed_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    rotate = store._rotate

    def go_first(stem: str, now: int) -> None:
        (tmp_path / "checkpoints").rename(tmp_path / "aside")
        rotate(stem, now)

    monkeypatch.setattr(store, "_rotate", go_first)
    with pytest.raises(FileNotFoundError, match="gone since it was written"):
        store.save(Snapshot({"w": torch.zeros(2)}, {"step": 1}, 8, 8, 1, 1.0, None))
    assert saved_steps(tmp_path / "aside") == [8]


def test_milestones_stay_for_good(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1, milestone_every=1000)
    for env_steps in (400, 900, 1100, 1900, 2000, 2500, 4800, 4900):
        store.save(snapshot(env_steps))
    assert saved_steps(tmp_path) == [1100, 2000, 4800, 4900]
    CheckpointStore(tmp_path, keep=1).save(snapshot(5000))
    assert saved_steps(tmp_path) == [1100, 2000, 4800, 5000]


def test_saving_again_at_the_same_env_steps_never_leaves_none(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    for wall_s in range(12):
        store.save(Snapshot({}, {"step": 1}, 50, 50, 5, float(wall_s), None))
        assert store.load_latest().wall_s == wall_s
    assert saved_steps(tmp_path) == [50]


def test_of_many_saves_at_the_same_env_steps_a_reader_finds_the_last(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / CHECKPOINTS)
    for count in range(12):
        store.save(dataclasses.replace(snapshot(10), wall_s=float(count)))
    (store.folder / "checkpoint_of_mine.json").write_text("{}")
    latest = store.load_latest()
    assert latest is not None and latest.wall_s == newest_checkpoint(tmp_path)["wall_s"] == 11


def test_a_checkpoint_without_trainer_state_is_two_files(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    for env_steps in (10, 20):
        store.save(dataclasses.replace(snapshot(env_steps), trainer={}))
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".safetensors"]
    loaded = store.load_latest()
    assert (loaded.env_steps, loaded.trainer) == (20, {})


def test_load_best_without_returns_is_the_latest(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    assert store.load_best() is None and store.load_latest() is None
    store.save(snapshot(1))
    store.save(snapshot(2))
    assert store.load_best().env_steps == 2


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_torn_file_at_every_sixteenth_falls_back_and_says_so(
    tmp_path: Path, suffix: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(tmp_path)
    store.save(snapshot(10))
    path = store.save(snapshot(20)).with_suffix("").with_name(f"checkpoint_000000000020{suffix}")
    whole = path.read_bytes()
    for part in range(16):
        path.write_bytes(whole[: len(whole) * part // 16])
        caplog.clear()
        assert_same(store.load_latest(), snapshot(10))
        assert "checkpoint_000000000020" in caplog.text and caplog.records[0].levelno == logging.WARNING
    path.write_bytes(whole)
    assert_same(store.load_latest(), snapshot(20))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_flipped_byte_is_noticed(tmp_path: Path, suffix: str) -> None:
    store = CheckpointStore(tmp_path)
    store.save(snapshot(10))
    path = store.save(snapshot(20, 5.0)).with_name(f"checkpoint_000000000020{suffix}")
    whole = path.read_bytes()
    for place in range(0, len(whole), max(1, len(whole) // 60)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        loaded = store.load_latest()
        harmless = suffix == ".json" and whole[place : place + 1].isspace()
        assert harmless or loaded.env_steps == 10, f"byte {place} of {suffix}"


@pytest.mark.parametrize("lost", SUFFIXES[:2])
def test_a_missing_file_falls_back(tmp_path: Path, lost: str) -> None:
    store = CheckpointStore(tmp_path)
    store.save(snapshot(10))
    store.save(snapshot(20)).with_name(f"checkpoint_000000000020{lost}").unlink()
    assert store.load_latest().env_steps == 10


def test_never_silently_from_scratch(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for env_steps in (10, 20):
        store.save(snapshot(env_steps)).write_text("{")
    with pytest.raises(CheckpointError, match=r"checkpoint_000000000020.*checkpoint_000000000010.*--overwrite"):
        store.load_latest()
    with pytest.raises(CheckpointError):
        store.load_best()


def test_after_a_fall_back_the_torn_future_displaces_nothing(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    torn = [store.save(snapshot(env_steps, 100.0)) for env_steps in (20, 30)][-1].with_suffix(".safetensors")
    torn.write_bytes(b"")
    store.save(snapshot(10, 1.0))
    assert saved_steps(tmp_path) == [10]
    assert store.load_latest().env_steps == store.load_best().env_steps == 10


def test_what_could_not_be_read_counts_for_nothing_once_the_run_has_passed_it(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    store.save(dataclasses.replace(snapshot(10), eval_return=1.0))
    torn = store.save(dataclasses.replace(snapshot(19), eval_return=9.0)).with_suffix(".safetensors")
    torn.write_bytes(b"")
    assert store.load_latest().env_steps == 10 and store.best_evaluation() == 1.0
    store.save(snapshot(25))
    assert saved_steps(tmp_path) == [10, 25]
    assert store.load_best().env_steps == 10


def test_a_checkpoint_may_get_the_name_of_one_that_could_not_be_read(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    store.save(snapshot(10))
    store.save(snapshot(20)).with_suffix(".safetensors").write_bytes(b"")
    assert store.load_latest().env_steps == 10
    for env_steps in (15, 20, 25):
        store.save(snapshot(env_steps))
    assert saved_steps(tmp_path) == [20, 25]


def test_a_checkpoint_of_a_newer_format_is_refused_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path)
    store.save(snapshot(10))
    monkeypatch.setattr(checkpoint_module, "FORMAT", 2)
    store.save(snapshot(20))
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="format 2"):
        store.load_latest()


class _Touch:
    """Unpickling it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return Path.touch, (self.path,)


def _zip_with_pickle(path: Path, payload: bytes) -> None:
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in entries.items():
            archive.writestr(name, payload if name.endswith("data.pkl") else data)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_malicious_pickle_is_refused_even_with_fitting_hashes(tmp_path: Path, zipped: bool) -> None:
    store = CheckpointStore(tmp_path)
    store.save(snapshot(10))
    path = store.save(snapshot(20))
    state, touched = path.with_suffix(".opt.pt"), tmp_path / "touched"
    payload = pickle.dumps(_Touch(touched), protocol=2)
    if zipped:
        _zip_with_pickle(state, payload)
    else:
        state.write_bytes(payload)
    description = json.loads(path.read_text())
    data = state.read_bytes()
    description["files"][".opt.pt"] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    description["sha256"] = checkpoint_module._seal(description)
    path.write_text(json.dumps(description))
    pickle.loads(payload)
    assert touched.exists(), "the payload works where it is unpickled"
    touched.unlink()

    assert store.load_latest().env_steps == 10
    assert not touched.exists()


@pytest.mark.parametrize("failing_write", [1, 2, 3])
def test_a_full_disk_leaves_the_last_one_and_no_debris(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing_write: int
) -> None:
    store = CheckpointStore(tmp_path)
    store.save(snapshot(10))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    writes = 0
    fsync = os.fsync

    def full(descriptor: int) -> None:
        nonlocal writes
        writes += 1
        if writes == failing_write:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        store.save(snapshot(20))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert_same(store.load_latest(), snapshot(10))


def test_a_file_size_limit_leaves_the_last_one_and_no_debris(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(snapshot(10))
    before = {path.name for path in tmp_path.iterdir()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(OSError):
            store.save(Snapshot({"big": torch.zeros(100_000)}, {"step": 1}, 20, 20, 2, 0.0, None))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {path.name for path in tmp_path.iterdir()} == before
    assert_same(store.load_latest(), snapshot(10))


_SAVER = """
import os, sys, torch
from sfactory.runs.checkpoint import CheckpointStore, Snapshot

torch.set_num_threads(1)
store = CheckpointStore(sys.argv[1], keep=1)


def say(word):
    os.write(1, f"{word}\\n".encode())  # one write: a kill cannot cut a line in two


for step in map(int, sys.stdin):
    if os.fork() == 0:
        say(os.getpid())
        while True:
            step += 1
            store.save(Snapshot({"w": torch.full((50_000,), float(step))}, {"s": step}, step, step, step, 0.0, None))
            say(step)
    os.wait()
    say("dead")
"""


def test_a_kill_at_any_moment_leaves_a_loadable_one(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    step = 0
    with subprocess.Popen(
        [sys.executable, "-c", _SAVER, tmp_path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    ) as saver:
        for kill in range(12):
            print(step, file=saver.stdin, flush=True)
            child = int(saver.stdout.readline())
            acknowledged = int(saver.stdout.readline())
            time.sleep(kill * 0.001)  # the kill falls into different parts of a save
            os.kill(child, signal.SIGKILL)
            while (line := saver.stdout.readline()) != "dead\n":
                acknowledged = int(line)
            loaded = store.load_latest()
            step = loaded.env_steps
            assert step >= acknowledged
            assert loaded.trainer["s"] == step
            assert torch.all(loaded.model["w"] == step)
        saver.stdin.close()
    CheckpointStore(tmp_path, keep=1).save(snapshot(10**6))
    assert len(list(tmp_path.iterdir())) == 3, "temporaries and halves of dead runs are cleared away"


def test_the_folder_is_loadable_between_any_two_operations_of_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(tmp_path / "run", keep=1)
    states = []

    def watched(owner: object, name: str) -> None:
        operation = getattr(owner, name)

        def before(*args: object, **kwargs: object) -> object:
            states.append(shutil.copytree(tmp_path / "run", tmp_path / str(len(states))))
            return operation(*args, **kwargs)

        monkeypatch.setattr(owner, name, before)

    store.save(snapshot(10))
    for owner, name in ((os, "replace"), (os, "fsync"), (Path, "unlink")):
        watched(owner, name)
    for wall_s, env_steps in enumerate((20, 20, 30)):
        store.save(dataclasses.replace(snapshot(env_steps), wall_s=float(wall_s)))
    monkeypatch.undo()
    assert len(states) >= 3 * 11
    loaded = [CheckpointStore(state).load_latest() for state in states]
    progress = [(one.env_steps, one.wall_s) for one in loaded if one.env_steps > 10]
    assert progress == sorted(progress), "nothing that was saved is lost again"
    assert set(progress) == {(20, 0.0), (20, 1.0), (30, 2.0)}
    assert caplog.text == "", "nothing was ever torn"


def test_a_reader_survives_the_rotation_of_a_living_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    store.save(snapshot(10))
    reader = CheckpointStore(tmp_path)
    read = checkpoint_module._parse_description

    def rotated_meanwhile(data: bytes) -> dict:
        monkeypatch.setattr(checkpoint_module, "_parse_description", read)
        store.save(snapshot(20))
        return read(data)

    monkeypatch.setattr(checkpoint_module, "_parse_description", rotated_meanwhile)
    assert reader.load_latest().env_steps == 20
    assert caplog.text == "", "nothing was torn"


# The run folder


def config(path: Path, **values: object) -> Config:
    return Config(**({"env": "CartPole-v1", "run": str(path)} | values))


def began(path: Path, **values: object) -> None:
    """A run that has reported and saved."""
    with begun_run(config(path, **values)) as run:
        (run.path / METRICS).write_text("header\n")
        CheckpointStore(run.checkpoints).save(snapshot(10))


def test_the_config_is_saved_and_read_back(tmp_path: Path) -> None:
    asked = config(
        tmp_path / "a",
        env_kwargs={"k": [1, 2.5]},
        model=ModelConfig(hidden=(8, 4)),
        optim=OptimConfig(eps=1e-8),
        overwrite=True,
    )
    with begun_run(asked) as run:
        assert not run.resumed and run.path == tmp_path / "a"
    saved = read_config(tmp_path / "a")
    assert saved.env_kwargs == {"k": [1, 2.5]} and saved.model.hidden == (8, 4) and saved.optim.eps == 1e-8
    assert saved.overwrite is False, "training from this file again must not delete the run"
    assert next(iter(yaml.safe_load((tmp_path / "a/config.yaml").read_text()))) == "env"
    with pytest.raises(ConfigError, match="holds no run"):
        read_config(tmp_path)


def test_resume_refuses_what_changes_the_meaning_of_the_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    began(tmp_path, env_kwargs={"a": 1})
    before = (tmp_path / "config.yaml").read_bytes()
    changed = config(
        tmp_path,
        env="Acrobot-v1",
        env_kwargs={"a": 2},
        model=ModelConfig(hidden=(32,), core="gru"),
        loss=LossConfig(normalize_returns=True),
        steps=5,
        seed=9,
    )
    with pytest.raises(ConfigError) as error:
        open_run(changed)
    assert caplog.text == "", "a run that is refused does not go on"
    text = str(error.value)
    for line in (
        "env: CartPole-v1 -> Acrobot-v1",
        "env_kwargs: {'a': 1} -> {'a': 2}",
        "model.hidden: [64, 64] -> [32]",
        "model.core: none -> gru",
        "loss.normalize_returns: False -> True",
    ):
        assert line in text
    assert "--overwrite" in text and "--run" in text and "steps" not in text
    assert (tmp_path / "config.yaml").read_bytes() == before
    assert open_run(config(tmp_path, env_kwargs={"a": 1})).resumed, "the lock of the refused attempt is gone"


def test_resume_allows_what_does_not_and_warns_of_what_changes_the_curve(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    began(tmp_path)
    asked = config(tmp_path, steps=7, workers=3, log=LogConfig(keep=9), device="cpu")
    with begun_run(asked) as run:
        assert run.resumed and caplog.text == ""
    assert read_config(tmp_path).steps == 7
    with open_run(config(tmp_path, seed=5, optim=OptimConfig(lr=1.0))):
        assert "seed: 0 -> 5" in caplog.text and "optim.lr: 0.0003 -> 1.0" in caplog.text


def test_a_run_that_never_began_may_be_asked_for_with_other_settings(tmp_path: Path) -> None:
    with begun_run(config(tmp_path, env="Typo-v1")):
        pass
    with open_run(config(tmp_path)) as run:
        assert not run.resumed


def test_callables_compare_by_name(tmp_path: Path) -> None:
    def make_env() -> None: ...

    def make_other() -> None: ...

    began(tmp_path, env=make_env)
    open_run(config(tmp_path, env=make_env)).close()
    with pytest.raises(ConfigError, match=r"make_env.* -> .*make_other"):
        open_run(config(tmp_path, env=make_other))


def test_overwrite_removes_the_run_and_nothing_else(tmp_path: Path) -> None:
    began(tmp_path)
    for name in (
        "summary.json",
        "events.out.tfevents.1.host",
        "notes.txt",
        "checkpoints/mine.safetensors",
        "checkpoints/checkpoint_mine.json",
    ):
        (tmp_path / name).write_text("x")
    with begun_run(config(tmp_path, env="Acrobot-v1", overwrite=True)) as run:
        assert not run.resumed
        files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
        assert files == {
            ".lock",
            "config.yaml",
            "notes.txt",
            "checkpoints/mine.safetensors",
            "checkpoints/checkpoint_mine.json",
        }
        assert CheckpointStore(run.checkpoints).load_latest() is None


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_is_refused_after_the_folder_is_open_leaves_the_run_as_it_was(tmp_path: Path, overwrite: bool) -> None:
    run = short_run(tmp_path / "run", "CartPole-v1")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}
    with pytest.raises(ConfigError, match="foo"):
        short_run(run, "CartPole-v1", steps=256, overwrite=overwrite, log=LogConfig(loggers=("foo",)))
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"} == before


def test_a_run_whose_folder_was_removed_holds_it_again(tmp_path: Path) -> None:
    asked = config(tmp_path / "run")
    with begun_run(asked) as run:
        shutil.rmtree(run.path)
        run.restore()
        assert (tmp_path / "run/config.yaml").exists()
        with pytest.raises(ConfigError, match=f"pid {os.getpid()}"):
            open_run(asked)
        shutil.rmtree(run.path)
        with open_run(asked), pytest.raises(ConfigError, match=f"pid {os.getpid()}"):
            run.restore()


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", ["notes.txt", "config.yaml", "metrics.csv"])
def test_a_folder_that_is_not_a_run_is_left_alone(tmp_path: Path, name: str, overwrite: bool) -> None:
    (tmp_path / name).write_text("theirs: 1")
    with pytest.raises(ConfigError, match="--run"):
        open_run(config(tmp_path, overwrite=overwrite))
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "theirs: 1"


def test_a_folder_that_cannot_be_made_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ConfigError, match="cannot use the run folder"):
            open_run(config(path))


def test_a_second_living_run_is_refused_and_a_dead_one_is_not(tmp_path: Path) -> None:
    code = "import fcntl, os, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, 2)"
    code += "; print(os.getpid(), file=f, flush=True); print(1, flush=True); input()"
    open_run(config(tmp_path)).close()
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / ".lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        other.stdout.readline()
        with pytest.raises(ConfigError, match=f"pid {other.pid}"):
            open_run(config(tmp_path, overwrite=True))
        other.kill()
    with open_run(config(tmp_path)):
        assert (tmp_path / ".lock").read_text() == f"{os.getpid()}\n"
        with pytest.raises(ConfigError, match=f"pid {os.getpid()}"):
            open_run(config(tmp_path))


def test_a_checkpoint_with_an_evaluation_is_better_than_any_without(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    assert store.best_evaluation() == -float("inf")
    store.save(snapshot(10, episode_return=100.0))
    store.save(dataclasses.replace(snapshot(20), eval_return=-5.0))
    store.save(dataclasses.replace(snapshot(30), eval_return=-7.0))
    store.save(snapshot(40, episode_return=200.0))
    assert saved_steps(tmp_path) == [20, 40]
    best = store.load_best()
    assert best is not None and (best.env_steps, best.eval_return, store.best_evaluation()) == (20, -5.0, -5.0)


def test_an_evaluated_snapshot_that_is_saved_late_removes_nothing_newer(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for steps in (30, 40):
        store.save(snapshot(steps))
    store.save(dataclasses.replace(snapshot(20), eval_return=3.0), now=45)
    assert saved_steps(tmp_path) == [20, 30, 40]
    assert store.load_latest().env_steps == 40 and store.load_best().env_steps == 20


def test_a_frozen_snapshot_is_not_changed_by_training() -> None:
    living = snapshot(10)
    frozen = living.frozen()
    living.model["weight"].zero_()
    living.trainer["optimizer"]["state"][0]["step"].zero_()
    assert frozen.model["weight"].any() and frozen.trainer["optimizer"]["state"][0]["step"] == 1
