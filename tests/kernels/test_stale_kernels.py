"""Compiled code that numba has kept is not used after an update of what it calls."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from commands import ENVIRONMENT

from sfactory.files import forget_stale_kernels

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
