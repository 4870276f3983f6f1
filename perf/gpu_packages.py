"""What perf/gpu.sh needs beside torch and NumPy, on machines that have no network, no pip and no virtual environments.

    python perf/gpu_packages.py gather wheels [base atari ...]     # with a network: wheels for Linux and Python 3.12
    python perf/gpu_packages.py install SITE [--wheels wheels]     # on the machine with the GPU

`install` tries every module and puts what is missing, or cannot be imported, into the folder SITE; that comes first on
PYTHONPATH and is removed afterwards, so nothing of the machine changes. Wheels are unpacked as they are; without a
folder of wheels pip fetches them. Packages come without what they ask for, so that torch and NumPy stay as they are:
the table names all that they need. This file needs Python alone.
"""

from __future__ import annotations

import argparse
import importlib
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

PACKAGES = {
    "base": {
        "typing_extensions": ["typing-extensions"],
        "psutil": ["psutil"],
        "yaml": ["pyyaml"],
        "cloudpickle": ["cloudpickle"],
        "mdurl": ["mdurl"],
        "markdown_it": ["markdown-it-py"],
        "pygments": ["pygments"],
        "rich": ["rich"],
        "safetensors": ["safetensors"],
        "faster_fifo": ["faster-fifo"],
        "farama_notifications": ["farama-notifications"],
        "gymnasium": ["gymnasium"],
        "docstring_parser": ["docstring-parser"],
        "typeguard": ["typeguard"],
        "tyro": ["tyro"],
        "llvmlite": ["llvmlite"],
        "numba": ["numba"],
    },
    "atari": {"ale_py": ["ale-py"]},
    "mujoco": {
        "glfw": ["glfw"],
        "OpenGL": ["pyopengl"],
        "mujoco": ["mujoco", "mujoco-core"],
        "packaging": ["packaging"],
        "imageio": ["imageio"],
    },
    "vizdoom": {"pygame": ["pygame-ce"], "vizdoom": ["vizdoom"]},
}
"""By group, the modules in the order in which they need each other, and the packages that they are in."""
USUAL = ("faster-fifo", "farama-notifications", "gymnasium", "docstring-parser", "typeguard", "tyro")
"""What of the base group a machine for training does not have; the rest is gathered by the group `all`."""
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014", "manylinux1")


def gather(folder: Path, groups: list[str], python: str, machine: str) -> int:
    """Download wheels; gives 1 if one is missing."""
    wanted = [*USUAL]
    for group in groups:
        chosen = PACKAGES if group == "all" else {group: PACKAGES[group]} if group != "base" else {}
        wanted += [name for modules in chosen.values() for packages in modules.values() for name in packages]
    tags = [word for name in PLATFORMS for word in ("--platform", f"{name}_{machine}")]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", folder]
    command += ["--python-version", python, "--implementation", "cp", *tags]
    lacking = []
    for name in dict.fromkeys(wanted):
        texts = [_metadata(path) for path in folder.glob("*.whl")]
        if subprocess.run([*command, pinned(name, texts)]).returncode:
            lacking.append(name)
    size = sum(path.stat().st_size for path in folder.glob("*.whl"))
    print(f"{len(list(folder.glob('*.whl')))} wheels of {size / 2**20:.1f} MiB in {folder}")
    if lacking:
        print(f"no wheel for Python {python} on {machine}: {', '.join(lacking)}")
    return bool(lacking)


def _metadata(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as files:
        name = next(name for name in files.namelist() if name.endswith(".dist-info/METADATA"))
        return files.read(name).decode()


def pinned(package: str, texts: list[str]) -> str:
    """A package in the one version that others ask for, whose metadata are given, if one of them does."""
    asked = re.compile(rf"^Requires-Dist: {package} *\(?(==[\w.]+)", re.MULTILINE | re.IGNORECASE)
    return next((package + found[1] for text in texts if (found := asked.search(text))), package)


def install(site: Path, wheels: Path | None) -> list[str]:
    """Put what is missing into a folder, which is on the path already; the modules that are still missing."""
    left = []
    for modules in PACKAGES.values():
        for module, packages in modules.items():
            if importable(module) is None:
                continue
            for package in packages:
                unpack(site, wheels, package) if wheels else fetch(site, package)
            if (reason := importable(module)) is not None:
                left.append(f"{module}: {reason}")
    return left


def importable(module: str) -> str | None:
    """Why a module cannot be imported, or None."""
    importlib.invalidate_caches()
    try:
        importlib.import_module(module)
    except Exception as error:  # a compiled module may refuse the NumPy that is there with any error
        for name in [name for name in sys.modules if name.split(".")[0] == module]:
            del sys.modules[name]
        return f"{type(error).__name__}: {error}"
    return None


def unpack(site: Path, wheels: Path, package: str) -> None:
    """Unpack the wheel of a package that suits this Python, if there is one."""
    for path in sorted(wheels.glob(f"{package.replace('-', '_')}-*.whl")):
        if suits(path.name):
            with zipfile.ZipFile(path) as wheel:
                wheel.extractall(site)
            for part in ("purelib", "platlib"):
                for folder in site.glob(f"{package.replace('-', '_')}-*.data/{part}"):
                    shutil.copytree(folder, site, dirs_exist_ok=True)
            return


def suits(wheel: str) -> bool:
    """Whether a wheel, by its name, is for this Python and machine."""
    pythons, abi, system = wheel.removesuffix(".whl").split("-")[-3:]
    own = f"cp3{sys.version_info.minor}"
    right = "py3" in pythons.split(".") or own in pythons.split(".") or abi == "abi3"
    return right and (system == "any" or platform.machine() in system)


def fetch(site: Path, package: str) -> None:
    """Install a package by pip, where there is one and a network."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    # A package in two parts, as mujoco is, has both in one folder, which pip else leaves as the first part made it.
    command += ["--retries", "1", "--timeout", "10", "--upgrade", "--target", site]
    texts = [path.read_text() for path in site.glob("*.dist-info/METADATA")]
    subprocess.run([*command, pinned(package, texts)], capture_output=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("gather")
    command.add_argument("folder", type=Path)
    command.add_argument("groups", nargs="*", help=f"{', '.join(PACKAGES)} or all; unset: all groups' usual packages")
    command.add_argument("--python", default="3.12")
    command.add_argument("--machine", default="x86_64")
    command = commands.add_parser("install")
    command.add_argument("site", type=Path)
    command.add_argument("--wheels", type=Path)
    args = parser.parse_args()
    if args.command == "gather":
        args.folder.mkdir(parents=True, exist_ok=True)
        return gather(args.folder, args.groups or list(PACKAGES), args.python, args.machine)
    if args.wheels and not args.wheels.is_dir():
        print(f"there is no folder {args.wheels}; make gpu-wheels makes one")
        return 2
    for reason in install(args.site, args.wheels):
        print(f"not there: {reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
