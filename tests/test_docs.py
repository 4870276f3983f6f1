"""The pages name files, modules and fields that there are."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from gymnasium import spaces

from sfactory.data.arena import segment_fields
from sfactory.envs.interface import EnvSpec
from sfactory.spaces import ActionSpec, ObservationSpec

ROOT = Path(__file__).parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
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
