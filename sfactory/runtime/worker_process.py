"""What surrounds a worker in its process: signals, temporary files, output, the report of a failure, and the end with
the runner."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import signal
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping
from multiprocessing import connection, parent_process
from multiprocessing.process import BaseProcess
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any, cast

from sfactory.errors import EnvironmentFault, SfactoryError
from sfactory.files import remove_temporary_folder, user_caches
from sfactory.runtime.device_errors import is_device_error
from sfactory.runtime.output import print_into
from sfactory.runtime.plan import PickledPlan
from sfactory.runtime.processes import RUNNER_SIGNALS, EventSender, kill_tree
from sfactory.runtime.stacks import explain_exit, keep_stacks
from sfactory.runtime.wires import Wires
from sfactory.telemetry.events import Failure

DEVICE_FAILED = 71
"""Exit status of a worker whose device failed or ran out of memory; it is started anew."""


def settle_process(name: str, folder: str) -> None:
    """Make the process that this is called in one of a run's: it leaves signals to the runner, has its temporary files
    in a folder of its own, and ends with the runner.

    Args:
        name: Name of the process.
        folder: Temporary files of this process and of its children belong there.
    """
    with contextlib.suppress(OSError):  # a sandbox may forbid it
        Path("/proc/self/comm").write_text(f"sf-{name}")  # the name shown by top and ps
    runner_group = os.getpgrp()
    os.setpgid(0, 0)  # Ctrl-C does not reach this group, and the runner finds children of environments by it
    signal.signal(signal.SIGCONT, signal.SIG_DFL)  # only the fork server passes it on
    # Handled rather than ignored: programs that environments start, and their forks, must still end by them.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)
        os.register_at_fork(after_in_child=functools.partial(signal.signal, number, signal.SIG_DFL))
    keep_stacks(folder)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, RUNNER_SIGNALS)
    if (caches := user_caches()) is not None:  # what torch.compile has made outlasts the folder, where torch's own lies
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(caches / "sfactory" / "inductor"))
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    threading.Thread(target=_end_with_runner, args=(runner_group,), daemon=True).start()


def process_main(
    name: str,
    events: EventSender,
    folder: str,
    target: Callable[..., None],
    plan: PickledPlan,
    wires: Wires,
    *args: Any,
    output: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Run a worker process: leave signals to the runner, report failures, and let nothing of it outlive the runner.

    Args:
        name: Name of the worker.
        events: Sends this process's events.
        folder: Temporary files of this process and of its children belong there.
        target: Main function of the worker, called with plan, wires and `args`.
        plan: Plan of the run.
        wires: Wires of the run.
        args: Further arguments of `target`.
        output: Where what is printed goes; None: to the runner's own standard output.
        environment: Variables that it has besides the fork server's.
    """
    settle_process(name, folder)
    os.environ.update(environment or {})
    if output is not None:
        print_into(output)
    try:
        target(plan.open(), dataclasses.replace(wires, events=events), *args)
    except SfactoryError as error:
        events.put(Failure(name, str(error), "", isinstance(error, EnvironmentFault)))
    except BaseException as error:
        if is_device_error(error):  # another process may have better luck, or another GPU
            explain_exit(folder, str(error).strip().partition("\n")[0])
            os._exit(DEVICE_FAILED)
        events.put(Failure(name, str(error) or repr(error), traceback.format_exc()))
    finally:
        wires.control.close()


def _end_with_runner(runner_group: int) -> None:
    """Wait for the end of the runner; then end this process and its descendants, remove temporary files, for which the
    runner has had no time, and continue what is stopped of the runner's process group, such as the resource tracker, so
    that it ends, too."""
    connection.wait([cast(BaseProcess, parent_process()).sentinel])
    kill_tree(os.getpid(), spare_root=True)
    with contextlib.suppress(OSError):
        os.killpg(runner_group, signal.SIGCONT)
    remove_temporary_folder(Path(get_temp_dir()))  # with the folders of all workers and of the fork server
    os._exit(1)
