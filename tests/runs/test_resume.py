"""A resumed run whose configuration has changed: each field is safe, warned of or refused, as docs/resume.md says."""

from __future__ import annotations

import csv
import dataclasses
import shutil
import typing
from pathlib import Path
from typing import Any

import pytest
import yaml
from short_runs import begun_run, short_run

from sfactory.config import Config, from_dict, merged, resolve, to_dict
from sfactory.config.declaring import safe, setting, settings_of, types_of
from sfactory.errors import ConfigError
from sfactory.runs.checkpoint import CheckpointStore
from sfactory.runs.resume_rules import RULES, markdown
from sfactory.runs.run_files import METRICS, read_config
from sfactory.runs.run_folder import open_run
from sfactory.runtime.runner import train

BASE = {"env": "CartPole-v1", "steps": 128, "preset": "none", "device": "cpu", "model": {"core": "gru", "core_size": 8}}
OTHERS: dict[str, Any] = {
    "env": "Acrobot-v1", "env_kwargs": {"sutton_barto_reward": True}, "device": "cuda:7", "preset": "classic",
    "workers": 3,
    "model.encoder": "nature_cnn", "model.core": "lstm", "model.model": "mine:Model", "model.kwargs": {"a": 1},
    "model.hidden": [8], "model.distribution": "mine:Distribution", "loss.estimator": "gae", "loss.terms": "mine:terms",
    "batch_source": "mine:Source",
    "loss.term_coefs": {"a": 1.0}, "log.loggers": ["mlflow"],
    "model.shared_critic": True, "model.categories": 11,
    "optim.betas": [0.5, 0.9], "loss.max_lag": 99, "runtime.inference_device": "cpu", "runtime.learner_threads": 2,
    "runtime.inference_threads": 2, "runtime.policy_workers": 2,
}  # fmt: skip
"""Another value of a field whose type does not suggest one."""
NOT_SAVED = ("run", "overwrite")


def all_fields(kind: type = Config, path: str = "") -> dict[str, Any]:
    """Dotted names of all fields with their annotated types."""
    found = {}
    for name, hint in types_of(kind).items():
        found |= all_fields(hint, f"{path}{name}.") if dataclasses.is_dataclass(hint) else {f"{path}{name}": hint}
    return found


def value_of(config: Config, field: str) -> Any:
    group, _, name = field.rpartition(".")
    return getattr(getattr(config, group) if group else config, name)


def with_value(values: dict[str, Any], field: str, value: Any) -> dict[str, Any]:
    group, _, name = field.rpartition(".")
    changed = dict(values) | ({name: value} if not group else {group: dict(values.get(group, {})) | {name: value}})
    return changed


def other_value(field: str, hint: Any) -> Any:
    if field in OTHERS:
        return OTHERS[field]
    now = value_of(merged(Config(), BASE), field)
    if typing.get_origin(hint) is typing.Literal:
        return next(value for value in typing.get_args(hint) if value != now)
    return not now if isinstance(now, bool) else now + 1


FIELDS = {field: hint for field, hint in all_fields().items() if field not in NOT_SAVED}


def test_every_field_has_a_rule_in_the_order_of_the_config():
    assert list(RULES) == list(all_fields())


def test_a_field_without_a_rule_is_a_mistake_that_is_named():
    @dataclasses.dataclass(frozen=True)
    class Forgetful:
        lr: float = setting(1.0, resume=safe("it is only a test"))
        forgotten: int = 3

    with pytest.raises(TypeError, match=r"Forgetful\.forgotten has no rule for resuming"):
        settings_of(Forgetful)


def test_the_documentation_is_the_table():
    text = Path(__file__).parents[2].joinpath("docs", "resume.md").read_text()
    assert text == markdown(), "python -m sfactory.runs.resume_rules > docs/resume.md"


@pytest.mark.parametrize("field", FIELDS)
def test_a_changed_field_follows_its_rule(field, tmp_path, caplog):
    begun = merged(Config(run=str(tmp_path)), BASE)
    with begun_run(begun) as run:
        (run.path / METRICS).write_text("header\n")
    changed = merged(Config(run=str(tmp_path)), with_value(BASE, field, other_value(field, FIELDS[field])))
    assert value_of(changed, field) != value_of(begun, field)
    before = (tmp_path / "config.yaml").read_bytes()
    if RULES[field].verdict == "refused":
        with pytest.raises(ConfigError) as caught:
            open_run(changed)
        assert [line for line in caught.value.problems if line.startswith(f"  {field}: ")] == list(
            caught.value.problems[1:]
        )
        assert len(caught.value.problems) == 2
        assert (tmp_path / "config.yaml").read_bytes() == before
        return
    with begun_run(changed) as run:
        assert run.resumed
    assert value_of(read_config(tmp_path), field) == value_of(changed, field)
    if RULES[field].verdict == "warned":
        assert f"changed setting: {field}: " in caplog.text
        assert caplog.text.count("changed setting") == 1
    else:
        assert caplog.text == ""


