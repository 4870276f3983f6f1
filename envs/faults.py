"""What an environment does wrong, as the error that its user reads: with its name, the call and its own traceback."""

from __future__ import annotations

import contextlib
import signal
import traceback
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from sfactory.config import env_name
from sfactory.envs.interface import EnvRequest
from sfactory.errors import ConfigError, EnvironmentFault, said, shown

T = TypeVar("T")


def environment_name(request: EnvRequest, index: int) -> str:
    """Name of environment number `index` of the run in error messages."""
    return f"environment {index} ({env_name(request.env)})"


def is_interrupt(error: BaseException) -> bool:
    """Whether what came out of an environment is Ctrl-C. Everything else is the environment's fault, also what is no
    Exception: exit(), a cancelled task of asyncio, a panic in Rust. So is a KeyboardInterrupt in a run, whose processes
    handle or ignore SIGINT."""
    return isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def environment_fault(name: str, doing: str, error: BaseException, row: int | None = None) -> EnvironmentFault:
    """The fault for an exception of an environment, with the environment's own traceback; the exception itself if it is
    one already.

    Args:
        name: Name of the environment.
        doing: The call that raised, for example ``step(1)``.
        error: The exception.
        row: The row at fault, if it is a single one.

    Raises:
        KeyboardInterrupt: The exception itself, if it is Ctrl-C.
    """
    if is_interrupt(error):
        raise error
    if isinstance(error, EnvironmentFault):
        return error
    frames = error.__traceback__ and (error.__traceback__.tb_next or error.__traceback__)
    lines = "".join(traceback.format_exception(type(error), error, frames))
    return EnvironmentFault(f"{name} raised {type(error).__name__} in {doing}: {said(error)}\n{lines.rstrip()}", row)


def close_quietly(env: Any) -> None:
    """Close an environment and ignore its exceptions."""
    try:
        env.close()
    except BaseException as error:
        if is_interrupt(error):
            raise


@contextlib.contextmanager
def probing(env: T) -> Iterator[T]:
    """An environment of which something is read before a run, and which is closed quietly then.

    Raises:
        ConfigError: In place of an :class:`EnvironmentFault`.
    """
    try:
        yield env
    except EnvironmentFault as fault:
        raise ConfigError(str(fault)) from fault
    finally:
        close_quietly(env)


def check_reset(name: str, reset: Callable[[], Any], row: int | None = None) -> tuple[Any, dict[str, Any]]:
    """Call reset(); gives (observation, info).

    Raises:
        EnvironmentFault: If it raises, or returns something else.
    """
    try:
        result = reset()
    except BaseException as error:
        raise environment_fault(name, "reset()", error, row) from error
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], dict):
        raise EnvironmentFault(
            f"{name}: reset() returned {shown(result)}; it must return the two values observation, info (a dict)", row
        )
    return result
