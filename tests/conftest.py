"""What the tests of whole runs share."""

import os
from multiprocessing import forkserver

import psutil
import pytest

from sfactory.runtime.processes import fork_server

MARK = "SFACTORY_TEST_RUN"
"""An environment variable by which the processes that tests have started are known."""


@pytest.fixture(scope="module")
def server():
    """One fork server for all runs of a module; each would start its own otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARK, str(os.getpid()))
        with fork_server():
            yield


@pytest.fixture
def kernels_on(monkeypatch):
    """For tests of kernels, also where all others run without (make test-plain)."""
    monkeypatch.delenv("SFACTORY_KERNELS", raising=False)


@pytest.fixture
def nothing_is_left(server):
    """No process that the test has started lives on, whoever has adopted it, except for the server."""
    before = marked_processes()
    yield
    assert marked_processes() - before - {forkserver._forkserver._forkserver_pid} == set()


def marked_processes() -> set[int]:
    processes = psutil.process_iter(["environ", "status"])
    return {process.pid for process in processes if (process.info["environ"] or {}).get(MARK) == str(os.getpid())}
