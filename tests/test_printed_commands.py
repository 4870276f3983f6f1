"""Every command of sfactory's that README and docs print runs, in the order of its page, with few env steps."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pages
import pytest
import yaml
from short_runs import short_run

from sfactory.commands import COMMANDS

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LIMIT_S = 400
TRAINING = ("README.md", "first-run.md")
"""Pages that train the run which others suppose."""
LEFT = {"first-run.md": ("runs/cartpole/report.html", "seeds.svg")}
"""Files that a page says its commands leave."""


def printed(page: Path) -> Iterator[list[str]]:
    """The commands of sfactory's on a page, as arguments of the one program."""
    for words in pages.commands(page):
        match words:
            case ["sfactory", *rest]:
                yield rest
            case [_, "-m", module, *rest] if (name := module.split(".")[-1]) in COMMANDS and "sfactory" in module:
                yield [name, *rest]


def few(words: list[str]) -> list[str]:
    """A command that is soon done; a policy is shown as a video, since a test has no terminal."""
    if words[0] == "train" and "--steps" not in words:
        words = [*words, "--steps", "0"]
    words = pages.few(words)
    return [*words, "--video", "shown"] if words[0] == "play" else words


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return short_run(tmp_path_factory.mktemp("trained") / "cartpole", "CartPole-v1")


@pytest.fixture
def desk(tmp_path: Path, trained: Path) -> Path:
    """A folder with what the pages suppose: a trained run, modules and files of the reader's own."""
    for name in ("cartpole", "a-1", "a-2", "b-1", "one", "two"):
        shutil.copytree(trained, tmp_path / "runs" / name)
    (tmp_path / "my_module.py").write_text(pages.MINE)
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "envs.py").write_text(pages.MINE)
    (tmp_path / "run.yaml").write_text("epochs: 1\n")
    (tmp_path / "catch.py").write_text(pages.python_of(ROOT / "docs" / "own-environment.md"))
    space = next(
        b.text for b in pages.blocks(ROOT / "docs" / "sweeps.md") if b.language == "yaml" and "search" in b.text
    )
    values = yaml.safe_load(space) | {"trials": 2, "seeds": [101]}
    values["base"]["steps"] = 4096
    (tmp_path / "space.yaml").write_text(yaml.safe_dump(values))
    return tmp_path


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", [page for page in PAGES if list(printed(page))], ids=lambda page: page.name)
def test_every_printed_command_runs(page: Path, desk: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TERM": "xterm"}
    if page.name in TRAINING:
        shutil.rmtree(desk / "runs" / "cartpole")
    for words in printed(page):
        if "--push" in words:
            continue
        command = [sys.executable, "-c", "import sys; from sfactory.commands import main; sys.exit(main())"]
        for word in few(words):
            command += sorted(str(path.relative_to(desk)) for path in desk.glob(word)) if "*" in word else [word]
        done = subprocess.run(command, cwd=desk, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"
    assert not [name for name in LEFT.get(page.name, ()) if not (desk / name).exists()]
