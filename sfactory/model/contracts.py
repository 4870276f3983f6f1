"""What a user's encoder, core or model must be, checked before anything starts."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sfactory.errors import ConfigError
from sfactory.model.cores import Core
from sfactory.model.interface import Model
from sfactory.spaces import Leaf, ObservationSpec

_ROWS = 2
_FIRST = torch.tensor([[True, False], [False, False], [False, True]])
"""Where episodes begin in the three steps of two rows that `forward` and `unroll` are both tried with: one at the first
step, and one at the last, which goes on with a stored state before."""


def construct(make: Callable[..., Any], role: str, /, *args: Any, **kwargs: Any) -> Any:
    """Call a user's factory; gives its module in float32, in which all weights are trained.

    Raises:
        ConfigError: If it raises, makes something that is not a module, or gives that complex parameters.
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
    if names := [name for name, parameter in made.named_parameters() if parameter.is_complex()]:
        raise ConfigError(
            f"{role} has complex parameters, {', '.join(names)}, and weights are trained as real numbers; keep their "
            "real and imaginary parts, which torch.complex joins"
        )
    return made.float()


def checked_encoder(encoder: Any, role: str, leaf: Leaf) -> nn.Module:
    """The encoder, if it has `out_features` and maps two observations to ``[2, out_features]``.

    Raises:
        ConfigError: If not.
    """
    _require(encoder, role, out_features=int)
    x = _observations(leaf)
    with _trying(encoder, role, x):
        features = encoder(x)
    _require_shape(
        role, f"two observations {leaf.name} {leaf.shape}", features, (_ROWS, encoder.out_features), "(2, out_features)"
    )
    return encoder


def checked_core(core: Any, role: str, in_features: int) -> Core:
    """The core, if it has `out_features`, a positive `state_size` and `unroll`, a step gives an output and a state of
    these sizes, and `unroll` the outputs of `forward` step by step.

    Raises:
        ConfigError: If not.
    """
    _require(core, role, out_features=int, state_size=int, unroll=Callable)
    if core.state_size < 1:
        raise ConfigError(
            f"{role}'s state_size is {core.state_size}; it must be at least 1; what keeps no state is an encoder"
        )
    x, zeros = torch.ones(_ROWS, in_features), torch.zeros(_ROWS, core.state_size)
    with _trying(core, role, x):
        answer = core(x, zeros)
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise ConfigError(f"{role} returned a {type(answer).__name__} from forward; it must return (output, state)")
    _require_shape(role, "two rows", answer[0], (_ROWS, core.out_features), "(2, out_features)")
    _require_shape(role, "two states", answer[1], (_ROWS, core.state_size), "(2, state_size)")
    inputs = torch.stack([x, -x, x])
    with _trying(core, role):
        stepped = _step_by_step(lambda t, state: core(inputs[t], state), answer[1])
    with _trying(core, f"{role}.unroll", inputs, _FIRST, answer[1]):
        outputs = core.unroll(inputs, _FIRST, answer[1])
    _require_same(role, "outputs", stepped[0], outputs)
    return core


def checked_model(model: Any, role: str, observation: ObservationSpec, width: int) -> Model:
    """The model, if it has `state_size` and `unroll`, its forward gives policy parameters, a value and a state for each
    row, and its unroll the parameters and values of forward step by step.

    Raises:
        ConfigError: If not.
    """
    _require(model, role, state_size=int, unroll=Callable)
    obs = tuple(map(_observations, observation.leaves))
    with _trying(model, role, *obs):
        answer = model(obs, torch.zeros(_ROWS, model.state_size) if model.state_size else None)
    if not isinstance(answer, tuple) or len(answer) != 3:
        raise ConfigError(
            f"{role} returned a {type(answer).__name__} from forward; it must return (params, value, state)"
        )
    _require_shape(role, "two observations", answer[0], (_ROWS, width), "(2, the width of the distribution)")
    _require_shape(role, "two observations", answer[1], (_ROWS,), "(2,) values")
    if model.state_size:
        _require_shape(role, "two states", answer[2], (_ROWS, model.state_size), "(2, state_size)")
    state = answer[2] if model.state_size else None
    inputs = tuple(torch.stack([leaf, leaf.flip(0), leaf]) for leaf in obs)
    with _trying(model, role):
        params, values = _step_by_step(lambda t, state: model(tuple(leaf[t] for leaf in inputs), state), state)
    with _trying(model, f"{role}.unroll", *inputs, _FIRST, *([] if state is None else [state])):
        unrolled_params, unrolled_values, *others = model.unroll(inputs, _FIRST, state)
    _require_same(role, "parameters", params, unrolled_params)
    _require_same(role, "values", values, unrolled_values)
    _require_auxiliary(f"{role}.unroll", others)
    return model


