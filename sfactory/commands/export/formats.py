"""Files of a policy that need no sfactory: torch.export's archive, and ONNX."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from sfactory.commands.export.portable import MASK, PARAMS, PortablePolicy
from sfactory.errors import ConfigError, SfactoryError, installing, said

ABOUT = "about.json"
"""Where an archive of torch.export says what it is."""
TOLERANCE = 1e-3
"""Largest difference, relative to 1 or to the size of the figure, between the file's outputs and the policy's."""
ROWS = "batch"
"""Name of the first dimension of all inputs and outputs."""
_CHECKED_ROWS = (1, 64)
Played = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
"""An exported file in use: named inputs to named outputs."""


def torch_file(policy: PortablePolicy, about: Mapping[str, object]) -> tuple[bytes, Played]:
    """A file for ``torch.export.load(path).module()``, which maps a dict of inputs to a dict of outputs.

    Raises:
        ConfigError: If the model is not one that torch.export can trace.
    """
    buffer = io.BytesIO()
    torch.export.save(_traced(policy), buffer, extra_files={ABOUT: json.dumps(about)})
    return buffer.getvalue(), torch.export.load(buffer).module()


def onnx_file(policy: PortablePolicy, about: Mapping[str, object]) -> tuple[bytes, Played]:
    """A file for ONNX runtimes.

    Raises:
        ConfigError: If a package that it needs is missing, or the model cannot be expressed in ONNX.
    """
    try:
        import onnx  # noqa: F401 - torch.onnx would explain less
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"--format onnx needs {error.name}; {installing('onnx')}") from error
    inputs = policy.examples(2)
    with torch.no_grad():
        outputs = list(policy(inputs))
    traced = _traced(policy)
    try:
        with _quiet():
            program = torch.onnx.export(
                traced, dynamo=True, external_data=False, verbose=False, input_names=list(inputs),
                output_names=outputs,
            )  # fmt: skip
    except torch.onnx.errors.OnnxExporterError as error:
        raise ConfigError(f"the model cannot be expressed in ONNX: {_summary(error)}; use --format torch") from error
    assert program is not None
    program.model.metadata_props.update({name: str(value) for name, value in about.items()})
    model = program.model_proto
    _name_rows(model.graph)
    data = model.SerializeToString()
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])

    def play(given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = session.run(None, {name: tensor.numpy() for name, tensor in given.items()})
        return {name: torch.from_numpy(array) for name, array in zip(outputs, found, strict=True)}

    return data, play


def _name_rows(graph: Any) -> None:
    """Call the number of rows by its name in an ONNX graph, where torch has a symbol such as s35."""
    symbol = graph.input[0].type.tensor_type.shape.dim[0].dim_param
    for value in (*graph.input, *graph.output, *graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_param = re.sub(rf"\b{re.escape(symbol)}\b", ROWS, dim.dim_param)


def largest_difference(policy: PortablePolicy, played: Played) -> float:
    """How far a file's outputs are from the policy's, on random observations, in batches of two sizes. Its actions are
    compared with the policy's for its own parameters, of which rounding may part two that are equal.

    Raises:
        SfactoryError: If that is too far to be rounding.
    """
    largest = 0.0
    for rows in _CHECKED_ROWS:
        inputs = policy.examples(rows, seed=rows)
        with torch.no_grad():
            expected, found = policy(inputs), played(inputs)
            expected |= policy.decided(found[PARAMS], inputs.get(MASK))
        largest = max(largest, *(_difference(found[name], tensor) for name, tensor in expected.items()))
    if largest > TOLERANCE:
        raise SfactoryError(f"the exported file computes other figures than the policy: they differ by {largest:.2g}")
    return largest


def _difference(found: Tensor, expected: Tensor) -> float:
    """The largest, relative to 1 or to the size of the figure; infinite where one alone is NaN or infinite."""
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        return math.inf
    found, expected = found.double(), expected.double()
    same = (found == expected) | (found.isnan() & expected.isnan())
    error = ((found - expected).abs() / expected.abs().clamp(min=1.0)).nan_to_num(math.inf, math.inf)
    return float(error.masked_fill(same, 0.0).max())


def _traced(policy: PortablePolicy) -> torch.export.ExportedProgram:
    """The policy as torch.export sees it, for any number of rows."""
    inputs = policy.examples(2)
    batch = torch.export.Dim(ROWS, min=1)
    try:
        with _quiet(), torch.no_grad():
            return torch.export.export(
                policy, (inputs,), dynamic_shapes=({name: {0: batch} for name in inputs},), strict=False
            )
    except Exception as error:  # whatever a user's own model does
        raise ConfigError(
            f"the model cannot be traced by torch.export: {_summary(error)}; let its forward() and its distribution's "
            "mode() compute with any number of rows (x.shape[0], not len(x)), without branches on values of tensors"
        ) from error


def _summary(error: BaseException) -> str:
    """The first line of what an exception, or the first of its causes, says."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {said(error).strip().partition(chr(10))[0]}"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporters' remarks about themselves."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir", "torch.export")]
    levels = [logger.level for logger in loggers]
    validates = torch.distributions.Distribution._validate_args
    try:
        torch.distributions.Distribution.set_default_validate_args(False)  # it branches on values
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.distributions.Distribution.set_default_validate_args(validates)
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
