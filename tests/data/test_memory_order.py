"""Fences and barriers."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from sfactory.data import memory_order


def test_a_fence_is_the_processor_s_or_else_a_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    fences: list[int] = []
    monkeypatch.setattr(memory_order.ctypes, "CDLL", lambda _: SimpleNamespace(atomic_thread_fence=fences.append))
    memory_order.make_fence()()
    assert fences == [5], "sequentially consistent"

    def missing(name: str) -> None:
        raise OSError(f"no {name}")

    lock = MagicMock()
    monkeypatch.setattr(memory_order.ctypes, "CDLL", missing)
    monkeypatch.setattr(memory_order.threading, "Lock", lambda: lock)
    memory_order.make_fence()()
    assert [call[0] for call in lock.method_calls] == ["acquire", "release"] and fences == [5]


def test_a_barrier_costs_something_only_where_stores_or_loads_are_reordered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_order, "fence", fence := MagicMock())
    memory_order.make_barrier("x86_64")()
    fence.assert_not_called()
    memory_order.make_barrier("aarch64")()
    fence.assert_called_once_with()
