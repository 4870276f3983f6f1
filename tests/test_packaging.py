"""The package installs from a wheel and from an sdist, and the files around it are sound."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_what_there_is(path: Path) -> None:
    # YAML 1.1 reads the key `on` as true.
    workflow = yaml.safe_load(path.read_text())
    assert {"name", True, "jobs", "permissions"} <= workflow.keys()
    targets = (ROOT / "Makefile").read_text()
    for job in workflow["jobs"].values():
        assert job["runs-on"] and job["steps"]
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)
            if (command := step.get("run", "")).startswith("make "):
                assert f"\n{command.removeprefix('make ')}:" in targets


def test_workflows_test_every_python_that_is_promised() -> None:
    pythons = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())["jobs"]["tests"]["strategy"]["matrix"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == f">={pythons['python'][0]}"
    listed = [text.rsplit(" ", 1)[1] for text in project["classifiers"] if "Python :: 3." in text]
    assert pythons["python"] == listed


def test_the_devcontainer_names_a_target_of_make() -> None:
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    target = container["postCreateCommand"].removeprefix("make ")
    assert f"\n{target}:" in (ROOT / "Makefile").read_text()


def test_the_dockerfile_passes_hadolint() -> None:
    hadolint = shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if hadolint is None:
        pytest.skip("needs hadolint")
    done = subprocess.run([hadolint, str(ROOT / "Dockerfile")], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_the_image_is_built_from_files_that_are_let_in() -> None:
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copies = [line.split()[1:-1] for line in (ROOT / "Dockerfile").read_text().splitlines() if line.startswith("COPY")]
    copied = {name for names in copies if not names[0].startswith("--from") for name in names}
    assert copied == let_in
    assert all((ROOT / name).exists() for name in copied)


def test_an_sdist_has_the_tests_with_their_helpers_and_what_make_wants(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    run(sys.executable, "setup.py", "-q", "egg_info", "--egg-base", tmp_path, cwd=ROOT)
    listed = set((tmp_path / "sfactory.egg-info" / "SOURCES.txt").read_text().splitlines())
    folders = ("sfactory", "envs", "tests", "examples", "docs", "perf")
    wanted = {str(path.relative_to(ROOT)) for name in folders for path in (ROOT / name).rglob("*.py")}
    wanted |= {"Makefile", "constraints.txt", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "mkdocs.yml", "perf/gpu.sh"}
    measured = ("perf/data/", "perf/out/")
    assert {name for name in wanted if not name.startswith(measured)} <= listed
    assert not [name for name in listed if name.startswith(measured)]


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """What a command prints; it sees nothing of the checkout and its environment."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=kept | environment, capture_output=True, text=True, timeout=1500
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_wheel_and_sdist_install_in_an_empty_environment(tmp_path: Path) -> None:
    """The wheel with all its dependencies, used from another folder; then the sdist in its place; then by uv."""
    dist = ROOT / "dist" if (ROOT / "dist").exists() else tmp_path / "dist"
    if not dist.exists():  # the wheel is built from the sdist
        run(sys.executable, "-m", "build", "--outdir", dist, ROOT, cwd=tmp_path)
    [wheel], [sdist] = dist.glob("*.whl"), dist.glob("*.tar.gz")
    modules = {str(path.relative_to(ROOT)) for name in ("sfactory", "envs") for path in (ROOT / name).rglob("*.py")}
    with zipfile.ZipFile(wheel) as archive:
        names = {name.replace("sfactory/envs/", "envs/") for name in archive.namelist()}
    assert modules <= names and "sfactory/py.typed" in names
    with tarfile.open(sdist) as archive:
        assert modules <= {name.partition("/")[2] for name in archive.getnames()}

    run(sys.executable, "-m", "venv", tmp_path / "empty", cwd=tmp_path)
    bin = tmp_path / "empty" / "bin"
    install = (bin / "python", "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt")
    run(*install, wheel, cwd=tmp_path)
    for artifact in (None, sdist):
        if artifact is not None:
            run(*install, "--no-deps", "--force-reinstall", artifact, cwd=tmp_path)
        try_out(bin, tmp_path / ("wheel" if artifact is None else "sdist"))
    if (uv := Path(sys.executable).parent / "uv").exists():
        places = {"UV_TOOL_DIR": str(tmp_path / "tools"), "UV_TOOL_BIN_DIR": str(tmp_path / "bin")}
        run(
            uv, "tool", "install", "--quiet", "-c", ROOT / "constraints.txt", "--python", sys.executable, wheel,
            cwd=tmp_path, **places,
        )  # fmt: skip
        assert "usage: sfactory" in run(tmp_path / "bin" / "sfactory", "--help", cwd=tmp_path)


def try_out(bin: Path, folder: Path) -> None:
    """Train, evaluate and export in a folder."""
    folder.mkdir()
    where = run(bin / "python", "-c", "import sfactory.envs as e; print(e.__file__)", cwd=folder)
    assert where.startswith(str(bin.parent))
    told = run(bin / "python", "-c", "from sfactory.errors import installing; print(installing('plot'))", cwd=folder)
    assert told.strip() == 'pip install "sfactory[plot]"'
    small = ("--steps", "2048", "--run", "run", "--workers", "1", "--log.display", "plain")
    run(bin / "sfactory", "train", "--env", "CartPole-v1", *small, cwd=folder)
    result = json.loads(run(bin / "sfactory", "eval", "--run", "run", "--episodes", "2", "--json", cwd=folder))
    assert result["episodes"] == 2
    run(bin / "sfactory", "export", "run", "--format", "torch", cwd=folder)
    run(bin / "python", "-m", "sfactory.status", "--run", "run", cwd=folder)
