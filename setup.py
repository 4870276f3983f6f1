"""What pyproject.toml cannot say: ``envs/`` ships as ``sfactory.envs``. All else is there.

The license is here because setuptools before 77, which Python 3.11's venv brings, refuses an SPDX expression there, and
later ones will refuse what came before it.
"""

from setuptools import find_packages, setup

setup(
    license="MIT",
    packages=[
        *find_packages(include=["sfactory", "sfactory.*"]),
        *(f"sfactory.{name}" for name in find_packages(include=["envs", "envs.*"])),
    ],
    package_dir={"sfactory.envs": "envs"},
    package_data={"sfactory": ["py.typed"]},
)
