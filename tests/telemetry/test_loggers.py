"""Reports also go to Weights & Biases, Trackio, MLflow and loggers of the user's, none of which can hurt a run."""

from __future__ import annotations

import dataclasses
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from short_runs import begun_run, short_run
from whole_runs import QUIET

from sfactory import Config, LogConfig
from sfactory.commands import main
from sfactory.config.command_line import from_command_line
from sfactory.errors import ConfigError
from sfactory.runs.run_files import read_config
from sfactory.telemetry import loggers
from sfactory.telemetry.loggers import Logger, Loggers, kept_id
from sfactory.telemetry.metrics import Report

FIRST = Report(wall_s=1.0, env_steps=256, frames=256, episode_return_mean=20.0, extras={"speed/max (m s)": 3.0})
SECOND = dataclasses.replace(FIRST, wall_s=2.0, env_steps=512, episode_return_mean=25.0)


class Kept:
    """Keeps all that it is told."""

    calls: list[Any]

    def __init__(self) -> None:
        Kept.calls = []

    def start(self, config: Config, run_dir: Path) -> None:
        self.calls.append((config.env, run_dir))

    def write(self, report: Report) -> None:
        self.calls.append(report)

    def close(self) -> None:
        self.calls.append("close")


class Told(Kept):
    """Is told how the run ended, too."""

    def close(self, status: str) -> None:
        self.calls.append(status)


def hand_over(tmp_path: Path, *names: Any, notes: Callable[[str], None] = print, status: str = "completed") -> None:
    """Let loggers take two reports."""
    many = {f"argument_{number}": number for number in range(100)}  # more than one request of MLflow's takes
    many["one [m]"] = 1
    config = Config(env="CartPole-v1", env_kwargs=many, log=LogConfig(loggers=names))
    several = Loggers(config, tmp_path, notes)
    several.write(FIRST)
    several.write(SECOND)
    several.close(status)


def test_a_logger_that_asks_is_told_how_the_run_ended(tmp_path: Path) -> None:
    hand_over(tmp_path, Told, status="failed")
    assert Kept.calls[-1] == "failed"
    hand_over(tmp_path, Kept, status="failed")
    assert Kept.calls[-1] == "close"


def test_a_run_tells_its_loggers_every_report(tmp_path: Path) -> None:
    run = short_run(tmp_path / "run", "CartPole-v1", log=dataclasses.replace(QUIET, loggers=(Kept,)))
    begin, *reports, end = Kept.calls
    assert begin == ("CartPole-v1", run) and end == "close"
    assert reports[-1].env_steps >= 128
    assert read_config(run).log.loggers == ("<Kept>",)


def test_loggers_are_named_on_the_command_line() -> None:
    config = from_command_line(["--env", "CartPole-v1", "--log.loggers", "wandb", "my_code:MyLogger"], "train")
    assert config.log.loggers == ("wandb", "my_code:MyLogger")
    assert from_command_line(["--env", "CartPole-v1"], "train").log.loggers == ()


@pytest.mark.parametrize(
    ("where", "error"), [("start", RuntimeError), ("write", KeyboardInterrupt), ("close", RuntimeError)]
)
def test_a_logger_that_fails_is_left_out_with_one_line(
    tmp_path: Path, monkeypatch: Any, where: str, error: type[BaseException]
) -> None:
    notes: list[str] = []
    made: Logger = Kept()

    def fail(*_: Any) -> None:
        raise error("no route to host\nand more")

    monkeypatch.setattr(made, where, fail, raising=True)
    several = Loggers(Config(log=LogConfig(loggers=(lambda: made,))), tmp_path, notes.append)
    several.write(FIRST)
    for thread in [each for each in threading.enumerate() if each.name.startswith("logger")]:
        thread.join(5 if where != "close" else 0)
    several.write(SECOND)
    several.close()
    [line] = notes
    assert f"has failed in {where}(): {error.__name__}: no route to host; the run goes on" in line


def test_a_logger_that_hangs_holds_up_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    free = threading.Event()
    made = Kept()
    monkeypatch.setattr(made, "start", lambda config, run_dir: free.wait(60))
    monkeypatch.setattr(loggers, "LONGEST_END_S", 0.2)
    hand_over(tmp_path, lambda: made, notes=notes.append)
    assert len(notes) == 1 and "has not finished" in notes[0]
    free.set()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wandbb", "unknown log.loggers wandbb; known: wandb, trackio, mlflow"),
        ("no_such_module:Logger", "cannot be imported"),
        (dict, "without start, write, close"),
        (lambda: 1 / 0, "could not be made: ZeroDivisionError"),
    ],
)
def test_what_is_no_logger_is_refused_before_anything_starts(tmp_path: Path, name: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        hand_over(tmp_path, name)


def test_a_built_in_logger_is_named_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"log\.loggers has wandb more than once; name it once"):
        hand_over(tmp_path, "wandb", Kept, "wandb")


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'pip install -e "\.\[wandb\]"'):
        hand_over(tmp_path, "wandb")


def test_a_folder_of_records_is_not_taken_for_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wandb_records").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"log\.loggers has wandb_records, which is not installed"):
        loggers._need("wandb_records")


def test_a_run_keeps_its_id_until_it_is_begun_anew(tmp_path: Path) -> None:
    run = short_run(tmp_path / "run", "CartPole-v1")
    assert kept_id(run, "service", lambda: "first") == kept_id(run, "service", lambda: "second") == "first"
    config = Config(env="CartPole-v1", run=str(run), overwrite=True)
    with begun_run(config):
        pass
    assert kept_id(run, "service", lambda: "third") == "third"


