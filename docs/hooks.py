"""What mkdocs calls while it builds the site: pages of the repository outside docs/ are part of it.

Pages link to each other as files of the repository, so that links work where one reads the files. Here they become
links of the site, in which docs/ is the root and README.md the first page.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "LICENSE": "LICENSE.txt",
    "perf/RESULTS.md": "perf/RESULTS.md",
    "perf/LEARNING.md": "perf/LEARNING.md",
}
"""Files of the repository that are part of the site, and their place in it."""
_LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")

_ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):<code>~?(?:[\w.]*\.)?(\w+)</code>")


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages that lie outside of docs/."""
    for source, place in OUTSIDE.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Turn links between files of the repository into links of the site."""
    here = page.file.src_uri
    return _LINK.sub(lambda link: _of_site(link, here), markdown)


def on_page_content(html: str, *, page: Any, config: Any, files: Files) -> str:
    """Leave out the roles of references in docstrings, which are written for Sphinx."""
    return _ROLE.sub(r"<code>\1</code>", html)


def _of_site(link: re.Match[str], here: str) -> str:
    """A link of the page at `here` in the site, whose target is told as a file of the repository."""
    opening, target, anchor, closing = link.groups(default="")
    if re.match(r"\w+:", target):
        return link[0]
    source = posixpath.normpath(str(PurePosixPath(_source(here)).parent / target))
    place = OUTSIDE.get(source) or source.removeprefix("docs/")
    relative = os.path.relpath(place, PurePosixPath(here).parent)
    return f"{opening}{relative}{anchor}{closing}"


def _source(here: str) -> str:
    """The file of the repository from which a page of the site is made."""
    return next((source for source, place in OUTSIDE.items() if place == here), f"docs/{here}")
