"""Which folders are which packages: ``envs/`` ships as ``sfactory.envs``. All else is in pyproject.toml."""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["sfactory", "sfactory.*"]),
        *(f"sfactory.{name}" for name in find_packages(include=["envs", "envs.*"])),
    ],
    package_dir={"sfactory.envs": "envs"},
    package_data={"sfactory": ["py.typed"]},
)