def level_log(data: bytes) -> Iterator[bytes]:
    """The entries of a file in LevelDB's log format, after wandb's own header of 7 bytes."""
    place, whole, block = 7, b"", 32768
    while place + 7 <= len(data):
        if block - place % block < 7:
            place += block - place % block
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        whole, place = whole + data[place + 7 : place + 7 + length], place + 7 + length
        if kind in (1, 4):  # the whole entry, or its last part
            yield whole
            whole = b""


def test_weights_and_biases_offline_has_the_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    notes: list[str] = []
    hand_over(tmp_path, "wandb", notes=notes.append)
    assert not notes
    assert not [each for each in psutil.Process().children() if each.name().startswith("wandb")], (
        "its service has ended"
    )
    [file] = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert (tmp_path / "logger-wandb.id").read_text().strip() in file.name
    rows, project = [], ""
    for data in level_log(file.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(data)
        project = project or record.run.project
        if record.history.item:
            rows.append({item.key or "/".join(item.nested_key): item.value_json for item in record.history.item})
    assert project == "sfactory"
    assert [(row["env_steps"], row["episode/episode_return_mean"]) for row in rows] == [("256", "20"), ("512", "25")]


def test_a_weights_and_biases_run_of_the_users_own_stays_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    (run := tmp_path / "run").mkdir()
    (mine := tmp_path / "mine").mkdir()
    own = wandb.init(project="mine", dir=str(mine))
    try:
        hand_over(run, "wandb")
        assert wandb.run is own
        own.log({"x": 1})
    finally:
        wandb.finish()
        wandb.teardown()
    assert len(list(run.glob("wandb/offline-run-*"))) == 1, "reports are in a record of their own"


def test_trackio_in_a_folder_has_the_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "records"))  # read when it is imported
    trackio = pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    notes: list[str] = []
    hand_over(tmp_path, "trackio", notes=notes.append)
    hand_over(tmp_path, "trackio", notes=notes.append)  # as a resumed run, in the same record
    assert not notes
    [run] = trackio.Api().runs("sfactory")
    assert run.name == (tmp_path / "logger-trackio.id").read_text().strip()
    assert run.config["optim"]["lr"] == 0.0003
    rows = SQLiteStorage.get_logs("sfactory", run.name)
    assert {(row["step"], row["episode/episode_return_mean"]) for row in rows} == {(256, 20.0), (512, 25.0)}


def test_mlflow_in_a_folder_has_the_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "records").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    notes: list[str] = []
    for status in ("interrupted", "failed"):  # the second time as a resumed run, in the same record
        hand_over(tmp_path, "mlflow", notes=notes.append, status=status)
    assert not notes
    from mlflow import MlflowClient

    client = MlflowClient()
    [run] = client.search_runs([client.get_experiment_by_name("sfactory").experiment_id])
    assert run.info.status == "FAILED" and run.data.params["optim.lr"] == "0.0003"
    assert len(run.data.params) > 150 and run.data.params["env_kwargs.one _m_"] == "1"
    history = client.get_metric_history(run.info.run_id, "episode/episode_return_mean")
    assert {(metric.step, metric.value) for metric in history} == {(256, 20.0), (512, 25.0)}
    assert run.data.metrics["extra/speed/max _m s_"] == 3.0


def test_a_resumed_run_has_a_new_record_where_mlflow_does_not_know_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    notes: list[str] = []
    ids = []
    for place in ("one", "other", "other"):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / place).as_uri())
        hand_over(tmp_path, "mlflow", notes=notes.append)
        ids.append((tmp_path / "logger-mlflow.id").read_text().strip())
        assert MlflowClient().get_run(ids[-1]).data.metrics
    assert not notes
    assert ids[0] != ids[1] == ids[2]
    MlflowClient().delete_run(ids[2])
    hand_over(tmp_path, "mlflow", notes=notes.append)
    assert not notes and (tmp_path / "logger-mlflow.id").read_text().strip() not in ids


def test_runs_that_begin_at_once_share_mlflows_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "records").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    MlflowClient().create_experiment("sfactory")
    find, notes, asked = MlflowClient.get_experiment_by_name, [], []

    def not_yet(client: MlflowClient, name: str) -> Any:
        asked.append(name)
        return None if len(asked) == 1 else find(client, name)

    monkeypatch.setattr(MlflowClient, "get_experiment_by_name", not_yet)
    hand_over(tmp_path, "mlflow", notes=notes.append)
    assert not notes and len(asked) == 2


@pytest.mark.parametrize("name", ["wandb", "trackio", "mlflow"])
def test_services_show_an_evaluation_over_the_env_steps_of_its_weights(name: str) -> None:
    pytest.importorskip(name)
    logger: Any = loggers.BUILT_IN[name]()
    shown: list[tuple[str, int]] = []

    def log(row: dict[str, float], step: int | None = None) -> None:
        shown.extend((tag, row["env_steps"] if step is None else step) for tag in row)

    def log_batch(run_id: str, metrics: list[Any]) -> None:
        shown.extend((metric.key, metric.step) for metric in metrics)

    logger._run, logger._client, logger._id = SimpleNamespace(log=log), SimpleNamespace(log_batch=log_batch), "1"
    logger.write(dataclasses.replace(SECOND, eval_env_steps=384.0, eval_return_mean=30.0))
    assert ("eval/eval_return_mean", 384) in shown
    assert {steps for tag, steps in shown if tag.startswith("episode/")} == {512}
    assert shown[-1][1] == 512, "the newest figures are of the report"


def test_the_command_refuses_an_unknown_logger(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--env", "CartPole-v1", "--run", str(tmp_path / "run"), "--serial", "--log.loggers", "wandbb"]
    assert main(["train", *arguments]) == 2
    assert "unknown log.loggers wandbb" in capsys.readouterr().err
