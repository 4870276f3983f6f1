"""Spaces and model as JSON: what a run's policy sees and does, and how it is built, kept in the run folder so that the
policy can be used without its environment and without PyYAML.

A file holds data only. A Text leaf, from which nothing is learned, is kept without what it may contain.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from sfactory.config import ModelConfig, check_types, from_dict, to_dict
from sfactory.config.env_source import EnvSource
from sfactory.envs.interface import EnvSpec
from sfactory.errors import CheckpointError, ConfigError
from sfactory.files import write_atomically
from sfactory.spaces import AS_DECLARED, ActionSpec, ObservationSpec, Reading, spaces

FORMAT = 1
"""Version of the file's layout."""
MAX_ENTRIES = 2**28
"""Numbers in the largest array that a file may ask for."""

_ANEW = "give the run's training command again, which writes the file anew, also where the run is complete"
_NUMBERS = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
)  # fmt: skip


def save_spec(path: Path, spec: EnvSpec, model: ModelConfig) -> None:
    """Write what is known of a run's environment, and what its model is.

    Raises:
        OSError: If the file cannot be written.
    """
    described = {
        "format": FORMAT,
        "family": spec.family,
        "agents": spec.agents,
        "frameskip": spec.frameskip,
        "masked": spec.masked,
        "render_fps": spec.render_fps,
        "protocol": spec.protocol,
        "observation": encode_space(cast(spaces.Space, spec.observation.space)),
        "action": encode_space(spec.action.space),
        "source": None if spec.source is None else dataclasses.asdict(spec.source),
        "model": to_dict(model),
    }
    write_atomically(path, (json.dumps(described) + "\n").encode())


def load_spec(path: Path, squash: Literal["clip", "tanh"], reading: Reading = AS_DECLARED) -> EnvSpec:
    """Read what :func:`save_spec` wrote.

    Args:
        squash: How the run's continuous actions get into bounded boxes.
        reading: What the run's model makes of observations.

    Raises:
        ConfigError: If there is no such file.
        CheckpointError: If it is damaged, or was written by a newer sfactory.
    """
    with _told(path):
        described = _described(path)
        return EnvSpec(
            ObservationSpec.from_space(decode_space(described["observation"]), reading),
            ActionSpec.from_space(decode_space(described["action"]), squash),
            **{name: described[name] for name in ("agents", "frameskip", "masked", "family", "render_fps")},
            protocol=_text(described.get("protocol", "")),
            source=_decode_source(described.get("source")),
        )


def load_model_config(path: Path) -> ModelConfig:
    """What :func:`save_spec` wrote of the model; a class has become its name in angle brackets. Raises as
    :func:`load_spec` does."""
    with _told(path):
        described = _described(path)
        if "model" not in described:
            raise CheckpointError(f"{path} was written by an earlier sfactory and does not tell the model; {_ANEW}")
        config = from_dict({"model": described["model"]})
        check_types(config)
        return config.model


