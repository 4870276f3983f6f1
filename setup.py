"""Packaging of sfactory. ``envs/`` ships as ``sfactory.envs``."""

from pathlib import Path

from setuptools import find_packages, setup

ENVIRONMENTS = {
    "atari": ["ale-py>=0.11", "opencv-python-headless>=4.8"],
    "vizdoom": ["vizdoom>=1.3"],
    "mujoco": ["mujoco>=3.1"],
    "box2d": ["box2d>=2.3.10", "pygame>=2.5"],
    "minigrid": ["minigrid>=3.0"],
    "multiagent": ["pettingzoo>=1.25"],
    "envpool": ["envpool>=1.0"],
}
VIDEO = ["imageio[ffmpeg]>=2.34"]
TOOLS = ["pytest>=8", "pytest-timeout>=2.3", "hypothesis>=6.100", "matplotlib>=3.8", "ruff>=0.8"]

setup(
    name="sfactory",
    version="0.1.0",
    description="The fastest way to train a reinforcement-learning agent on one workstation",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    python_requires=">=3.11",
    packages=[
        *find_packages(include=["sfactory", "sfactory.*"]),
        *(f"sfactory.{p}" for p in find_packages(include=["envs", "envs.*"])),
    ],
    package_dir={"sfactory.envs": "envs"},
    package_data={"sfactory": ["py.typed"]},
    install_requires=[
        "torch>=2.8",
        "numpy>=2.0",
        "gymnasium>=1.1",
        "faster-fifo>=1.5",
        "numba>=0.61",
        "cloudpickle>=3.0",
        "psutil>=5.9",
        "pyyaml>=6.0",
        "rich>=13.7",
        "safetensors>=0.4.5",
        "tensorboard>=2.16",
        "tyro>=0.9",
    ],
    extras_require={
        **ENVIRONMENTS,
        "video": VIDEO,
        "all": [package for packages in ENVIRONMENTS.values() for package in packages] + VIDEO,
        "dev": [package for packages in ENVIRONMENTS.values() for package in packages] + VIDEO + TOOLS,
    },
)
