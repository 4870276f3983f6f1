"""What a user's encoder, core or model must be, checked before anything starts."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sfactory.errors import ConfigError
from sfactory.spaces import Leaf, ObservationSpec

_ROWS = 2


def construct(make: Callable[..., Any], role: str, /, *args: Any, **kwargs: Any) -> nn.Module:
    """Call a user's factory.

    Raises:
        ConfigError: If it raises or makes something that is not a module.
    """
    try:
        made = make(*args, **kwargs)
    except TypeError as error:
        raise ConfigError(
            f"{role} could not be made with the arguments {args} and model.kwargs {kwargs}: {error}"
        ) from error
    except Exception as error:
        trace = "".join(traceback.format_exception(error)).rstrip()
        raise ConfigError(f"{role} could not be made: {type(error).__name__}: {error}\n{trace}") from error
    if not isinstance(made, nn.Module):
        raise ConfigError(f"{role} made a {type(made).__name__}; it must make a torch.nn.Module")
    return made


def checked_encoder(encoder: nn.Module, role: str, leaf: Leaf) -> nn.Module:
    """The encoder, if it has `out_features` and maps two observations to ``[2, out_features]``.

    Raises:
        ConfigError: If not.
    """
    _require(encoder, role, out_features=int)
    features = _call(role, encoder, _zeros(leaf))
    _require_shape(
        role, f"two observations {leaf.name} {leaf.shape}", features, (_ROWS, encoder.out_features), "(2, out_features)"
    )
    return encoder


def checked_core(core: nn.Module, role: str, in_features: int) -> nn.Module:
    """The core, if it has `out_features`, `state_size` and `unroll`, and one step gives an output and a state of these
    sizes.

    Raises:
        ConfigError: If not.
    """
    _require(core, role, out_features=int, state_size=int, unroll=Callable)
    answer = _call(role, core, torch.zeros(_ROWS, in_features), torch.zeros(_ROWS, core.state_size))
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise ConfigError(f"{role} returned a {type(answer).__name__} from forward; it must return (output, state)")
    _require_shape(role, "two rows", answer[0], (_ROWS, core.out_features), "(2, out_features)")
    _require_shape(role, "two states", answer[1], (_ROWS, core.state_size), "(2, state_size)")
    return core


def checked_model(model: nn.Module, role: str, observation: ObservationSpec, width: int) -> nn.Module:
    """The model, if it has `state_size` and `unroll` and its forward gives policy parameters, a value and a state for
    each row.

    Raises:
        ConfigError: If not.
    """
    _require(model, role, state_size=int, unroll=Callable)
    state = torch.zeros(_ROWS, model.state_size) if model.state_size else None
    answer = _call(role, model, tuple(map(_zeros, observation.leaves)), state)
    if not isinstance(answer, tuple) or len(answer) != 3:
        raise ConfigError(
            f"{role} returned a {type(answer).__name__} from forward; it must return (params, value, state)"
        )
    _require_shape(role, "two observations", answer[0], (_ROWS, width), "(2, the width of the distribution)")
    _require_shape(role, "two observations", answer[1], (_ROWS,), "(2,) values")
    if state is not None:
        _require_shape(role, "two states", answer[2], (_ROWS, model.state_size), "(2, state_size)")
    return model


def _require(module: nn.Module, role: str, **attributes: Any) -> None:
    for name, kind in attributes.items():
        value = getattr(module, name, None)
        if not isinstance(value, kind):
            wanted = "an integer" if kind is int else "a method"
            raise ConfigError(
                f"{role}: {type(module).__name__}.{name} is {value!r}; it must be {wanted} (see sfactory.model)"
            )


def _call(role: str, module: nn.Module, *inputs: Any) -> Any:
    try:
        with torch.no_grad():
            return module(*inputs)
    except Exception as error:
        raise ConfigError(
            f"{role} failed on a batch of two zero observations: {type(error).__name__}: {error}"
        ) from error


def _require_shape(role: str, given: str, result: Any, shape: tuple[int, ...], meaning: str) -> None:
    got = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
    if got != shape:
        raise ConfigError(f"{role} turned {given} into {got}; it must be {meaning} = {shape}")


def _zeros(leaf: Leaf) -> Tensor:
    return torch.from_numpy(np.zeros((_ROWS, *leaf.shape), leaf.dtype))