def test_a_moved_folder_and_an_overwritten_one_are_no_changes(tmp_path, caplog):
    single = {"env_backend": "gymnasium"}  # no row of it ever rests, so that env steps are exact
    run = short_run(tmp_path / "run", "CartPole-v1", **single)
    shutil.move(run, tmp_path / "elsewhere")
    short_run(tmp_path / "elsewhere", "CartPole-v1", steps=256, **single)
    assert CheckpointStore(tmp_path / "elsewhere" / "checkpoints").load_latest().env_steps == 256
    model = from_dict({"model": {"hidden": [8]}}).model
    short_run(tmp_path / "elsewhere", "CartPole-v1", model=model, overwrite=True, **single)
    assert CheckpointStore(tmp_path / "elsewhere" / "checkpoints").load_latest().env_steps == 128
    assert caplog.text == ""


def test_nan_is_the_same_as_nan_and_true_is_not_1(tmp_path):
    def begun(value):
        config = merged(Config(run=str(tmp_path)), BASE | {"env_kwargs": {"x": {"y": [value, 2.0]}}})
        with begun_run(config) as run:
            (run.path / METRICS).write_text("header\n")

    begun(float("nan"))
    begun(float("nan"))
    with pytest.raises(ConfigError, match="env_kwargs: "):
        begun(1)
    shutil.rmtree(tmp_path)
    begun(1)
    begun(1.0)
    with pytest.raises(ConfigError, match="env_kwargs: "):
        begun(True)


def test_a_damaged_config_of_a_run_is_not_compared_blindly(tmp_path):
    with begun_run(merged(Config(run=str(tmp_path)), BASE)) as run:
        (run.path / METRICS).write_text("header\n")
    values = yaml.safe_load((tmp_path / "config.yaml").read_text())
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values | {"model": 5, "loss": None}))
    with open_run(merged(Config(run=str(tmp_path)), BASE)) as run:
        assert run.resumed


def test_a_run_of_a_version_with_other_fields_goes_on(tmp_path, caplog):
    begun = merged(Config(run=str(tmp_path)), BASE)
    with begun_run(begun) as run:
        (run.path / METRICS).write_text("header\n")
    values = yaml.safe_load((tmp_path / "config.yaml").read_text()) | {"gone": 1}
    values["loss"] = {name: value for name, value in values["loss"].items() if name != "gamma"} | {"gone": 2}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    with begun_run(merged(begun, {"loss": {"gamma": 0.5}})) as run:
        assert run.resumed
    assert caplog.text == "", "nothing is known of the field that the run did not have"
    assert read_config(tmp_path).loss.gamma == 0.5


# Real runs

CONTINUED = {
    "steps": 512, "seed": 5, "algo": "impala", "precision": "bfloat16", "workers": 2, "envs_per_worker": 8,
    "rollout": 16,
    "batch_size": 128, "epochs": 3, "optim.lr": 0.125, "optim.schedule": "linear", "optim.minibatches": 2,
    "optim.betas": [0.5, 0.9],
    "loss.gamma": 0.5, "loss.exploration": "kl", "runtime.groups": 4, "runtime.policy_workers": 2,
    "runtime.spare_batches": 3,
    "log.keep": 1, "log.milestone_every": 64, "log.episode_window": 3, "model.initial_log_std": 2.0,
    "env_backend": "gymnasium",
}  # fmt: skip


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    return short_run(tmp_path_factory.mktemp("resume") / "run", "CartPole-v1")


@pytest.mark.parametrize("field", CONTINUED)
def test_a_run_goes_on_with_a_changed_field(field, begun, tmp_path):
    assert RULES[field].verdict != "refused"
    run = tmp_path / "run"
    shutil.copytree(begun, run)
    saved = CheckpointStore(run / "checkpoints").load_latest()
    values = to_dict(read_config(run)) | {"run": str(run), "steps": 384}
    result = train(resolve(from_dict(with_value(values, field, CONTINUED[field]))))
    assert result.status == "completed"
    assert result.env_steps >= 384 > saved.env_steps
    snapshot = CheckpointStore(run / "checkpoints").load_latest()
    assert snapshot.env_steps == result.env_steps
    assert snapshot.updates > saved.updates
    assert snapshot.wall_s > saved.wall_s
    if field == "optim.lr":
        assert snapshot.trainer["lr"] == 0.125
        with (run / "metrics.csv").open() as file:
            assert float(list(csv.DictReader(file))[-1]["lr"]) == 0.125


def test_a_run_of_an_earlier_version_with_a_field_that_there_is_no_more_resumes(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    config = merged(Config(), BASE | {"run": str(folder), "log": {"display": "none", "tensorboard": False}})
    train(config)
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    saved["runtime"]["spin"] = False
    (folder / "config.yaml").write_text(yaml.safe_dump(saved))
    assert read_config(folder).steps == 128
    assert train(dataclasses.replace(config, steps=256)).env_steps >= 256
