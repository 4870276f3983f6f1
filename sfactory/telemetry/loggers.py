"""Where reports go besides metrics.csv and TensorBoard: Weights & Biases, Trackio, MLflow, or a logger of the user's.

A logger works in a thread of its own. What it waits for holds up no run, and what it raises ends nothing but itself.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import os
import queue
import re
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from sfactory.config import Config, env_name, flattened, to_dict
from sfactory.config.importing import load_object
from sfactory.errors import ConfigError, installing, said
from sfactory.files import LOGGER_ID, run_name, write_atomically
from sfactory.telemetry.metrics import Report, scalars_by_steps

MOST_PARAMS = 100
"""Parameters in one request, of MLflow."""
LONGEST_END_S = 30.0
"""How long the end of a run waits for its loggers."""
_MOST_WAITING = 1000
"""Reports that wait for a slow logger; further ones are left out."""


class Logger(Protocol):
    """What a logger must have. All three are called in one thread, in this order; `write` once for each report.

    `close` may have a parameter `status`, and is then told how the run ended: completed, interrupted or failed.
    """

    def start(self, config: Config, run_dir: Path) -> None:
        """A run begins, or goes on after it was resumed."""
        ...

    def write(self, report: Report) -> None:
        """Take a report. :func:`sfactory.telemetry.metrics.scalars` gives its figures by name, without unknown ones."""
        ...

    def close(self) -> None:
        """The run has ended. Not called if one of the others has raised."""
        ...


class WandbLogger:
    """Weights & Biases. ``WANDB_MODE=offline`` and its other environment variables have their effect."""

    def __init__(self) -> None:
        _need("wandb")

    def start(self, config: Config, run_dir: Path) -> None:
        import wandb

        self._alone = wandb.run is None
        project, name = os.environ.get("WANDB_PROJECT", "sfactory"), run_name(run_dir)
        self._run = wandb.init(
            project=project, name=name, group=name.rpartition("/")[0] or None, dir=str(run_dir), config=to_dict(config),
            id=kept_id(run_dir, "wandb", lambda: uuid.uuid4().hex), resume="allow",
            settings=wandb.Settings(console="off"),  # the terminal is the display's
            reinit=None if self._alone else "create_new",  # else reports would go into the run of the user's own
        )  # fmt: skip
        self._run.define_metric("*", step_metric="env_steps")

    def write(self, report: Report) -> None:
        for env_steps, tagged in scalars_by_steps(report).items():
            self._run.log({"env_steps": env_steps, **dict(tagged)})

    def close(self, status: str = "completed") -> None:
        import wandb

        self._run.finish(exit_code=int(status == "failed"))
        if self._alone:  # else a run of the user's own needs the service's process
            wandb.teardown()


class TrackioLogger:
    """Trackio, in the project ``TRACKIO_PROJECT``, else sfactory. ``TRACKIO_DIR``, ``TRACKIO_SPACE_ID`` and its other
    environment variables have their effect."""

    def __init__(self) -> None:
        _need("trackio")

    def start(self, config: Config, run_dir: Path) -> None:
        import trackio

        told = run_name(run_dir).replace("/", "-")
        name = kept_id(run_dir, "trackio", lambda: f"{told}-{uuid.uuid4().hex[:8]}")  # a run is found by name
        project = os.environ.get("TRACKIO_PROJECT", "sfactory")
        self._run = trackio.init(project=project, name=name, config=to_dict(config), resume="allow", embed=False)

    def write(self, report: Report) -> None:
        for env_steps, tagged in scalars_by_steps(report).items():
            self._run.log(dict(tagged), step=env_steps)

    def close(self) -> None:
        self._run.finish()


class MlflowLogger:
    """MLflow, at ``MLFLOW_TRACKING_URI`` and in the experiment ``MLFLOW_EXPERIMENT_NAME``, else sfactory."""

    def __init__(self) -> None:
        _need("mlflow")

    def start(self, config: Config, run_dir: Path) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = MlflowClient()
        self._id = kept_id(run_dir, "mlflow", lambda: self._new_run(run_name(run_dir)), self._knows)
        self._client.update_run(self._id, status="RUNNING")
        known = self._client.get_run(self._id).data.params  # of a resumed run
        values = {_mlflow_key(key): str(value) for key, value in flattened(to_dict(config), whole=True).items()}
        params = [Param(key, value) for key, value in values.items() if key not in known]
        for begin in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(self._id, params=params[begin : begin + MOST_PARAMS])

    def write(self, report: Report) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [
            Metric(_mlflow_key(tag), value, now, env_steps)
            for env_steps, tagged in scalars_by_steps(report).items()
            for tag, value in tagged
        ]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self, status: str = "completed") -> None:
        self._client.set_terminated(self._id, {"interrupted": "KILLED", "failed": "FAILED"}.get(status, "FINISHED"))

    def _knows(self, run_id: str) -> bool:
        """Whether there is a run of this id, which another server may have been told of, or somebody has deleted."""
        from mlflow.exceptions import MlflowException

        try:
            return self._client.get_run(run_id).info.lifecycle_stage == "active"
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return False

    def _new_run(self, name: str) -> str:
        return self._client.create_run(self._experiment(), run_name=name).info.run_id

    def _experiment(self) -> str:
        """Id of the experiment. Of several runs that begin at once, as in a sweep, one makes it."""
        from mlflow.exceptions import MlflowException

        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "sfactory")
        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                return self._client.create_experiment(name)
            except MlflowException:
                if (found := self._client.get_experiment_by_name(name)) is None:
                    raise
        return found.experiment_id


def _mlflow_key(name: str) -> str:
    """A name with the characters that MLflow allows."""
    return re.sub(r"[^\w\-./ ]", "_", name)


BUILT_IN: dict[str, Callable[[], Logger]] = {"wandb": WandbLogger, "trackio": TrackioLogger, "mlflow": MlflowLogger}


class Loggers:
    """All loggers of a run.

    Args:
        config: Of the run. An entry of `log.loggers` is a name in :data:`BUILT_IN`, a callable, or ``module:Name``;
            called without arguments, it makes a logger.
        run_dir: Run folder.
        note: Shows the user a line.

    Raises:
        ConfigError: If one cannot be made, is no :class:`Logger`, or is a built-in one that is named twice.
    """

    def __init__(self, config: Config, run_dir: Path, note: Callable[[str], None]) -> None:
        if twice := [name for name in BUILT_IN if config.log.loggers.count(name) > 1]:
            raise ConfigError(*(f"log.loggers has {name} more than once; name it once" for name in twice))
        self._threads = [_LoggerThread(name, make_logger(name), config, run_dir) for name in config.log.loggers]
        self._note = note

    def write(self, report: Report) -> None:
        """Hand a report to all that work; the first one starts them."""
        for each in self._threads:
            each.write(report)
        self._tell()

    def close(self, status: str = "completed") -> None:
        """Let all finish, for a while, and tell those that ask how the run ended."""
        deadline = time.monotonic() + LONGEST_END_S
        for each in self._threads:
            each.end(status, deadline)
        self._tell()

    def _tell(self) -> None:
        for each in self._threads:
            if each.problem is not None:
                self._note(f"log.loggers {each.name} {each.problem}; the run goes on without it")
                each.problem = None


class _LoggerThread:
    """Runs one logger.

    Args:
        name: What the configuration calls it.
        logger: The logger.
        config, run_dir: Arguments of its `start`.

    Attributes:
        problem: What has happened to it that the user has not been told, else None.
    """

    def __init__(self, name: Any, logger: Logger, config: Config, run_dir: Path) -> None:
        self.name = name if isinstance(name, str) else env_name(name)
        self.problem: str | None = None
        self._logger, self._config, self._run_dir = logger, config, run_dir
        self._reports: queue.Queue[Report | None] = queue.Queue(_MOST_WAITING)
        self._thread = threading.Thread(target=self._run, name=f"logger {self.name}", daemon=True)
        self._failed, self._status = False, "completed"

    def write(self, report: Report) -> None:
        """Hand over a report, without waiting."""
        if self._failed:
            return
        if self._thread.ident is None:
            self._thread.start()
        try:
            self._reports.put_nowait(report)
        except queue.Full:
            self._failed, self.problem = True, f"has not taken {_MOST_WAITING} reports"

    def end(self, status: str, deadline: float) -> None:
        """Let it finish until a time in monotonic seconds."""
        self._status = status
        if self._failed or not self._thread.is_alive():
            return
        with contextlib.suppress(queue.Full):
            self._reports.put(None, timeout=max(0.0, deadline - time.monotonic()))
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._failed, self.problem = True, f"has not finished within {LONGEST_END_S:.0f} s"

    def _run(self) -> None:
        doing = "start"
        try:
            self._logger.start(self._config, self._run_dir)
            while (report := self._reports.get()) is not None:
                doing = "write"
                self._logger.write(report)
            doing = "close"
            self._close()
        except BaseException as error:  # the user's Ctrl-C reaches the main thread alone
            first_line = said(error).strip().partition("\n")[0]
            self._failed, self.problem = True, f"has failed in {doing}(): {type(error).__name__}: {first_line}"

    def _close(self) -> None:
        close: Callable[..., None] = self._logger.close
        try:
            asks = "status" in inspect.signature(close).parameters
        except (TypeError, ValueError):  # it is not of Python
            asks = False
        close(**({"status": self._status} if asks else {}))


def make_logger(name: Any) -> Logger:
    """The logger that an entry of `log.loggers` means.

    Raises:
        ConfigError: If it cannot be made, or is no :class:`Logger`.
    """
    role = f"log.loggers {name}"
    if isinstance(name, str) and ":" not in name and name not in BUILT_IN:
        raise ConfigError(f"unknown {role}; known: {', '.join(BUILT_IN)}, or a callable or module:Name that makes one")
    try:
        made = (BUILT_IN[name] if isinstance(name, str) and name in BUILT_IN else load_object(name, "log.loggers"))()
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{role} could not be made: {type(error).__name__}: {said(error)}") from error
    missing = [method for method in ("start", "write", "close") if not callable(getattr(made, method, None))]
    if missing:
        raise ConfigError(
            f"{role} made a {type(made).__name__} without {', '.join(missing)}; a logger has start(config, run_dir), "
            "write(report) and close()"
        )
    return made


def kept_id(
    run_dir: Path, name: str, create: Callable[[], str], known: Callable[[str], bool] = lambda kept: True
) -> str:
    """The id under which a service knows a run: the one that its folder keeps, or else a new one, which it then
    keeps, so that a resumed run finds its record.

    Args:
        name: Of the service.
        create: Makes a new id.
        known: Whether the service still knows the one that is kept.
    """
    path = run_dir / LOGGER_ID.format(name)
    if path.exists() and known(kept := path.read_text().strip()):
        return kept
    made = create()
    write_atomically(path, f"{made}\n".encode())
    return made


def _need(module: str) -> None:
    """Make sure that an optional module, which is also the name of its extra, is installed. It is imported only in the
    logger's thread, since that takes seconds.

    Raises:
        ConfigError: If it is not.
    """
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None:  # a folder of that name, such as of its records, is no package
        raise ConfigError(f"log.loggers has {module}, which is not installed; {installing(module)}")
