"""The house stays as it is: which part may import which, and how large its pieces are."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
GROUND = {"errors", "files"}
"""What every part may import."""
ALLOWED = {
    "spaces": set(),
    "config": set(),
    "gae": set(),
    "vtrace": {"gae"},
    "envs": {"config", "spaces"},
    "distributions": {"config", "spaces"},
    "model": {"config", "data", "spaces", "distributions"},
    "data": {"config", "envs", "spaces"},
    "telemetry": {"config", "envs"},
    "runs": {"config", "envs", "spaces"},
    "losses": {"config", "data"},
    "objective": {"config", "data", "distributions", "gae", "losses", "model", "vtrace"},
    "update": {"config", "data", "losses", "model"},
    "kernels": {"config", "data", "distributions", "losses", "model", "objective", "spaces", "update"},
    "engines": {"data", "kernels", "model", "telemetry"},
    "rollout": {"data", "envs", "telemetry"},
    "device_rollout": {"config", "data", "envs", "model", "spaces", "telemetry"},
    "inference": {"data", "engines", "kernels", "model", "telemetry"},
    "learner": {"config", "data", "kernels", "losses", "model", "objective", "telemetry", "update"},
    "policy": {"config", "envs", "model", "runs", "spaces"},
    "runtime": {
        "config", "data", "device_rollout", "distributions", "envs", "inference", "kernels", "learner", "model",
        "objective", "player", "policy", "rollout", "runs", "telemetry",
    },
    "profiling": {"config", "data", "envs", "kernels", "learner", "model", "runtime", "spaces", "telemetry"},
    "train": {"config", "runtime"},
    "player": {"config", "envs", "policy", "runs"},
    "eval": {"config", "player", "runs", "runtime", "telemetry"},
    "profile": {"config", "profiling", "runtime", "telemetry"},
    "status": {"config", "runs", "telemetry"},
    "commands": {
        "config", "envs", "eval", "model", "player", "policy", "profiling", "runs", "runtime", "spaces", "status",
        "telemetry",
    },
}  # fmt: skip
"""For each file and folder below sfactory/ (envs/ is sfactory.envs) what it may import of the others."""
LONGEST_FUNCTION = 60
MOST_ARGUMENTS = 7
"""Of a constructor, self among them."""


def sources() -> Iterator[tuple[str, Path]]:
    """Names of modules, and their files."""
    for folder, package in (("sfactory", ["sfactory"]), ("envs", ["sfactory", "envs"])):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = [*package, *path.relative_to(ROOT / folder).with_suffix("").parts]
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def part_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imported(path: Path) -> Iterator[str]:
    """Names of sfactory's modules that a file imports, and of what it imports from them."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "sfactory" and "." in name)


def test_every_part_imports_only_what_it_may() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for module, path in sources()
        if (part := part_of(module))
        for name in imported(path)
        if (other := part_of(name)) != part and other not in ALLOWED[part] | GROUND and part not in GROUND
    ]
    assert not wrong


def test_every_import_that_is_allowed_is_there() -> None:
    edges = {(part_of(module), part_of(name)) for module, path in sources() for name in imported(path)}
    assert not [(part, other) for part, others in ALLOWED.items() for other in others if (part, other) not in edges]


def test_the_ground_floor_imports_nothing() -> None:
    assert not [name for module, path in sources() if part_of(module) in GROUND for name in imported(path)]


def test_there_is_no_circle_and_there_are_few_levels() -> None:
    levels: dict[str, int] = dict.fromkeys(GROUND, 1)
    waiting = dict(ALLOWED)
    while waiting:
        ready = [part for part, others in waiting.items() if others <= levels.keys()]
        assert ready, f"a circle among {sorted(waiting)}"
        for part in ready:
            levels[part] = 1 + max((levels[other] for other in waiting.pop(part) | GROUND), default=0)
    assert max(levels.values()) <= 12


def test_the_top_level_is_small() -> None:
    top = {p.stem for p in (ROOT / "sfactory").iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    assert top - {"__init__"} == (ALLOWED.keys() | GROUND) - {"envs"}
    assert len(top) <= 30


def test_the_three_workers_know_nothing_of_each_other() -> None:
    workers = {"rollout", "inference", "learner"}
    assert all(not ALLOWED[worker] & (workers | {"runtime"}) for worker in workers)


@pytest.mark.parametrize("package", ["numba", "llvmlite"])
def test_only_kernels_are_compiled(package: str) -> None:
    """What happens is plain PyTorch and NumPy; the environments' own compiled passes have their folders too."""
    places = {
        str(path.relative_to(ROOT))
        for _, path in sources()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""])
        if name.split(".")[0] == package
    }
    assert all(place.startswith(("sfactory/kernels/", "envs/kernels/", "envs/native/")) for place in places), places


def test_nothing_imports_the_insides_of_the_kernels() -> None:
    insides = tuple(name for name, _ in sources() if name.startswith("sfactory.kernels."))
    assert not [
        f"{path.relative_to(ROOT)} imports {name}"
        for module, path in sources()
        if part_of(module) != "kernels"
        for name in imported(path)
        if name.startswith(insides)
    ]


def test_what_changes_a_config_does_not_count_as_its_user() -> None:
    """`dataclasses.replace` would note what it changes as given."""
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for module, path in sources()
        if module != "sfactory.config.declaring"
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("replace", "dataclasses.replace")
        if re.search(r"\bconfig(\.\w+)?$", ast.unparse(node.args[0]))
    ]
    assert not wrong, f"use sfactory.config.changed in {wrong}"


def functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    for _, path in sources():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef):
                yield f"{path.relative_to(ROOT)}: {node.name}", node


def test_functions_are_short() -> None:
    """Without their docstrings."""
    long = []
    for name, node in functions():
        body = node.body[1:] if ast.get_docstring(node) else node.body
        if body and (node.end_lineno or 0) - body[0].lineno > LONGEST_FUNCTION:
            long.append(name)
    assert not long


def test_constructors_take_few_arguments() -> None:
    many = [name for name, node in functions() if node.name == "__init__" and len(node.args.args) > MOST_ARGUMENTS]
    assert not many
