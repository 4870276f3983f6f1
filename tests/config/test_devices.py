"""Which precision a device gets by default, and how many cores a run has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cgroup_folders import use_cgroups

from sfactory.config import devices


@pytest.mark.parametrize(
    ("capability", "tiles", "vectors", "amd", "faster"),
    [
        ("AVX2", False, False, False, False),
        ("AVX2", True, True, True, False),  # held to AVX2
        ("AVX512", False, False, True, False),
        ("AVX512", False, True, True, True),
        ("AVX512", False, True, False, False),  # an Intel processor without AMX multiplies no faster in it
        ("AVX512", True, True, False, True),
    ],
)
def test_bfloat16_is_taken_where_it_is_faster(monkeypatch, capability, tiles, vectors, amd, faster):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: tiles)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: vectors)
    monkeypatch.setattr(devices, "_is_amd", lambda: amd)
    assert devices.computes_bfloat16(torch.device("cpu")) == faster


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("0::/", {}, 8),
        ("0::/", {"cpu.max": "max 100000"}, 8),
        ("0::/", {"cpu.max": "1600000 100000"}, 8),
        ("0::/", {"cpu.max": "400000 100000"}, 4),
        ("0::/", {"cpu.max": "50000 100000"}, 1),
        ("0::/user/job", {"user/job/cpu.max": "250000 100000", "user/cpu.max": "450000 100000"}, 3),
        ("0::/user/job", {"user/job/cpu.max": "max 100000", "user/cpu.max": "150000 100000"}, 2),
        ("0::/not/mounted/in/this/container", {"cpu.max": "200000 100000"}, 2),
        ("3:cpu,cpuacct:/job", {"cpu/job/cpu.cfs_quota_us": 200000, "cpu/job/cpu.cfs_period_us": 100000}, 2),
        ("3:cpu,cpuacct:/job", {"cpu/job/cpu.cfs_quota_us": -1, "cpu/job/cpu.cfs_period_us": 100000}, 8),
        ("3:cpuset:/job", {"cpu/job/cpu.cfs_quota_us": 200000, "cpu/job/cpu.cfs_period_us": 100000}, 8),
    ],
)
def test_a_container_has_as_many_cores_as_fill_its_time(
    own: str, files: dict[str, object], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(devices.os, "sched_getaffinity", lambda process: set(range(8)))
    use_cgroups(monkeypatch, tmp_path, own, files)
    assert devices.cores() == expected
