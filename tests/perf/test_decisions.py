"""docs/decisions: each is a page, is in the index, and links to what exists."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "decisions"
DECISIONS = sorted(FOLDER.glob("[0-9]*.md"))


def test_the_index_has_each_decision_once():
    linked = re.findall(r"^- \[\d+\]\((.+?)\)", (FOLDER / "README.md").read_text(), re.MULTILINE)
    assert linked == [path.name for path in DECISIONS]


def test_a_decision_is_a_page():
    assert [path.name for path in DECISIONS if path.read_text().count("\n") > 60] == []


def test_links_lead_to_files():
    for path in FOLDER.glob("*.md"):
        for target in re.findall(r"\]\((?!http)(.+?)\)", path.read_text()):
            assert (FOLDER / target).exists(), (path.name, target)
