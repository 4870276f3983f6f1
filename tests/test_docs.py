"""The pages name files, modules and fields that there are; their commands are read, their programs run."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pages
import pytest
import tyro
import yaml
from docs.reference import PAGES as GENERATED
from gymnasium import spaces
from short_runs import short_run

from sfactory.commands import MODULES, main
from sfactory.config import Config, check_types, merged
from sfactory.config.declaring import settings_of
from sfactory.data.arena import segment_fields
from sfactory.envs.interface import EnvSpec
from sfactory.spaces import ActionSpec, ObservationSpec

ROOT = Path(__file__).parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
PROSE = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MOST_WORDS = 40
BANNED = re.compile(
    r"\b(simply|robust\w*|seamless\w*|easily|effortless\w*|powerful|blazing\w*|leverag\w+|utili[sz]\w+|cutting-edge|"
    r"state-of-the-art|world-class|turn-key)\b",
    re.IGNORECASE,
)
"""Words of advertisement, and words that say nothing."""
FIGURES = sorted((ROOT / "docs").glob("*.svg"))
FOLDERS = "sfactory|envs|perf|tests|examples|docs"
WRITERS = {"environment": "environment", "rollout": "rollout worker", "policy": "policy worker"}


def every(files: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("page", files, ids=lambda page: str(page.relative_to(ROOT)))


def anchors(page: Path) -> set[str]:
    """Those that a page's headings have."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@every(PAGES)
def test_every_relative_link_leads_somewhere(page):
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if re.match(r"\w+:", link):
            continue
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


