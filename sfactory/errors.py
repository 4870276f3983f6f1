"""The errors that reach a user, each with the process exit status it stands for; and values as messages show them."""

from __future__ import annotations

import functools
import math
import os
import select
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, cast

P = ParamSpec("P")
_STANDARD_OUTPUT = 1
"""Its file descriptor."""


class SfactoryError(Exception):
    """Base of the errors that sfactory raises for its user. ``exit_status`` is what the commands return."""

    exit_status = 1


class ConfigError(SfactoryError, ValueError):
    """The configuration cannot work. Raised before any process starts, with every problem that was found.

    Args:
        problems: One sentence each: what is wrong, the value, and what to do.
    """

    exit_status = 2

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.problems


class EnvironmentFault(SfactoryError):
    """An environment broke its contract or raised. The message names the environment and holds its traceback.

    Args:
        row: Of its group, where a single row is at fault; whoever reads it knows that one is.
    """

    def __init__(self, message: str, row: int | None = None) -> None:
        super().__init__(message)
        self.row = cast(int, row)


class RunFailed(SfactoryError):
    """A worker process failed or ended by itself; the run was stopped and saved."""


class CheckpointError(SfactoryError):
    """No checkpoint could be read, or it does not fit the model."""


def shown(value: object, longest: int = 200) -> str:
    """A value as an error message shows it: shortened, and whatever it raises when it is asked."""
    try:
        text = repr(value)
    except Exception:
        text = f"<{type(value).__name__} that cannot be shown>"
    return text if len(text) <= longest else f"{text[:longest]}..."


def said(error: BaseException) -> str:
    """What an exception says, if that can be had."""
    try:
        return str(error)
    except Exception:
        return f"<{type(error).__name__} that cannot be shown>"


def printable(text: str) -> str:
    """Text of a stranger's file, or of its name, as a terminal may have it: control characters, which could retitle the
    window or write to the clipboard, are written out, as ``\\x1b``; line breaks stay."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def counted(number: int, noun: str, plural: str = "") -> str:
    """A number with its noun: ``1 batch``, ``2,000 batches``."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def thousands(value: float) -> str:
    """A number without decimals: ``2,000``; ``-`` for one that is not finite."""
    return f"{value:,.0f}" if math.isfinite(value) else "-"


def clock(seconds: float) -> str:
    """A duration as hours, minutes and seconds: ``0:20:05``; ``-`` for one that is not finite."""
    if not math.isfinite(seconds):
        return "-"
    minutes, second = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{second:02d}"


def installing(extra: str) -> str:
    """The command that installs an extra, in a checkout or beside the installed package."""
    installed = (Path(__file__).parent / "envs").is_dir()  # in a checkout it lies beside sfactory/
    return f'pip install "sfactory[{extra}]"' if installed else f'pip install -e ".[{extra}]"'


def telling_errors(main: Callable[P, int]) -> Callable[P, int]:
    """Decorates the main function of a command: what goes wrong in it is told in one message, and ends it with the exit
    status of the error, 1 for one of the system, and 130 for Ctrl-C. Where nobody reads its output any more, as after
    ``head``, it ends silently with 141, as SIGPIPE ends other programs."""

    @functools.wraps(main)
    def told(*args: P.args, **kwargs: P.kwargs) -> int:
        escape_unencodable()
        try:
            try:
                return main(*args, **kwargs)
            finally:
                print(end="", flush=True)
        except SfactoryError as error:
            print(f"error: {printable(str(error))}", file=sys.stderr)
            return error.exit_status
        except OSError as error:
            if isinstance(error, BrokenPipeError) and _nobody_reads_output():
                discard_output()
                return 128 + signal.SIGPIPE
            print(f"error: {printable(str(error))}", file=sys.stderr)
            return 1
        except SystemExit as end:
            if isinstance(end.__context__, BrokenPipeError):  # so ends rich, with 1, where nobody reads
                return 128 + signal.SIGPIPE
            raise
        except KeyboardInterrupt:
            return 130

    return told


def _nobody_reads_output() -> bool:
    """Whether standard output is a pipe whose reader has ended."""
    poll = select.poll()
    poll.register(_STANDARD_OUTPUT, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def escape_unencodable() -> None:
    """Let standard output show as escapes what its encoding lacks, as standard error does, unless it was told to do
    something else: a name is no error."""
    if getattr(sys.stdout, "errors", None) == "strict" and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")


def discard_output() -> None:
    """Let what standard output still holds, and all that follows, go nowhere, so that it cannot fail."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def check_platform() -> None:
    """Say what is missing on another system than Linux, whose shared memory and process control the workers use.

    Raises:
        ConfigError: If this is not Linux.
    """
    if sys.platform != "linux":
        remedy = "WSL 2, which is a Linux" if sys.platform == "win32" else "a Linux container or another machine"
        raise ConfigError(
            f"sfactory runs on Linux, and this is {sys.platform}, which lacks memfd_create, prlimit and "
            f"sched_getaffinity; use {remedy}"
        )
