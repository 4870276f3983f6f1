"""What happens when a resumed run's config differs from the saved one: each field follows the rule that it declares.

``python -m sfactory.runs.resume_rules`` prints docs/resume.md, the table of these rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sfactory.config import Config, alike, flattened
from sfactory.config.declaring import Rule, settings_of
from sfactory.config.env_source import EnvSource
from sfactory.envs.interface import EnvSpec
from sfactory.errors import ConfigError
from sfactory.runs.space_codec import space_differences

RULES: dict[str, Rule] = {name: declared.resume for name, declared in settings_of(Config).items()}
"""The rule for every field of :class:`Config`, by dotted name, as the field declares it."""

_INTRODUCTION = """# Resuming with another configuration

The same command again resumes a run. Every field that differs from the saved one (`config.yaml` in the run folder)
follows its rule:

- **refused**: exit status 2, nothing is changed. The saved weights, or what was learned with them, would not fit or
  would mean something else. Ask for the saved value, start anew with `--overwrite`, or name another folder.
- **warned**: the run goes on and says so. It learns in another way from here on, so its curve is not that of one
  configuration.
- **safe**: the run goes on as it would have.

The environment itself is compared, too, as far as `spaces.json` in the run folder tells it. **Refused** are other
spaces, an environment of another class, other values that a callable carries (in a closure, a partial, a default, or
read from its module), and another lambda. **Warned** of is edited code of a class or of a function that makes
environments.

All refused fields are named at once. This file is printed by `python -m sfactory.runs.resume_rules`.

| field | rule | why |
|---|---|---|
"""


def check_resume(path: Path, saved: Mapping[str, Any], asked: Mapping[str, Any]) -> list[str]:
    """Compare the saved config of a run with the one that is asked for.

    Args:
        path: The run folder.
        saved, asked: Configs as nested plain values.

    Returns:
        Warnings, where the rules want them.

    Raises:
        ConfigError: With every field that must not change.
    """
    refused, changes = [], []
    for field, (old, new) in _differences(saved, asked).items():
        verdict, why = RULES[field]
        if verdict == "refused":
            refused.append(f"  {field}: {old} -> {new} ({why})")
        elif verdict == "warned":
            changes.append(f"{field}: {old} -> {new}: {why}")
    if refused:
        raise ConfigError(
            f"{path} holds a run that cannot continue with other settings (saved -> asked); ask for the saved ones, "
            "start anew with --overwrite, or name another folder with --run:",
            *refused,
        )
    return [f"the run in {path} continues with a changed setting: {change}" for change in changes]


def check_environment(path: Path, saved: EnvSpec, now: EnvSpec) -> list[str]:
    """Compare a run's environment with the one with which it was begun.

    Refused is another task: other spaces, another class, other values that a callable carries (as other env_kwargs
    are), and another lambda, whose code is hardly more than the arguments that it passes. The code of a function or a
    class may be edited: whoever mends a bug wants to go on, and whoever makes another game of it is warned. A callable
    that is otherwise the same and makes an environment of another class may choose among several, and is warned of,
    too.

    Args:
        path: The run folder.

    Returns:
        Warnings, where it may be another task.

    Raises:
        ConfigError: With everything that differs.
    """
    spaces = [f"{what} space: {old} -> {new}" for what, (old, new) in space_differences(saved, now).items()]
    refused: list[str] = []
    noticed: list[str] = []
    if saved.source is not None and now.source is not None:
        refused, noticed = _source_differences(saved.source, now.source)
    remedy = "name another folder with run= (--run), or start anew with overwrite (--overwrite)"
    if spaces or refused:
        exception = (
            ""
            if spaces
            else ". If it is the same task for all that, remove spaces.json, which tells them apart, from the folder"
        )
        problem = f"{path} holds a run of another environment (saved -> now); {remedy}{exception}:"
        raise ConfigError(problem, *(f"  {difference}" for difference in (*spaces, *refused)))
    if not noticed:
        return []
    return [
        f"the environment of the run in {path} has changed since (saved -> now), and the run goes on with it; if it is "
        f"another task, {remedy}: {'; '.join(noticed)}"
    ]


def _source_differences(saved: EnvSource, now: EnvSource) -> tuple[list[str], list[str]]:
    """Differences that make it another environment, and differences that may not."""
    made = [f"what is made: {saved.made} -> {now.made}"] if saved.made != now.made else []
    same_python = saved.code.partition(" ")[0] == now.code.partition(" ")[0]  # else bytecode tells nothing
    edited = ["the code of what makes it has changed"] if same_python and saved.code != now.code else []
    names = (
        saved.values.keys() & now.values.keys() if saved.code != now.code else saved.values.keys() | now.values.keys()
    )
    pairs = {name: (saved.values.get(name, "none"), now.values.get(name, "none")) for name in sorted(names)}
    values = [f"{name}: {old} -> {new}" for name, (old, new) in pairs.items() if old != new]
    if made and (edited or saved.values != now.values or not now.code):
        return [*made, *values], []
    if edited and (saved.anonymous or now.anonymous):
        return [*values, "the code of its lambda has changed"], []
    return values, [*made, *edited]


def _differences(saved: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The saved and the asked value of each field that both configs have and in which they differ, by dotted name."""
    old, new = flattened(saved), flattened(asked)
    return {name: (old[name], new[name]) for name in sorted(old.keys() & new.keys()) if not alike(old[name], new[name])}


def markdown() -> str:
    """The text of docs/resume.md."""
    return _INTRODUCTION + "".join(f"| `{field}` | {rule.verdict} | {rule.why} |\n" for field, rule in RULES.items())


if __name__ == "__main__":
    print(markdown(), end="")
