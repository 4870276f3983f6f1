"""Compiled passes over what groups of environments write."""

from pathlib import Path

from sfactory.files import forget_stale_kernels

forget_stale_kernels(Path(__file__).parent)