def _step_by_step(step: Callable[[int, Tensor | None], tuple[Any, ...]], state: Tensor | None) -> list[Tensor]:
    """What a module's forward, given a time and a state, answers before the next state, of all steps ``[3, 2, ...]``.
    The state is zeroed where an episode begins."""
    answers = []
    for t, first in enumerate(_FIRST):
        *answer, after = step(t, None if state is None else state.masked_fill(first[:, None], 0.0))
        answers.append(answer)
        state = None if state is None else after
    return [torch.stack(steps) for steps in zip(*answers, strict=True)]


def _require(module: nn.Module, role: str, **attributes: Any) -> None:
    for name, kind in attributes.items():
        value = getattr(module, name, None)
        if not isinstance(value, kind):
            wanted = "an integer" if kind is int else "a method"
            raise ConfigError(
                f"{role}: {type(module).__name__}.{name} is {value!r}; it must be {wanted} (see sfactory.model)"
            )


@contextlib.contextmanager
def _trying(module: nn.Module, role: str, *given: Tensor) -> Iterator[None]:
    """Within it a module is in evaluation mode, and whatever it raises becomes a ConfigError, as does a change of what
    it is given."""
    training, before = module.training, [tensor.clone() for tensor in given]
    module.eval()
    try:
        with torch.no_grad():
            yield
    except Exception as error:
        raise ConfigError(
            f"{role} failed on a batch of two observations, of zeros and of ones: {type(error).__name__}: {error}"
        ) from error
    finally:
        module.train(training)
    require_unchanged(role, before, given)


def require_unchanged(role: str, before: Sequence[Tensor], after: Sequence[Tensor]) -> None:
    """Raise ConfigError if what user code was given is no longer what it was: others read it, too."""
    for old, new in zip(before, after, strict=True):
        if not bool((old.eq(new) | (old.ne(old) & new.ne(new))).all()):
            raise ConfigError(
                f"{role} changes its input in place, where it is the memory of the samples themselves; write x = x - 1 "
                "instead of x -= 1, and x.exp() instead of x.exp_()"
            )


def _require_shape(role: str, given: str, result: Any, shape: tuple[int, ...], meaning: str) -> None:
    got = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
    if got != shape:
        raise ConfigError(f"{role} turned {given} into {got}; it must be {meaning} = {shape}")


def _require_auxiliary(role: str, others: list[Any]) -> None:
    """See to what `unroll` gives besides parameters and values."""
    if others and not (len(others) == 1 and isinstance(others[0], Mapping)):
        kinds = ", ".join(type(other).__name__ for other in others)
        raise ConfigError(
            f"{role} returned {kinds} besides parameters and values; a third value must be a mapping of names to "
            "tensors [T, B, ...]"
        )
    for name, tensor in (others[0] if others else {}).items():
        got = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
        if not isinstance(tensor, Tensor) or tensor.shape[:2] != _FIRST.shape:
            raise ConfigError(
                f"{role} gave {got} as {name!r} of three steps of two rows; it must be a tensor (3, 2, ...)"
            )


def _require_same(role: str, what: str, stepped: Tensor, unrolled: Any) -> None:
    """Compare what forward and unroll make of three steps, in which one episode goes on and others begin."""
    _require_shape(f"{role}.unroll", "three steps of two rows", unrolled, tuple(stepped.shape), f"(3, 2, ...) {what}")
    for t, (wanted, got) in enumerate(zip(stepped.float(), unrolled.float(), strict=True)):
        if not torch.allclose(got, wanted, rtol=1e-3, atol=1e-4, equal_nan=True):
            raise ConfigError(
                f"{role}.unroll gave the {what} {got.tolist()} for step {t} of two rows, in which episodes begin as in "
                f"{_FIRST.tolist()}, and forward {wanted.tolist()}; both must give the same numbers, with a state that "
                "is zeroed where an episode begins"
            )


def _observations(leaf: Leaf) -> Tensor:
    """Two of them: of zeros, and of ones where there is more than one category."""
    highest = np.reshape(leaf.sizes, leaf.shape) - 1 if leaf.sizes else 1
    ones = np.broadcast_to(np.minimum(1, highest), leaf.shape)
    return torch.from_numpy(np.stack((np.zeros_like(ones), ones)).astype(leaf.dtype))
