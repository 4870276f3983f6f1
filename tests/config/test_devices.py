"""Which precision a device gets by default."""

from __future__ import annotations

import pytest
import torch

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
