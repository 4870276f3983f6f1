"""Compiled code that numba has kept is not used after an update of what it calls."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from commands import ENVIRONMENT

from sfactory.files import forget_stale_kernels, user_caches

CALLED = "from numba import njit\n\n@njit(cache=True)\ndef number():\n    return {number}\n"
CALLING = """
from numba import njit
from {package}.called import number

@njit(cache=True)
def twice():
    return 2 * number()
"""


def test_a_function_is_compiled_anew_when_one_that_it_calls_has_changed(tmp_path: Path) -> None:
    package = tmp_path / "small"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from pathlib import Path\nfrom sfactory.files import forget_stale_kernels\n"
        "forget_stale_kernels(Path(__file__).parent)\n"
    )
    (package / "calling.py").write_text(CALLING.format(package="small"))
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "NUMBA_CACHE_DIR"}
    code = "from small.calling import twice; print(twice(), sum(twice.stats.cache_hits.values()))"
    said = []
    for number in (3, 3, 4):
        (package / "called.py").write_text(CALLED.format(number=number))
        done = subprocess.run(
            [sys.executable, "-B", "-c", code],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        said.append(done.stdout.split())
    assert said == [["6", "0"], ["6", "1"], ["8", "0"]]


def test_only_what_is_older_than_its_source_goes(tmp_path: Path) -> None:
    kept = tmp_path / "inner" / "__pycache__" / "a.f-1.py311.nbi"
    (tmp_path / "a.py").write_text("1")
    for source, stays in (("1", False), ("1", True), ("2", False), ("2", True)):
        (tmp_path / "a.py").write_text(source)
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.touch()
        forget_stale_kernels(tmp_path)
        assert kept.exists() == stays


def test_a_package_that_cannot_be_written_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError

    (tmp_path / "a.py").write_text("1")
    monkeypatch.setattr(Path, "write_text", refuse)
    forget_stale_kernels(tmp_path)
    assert not (tmp_path / "__pycache__" / "kernels.sha256").exists()


def test_without_a_place_for_compiled_code_a_command_says_what_to_set(tmp_path: Path) -> None:
    """As for a container's user without a home, where the packages belong to root; here no folder can be written to."""
    environment = {name: value for name, value in ENVIRONMENT.items() if name not in ("HOME", "XDG_CACHE_HOME")}
    code = (
        "import os, pwd, sys; from unittest import mock; access = os.access\n"
        "os.access = lambda path, mode: not mode & os.W_OK and access(path, mode)\n"
        "with mock.patch('pwd.getpwuid', side_effect=KeyError):\n"
        "    from sfactory.train import main; sys.exit(main(sys.argv[1:]))"
    )
    arguments = ["--env", "sfactory/CartPole", "--serial", "--steps", "64", "--run", str(tmp_path / "run")]
    done = subprocess.run([sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "set NUMBA_CACHE_DIR to a folder of your own" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_user_without_a_home_has_no_caches_but_those_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", _no_home)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert user_caches() is None
    monkeypatch.setenv("XDG_CACHE_HOME", "/named")
    assert user_caches() == Path("/named")


def _no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")