def _described(path: Path) -> dict[str, Any]:
    described = json.loads(path.read_bytes())
    if described["format"] > FORMAT:
        raise CheckpointError(
            f"{path} has format {described['format']}, this sfactory reads up to {FORMAT}; upgrade sfactory"
        )
    return described


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    """Turn what a missing or damaged file raises into an error for the user."""
    try:
        yield
    except FileNotFoundError:
        raise ConfigError(
            f"{path} is missing: {path.parent} holds no run, or not all of one; name a run folder, copy the whole of "
            f"it, or {_ANEW}"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged ({error!r}); restore it from a copy, or {_ANEW}") from None


def _text(described: object) -> str:
    """A string of a file. Raises TypeError if it is something else."""
    if not isinstance(described, str):
        raise TypeError(f"{described!r} is no text")
    return described


def _decode_source(described: dict[str, Any] | None) -> EnvSource | None:
    """Where the environment of a file comes from; older files do not say it.

    Raises:
        TypeError, AttributeError: If it is something else.
    """
    if described is None:
        return None
    source = EnvSource(**described)
    strings = (source.made, source.code, *source.values, *source.values.values())
    if not (isinstance(source.anonymous, bool) and all(isinstance(string, str) for string in strings)):
        raise TypeError("the source of the environment is not described by strings")
    return source


def check_spaces(ours: EnvSpec, theirs: EnvSpec, our_name: str, their_name: str) -> None:
    """Make sure that a policy made for one environment fits another. The bounds of observations may differ.

    Raises:
        ConfigError: With the two spaces that differ.
    """
    for what, (own, other) in space_differences(ours, theirs).items():
        raise ConfigError(f"{our_name} has the {what} space {own}, {their_name} has {other}; they must fit together")


def space_differences(ours: EnvSpec, theirs: EnvSpec) -> dict[str, tuple[spaces.Space, spaces.Space]]:
    """Of observation and action the spaces that differ; the bounds of observations may."""
    pairs = {what: (getattr(ours, what), getattr(theirs, what)) for what in ("observation", "action")}
    return {what: (own.space, other.space) for what, (own, other) in pairs.items() if own != other}


def encode_space(space: spaces.Space) -> dict[str, Any]:
    """A space as plain values for JSON; exact, with infinite bounds and dtypes.

    Raises:
        ConfigError: On a kind of space that sfactory does not train on.
    """
    match space:
        case spaces.Dict():
            return {"type": "Dict", "spaces": [[key, encode_space(sub)] for key, sub in space.spaces.items()]}
        case spaces.Tuple():
            return {"type": "Tuple", "spaces": [encode_space(sub) for sub in space.spaces]}
        case spaces.Discrete():
            return {"type": "Discrete", "n": int(space.n), "start": int(space.start), "dtype": space.dtype.name}
        case spaces.MultiDiscrete():
            return {
                "type": "MultiDiscrete",
                "nvec": space.nvec.tolist(),
                "start": space.start.tolist(),
                "dtype": space.dtype.name,
            }
        case spaces.MultiBinary():
            return {"type": "MultiBinary", "n": space.n if isinstance(space.n, int) else list(space.shape)}
        case spaces.Box():
            bounds = {"low": _encode_bound(space.low), "high": _encode_bound(space.high)}
            return {"type": "Box", "shape": list(space.shape), "dtype": space.dtype.name, **bounds}
    if space.dtype is not None and space.dtype.kind == "U":
        return {"type": "Text"}
    raise ConfigError(
        f"the space {space} cannot be written to a run folder; use Box, Discrete, MultiDiscrete, MultiBinary, Dict "
        "and Tuple"
    )


def decode_space(described: dict[str, Any]) -> spaces.Space:
    """The space that :func:`encode_space` described.

    Raises:
        ValueError, KeyError, TypeError, AssertionError: If it describes none.
    """
    match described["type"]:
        case "Dict":
            return spaces.Dict([(key, decode_space(sub)) for key, sub in described["spaces"]])
        case "Tuple":
            return spaces.Tuple([decode_space(sub) for sub in described["spaces"]])
        case "Discrete":
            dtype = _dtype(described)
            # The argument is newer than the oldest Gymnasium that is supported.
            newer: dict[str, Any] = {} if dtype == np.int64 else {"dtype": dtype}
            return spaces.Discrete(described["n"], start=described["start"], **newer)
        case "MultiDiscrete":
            dtype = _dtype(described)
            return spaces.MultiDiscrete(
                np.array(described["nvec"], dtype), dtype, start=np.array(described["start"], dtype)
            )
        case "MultiBinary":
            _check_size(np.atleast_1d(described["n"]).tolist())
            return spaces.MultiBinary(described["n"])
        case "Box":
            dtype, shape = _dtype(described), described["shape"]
            _check_size(shape)
            return spaces.Box(
                _decode_bound(described["low"], shape, dtype),
                _decode_bound(described["high"], shape, dtype),
                dtype=dtype,
            )
        case "Text":
            return spaces.Text(1)
    raise ValueError(f"unknown space {described['type']!r}")


def _dtype(described: dict[str, Any]) -> np.dtype:
    if described["dtype"] not in _NUMBERS:
        raise ValueError(f"unknown dtype {described['dtype']!r}")
    return np.dtype(described["dtype"])


def _check_size(shape: list[int]) -> None:
    if any(size < 0 for size in shape) or np.prod(shape, dtype=float) > MAX_ENTRIES:
        raise ValueError(f"the shape {shape} is not one of a space of at most {MAX_ENTRIES} numbers")


def _encode_bound(bound: np.ndarray) -> Any:
    """One number where all entries are equal, else all of them in C order; infinities, which JSON lacks, as strings."""
    entries = bound.ravel().tolist()
    if len(set(entries)) == 1:
        entries = entries[:1]
    numbers = [str(number) if number in (np.inf, -np.inf) else number for number in entries]
    return numbers[0] if len(numbers) == 1 else numbers


def _decode_bound(described: Any, shape: list[int], dtype: np.dtype) -> np.ndarray:
    numbers = described if isinstance(described, list) else [described]
    entries = np.array([float(number) if isinstance(number, str) else number for number in numbers], dtype)
    return np.full(shape, entries[0]) if len(entries) == 1 else entries.reshape(shape)