@every(PAGES)
def test_every_command_names_a_module(page, monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    named = set(re.findall(r"python\s+-m\s+(\w+(?:\.\w+)*)", page.read_text()))
    assert not [name for name in named if importlib.util.find_spec(name) is None]


@every([*PAGES, *FIGURES])
def test_every_file_and_folder_that_is_named_is_there(page):
    named = set(re.findall(rf"(?<![\w./-])(?:{FOLDERS})/[\w./-]*(?:\.(?:py|md|sh|svg)\b|/)", page.read_text()))
    assert not [name for name in named if not (ROOT / name).exists()]


@every(FIGURES)
def test_every_file_of_a_figure_is_there(page):
    """Figures leave the beginnings of paths out where they have little room."""
    labels = re.findall(r'class="file"[^>]*>([^<]*)<', page.read_text())
    places = [ROOT, ROOT / "sfactory", ROOT / "sfactory" / "data"]
    named = {name for label in labels for name in label.split(", ")}
    assert not [name for name in named if not any((place / name).exists() for place in places)]


def test_the_arenas_table_is_that_of_the_code():
    observation = ObservationSpec.from_space(spaces.Box(-1, 1, (3,)))
    env = EnvSpec(observation, ActionSpec.from_space(spaces.Discrete(2)), masked=True)
    table = (ROOT / "docs" / "architecture.md").read_text().partition("## The arena")[2]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| `")]
    told = {re.findall(r"`(\w+)", name)[0]: (shape.strip("`"), dtype, writer) for name, shape, dtype, writer, _ in rows}
    for field in segment_fields(env, state_size=4):
        shape, dtype, writer = told.pop(field.name)
        steps = {"T+1": "S, T+1", "T": "S, T", "1": "S"}[field.steps] + (", R" if field.per_row else "")
        assert shape.startswith(f"[{steps}") and (shape == f"[{steps}]") == (not field.shape)
        assert str(field.dtype) in dtype and writer == WRITERS[field.writer]
    assert set(told) == {"state", "begun", "finished_s"}


# What a reader copies


class Read(Exception):
    """A command line has been read, and nothing has started."""


@pytest.fixture
def reader(tmp_path, monkeypatch):
    """Reads a command of sfactory's without starting it."""
    real = tyro.cli

    def read(*args, **kwargs):
        real(*args, **kwargs)
        raise Read

    def command(words):
        for flag, name in itertools.pairwise(words):
            if flag == "--config":
                (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / name).touch()
        with pytest.raises(Read):
            main(words)

    monkeypatch.setattr(tyro, "cli", read)
    monkeypatch.chdir(tmp_path)
    return command


@every([page for page in PAGES if pages.commands(page)])
def test_every_command_is_one_that_there_is(page, reader):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys()
    for words in pages.commands(page):
        match words:
            case ["sfactory", *rest]:
                reader(rest)
            case [_, "-m", module, *rest] if module.startswith("sfactory."):
                name = module.split(".")[-1]
                if name in MODULES:
                    reader([name, *rest])
            case [_, "-m", module, *_]:
                assert importlib.util.find_spec(module) is not None
            case ["python", file, *_]:
                assert (ROOT / file).exists()
            case ["make", *wanted]:
                assert set(wanted) <= targets
            case [program, "install", *wanted] if program.endswith("pip"):
                assert set(re.findall(r"\w+", " ".join(re.findall(r"\[(.*?)\]", " ".join(wanted))))) <= extras
            case [program, *_]:
                assert program in pages.COMMANDS or re.match(r"[A-Z]+=", program)


@every([page for page in PAGES if any(block.language == "yaml" for block in pages.blocks(page))])
def test_every_configuration_is_one_that_there_is(page):
    for block in pages.blocks(page):
        if block.language == "yaml":
            values = yaml.safe_load(block.text)
            if "search" not in values:  # of a sweep, whose command is read
                check_types(merged(Config(), values))


@pytest.fixture(scope="module")
def cartpole(tmp_path_factory):
    return short_run(tmp_path_factory.mktemp("trained") / "cartpole", "CartPole-v1")


@pytest.mark.timeout(420)
@every([page for page in PAGES if page.name != "CONTRIBUTING.md" and pages.python_of(page)])
def test_every_program_runs(page, tmp_path, monkeypatch, cartpole):
    """With few env steps; all programs of a page are one script, which finds what the page has exported."""
    if "onnxruntime" in pages.python_of(page):
        pytest.importorskip("onnxruntime")
    monkeypatch.chdir(tmp_path)
    shutil.copytree(cartpole, tmp_path / "runs" / "cartpole")
    (tmp_path / "my_module.py").write_text(pages.MINE)
    (tmp_path / "page.py").write_text(pages.python_of(page))
    for words in pages.commands(page):
        if words[:2] == ["sfactory", "export"] and "runs/cartpole" in words and not {"hf", "--push"} & {*words}:
            assert main(words[1:]) == 0
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "page.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", GENERATED)
def test_a_page_of_declarations_is_fresh(name):
    text = (ROOT / "docs" / f"{name}.md").read_text()
    assert text == GENERATED[name](), f"python -m docs.reference {name} > docs/{name}.md"


@every(PROSE)
def test_sentences_are_short(page):
    assert not [sentence for sentence in pages.sentences(page) if len(sentence.split()) > MOST_WORDS]


@every(PROSE)
def test_words_are_plain(page):
    assert not [sentence for sentence in pages.sentences(page) if BANNED.search(sentence)]


@every(PROSE)
def test_every_field_that_is_named_is_there(page):
    groups = "|".join(f.name for f in dataclasses.fields(Config) if dataclasses.is_dataclass(getattr(Config(), f.name)))
    named = re.findall(rf"(?<![\w./])(?:--)?((?:{groups})\.[\w-]+)(?![\w.(/])", page.read_text())
    known = settings_of(Config)
    fields = {re.sub(r"\.no_", ".", name.replace("-", "_")) for name in named}
    assert not {field for field in fields if field not in known and not field.endswith((".py", ".md"))}


def test_every_page_is_in_the_sites_navigation():
    told = (ROOT / "mkdocs.yml").read_text()
    assert not [page.name for page in (ROOT / "docs").glob("*.md") if page.name not in told]
