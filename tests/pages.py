"""Blocks of code in the pages of documentation, and the commands in them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

TOOLS = (".venv/bin/python", ".venv/bin/pip", ".venv/bin/pre-commit", "kill", ".ci/run", "perf/gpu.sh")
COMMANDS = ("sfactory", "python", "make", "pip", *TOOLS)
"""First words by which an indented block is known to be shell."""
_FENCED = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?:(?<=\n\n)|\A)((?: {4}[^\n]*\n|\n(?= {4}))+)")


MINE = """
import gymnasium


class MyEnv(gymnasium.wrappers.TransformReward):
    def __init__(self, size=1):
        super().__init__(gymnasium.make("CartPole-v1"), lambda reward: reward / size)


gymnasium.register("MyEnv-v0", MyEnv)
"""
"""A module of the reader's own, as the pages name it."""


class Block(NamedTuple):
    """A block of code.

    Attributes:
        language: sh, python, yaml, ...; that of an indented block follows from its first word.
    """

    language: str
    text: str


def blocks(page: Path) -> list[Block]:
    """The blocks of a page, fenced or indented by four spaces, in their order."""
    text = page.read_text()
    fenced = [(match.start(), Block(match[1], match[2])) for match in _FENCED.finditer(text)]
    plain = _FENCED.sub(lambda match: re.sub(r"[^\n]", "x", match[0]), text)
    indented = [(match.start(), _indented(match[1])) for match in _INDENTED.finditer(plain)]
    return [block for _, block in sorted(fenced + indented)]


def _indented(lines: str) -> Block:
    text = "".join(line[4:] or "\n" for line in lines.splitlines(keepends=True))
    return Block("sh" if text.split()[0] in COMMANDS else "python", text)


def sentences(page: Path) -> list[str]:
    """The sentences of a page's paragraphs and lists, in which code and the targets of links are one word."""
    text = _INDENTED.sub("\n", _FENCED.sub("", page.read_text()))
    text = re.sub(r"^(\||#|```).*$", "", re.sub(r"`[^`]+`", "code", text), flags=re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)|[\[*]", "", text)
    paragraphs = re.split(r"\n\s*\n|\n(?=\s*(?:-|\d+\.) )", text)
    return [part for each in paragraphs for part in re.split(r"(?<=[.!?])\s+", " ".join(each.split())) if part]


def commands(page: Path) -> list[list[str]]:
    """The commands of a page's shell blocks as words, without comments."""
    text = "\n".join(block.text for block in blocks(page) if block.language == "sh").replace("\\\n", " ")
    lines = (part for line in text.splitlines() for part in line.split(" && "))
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def python_of(page: Path) -> str:
    """The Python blocks of a page, one after the other, with few env steps and episodes."""
    text = "\n\n".join(block.text for block in blocks(page) if block.language == "python")
    return re.sub(r"\bepisodes=\d+", "episodes=2", re.sub(r"\bsteps=[\d_]+", "steps=2048", text))


def few(words: list[str]) -> list[str]:
    """A command with few env steps, episodes and seconds, and reports in spite of that."""
    small = {"--steps": "4096", "--episodes": "2", "--seconds": "4"}
    reports = ["--log.report-every-s", "0.2"] if "--steps" in words else []
    return [small.get(flag, word) for flag, word in zip(["", *words], words, strict=False)] + reports
