"""Kernels: accelerators, some of them for GPUs, each of which stands for one plain callable elsewhere and gives the
same numbers.

What a run computes is written in plain PyTorch: :mod:`sfactory.model`, :mod:`sfactory.objective`,
:mod:`sfactory.losses`, :mod:`sfactory.distributions`, :mod:`sfactory.vtrace`, :mod:`sfactory.gae`,
:mod:`sfactory.update`. A :class:`Kernels` object, of which every worker has one, puts kernels in the place of such
callables, and nothing outside this package imports its insides. A kernel is taken only for exactly the built-in
callable that it stands for, and only after a small chunk has given the same numbers both ways within the kernel's
tolerance. Edited or custom code is therefore used as written. An edit that changes results only in rare cases may go
unnoticed. ``--runtime.kernels off`` takes none.
"""

from pathlib import Path

from sfactory.files import forget_stale_kernels

forget_stale_kernels(Path(__file__).parent)

from sfactory.kernels.dense_network import DenseNetwork  # noqa: E402
from sfactory.kernels.lowered import lower_weights  # noqa: E402
from sfactory.kernels.modules import scanned  # noqa: E402
from sfactory.kernels.registry import REGISTRY, Kernel  # noqa: E402
from sfactory.kernels.sampling import initialize  # noqa: E402
from sfactory.kernels.selection import Kernels  # noqa: E402

__all__ = ["REGISTRY", "DenseNetwork", "Kernel", "Kernels", "initialize", "lower_weights", "scanned"]
