"""Weights that are cast once for each version of a policy."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from test_graphed_engine import CORES, answers_of, make_engines, publish_random
from torch import Tensor, nn
from torch.func import functional_call

from sfactory.engines.casts import CastWeights
from sfactory.model.layers import Dense, PixelConv
from sfactory.model.precision import full_precision, mixed_precision

BFLOAT16 = torch.bfloat16


def casts_of(model: nn.Module, x: Tensor, dtype: torch.dtype | None = BFLOAT16) -> tuple[CastWeights, list[Tensor]]:
    """The copies of a model's weights, and its answers with them."""

    def answer(copies: Mapping[str, Tensor]) -> list[Tensor]:
        with torch.inference_mode(), mixed_precision("cpu", dtype):
            return [functional_call(model, copies, (x,))]

    casts = CastWeights(model, dtype, answer, 1e-2)
    return casts, answer(casts.copies)


class Headed(nn.Module):
    """A layer under autocast and one outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Dense(6, 8), Dense(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        with full_precision(x.device):
            return self.head(x.float())


class Tied(nn.Module):
    """A layer whose weights are used once more, in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        with full_precision(x.device):
            return F.linear(x.float(), self.layer.weight)


def test_what_autocast_casts_is_kept_and_nothing_else() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 6)
    casts, (found,) = casts_of(model := Headed(), x)
    assert {name: copy.dtype for name, copy in casts.copies.items()} == dict.fromkeys(
        ("body.weight", "body.bias"), BFLOAT16
    )
    with torch.inference_mode(), mixed_precision("cpu", BFLOAT16):
        assert torch.equal(found, model(x))
    assert not casts_of(model, x, None)[0].copies


def test_convolutions_are_kept_in_the_order_of_images() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))
    casts, _ = casts_of(model, torch.randn(2, 3, 6, 6).to(memory_format=torch.channels_last))
    assert list(casts.copies) == ["0.weight", "0.bias", "3.weight", "3.bias"]
    assert casts.copies["0.weight"].is_contiguous(memory_format=torch.channels_last)


def test_weights_that_have_another_use_stay_as_they_are() -> None:
    assert not casts_of(Tied(), torch.randn(5, 6))[0].copies


@pytest.mark.parametrize("core", CORES)
def test_the_engines_copies_follow_each_version_where_they_lie(core: str) -> None:
    arena, published, _, engine = make_engines(core, BFLOAT16)
    requests = [(group, group, 0, False) for group in range(3)]
    publish_random(published, 1)
    engine.refresh(published)
    first = answers_of(engine, arena, requests)
    assert engine._casts is not None
    copies, weights = engine._casts.copies, dict(engine._model.named_parameters())
    modules = dict(engine._model.named_modules())
    kinds = {type(modules[name.rpartition(".")[0]]) for name in copies}
    assert Dense in kinds and PixelConv not in kinds
    places = {name: copy.data_ptr() for name, copy in copies.items()}
    publish_random(published, 2)
    engine.refresh(published)
    second = answers_of(engine, arena, requests)
    assert any((a != b).any() for a, b in zip(first, second, strict=True))
    assert places == {name: copy.data_ptr() for name, copy in copies.items()}
    for name, copy in copies.items():
        assert torch.equal(copy, weights[name].to(BFLOAT16)), name
